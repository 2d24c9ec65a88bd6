"""What each command does: one file per command, from its options to what is printed and the exit status."""
