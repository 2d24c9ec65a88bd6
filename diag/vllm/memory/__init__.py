"""The GPU memory that a server needs, by vLLM's own rules."""
