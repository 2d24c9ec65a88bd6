"""vLLM's processes on this host, as samples."""
