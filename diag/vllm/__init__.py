"""Facts about vLLM, by release: its flags, their defaults, its launch commands, and its use of GPUs."""
