"""What the dashboards show: an overview, a page per incident, a page of GPUs and ranks."""
