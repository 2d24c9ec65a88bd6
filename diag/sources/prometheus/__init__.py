"""Servers as a Prometheus knows them, or whatever speaks its HTTP API."""
