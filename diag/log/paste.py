"""Undo what people and programs do to a log when they paste it, before its lines are parsed.

A paste is quoted, indented or fenced as Markdown does it, its colours and carriage returns are written out as text, and
a terminal has wrapped it. The layout is undone only where nearly all lines have it, since a log's own text may look so.

What a collector or a shell writes before each line is learnt from the lines in which vLLM's own head stands behind it:
`stern`, `logcli`, `grep -n`, `cat -n`, `srun --label`, VLLM_LOGGING_PREFIX, or a head that no program here names.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from diag.log.parse_line import COLLECTOR, ISO


class Line(NamedTuple):
    """A line of text with its number in the file, 0 if unknown."""

    number: int
    text: str


NEARLY_ALL = 0.9
"""The share of lines that have a layout, if the layout is that of the paste and not of a text in the log."""
FEWEST_WRAPPED, NARROWEST, WIDEST = 3, 60, 250
"""Full lines from which a log was wrapped by a terminal, and the columns that a terminal may have."""
_LAYOUTS = tuple(map(re.compile, (r" {0,3}> ?", r"\t")))
"""Markdown's quotation, and a tab before each line."""
FEWEST_BLANKS = 4
"""Blanks before nearly all lines that are the paste's, such as Markdown's for code."""
_INSIDE = re.compile(
    r"(?<=\S) +(?=(?:\([A-Za-z]\w{0,60} (?:rank=\d+ )?pid=\d{1,20}[^()]{0,80}\) ?){0,3}"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[\w./]+:\d+\]"
    r"|(?:INFO|WARNING|ERROR): +(?:[A-Z][a-z]+ing |Started |Application |Uvicorn |[\d.]{7,15}:\d+ - )"
    r"|Traceback \(most recent call last\):|File \"[^\"]{1,300}\", line \d+, in ))"
)
"""The blank before the beginning of a line, where a form has joined the lines of a paste."""
_NUMBERED = re.compile(r" {0,12}(?:[Ll]ine )?(\d{1,9})[:|\t-] ?")
"""The number of a line, as `grep -n` with its context, an editor or an agent's tool writes it before the line."""
_BLANK = re.compile(r"[>\s]*")
_FENCE = re.compile(r"\s*(?:```|~~~)[\w.+-]{0,20}\s*$")
_MARK = re.compile(r"[\x1b\\^\u241b]")
_COLOUR = re.compile(
    r"(?:\x1b|\\x1b|\\033|\\u001b|\\e|\^\[|\u241b)\[[0-9;?]{0,20}[A-Za-z]"
    r"|\x1b[_\]][^\x07\x1b]{0,200}(?:\x07|\x1b\\)"  # Buildkite's times, a terminal's title
)
"""Colours, also as `cat -v`, JSON or an editor shows them; without a mark, a line has none."""
_BARE_COLOUR = re.compile(r"\[(?:[01]|[39][0-7]|[0-9;]{3,12})m")
"""Colours without the escape character, which a web page drops."""
_RETURNS = re.compile(r"(?:\^M|\\r|\r)+$")
"""Carriage returns at the end of a line, also written out."""
_LEVEL = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)"
_OWN = re.compile(
    rf"\((?:[A-Za-z]\w{{0,60}}) (?:rank=\d+ )?pid=\d+[^()]{{0,80}}\)|{_LEVEL} \d\d-\d\d \d\d:\d\d:\d\d "
    r"|(?:INFO|WARNING|ERROR): {4,5}\S|Traceback \(most recent call last\):"
)
"""The beginning of a line that vLLM, uvicorn or Python wrote."""
_PROCESS = re.compile(r"(?:\(\w[^()]{0,80} pid=\d{1,20}[^()]{0,80}\) ?){0,3}")
_PREFIX = re.compile(rf"(?!\(|{_LEVEL}(?::| \d))\S.{{0,80}}?(?={_LEVEL} \d\d-\d\d \d\d:\d\d:\d\d \[[\w./]+:\d+\])")
"""VLLM_LOGGING_PREFIX, between the name of the process and the level; behind uvicorn's level, a client wrote it."""
_TIME = re.compile(
    rf"(?P<iso>{ISO})|(?:\(\w[^()]{{0,80}} pid=\d{{1,20}}[^()]{{0,80}}\) ?){{0,3}}{_LEVEL} (?P<own>\d\d-\d\d \S+)"
)
LONGEST_HEAD, FEWEST_HEADS, RAREST = 300, 3, 0.01
"""Characters of a head, lines from which one is learnt, and their share of the lines that have one."""
_PIECE = re.compile(
    rf"(?P<iso>{ISO})|(?P<clock>\d\d:\d\d:\d\d(?:[.,]\d{{1,9}})?)|(?P<digits> *\d+)|(?P<text>.)", re.DOTALL
)
_BEGINS = re.compile(
    r"\s*\(?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|Traceback|File \"|[A-Za-z]\w{0,60} pid=\d|\d{4}-\d\d-\d\d)|\[|$"
)
"""Beginnings of a line that no terminal has wrapped."""
_WHOLE = re.compile(r'(?:usage|rate): [\d.]{1,6}%$|" \d{3} [A-Z][\w ]{1,40}$')
"""Ends of stats lines, which often have one width, and of lines of the access log."""


