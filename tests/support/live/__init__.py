"""A real vLLM on the CPU, and a load that makes it ill."""
