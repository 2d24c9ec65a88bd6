"""Sphinx builds these pages: `nox -s docs`. What the program knows is written into docs/generated at every build."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from pages import write  # noqa: E402  # docs/pages.py

project = "diag"
copyright = "the diag contributors"
extensions = ["myst_parser"]
myst_heading_anchors = 3
smartquotes = False  # it turns the dashes of a flag into one long dash
html_theme = "furo"
html_title = "diag"
html_static_path = ["_static", "generated/_static"]
html_css_files = ["plots.css"]
exclude_patterns = ["_build"]
suppress_warnings = ["misc.highlighting_failure"]  # the lexer of PromQL knows no colon in a name

write()
