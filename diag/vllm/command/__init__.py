"""Launch commands as people write them: parsed, edited and shown without secrets."""
