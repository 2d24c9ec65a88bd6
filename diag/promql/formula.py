"""A PromQL expression in which other expressions stand by name, as the series that recording rules make of them."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

_METRIC = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|`[^`]*`|[a-zA-Z_:][a-zA-Z0-9_:]*')
"""A string, in which nothing is a metric, or a word that may be the name of a series."""

_NONE: Mapping[str, str] = {}
Change = Callable[[str, Collection[str]], str]
"""Edits an expression; the names in the second argument are those of parts, not of series."""


@dataclass(frozen=True, eq=False)
class Formula:
    """PromQL over raw series and over other formulas.

    `name` is the series under which a rule records the formula, "" if none does. `parts` holds the formula of each
    recorded series that `text` selects. A formula is equal to itself only, so that a cache finds it without reading it.
    """

    name: str
    text: str
    parts: Mapping[str, "Formula"]

    def written_out(self, series: Mapping[str, str] = _NONE, change: Change | None = None) -> str:
        """Return PromQL over raw series and over the recorded `series`, which are named by the names of formulas.

        `change` edits the text of the formula and of each part, before the parts are put into it.
        """
        return series.get(self.name) or self.text_over(series, change)

    def text_over(self, series: Mapping[str, str], change: Change | None = None) -> str:
        """Return the expression of the formula itself, also where the formula is recorded."""
        return self._text_over(series, change, {})

    def _text_over(self, series: Mapping[str, str], change: Change | None, done: dict[str, str]) -> str:
        parts = {name: part for name, part in self.parts.items() if name not in series}
        text = _replaced(self.text, series) if self.parts else self.text
        if change:
            text = change(text, parts.keys())
        for name, part in parts.items():
            if name not in done:
                done[name] = f"({part._text_over(series, change, done)})"
        return _replaced(text, {name: done[name] for name in parts})

    def references(self) -> list[str]:
        """Return the names of the parts in the order and as often as the text selects them."""
        return [word[0] for word in _METRIC.finditer(self.text) if word[0] in self.parts]


def _replaced(text: str, words: Mapping[str, str]) -> str:
    return _METRIC.sub(lambda word: words.get(word[0], word[0]), text) if words else text
