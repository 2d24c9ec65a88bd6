"""Contents of the dashboards: Fleet, Server, GPUs and ranks, Capacity; a page per incident on request."""
