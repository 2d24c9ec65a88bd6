"""Layout of plain text: as wide as the terminal, else 100 columns; labels and tables in columns of their own.

All text is made harmless to a terminal first.
"""

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby

from diag.core.formatting import escaped, pasted
from diag.report.spans import Span, Text, joined, spans

WIDTH = 100
"""Columns of a file or a pipe."""
NARROWEST, WIDEST = 60, 160
"""Limits of a window: rows of evidence do not fit into less, and lines of text cannot be read if they are longer."""
_width: ContextVar[int] = ContextVar("width", default=WIDTH)
has_local_times: ContextVar[bool] = ContextVar("local", default=False)
name_room: ContextVar[int] = ContextVar("name_room", default=200)
LONGEST_ADDRESS = 250
"""Characters of an address that stays whole, to be copied; what is longer may be hostile."""
LABEL = 17
"""The column of labels: the longest of them and two spaces."""
_LEAST_ROOM = 30
"""The least room, in columns, in which the last cell of a row wraps below itself; with less it wraps at the left."""
_LEAST_NAME = 8
_WORD = r"""(?:[^\s'"\\]|\\.|'[^']*+'|"(?:[^"\\]|\\.)*+")++"""
"""A word of a shell command; possessive, or an open quote would be searched for its end again and again."""
_FLAG_OR_WORD = rf"-{_WORD}\s+(?!-){_WORD}|{_WORD}"


@contextmanager
def columns(count: int, *, local: bool = False) -> Iterator[None]:
    """Lay out `count` columns, with times of this host's zone if `local`, while the block runs."""
    token, times = _width.set(min(count, WIDEST)), has_local_times.set(local)
    try:
        yield
    finally:
        _width.reset(token)
        has_local_times.reset(times)


@contextmanager
def short_names(room: int) -> Iterator[None]:
    """Shorten the names of servers within sentences to so many columns while the block runs."""
    token = name_room.set(room)
    try:
        yield
    finally:
        name_room.reset(token)


def line_width() -> int:
    return _width.get()


def is_wide() -> bool:
    """Return True if the window has room for whole rows; a narrower one gets more lines instead."""
    return line_width() >= WIDTH


class StyledLine(str):
    """A line of a report, and the roles of its parts: first column, the column behind the last one, role."""

    roles: tuple[tuple[int, int, str], ...] = ()


def with_roles(lines: Iterable[str], *texts: Text) -> list[str]:
    """Give lines the roles of the texts that they were made from: all but the white space is still there, in order."""
    runs = [(escaped(span), role) for text in texts for span, role in spans(text)]
    if not any(role for _, role in runs):
        return list(lines)
    ink = (role for run, role in runs for char in run if not char.isspace())
    drawn: list[str] = []
    for text in lines:
        line, of_chars, at = StyledLine(text), [""], 0
        for char in text:
            of_chars.append(of_chars[-1] if char.isspace() else next(ink, ""))
        for role, run in groupby(of_chars[1:]):
            length = len(list(run))
            line.roles += ((at, at + length, role),) if role else ()
            at += length
        drawn.append(line)
    return drawn


def paragraph(text: Text, start: Text = "", rest: str = "  ") -> list[str]:
    """Wrap text behind `start`, further lines behind `rest`; names with hyphens and addresses stay whole."""
    whole = "".join(escaped(span) for span, _ in spans(text))
    lines = textwrap.wrap(
        whole,
        line_width(),
        initial_indent=joined(start),
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words="://" not in whole or max(map(len, whole.split())) > LONGEST_ADDRESS,
    )
    return with_roles(lines, start, text)


def labelled(label: str, texts: Sequence[Text], width: int = LABEL) -> list[str]:
    """Print the label once, and every text wrapped beside it; nothing if there is no text."""
    starts = [_label(label if at == 0 else "", width) for at in range(len(texts))]
    rest = " " * (width + 2)
    return [line for start, text in zip(starts, texts, strict=True) for line in paragraph(text, start, rest)]


def verbatim(label: str, text: str, width: int = LABEL) -> list[str]:
    """Print text to be pasted in one line, however long, since a line break would break the command."""
    start = _label(label, width)
    return with_roles([f"{joined(start)}{pasted(text)}"], start) if text else []


