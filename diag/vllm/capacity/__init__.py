"""Ceilings of a server: its work for each token against the rates at which its GPUs read, compute and send."""
