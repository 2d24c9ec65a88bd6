"""The command line: commands, options, help, and the exit status of each error."""
