"""Sphinx builds these pages: `nox -s docs`."""

project = "diag"
copyright = "the diag contributors"
extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "diag"
html_static_path = ["_static"]
exclude_patterns = ["_build"]
