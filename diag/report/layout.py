"""How reports are laid out for a terminal: at most 100 columns, labels in a column of their own, tables in columns.

Whatever is laid out here is made harmless to a terminal first.
"""

import textwrap
from collections.abc import Collection, Sequence

from diag.core.formatting import escaped

WIDTH = 100
LABEL = 17
"""The column of labels: the longest of them and two spaces."""
_LEAST_ROOM = 30
"""A cell with less room than this continues at the left instead of below itself."""


def paragraph(text: str, start: str = "", rest: str = "  ") -> list[str]:
    """Text wrapped behind `start`, its other lines behind `rest`; a name with hyphens stays whole, to be copied."""
    return textwrap.wrap(escaped(text), WIDTH, initial_indent=start, subsequent_indent=rest, break_on_hyphens=False)


def labelled(label: str, texts: Sequence[str], width: int = LABEL) -> list[str]:
    """The label once, and every text wrapped beside it; nothing where there is no text."""
    starts = [_label(label if at == 0 else "", width) for at in range(len(texts))]
    return [
        line for start, text in zip(starts, texts, strict=True) for line in paragraph(text, start, " " * len(start))
    ]


def verbatim(label: str, text: str, width: int = LABEL) -> list[str]:
    """Text to be pasted: in one line, however long, since a line break would break the command."""
    return [f"{_label(label, width)}{escaped(text)}"] if text else []


def table(
    rows: Sequence[Sequence[str]], *, label: str = "", width: int = LABEL, right: Collection[int] = ()
) -> list[str]:
    """Rows of as many cells, each column as wide as its widest cell; the last cell wraps below itself.

    `right` are the places of the columns to align at the right. Without a label the table begins at the left.
    """
    cells = [[escaped(cell) for cell in row] for row in rows]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for at, (*first, last) in enumerate(cells):
        columns = [
            f"{cell:>{room}}" if place in right else f"{cell:<{room}}"
            for place, (cell, room) in enumerate(zip(first, wide, strict=False))
        ]
        indent = _label(label if at == 0 else "", width) if label else "  "
        start = indent + "".join(f"{column}  " for column in columns)
        lines += _row(start, last, wide[-1])
    return lines


def _row(start: str, last: str, widest: int) -> list[str]:
    if not last:
        return paragraph(start.strip(), start[: len(start) - len(start.lstrip())])
    if WIDTH - len(start) < min(widest, _LEAST_ROOM):
        return paragraph(f"{start.strip()}  {last}", "  ", " " * 6)
    return paragraph(last, start, " " * len(start))


def _label(label: str, width: int) -> str:
    return f"  {label:<{width}}"
