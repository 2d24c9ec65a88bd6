"""The model that everything else is built on: incidents, metric families, the site's contract, errors, formatting."""
