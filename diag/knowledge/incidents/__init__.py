"""The incidents: one file, one variable `incident`."""
