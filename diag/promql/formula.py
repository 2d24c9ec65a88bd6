"""A PromQL expression in which other expressions stand by name, as the series that recording rules make of them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_METRIC = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|`[^`]*`|[a-zA-Z_:][a-zA-Z0-9_:]*')
"""A string, in which nothing is a metric, or a word that may be the name of a series."""

_NONE: Mapping[str, str] = {}


@dataclass(frozen=True, eq=False)
class Formula:
    """PromQL over raw series and over other formulas.

    `name` is the series under which a rule records the formula, "" if none does. `parts` holds the formula of each
    recorded series that `text` selects. A formula is equal to itself only, so that a cache finds it without reading it.
    """

    name: str
    text: str
    parts: Mapping[str, "Formula"]

    def written_out(self, recorded: Mapping[str, str] = _NONE) -> str:
        """Return PromQL in which every part is replaced by its series in `recorded`, else by its expression."""
        return recorded.get(self.name) or self.text_over(recorded)

    def text_over(self, recorded: Mapping[str, str]) -> str:
        """Return the PromQL of the formula itself over the series in `recorded`."""
        if not self.parts:
            return self.text
        texts = {name: recorded.get(name) or f"({part.text_over(recorded)})" for name, part in self.parts.items()}
        return _METRIC.sub(lambda word: texts.get(word[0], word[0]), self.text)

    def references(self) -> list[str]:
        """Return the names of the parts in the order and as often as the text selects them."""
        return [word[0] for word in _METRIC.finditer(self.text) if word[0] in self.parts]

    def rewritten(self, change: Callable[[str], str]) -> "Formula":
        """Return the formula with `change` applied to its text and to the text of every part."""
        if not self.parts:
            return Formula(self.name, change(self.text), {})
        parts = {name: part.rewritten(change) for name, part in self.parts.items()}
        return Formula(self.name, change(self.text), parts)
