"""Undo what people and programs do to a log when they paste it, before its lines are parsed.

A paste is quoted, indented or fenced as Markdown does it, its colours and carriage returns are written out as text, and
a terminal has wrapped it. The layout is undone only where nearly all lines have it, since a log's own text may look so.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Line(NamedTuple):
    """A line of text with its number in the file, 0 if unknown."""

    number: int
    text: str


NEARLY_ALL = 0.9
"""The share of lines that have a layout, if the layout is that of the paste and not of a text in the log."""
FEWEST_WRAPPED, NARROWEST, WIDEST = 5, 60, 250
"""Full lines from which a log was wrapped by a terminal, and the columns that a terminal may have."""
_LAYOUTS = tuple(map(re.compile, (r" {0,3}> ?", r" {4}|\t")))
"""Markdown's quotation, and its code by indentation."""
_BLANK = re.compile(r"[>\s]*")
_FENCE = re.compile(r"\s*(?:```|~~~)[\w.+-]{0,20}\s*$")
_WRITTEN_OUT = re.compile(r"(?:\\(?:x1b|033|u001b|e)|\^\[|\u241b)\[[0-9;?]{0,20}[A-Za-z]|(?:\^M|\\r)+$")
"""Escape sequences and carriage returns as `cat -v`, JSON or an editor shows them."""
_BEGINS = re.compile(
    r"\s*\(?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|Traceback|File \"|[A-Za-z]\w{0,60} pid=\d|\d{4}-\d\d-\d\d)|\[|$"
)
"""Beginnings of a line that no terminal has wrapped."""


def as_logged(lines: Sequence[Line]) -> list[Line]:
    """Return the lines as the server logged them; their numbers stay those of the paste."""
    plain = [Line(line.number, _WRITTEN_OUT.sub("", line.text)) for line in lines if not _FENCE.match(line.text)]
    for layout in _LAYOUTS:
        written = [line for line in plain if not _BLANK.fullmatch(line.text)]
        if written and sum(bool(layout.match(line.text)) for line in written) >= NEARLY_ALL * len(written):
            plain = [Line(line.number, layout.sub("", line.text, count=1)) for line in plain]
    return _unwrapped(plain)


def _unwrapped(lines: Sequence[Line]) -> list[Line]:
    """Join lines that a terminal has wrapped: the longest ones all have the same width, and none is longer."""
    widths = Counter(len(line.text) for line in lines)
    widest = max(widths, default=0)
    if not NARROWEST <= widest <= WIDEST or widths[widest] < FEWEST_WRAPPED:
        return list(lines)
    joined: list[Line] = []
    is_open = False
    for line in lines:
        if is_open and not _BEGINS.match(line.text):
            joined[-1] = joined[-1]._replace(text=joined[-1].text + line.text)
        else:
            joined.append(line)
        is_open = len(line.text) == widest
    return joined