def as_logged(lines: Sequence[Line]) -> list[Line]:
    """Return the lines as the server logged them, the oldest first; their numbers stay those of the paste."""
    bare = (Line(line.number, _without_colours(line.text)) for line in lines)
    plain = [line for line in bare if not _FENCE.match(line.text)]
    for layout in (*_LAYOUTS, *_LAYOUTS):  # a quotation may stand inside of another one
        written = [line for line in plain if not _BLANK.fullmatch(line.text)]
        if written and sum(bool(layout.match(line.text)) for line in written) >= NEARLY_ALL * len(written):
            plain = [Line(line.number, layout.sub("", line.text, count=1)) for line in plain]
    plain = [line for line in plain if not _FENCE.match(line.text)]
    plain = _separated(_unnumbered(_without_indentation(plain)))
    head = _learnt_head(plain)
    plain = [Line(line.number, _without(head, line.text)) for line in _unwrapped(plain, head)]
    starts = [_own_start(line.text) for line in plain]
    prefixes = [
        None if line.text.startswith('{"') else _PREFIX.match(line.text, start)
        for line, start in zip(plain, starts, strict=True)
    ]
    if prefix := _learnt(match[0] for match in prefixes if match):
        plain = [_cut(line, prefix.match(line.text, start)) for line, start in zip(plain, starts, strict=True)]
    times = [match for line in plain if (match := _TIME.match(line.text[:LONGEST_HEAD]))]
    kind = "iso" if sum(bool(match["iso"]) for match in times) * 2 > len(times) else "own"
    return plain[::-1] if is_newest_first([match[kind] for match in times if match[kind]]) else plain


def _without_indentation(lines: list[Line]) -> list[Line]:
    """Return the lines without the blanks that nearly all of them begin with."""
    depths = sorted(len(line.text) - len(line.text.lstrip(" ")) for line in lines if line.text.strip())
    depth = depths[int((1 - NEARLY_ALL) * len(depths))] if depths else 0
    if depth < FEWEST_BLANKS:
        return lines
    return [line._replace(text=line.text[:depth].lstrip(" ") + line.text[depth:]) for line in lines]


def _separated(lines: list[Line]) -> list[Line]:
    """Return the lines of a paste that has lost its line feeds: no line of a log but its first begins as one."""
    if sum(bool(_OWN.search(line.text[:LONGEST_HEAD])) for line in lines) >= FEWEST_HEADS:
        return lines
    parted = [(line, _INSIDE.split(line.text)) for line in lines]
    return [
        line._replace(text=text)
        for line, parts in parted
        for text in (parts if len(parts) > FEWEST_HEADS else [line.text])
    ]


def _unnumbered(lines: list[Line]) -> list[Line]:
    """Return the lines without their numbers, if nearly all have one and each number is larger than the one before."""
    matches = [_NUMBERED.match(line.text[:LONGEST_HEAD]) for line in lines]
    numbers = [int(match[1]) for match in matches if match]
    written = sum(not _BLANK.fullmatch(line.text) for line in lines)
    steps = sum(after > before for before, after in pairwise(numbers))
    if len(numbers) < max(FEWEST_HEADS, NEARLY_ALL * written) or steps < NEARLY_ALL * (len(numbers) - 1):
        return lines
    return [_cut(line, match) for line, match in zip(lines, matches, strict=True)]


