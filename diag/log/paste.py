"""Undo what log stores, people and programs do to a log before it reaches us, before its lines are parsed.

Exports: journald, Loki, Grafana, Datadog, CloudWatch and their like keep the text of a line and its time as two fields
of a record (JSON line by line or in a list, CSV, logfmt). A record becomes the lines of its text, each behind its time,
as `kubectl logs --timestamps` writes them. Other text stays.

Pastes: a paste is quoted, indented or fenced as Markdown does it, its colours and carriage returns are written out as
text, and a terminal has wrapped it. The layout is undone only where nearly all lines have it, since a log's own text
may look so. What stands before each line is learnt from the lines in which vLLM's own head stands behind it: `stern`,
`logcli`, `grep -n`, `cat -n`, `srun --label`, VLLM_LOGGING_PREFIX, or a head that no program here names.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple

from diag.core.files import parse_json
from diag.log.marks import MARKS
from diag.log.parse_line import COLLECTOR, ISO, Line

NEARLY_ALL = 0.9
"""The share of lines that have a layout, if the layout is that of the paste and not of a text in the log."""


# -- exports -----------------------------------------------------------------------------------------------------------

TEXTS = ("message", "log", "line", "textpayload", "msg", "content", "@message", "body", "text")
TIMES = ("@timestamp", "timestamp", "time", "__realtime_timestamp", "date", "ts", "eventtime")
"""Names of the fields, in lower case; the first one that a record has counts."""
_NESTED = ("attributes", "jsonpayload", "_source", "fields")
"""Fields whose own fields are those of the record."""
_OF_A_LOGGER = ("levelname", "logger", "name")
"""Fields of a record that a program's own logger wrote as JSON: the parser of lines reads them."""
_DOCKER = '{"log"'
"""The beginning of a line of Docker's json-file driver, which the parser of lines reads: it joins split lines."""
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3), (1e9, 1.0))
"""Numbers from which a time counts nanoseconds, microseconds, milliseconds or seconds, and how many make a second."""
_LOGFMT = re.compile(
    r"(?P<before>(?:[\w.]{1,40}=(?:\"(?:[^\"\\]|\\.)*\"|\S*) ){0,12})(?:msg|message)=(?P<text>\"(?:[^\"\\]|\\.)*\")"
)
"""A record of logfmt, as Docker Model Runner and other programs in Go write them."""
_LOGFMT_TIME = re.compile(r"\b(?:time|ts|timestamp)=\"?([^\" ]+)")
MOST_DEPTH = 4


class _ExportedRecord(NamedTuple):
    number: int
    at: str
    text: str


def as_lines(lines: Sequence[Line]) -> Sequence[Line]:
    """Return the lines of the records that the text consists of, the oldest first; other text as it is."""
    written = [line for line in lines if line.text.strip()]
    first = written[0].text.lstrip("\ufeff \t") if written else ""
    records: list[_ExportedRecord] = []
    if first.startswith("{") and not first.startswith(_DOCKER):
        records = [record for line in written for record in _record(_load(line.text), line.number)]
        records = records if len(records) >= NEARLY_ALL * len(written) else []
    if not records and first.startswith(("[", "{")) and not first.startswith(_DOCKER):
        document = _load("\n".join(line.text for line in lines))
        if isinstance(document, dict) and isinstance(document.get("cells"), list):
            written_by = [cell.get("outputs") for cell in document["cells"] if isinstance(cell, dict)]
            outputs = [output for listed in written_by if isinstance(listed, list) for output in listed]
            for output in (one for one in outputs if isinstance(one, dict)):
                text = output.get("text") or output.get("traceback") or ()
                joint = "\n" if "traceback" in output else ""
                records.append(_ExportedRecord(0, "", text if isinstance(text, str) else joint.join(map(str, text))))
        else:
            records = next(filter(None, _lists(document, MOST_DEPTH)), [])
    if not records and "=" in first:
        for line in written:
            if match := _LOGFMT.match(line.text):
                at, text = _LOGFMT_TIME.search(match["before"]), str(_load(match["text"]) or "")
                records.append(_ExportedRecord(line.number, _moment(at[1]) if at else "", text))
        records = records if len(records) >= NEARLY_ALL * len(written) else []
    if not records and first.count(","):
        with suppress(csv.Error):
            records = list(_cells(lines))
    if not records:
        return lines
    if is_newest_first([record.at for record in records if record.at], 1):  # a store sorts its records
        records.reverse()
    return [
        Line(record.number, f"{record.at} {text}" if record.at else text)
        for record in records
        for text in record.text.removesuffix("\n").split("\n")
    ]


