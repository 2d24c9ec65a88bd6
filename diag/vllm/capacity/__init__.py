"""What a server can do at most: its work for each token against what the GPUs can read, compute and send."""
