"""GPUs that vLLM servers run on: what they hold, and how fast they are."""
