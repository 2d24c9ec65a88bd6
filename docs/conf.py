"""Sphinx builds these pages: `nox -s docs`. What the program knows is written into docs/generated at every build."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from journeys import searches  # noqa: E402  # docs/journeys.py
from pages import write  # noqa: E402  # docs/pages.py
from pygments.lexers.promql import PromQLLexer  # noqa: E402
from pygments.token import Error, Name  # noqa: E402

project = "diag"
copyright = "the diag contributors"
extensions = ["myst_parser"]
myst_heading_anchors = 3
smartquotes = False  # it turns the dashes of a flag into one long dash
html_theme = "furo"
html_title = "diag"
html_static_path = ["_static", "generated/_static"]
html_css_files = ["plots.css"]
exclude_patterns = ["_build", "generated/symptoms.md"]  # a part of index.md
suppress_warnings = ["misc.highlighting_failure"]

SEARCH = searches()
write(with_cases="dummy" not in sys.argv)  # `-b dummy` looks at links, of which the recorded cases have none


class NamesOfRules(PromQLLexer):  # type: ignore[misc]
    """PromQL with the colons that names of recording rules have, which the lexer reports as errors."""

    name, aliases = "PromQL with recording rules", ["promql"]

    def get_tokens_unprocessed(self, text, stack=("root",)):  # type: ignore[no-untyped-def]
        for at, token, part in super().get_tokens_unprocessed(text, stack):
            yield at, Name.Variable if token is Error and part == ":" else token, part


def add_search_terms(app, page, source):  # type: ignore[no-untyped-def]
    """Enter the words by which people search for a page into the index, which a search consults first."""
    words = [f"   ! single: {words}" for words, target in SEARCH.items() if target == page]
    if words:
        entries = "\n".join(["", "```{eval-rst}", ".. index::", *words, "```", ""])
        source[0] = re.sub(r"(?m)^# .*$", lambda title: f"{title[0]}\n{entries}", source[0], count=1)


def setup(app):  # type: ignore[no-untyped-def]
    app.add_lexer("promql", NamesOfRules)
    app.connect("source-read", add_search_terms)
