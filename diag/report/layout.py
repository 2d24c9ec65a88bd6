"""How reports are laid out for a terminal: at most 100 columns, labels in a column of their own, tables in columns.

Whatever is laid out here is made harmless to a terminal first.
"""

import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from diag.core.formatting import escaped, pasted

WIDTH = 100
_width: ContextVar[int] = ContextVar("width", default=WIDTH)
LABEL = 17
"""The column of labels: the longest of them and two spaces."""
_LEAST_ROOM = 30
"""A cell with less room than this continues at the left instead of below itself."""
_LEAST_NAME = 8
_WORD = r"""(?:[^\s'"\\]|\\.|'[^']*+'|"(?:[^"\\]|\\.)*+")++"""
"""A word of a shell command. No part is read twice, or an open quote would be searched for its end again and again."""
_FLAG_OR_WORD = rf"-{_WORD}\s+(?!-){_WORD}|{_WORD}"


@contextmanager
def columns(count: int) -> Iterator[None]:
    """Lay out at most so many columns while the block runs, for a window that is narrower."""
    token = _width.set(min(count, WIDTH))
    try:
        yield
    finally:
        _width.reset(token)


def line_width() -> int:
    """How many columns a line may have."""
    return _width.get()


def paragraph(text: str, start: str = "", rest: str = "  ") -> list[str]:
    """Text wrapped behind `start`, its other lines behind `rest`; a name with hyphens stays whole, to be copied."""
    return textwrap.wrap(
        escaped(text), line_width(), initial_indent=start, subsequent_indent=rest, break_on_hyphens=False
    )


def labelled(label: str, texts: Sequence[str], width: int = LABEL) -> list[str]:
    """The label once, and every text wrapped beside it; nothing where there is no text."""
    starts = [_label(label if at == 0 else "", width) for at in range(len(texts))]
    return [
        line for start, text in zip(starts, texts, strict=True) for line in paragraph(text, start, " " * len(start))
    ]


def verbatim(label: str, text: str, width: int = LABEL) -> list[str]:
    """Text to be pasted: in one line, however long, since a line break would break the command."""
    return [f"{_label(label, width)}{pasted(text)}"] if text else []


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


def one_line_each(
    rows: Sequence[Sequence[str]], flexible: int, *, label: str = "", width: int = LABEL, right: Collection[int] = ()
) -> list[str]:
    """A table with one line for each row: the cells of one column are shortened to the room that the others leave."""
    if not rows:
        return []
    cells = [[escaped(cell) for cell in row] for row in rows]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    indents = [_label(label if at == 0 else "", width) if label else "  " for at in range(len(rows))]
    others = sum(wide) - wide[flexible] + 2 * (len(wide) - 1)
    wide[flexible] = min(wide[flexible], max(line_width() - len(indents[0]) - others, _LEAST_NAME))
    lines = []
    for indent, row in zip(indents, cells, strict=True):
        row[flexible] = shortened(row[flexible], wide[flexible])
        columns = (f"{cell:{'>' if at in right else '<'}{wide[at]}}" for at, cell in enumerate(row))
        lines.append(shortened(f"{indent}{'  '.join(columns)}".rstrip(), line_width()))
    return lines


def continued(command: str, start: str, rest: str) -> list[str]:
    """A shell command behind `start`, its other lines behind `rest`, backslashes between them: to be pasted as it is.

    A flag keeps its first value on its line. Nothing where the command cannot be divided so.
    """
    if not re.fullmatch(rf"\s*+(?:{_WORD}(?:\s++|$))*+", command):
        return []
    if any(word.startswith("#") for word in re.findall(_WORD, command)):
        return []
    lines = [start]
    for part in re.findall(_FLAG_OR_WORD, command):
        joined = f"{lines[-1]}{'' if lines == [start] else ' '}{part}"
        lines[-1:] = [joined] if len(joined) <= line_width() - 2 else [lines[-1], f"{rest}{part}"]
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]] if max(map(len, lines)) <= line_width() - 2 else []


def shortened(text: str, room: int) -> str:
    """Text in so many columns: of a name both ends are kept, since they tell it apart."""
    head = max(room - 1, 2) // 2
    return text if len(text) <= room else f"{text[:head]}…{text[len(text) - max(room - 1 - head, 1) :]}"


def clipped(lines: Sequence[str], most: int) -> list[str]:
    """The first few lines, the last of them ending in "…" where more followed."""
    if len(lines) <= most:
        return list(lines)
    return [*lines[: most - 1], f"{lines[most - 1][: line_width() - 2].rstrip('.,;: ')} …"]


def _row(start: str, last: str, widest: int) -> list[str]:
    if not last:
        return paragraph(start.strip(), start[: len(start) - len(start.lstrip())])
    if line_width() - len(start) < min(widest, _LEAST_ROOM):
        return paragraph(f"{start.strip()}  {last}", "  ", " " * 6)
    return paragraph(last, start, " " * len(start))


def _label(label: str, width: int) -> str:
    return f"  {label:<{width}}"
