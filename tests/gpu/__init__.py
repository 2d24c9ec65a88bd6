"""One command that records what a GPU, its driver and a vLLM on it really say: `python -m tests.gpu`."""
