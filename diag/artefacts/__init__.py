"""Files that are generated from the declarations: alerts, dashboards, runbooks, reference pages."""
