"""Recognises the lines of vLLM's log that are in the table.

A text is recognised at its beginning only, and only at a level at which vLLM writes it: what a client sends is logged
inside of other lines, and must not look like a failure.
"""

import re
from functools import lru_cache

from diag.core.formatting import GIB, LOG_UNITS
from diag.exporter.log.pattern import FAILED, Pattern
from diag.exporter.log.patterns import PATTERNS

_RANK = r"(?:\[[^\]]{0,120}Rank \d+\] ?){0,3}"
_BEFORE = re.compile(
    r"(?: *what\(\): +|\S{1,300}\.py:\d+: UserWarning: )?"
    rf"{_RANK}(?:Process group watchdog thread terminated with exception: )?{_RANK}"
    r"(?:[A-Za-z_][\w.]{0,120}(?:Error|Exception): )?"
    r"(?:Worker failed with error ['\"])?"
)
"""What may stand before the words of a failure: who warns, its class, torch's name of the rank, who quotes a worker."""
_ANY = re.compile("|".join(pattern.begins for pattern in PATTERNS))
"""Without groups: says no ten times as fast as the next."""
_WHICH = re.compile("|".join(f"({pattern.begins})" for pattern in PATTERNS))


MOST_SEARCHED = 2_000
"""Characters of a text that are searched for numbers, which may take as many steps as their square."""


def recognise(text: str, level: str) -> Pattern | None:
    """What a line tells, by its text without its head."""
    pattern = _which(text)
    if pattern is None and level in FAILED:
        before = _BEFORE.match(text)
        pattern = _which(text[before.end() :]) if before and before.end() else None
    return pattern if pattern and level in pattern.levels else None


def _which(text: str) -> Pattern | None:
    match = _WHICH.match(text) if _ANY.match(text) else None
    return PATTERNS[match.lastindex - 1] if match and match.lastindex else None


def values(pattern: Pattern, text: str) -> dict[str, str]:
    """The groups of `numbers` that are in the line."""
    match = _compiled(pattern.numbers).search(text[:MOST_SEARCHED]) if pattern.numbers else None
    return {name: value for name, value in match.groupdict().items() if value} if match else {}


def amount(text: str) -> float:
    """A number as vLLM prints it: "131,072", "2.0 GiB" (in gibibytes), "136.00 MiB"; ValueError for none."""
    digits, _, unit = text.replace(",", "").partition(" ")
    return float(digits) * LOG_UNITS.get(unit, GIB) / GIB


@lru_cache(len(PATTERNS))
def _compiled(regex: str) -> re.Pattern[str]:
    return re.compile(regex)
