"""vLLM's log, line by line, as samples."""
