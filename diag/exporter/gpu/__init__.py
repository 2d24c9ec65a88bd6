"""GPUs through NVML, as samples."""
