"""The commands: one file per command, from its options to the printed text and the exit status."""
