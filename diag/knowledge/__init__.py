"""What we know of vLLM in production: incidents, the signals that they are recognised by, the fixes that they share."""
