"""What is generated from the declarations: alerts, dashboards, runbooks."""
