"""vLLM's command-line flags and their defaults, release by release."""
