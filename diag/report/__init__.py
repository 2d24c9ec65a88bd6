"""A report as text: for a terminal, for a machine, for a ticket."""