def _without_colours(text: str) -> str:
    text = _COLOUR.sub("", text) if _MARK.search(text) else text
    text = _BARE_COLOUR.sub("", text) if "[" in text else text
    return _RETURNS.sub("", text) if text.endswith(("\r", "^M", "\\r")) else text


def _own_start(text: str) -> int:
    """Return the place behind the head of a collector and the names of processes."""
    collector = COLLECTOR.match(text)
    process = _PROCESS.match(text, collector.end() if collector else 0)
    return process.end() if process else 0


def _cut(line: Line, part: re.Match[str] | None) -> Line:
    return line._replace(text=line.text[: part.start()] + line.text[part.end() :]) if part else line


def is_newest_first(times: Sequence[str], fewest: int = FEWEST_HEADS) -> bool:
    """Return True if times, all in the same form, go back from each line to the next, as a log store shows them."""
    steps = Counter((after > before) - (after < before) for before, after in pairwise(times))
    return steps[-1] >= fewest and steps[-1] >= NEARLY_ALL * (steps[-1] + steps[1])


def _learnt_head(lines: Sequence[Line]) -> re.Pattern[str] | None:
    """Return the head that nearly all lines of vLLM's have before them, None if the parser of lines knows it."""
    found = [(line.text, match.start()) for line in lines if (match := _OWN.search(line.text[:LONGEST_HEAD]))]
    if sum(text.startswith('{"') for text, _ in found) > (1 - NEARLY_ALL) * len(found):  # Docker's file, vLLM's JSON
        return None
    heads = [text[:start] for text, start in found if start]
    known = sum(bool(COLLECTOR.fullmatch(head)) for head in heads)
    if len(heads) < NEARLY_ALL * len(found) or known >= NEARLY_ALL * len(heads):
        return None
    if len(heads) < FEWEST_HEADS:  # a short log: the head must be before the other lines too
        written = [line.text for line in lines if line.text.strip()]
        head = _learnt(heads, 1)
        return head if head and sum(bool(head.match(text)) for text in written) >= NEARLY_ALL * len(written) else None
    return _learnt(heads)


def _learnt(heads: Iterable[str], fewest: int = FEWEST_HEADS) -> re.Pattern[str] | None:
    """Return a pattern of the heads that are frequent; all numbers and times in one are taken to vary."""
    shapes = Counter(map(_shape, heads))
    frequent = [shape for shape, count in shapes.items() if count >= max(fewest, RAREST * shapes.total())]
    if sum(shapes[shape] for shape in frequent) < NEARLY_ALL * shapes.total() or not frequent:
        return None
    return re.compile("|".join(sorted(frequent, key=len, reverse=True)))


def _shape(head: str) -> str:
    forms = {"iso": ISO, "clock": r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?", "digits": r" *\d+"}
    return "".join(forms.get(piece.lastgroup or "", re.escape(piece[0])) for piece in _PIECE.finditer(head))


def _without(head: re.Pattern[str] | None, text: str) -> str:
    """Return a line without its head, behind the time in it as the parser of lines reads it."""
    match = head.match(text) if head else None
    if not match:
        return text
    times = re.findall(ISO, match[0])
    rest = text[match.end() :]
    has_time = bool((inner := COLLECTOR.match(rest)) and inner.end())
    return f"{times[-1]} {rest}" if times and not has_time else rest


def _unwrapped(lines: Sequence[Line], head: re.Pattern[str] | None) -> list[Line]:
    """Join lines that a terminal has wrapped: the longest ones all have the same width, and none is longer."""
    widths = Counter(len(line.text) for line in lines)
    widest = max(widths, default=0)
    if not NARROWEST <= widest <= WIDEST or widths[widest] < FEWEST_WRAPPED:
        return list(lines)
    joined: list[Line] = []
    is_open = False
    for line in lines:
        if is_open and not (_BEGINS.match(line.text) or (head and head.match(line.text))):
            joined[-1] = joined[-1]._replace(text=joined[-1].text + line.text)
        else:
            joined.append(line)
        is_open = len(line.text) == widest and not _WHOLE.search(line.text)
    return joined
