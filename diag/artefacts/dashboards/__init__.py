"""Contents of the dashboards: an overview, a page per incident, a page of GPUs and ranks."""
