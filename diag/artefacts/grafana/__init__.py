"""Grafana as it is written: panels and pages. The only folder that imports grafanalib."""