def _lists(value: object, depth: int) -> Iterator[list[_ExportedRecord]]:
    """Yield the records of each list inside a document: objects, or Loki's pairs of a time and a line."""
    if not depth or not isinstance(value, dict | list):
        return
    if isinstance(value, list):
        yield [record for entry in value for record in _record(entry, 0)]
    for entry in value.values() if isinstance(value, dict) else value[:MOST_DEPTH]:
        yield from _lists(entry, depth - 1)


def _cells(lines: Sequence[Line]) -> Iterator[_ExportedRecord]:
    """Read a table of CSV whose heading names a column of texts, the cells of which may have several lines."""
    reader = csv.reader(f"{line.text}\n" for line in lines)
    heading = [name.strip("\ufeff \"'").lower() for name in next(reader, [])]
    column = next((heading.index(name) for name in TEXTS if name in heading), None)
    if column is None or len(heading) < 2:
        return
    clock = next((heading.index(name) for name in TIMES if name in heading), None)
    for row in reader:
        if len(row) > column:
            number = lines[min(reader.line_num, len(lines)) - 1].number
            at = _moment(row[clock]) if clock is not None and len(row) > clock else ""
            yield _ExportedRecord(number, at, row[column])


def _record(value: object, number: int) -> Iterator[_ExportedRecord]:
    if isinstance(value, list) and len(value) >= 2 and isinstance(value[0], str) and isinstance(value[1], str):
        if at := _moment(value[0]):
            yield _ExportedRecord(number, at, value[1])
        return
    if not isinstance(value, dict):
        return
    fields = {str(name).lower(): field for name, field in value.items()}
    for name in _NESTED:
        if isinstance(nested := fields.get(name), dict):
            fields = {**{str(inner).lower(): field for inner, field in nested.items()}, **fields}
    text = next((fields[name] for name in TEXTS if isinstance(fields.get(name), str)), None)
    if isinstance(text, str) and fields.keys().isdisjoint(_OF_A_LOGGER):
        yield _ExportedRecord(number, next((_moment(fields[name]) for name in TIMES if name in fields), ""), text)


def _load(text: str) -> object:
    try:
        return parse_json(text.lstrip("\ufeff"))
    except ValueError:
        return None


def _moment(value: object) -> str:
    """Return a time as a log collector writes it, with its zone; "" for none."""
    text = str(value).strip().removesuffix(" UTC")
    if re.fullmatch(r"\d{9,20}(?:\.\d{1,9})?", text):
        number = float(text)
        unit = next((unit for least, unit in _UNITS if number >= least), None)
        return datetime.fromtimestamp(number / unit, UTC).isoformat(timespec="microseconds") if unit else ""
    try:
        at = datetime.fromisoformat(text.replace(",", "."))
    except ValueError:
        return ""
    return at.isoformat(timespec="microseconds")


# -- pastes ----------------------------------------------------------------------------------------------------------

FEWEST_WRAPPED, NARROWEST, WIDEST = 3, 60, 250
"""Full lines from which a log was wrapped by a terminal, and the columns that a terminal may have."""
_LAYOUTS = tuple(map(re.compile, (r" {0,3}> ?", r"\t")))
"""Markdown's quotation, and a tab before each line."""
FEWEST_BLANKS = 4
"""Blanks before nearly all lines that are the paste's, such as Markdown's for code."""
_BLANK = re.compile(r"[>\s]*")
_FENCE = re.compile(r"\s*(?:```|~~~)[\w.+-]{0,20}\s*$")
_MARK = re.compile(r"[\x1b\\^\u241b]")
_LEVEL = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)"
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


