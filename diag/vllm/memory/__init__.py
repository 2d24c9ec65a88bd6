"""How much GPU memory a server needs, by vLLM's own rules."""
