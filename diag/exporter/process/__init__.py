"""Processes of vLLM on this host, as samples."""
