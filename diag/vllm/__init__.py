"""What is known of vLLM itself, release by release: its flags, their defaults, and the commands that start it."""
