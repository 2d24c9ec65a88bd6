"""Knowledge about vLLM in production: incidents, the signals of their conditions, the fixes that they share."""
