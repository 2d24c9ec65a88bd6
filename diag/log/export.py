"""Read the records that log stores export instead of lines: objects of JSON, line by line or in a list, CSV, logfmt.

Journald, Loki, Grafana, Datadog, CloudWatch and their like keep the text of a line and its time as two fields. A record
becomes the lines of its text, each behind its time, as `kubectl logs --timestamps` writes them. Other text stays.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from diag.core.files import parse_json
from diag.log.paste import NEARLY_ALL, Line, is_newest_first

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
    first = next((line.text.lstrip("\ufeff \t") for line in lines if line.text.strip()), "")
    records: list[_ExportedRecord] = []
    if first.startswith("{") and not first.startswith(_DOCKER):
        records = _of_objects(lines)
    if not records and first.startswith(("[", "{")) and not first.startswith(_DOCKER):
        records = _of_document(lines)
    if not records and "=" in first:
        records = _of_logfmt(lines)
    if not records and first.count(","):
        records = _of_csv(lines)
    if not records:
        return lines
    if is_newest_first([record.at for record in records if record.at], 1):  # a store sorts its records
        records.reverse()
    return [
        Line(record.number, f"{record.at} {text}" if record.at else text)
        for record in records
        for text in record.text.removesuffix("\n").split("\n")
    ]


def _of_objects(lines: Sequence[Line]) -> list[_ExportedRecord]:
    """Read one object for each line, if nearly all lines are such objects."""
    written = [line for line in lines if line.text.strip()]
    records = [record for line in written for record in _record(_load(line.text), line.number)]
    return records if len(records) >= NEARLY_ALL * len(written) else []


def _of_document(lines: Sequence[Line]) -> list[_ExportedRecord]:
    """Read the first list of records in a document of JSON, and the printed outputs of a notebook."""
    document = _load("\n".join(line.text for line in lines))
    if isinstance(document, dict) and isinstance(document.get("cells"), list):
        return [_ExportedRecord(0, "", text) for text in _outputs(document["cells"])]
    return next((found for found in _lists(document, MOST_DEPTH) if found), [])


def _lists(value: object, depth: int) -> Iterator[list[_ExportedRecord]]:
    """Yield the records of each list inside a document: objects, or Loki's pairs of a time and a line."""
    if not depth or not isinstance(value, dict | list):
        return
    if isinstance(value, list):
        yield [record for each in value for record in _record(each, 0)]
    for each in value.values() if isinstance(value, dict) else value[:MOST_DEPTH]:
        yield from _lists(each, depth - 1)


def _outputs(cells: list[object]) -> Iterator[str]:
    for cell in cells:
        outputs = cell.get("outputs") if isinstance(cell, dict) else None
        for output in outputs if isinstance(outputs, list) else ():
            if isinstance(output, dict):
                text = output.get("text") or output.get("traceback") or ()
                joint = "\n" if "traceback" in output else ""
                yield text if isinstance(text, str) else joint.join(map(str, text))


def _of_logfmt(lines: Sequence[Line]) -> list[_ExportedRecord]:
    """Read a record of logfmt for each line, if nearly all lines are such records."""
    written = [line for line in lines if line.text.strip()]
    records = []
    for line in written:
        if match := _LOGFMT.match(line.text):
            at = _LOGFMT_TIME.search(match["before"])
            text = _load(match["text"])
            records.append(_ExportedRecord(line.number, _moment(at[1]) if at else "", str(text or "")))
    return records if len(records) >= NEARLY_ALL * len(written) else []


def _of_csv(lines: Sequence[Line]) -> list[_ExportedRecord]:
    """Read a table whose heading names a column of texts, the cells of which may have several lines."""
    reader = csv.reader(f"{line.text}\n" for line in lines)
    try:
        heading = [name.strip("\ufeff \"'").lower() for name in next(reader, [])]
        column = next((heading.index(name) for name in TEXTS if name in heading), None)
        if column is None or len(heading) < 2:
            return []
        clock = next((heading.index(name) for name in TIMES if name in heading), None)
        records = []
        for row in reader:
            number = lines[min(reader.line_num, len(lines)) - 1].number
            if len(row) > column:
                at = _moment(row[clock]) if clock is not None and len(row) > clock else ""
                records.append(_ExportedRecord(number, at, row[column]))
    except csv.Error:
        return []
    return records


def _record(value: object, number: int) -> Iterator[_ExportedRecord]:
    if isinstance(value, list) and len(value) >= 2 and isinstance(value[0], str) and isinstance(value[1], str):
        if at := _moment(value[0]):
            yield _ExportedRecord(number, at, value[1])
        return
    if not isinstance(value, dict):
        return
    fields = {str(name).lower(): each for name, each in value.items()}
    for name in _NESTED:
        if isinstance(nested := fields.get(name), dict):
            fields = {**{str(inner).lower(): each for inner, each in nested.items()}, **fields}
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