def table(
    rows: Sequence[Sequence[str]], *, label: str = "", width: int = LABEL, right: Collection[int] = ()
) -> list[str]:
    """Lay out rows of equal length, each column as wide as its widest cell; the last cell wraps below itself.

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
        edge = len(joined(indent))
        start = joined(indent) + "".join(f"{column}  " for column in columns)
        if not last:
            drawn = paragraph(start.strip(), start[: len(start) - len(start.lstrip())])
        elif line_width() - len(start) < min(wide[-1], _LEAST_ROOM):
            drawn = paragraph(f"{start[edge:].strip()}  {last}", joined(indent), " " * (edge + 4))
        else:
            drawn = paragraph(last, start, " " * len(start))
        lines += with_roles(drawn, indent, tuple(rows[at]))
    return lines


def aligned(
    rows: Sequence[Sequence[str]], flexible: int, *, label: str = "", width: int = LABEL, right: Collection[int] = ()
) -> list[str]:
    """Lay out rows of equal length; cells of one column wrap within themselves if the others leave too little room.

    `right` are the places of the columns to align at the right.
    """
    if not rows:
        return []
    cells = [[escaped(cell) for cell in row] for row in rows]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    indents = [_label(label if at == 0 else "", width) if label else "  " for at in range(len(rows))]
    margin = len(joined(indents[0]))
    others = sum(wide) - wide[flexible] + 2 * sum(map(bool, wide)) - 2
    wide[flexible] = min(wide[flexible], max(line_width() - margin - others, _LEAST_NAME))
    lines = []
    for indent, row, given in zip(indents, cells, rows, strict=True):
        name, *rest = wrapped(row[flexible], wide[flexible]) or [""]
        row[flexible] = name
        columns = (f"{cell:{'>' if at in right else '<'}{wide[at]}}" for at, cell in enumerate(row) if wide[at])
        line = shortened(f"{joined(indent)}{'  '.join(columns)}".rstrip(), line_width())
        lines += with_roles([line], indent, (*given[:flexible], name, *given[flexible + 1 :]))
        lines += [" " * (margin + sum(room + 2 for room in wide[:flexible] if room)) + text for text in rest]
    return lines


def wrapped(text: str, room: int) -> list[str]:
    """Wrap text between words; a word that is longer than a line is shortened."""
    words = " ".join(shortened(word, room) for word in text.split())
    return textwrap.wrap(words, room, break_on_hyphens=False)


def continued(command: str, start: str, rest: str) -> list[str]:
    """Break a shell command into lines that can be pasted: `start` before the first, `rest` before the others.

    A flag keeps its first value on its line. Empty if the command cannot be divided this way.
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
    """Shorten text to `room` columns; both ends stay, since they tell names apart, and end where a word does."""
    if len(text) <= room:
        return text
    head = max(room - 1, 2) // 2
    tail = max(room - 1 - head, 1)
    first, last = text[:head], text[len(text) - tail :]
    begin = re.match(r".*[\s./:_-](?=\S)|.*\s", first)
    end = re.search(r"(?<=\S)[\s./:_-].*", last)
    first = begin[0].rstrip() if begin and len(begin[0]) > head // 2 else first
    return f"{first}…{end[0].lstrip() if end and len(end[0]) > tail // 2 else last}"


def clipped(lines: Sequence[str], most: int) -> list[str]:
    """Return the first lines, the last of them ending in "…" behind a whole word if more followed."""
    if len(lines) <= most:
        return list(lines)
    last = lines[most - 1]
    if len(last) > line_width() - 2:
        cut = last[: line_width() - 1]
        last = cut.rpartition(" ")[0] if len(cut.split()[-1]) < LABEL else cut[:-1]
    ended = StyledLine(f"{last.rstrip('.,;: ')} …")
    ended.roles = getattr(lines[most - 1], "roles", ())
    return [*lines[: most - 1], ended]


def _label(label: str, width: int) -> Text:
    """Return the label in its column of a plain text."""
    role = getattr(label, "role", "label" if label else "")
    return ("  ", Span(label, role), " " * max(width - len(label), 0))