def by_source(lines: Sequence[Line]) -> list[tuple[str, list[Line]]]:
    """Return the lines of each server apart, with its name, if a file has those of several: several pods or services
    stand before the lines, `tail` names several files, or one log with such heads is joined to another without.

    A client can write any head into a log: heads count only before nearly all lines, or all at one end of the file.
    """
    heads = [MARKS.source.match(line.text[:LONGEST_HEAD]) for line in lines]
    marked = [at for at, head in enumerate(heads) if head]
    has_titles = bool(heads and heads[0] and heads[0]["title"])
    at_end = bool(marked) and 4 * len(marked) >= len(lines) and (not marked[0] or marked[-1] == len(lines) - 1)
    if not has_titles and (not at_end or len(marked) < NEARLY_ALL * (marked[-1] - marked[0] + 1)):
        return [("", list(lines))]
    groups: dict[str, list[Line]] = {}
    name = ""
    for line, head in zip(lines, heads, strict=True):
        if head and head["title"]:
            name = head["title"]
            continue
        if not has_titles:
            name = (head["pod"] or head["service"]) if head else ""
        groups.setdefault(name, []).append(line)
    counts = {
        name: sum(bool(MARKS.own_line.search(line.text[:LONGEST_HEAD])) for line in group)
        for name, group in groups.items()
    }
    servers = {name: group for name, group in groups.items() if counts[name] >= FEWEST_HEADS}
    if len(servers) < 2:
        return [("", list(lines))]
    others = [line for name, group in groups.items() if name not in servers for line in group]
    return [(name, sorted([*group, *others])) for name, group in servers.items()]


def as_logged(lines: Sequence[Line]) -> list[Line]:
    """Return the lines as the server logged them, the oldest first; their numbers stay those of the paste."""
    plain = list[Line]()
    for line in lines:  # without colours
        text = MARKS.colour.sub("", line.text) if _MARK.search(line.text) else line.text
        text = MARKS.bare_colour.sub("", text) if "[" in text else text
        text = MARKS.returns.sub("", text) if text.endswith(("\r", "^M", "\\r")) else text
        if not _FENCE.match(text):
            plain.append(Line(line.number, text))
    for layout in (*_LAYOUTS, *_LAYOUTS):  # a quotation may stand inside of another one
        written = [line for line in plain if not _BLANK.fullmatch(line.text)]
        if written and sum(bool(layout.match(line.text)) for line in written) >= NEARLY_ALL * len(written):
            plain = [Line(line.number, layout.sub("", line.text, count=1)) for line in plain]
    plain = [line for line in plain if not _FENCE.match(line.text)]
    depths = sorted(len(line.text) - len(line.text.lstrip(" ")) for line in plain if line.text.strip())
    depth = depths[int((1 - NEARLY_ALL) * len(depths))] if depths else 0
    if depth >= FEWEST_BLANKS:  # nearly all lines are indented
        plain = [Line(line.number, line.text[:depth].lstrip(" ") + line.text[depth:]) for line in plain]
    matches = [MARKS.numbered.match(line.text[:LONGEST_HEAD]) for line in plain]
    numbers = [int(match[1]) for match in matches if match]
    steps = sum(after > before for before, after in pairwise(numbers))
    fewest = max(FEWEST_HEADS, NEARLY_ALL * sum(not _BLANK.fullmatch(line.text) for line in plain))
    if len(numbers) >= fewest and steps >= NEARLY_ALL * (len(numbers) - 1):  # nearly each has one larger than before
        plain = [line.cut(match) for line, match in zip(plain, matches, strict=True)]
    if sum(bool(MARKS.own_line.search(line.text[:LONGEST_HEAD])) for line in plain) < FEWEST_HEADS:
        # a paste that has lost its line feeds: no line of a log but its first begins as one
        parted = ((line, MARKS.inside.split(line.text)) for line in plain)
        plain = [
            Line(line.number, text)
            for line, parts in parted
            for text in (parts if len(parts) > FEWEST_HEADS else [line.text])
        ]
    head = _learnt_head(plain)
    plain = [Line(line.number, _without(head, line.text)) for line in _unwrapped(plain, head)]
    starts = list[int]()
    for line in plain:  # behind the head of a collector and the names of processes
        collector = COLLECTOR.match(line.text)
        process = _PROCESS.match(line.text, collector.end() if collector else 0)
        starts.append(process.end() if process else 0)
    prefixes = [
        None if line.text.startswith('{"') else _PREFIX.match(line.text, start)
        for line, start in zip(plain, starts, strict=True)
    ]
    if prefix := _learnt(match[0] for match in prefixes if match):
        plain = [line.cut(prefix.match(line.text, start)) for line, start in zip(plain, starts, strict=True)]
    times = [match for line in plain if (match := _TIME.match(line.text[:LONGEST_HEAD]))]
    kind = "iso" if sum(bool(match["iso"]) for match in times) * 2 > len(times) else "own"
    return _once(plain[::-1] if is_newest_first([match[kind] for match in times if match[kind]]) else plain)


