"""The command line: what a user may type, the help, and what each error becomes."""
