"""Sources of telemetry: live servers, Kubernetes, recordings and Prometheus."""