def _once(lines: list[Line]) -> list[Line]:
    """Return the lines without copies, if two collectors wrote each of them, or the whole was pasted more than once.

    Lines of the access log have no time: many that are equal, one behind the other, are no copies.
    """
    written = [line for line in lines if not _BLANK.fullmatch(line.text)]
    texts = [line.text for line in written]
    differ = len(set(texts))
    if len(texts) < 2 * FEWEST_HEADS or differ < FEWEST_HEADS:
        return lines
    if sum(map(str.__eq__, texts[::2], texts[1::2])) * 2 >= NEARLY_ALL * len(texts) and differ * 4 >= len(texts):
        return written[::2]
    copies = next((count for count in (3, 2) if texts == texts[: len(texts) // count] * count), 1)
    return written[: len(written) // copies] if copies > 1 and differ * 2 * copies >= len(texts) else lines


def is_newest_first(times: Sequence[str], fewest: int = FEWEST_HEADS) -> bool:
    """Return True if times, all in the same form, go back from each line to the next, as a log store shows them."""
    steps = Counter((after > before) - (after < before) for before, after in pairwise(times))
    return steps[-1] >= fewest and steps[-1] >= NEARLY_ALL * (steps[-1] + steps[1])


def _learnt_head(lines: Sequence[Line]) -> re.Pattern[str] | None:
    """Return the head that nearly all lines of vLLM's have before them, None if the parser of lines knows it."""
    owns = [(line.text, match.start()) for line in lines if (match := MARKS.own_line.search(line.text[:LONGEST_HEAD]))]
    if sum(text.startswith('{"') for text, _ in owns) > (1 - NEARLY_ALL) * len(owns):  # Docker's file, vLLM's JSON
        return None
    heads = [text[:start] for text, start in owns if start]
    parsed = sum(bool(COLLECTOR.fullmatch(head)) for head in heads)
    if len(heads) < NEARLY_ALL * len(owns) or parsed >= NEARLY_ALL * len(heads):
        return None
    if len(heads) < FEWEST_HEADS:  # a short log: the head must be before the other lines too, but those of Slurm itself
        written = [text for line in lines if (text := line.text).strip() and not text.startswith(("srun:", "slurmst"))]
        head = _learnt(heads, 1)
        return head if head and sum(bool(head.match(text)) for text in written) >= NEARLY_ALL * len(written) else None
    return _learnt(heads)


def _learnt(heads: Iterable[str], fewest: int = FEWEST_HEADS) -> re.Pattern[str] | None:
    """Return a pattern of the heads that are frequent; all numbers and times in one are taken to vary."""
    forms = {"iso": ISO, "clock": r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?", "digits": r" *\d+"}
    shapes = Counter(
        "".join(forms.get(piece.lastgroup or "", re.escape(piece[0])) for piece in _PIECE.finditer(head))
        for head in heads
    )
    frequent = [shape for shape, count in shapes.items() if count >= max(fewest, RAREST * shapes.total())]
    if sum(shapes[shape] for shape in frequent) < NEARLY_ALL * shapes.total() or not frequent:
        return None
    return re.compile("|".join(sorted(frequent, key=len, reverse=True)))


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
    """Join lines that a terminal has wrapped: the longest ones all have the same width; and frames that are broken."""
    widths = Counter(len(line.text) for line in lines)
    widest = max(widths, default=0)
    is_wrapped = NARROWEST <= widest <= WIDEST and widths[widest] >= FEWEST_WRAPPED
    joined: list[Line] = []
    is_open = False
    for line in lines:
        if is_open and not (MARKS.begins.match(line.text) or (head and head.match(line.text))):
            joined[-1] = joined[-1]._replace(text=joined[-1].text + line.text)
        else:
            joined.append(line)
        is_open = is_wrapped and len(line.text) == widest and not MARKS.whole.search(line.text)
        is_open = is_open or ('File "' in line.text and bool(MARKS.torn.search(line.text)))
    return joined
