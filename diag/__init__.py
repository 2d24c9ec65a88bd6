"""diag: what is wrong with a vLLM server, why, what it is not, and which flag to change."""

__version__ = "0.1.0"
