"""What stands beside a vLLM server on its host: GPUs, log and processes, as samples; and the page that joins them."""
