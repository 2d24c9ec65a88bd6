"""Ceilings of a server: its work for each token against what its GPUs can read, compute and send."""
