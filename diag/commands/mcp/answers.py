"""What an answer to an agent is made of: texts from elsewhere marked as quotations, and no more than it can read.

Default deny: what is not a text of diag's own declarations, a number or a single name counts as written by others.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diag.core.formatting import escaped

COMPACT, DETAILED = 2_000, 20_000
"""Tokens of an answer at most."""
CHARACTERS = 3
"""Of one token: JSON has 3.5 and more for each token of the usual tokenizers, so this counts too many."""
OPEN, CLOSE = "⟦", "⟧"
MOST_ESCAPED = 4_000
WHOLE = ("relaunch", "corrected_command")
"""Left out rather than cut: half of a command is another one."""
_STEPS = ((50, 4000), (40, 2000), (30, 1200), (20, 800), (12, 500), (8, 300), (5, 200), (3, 140), (2, 100), (1, 60))
"""Entries of a list and characters of a text: the first of these with which an answer fits."""
_NAME = re.compile(r"(?:--)?\w{1,64}(?:[.:/,=@+-]{1,3}\w{1,64})*%?", re.ASCII)
_LONGEST_NAME = 64


def texts(declared: object) -> Iterator[str]:
    """Every text in declarations, however deep: what diag, or whoever wrote the incident files, says."""
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, Mapping):
        yield from texts([*declared.keys(), *declared.values()])
    elif isinstance(declared, Sequence):
        for part in declared:
            yield from texts(part)


def marked(value: Any, own: frozenset[str]) -> Any:
    """The document with every text from elsewhere as a quotation, and without numbers that JSON cannot hold."""
    if isinstance(value, str):
        return value if value in own or _is_name(value) else quoted(value)
    if isinstance(value, Mapping):
        return {marked(key, own): marked(part, own) for key, part in value.items()}
    if isinstance(value, Sequence):
        return [marked(part, own) for part in value]
    return _short(value) if isinstance(value, float) else value


def quoted(text: str) -> str:
    """A text from elsewhere between marks that it cannot close, with control and invisible characters as escapes."""
    inside = escaped(text, MOST_ESCAPED)
    for mark in (OPEN, CLOSE):
        inside = inside.replace(mark, mark.encode("unicode_escape").decode())
    return f"{OPEN}{inside}{CLOSE}"


def fitted(document: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """The document in at most so many tokens: long lists and texts are cut, and `left_out` says where."""
    shown: dict[str, Any] = {}
    for entries, characters in _STEPS:
        left: Counter[str] = Counter()
        shown = {name: _cut(part, entries, characters, name, left) for name, part in document.items()}
        if left:
            shown["left_out"] = [f"{place}: {count} more" for place, count in sorted(left.items())]
        if len(written(shown)) <= tokens * CHARACTERS:
            return shown
    return shown


def written(document: Mapping[str, Any]) -> str:
    """The document as text, without what only people need."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _is_name(text: str) -> bool:
    """Whether it is a name, an address, a number or a flag: one word, which asks nobody for anything."""
    return len(text) <= _LONGEST_NAME and bool(_NAME.fullmatch(text))


def _short(number: float) -> float | None:
    """Four digits; None for what JSON cannot hold. Times have to stay whole."""
    if not math.isfinite(number):
        return None
    return round(number, 3) if abs(number) >= 1000 else float(f"{number:.4g}")


def _cut(value: Any, entries: int, characters: int, place: str, left: Counter[str]) -> Any:
    if isinstance(value, str) and len(value) > characters:
        left[f"{place} (characters)"] += len(value) - characters
        is_quoted = value.endswith(CLOSE)
        return None if place.rpartition(".")[2] in WHOLE else value[:characters] + "…" + CLOSE * is_quoted
    if isinstance(value, Mapping):
        return {name: _cut(part, entries, characters, f"{place}.{name}", left) for name, part in value.items()}
    if isinstance(value, list):
        if len(value) > entries:
            left[place] += len(value) - entries
        return [_cut(part, entries, characters, place, left) for part in value[:entries]]
    return value
