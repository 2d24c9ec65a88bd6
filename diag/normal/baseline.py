"""The normal speed of a server: rows of its speed under its load, kept in a file and added to with time.

The file is JSON, "diag.baseline/1" (diag/normal/diag.baseline.schema.json): for each model, release, GPU and set of
flags a table of windows, and the seconds of its start-up phases. Rows rather than quantiles are kept, so that the
normal speed can be looked up for any load.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diag import __version__
from diag.core.errors import BadUsage
from diag.core.files import exists, only_writer, read_text, refused_in_words, written_whole
from diag.core.formatting import printable
from diag.core.subjects import LARGEST
from diag.diagnosis.query_cache import QueryCache
from diag.normal.measures import COLUMNS, Row, ServerKind, measure, starts

SCHEMA = "diag.baseline/1"
MOST_BYTES = 8 * 2**20
MOST_ROWS, MOST_STARTS, MOST_KINDS = 1_000, 50, 50
"""Rows and starts of one kind of server, and kinds; of more rows, some of each load are kept."""
NAMES = ("at", *COLUMNS)


class Normal(NamedTuple):
    """The rows of one kind of server, and its starts, each the seconds of its phases."""

    kind: ServerKind
    rows: tuple[Row, ...] = ()
    starts: tuple[Row, ...] = ()


Baseline = tuple[Normal, ...]


def learn(queries: QueryCache, but: Iterable[str] = ()) -> Baseline:
    """Measure the observed servers, without some of them."""
    left_out = set(but)
    rows = (Normal(found.kind, found.rows) for found in measure(queries) if found.instance not in left_out)
    begun = (Normal(kind, (), (phases,)) for name, kind, phases in starts(queries) if name not in left_out)
    return merged((*rows, *begun))


def merged(normals: Iterable[Normal]) -> Baseline:
    """Merge rows and starts of one kind, each once, in order of time; the kinds that were seen last are kept.

    If there are too many rows, evenly many of every load are kept.
    """
    found: dict[ServerKind, Normal] = {}
    for normal in normals:
        old = found.pop(normal.kind, Normal(normal.kind))
        rows = _without_duplicates((*old.rows, *normal.rows))
        if len(rows) > MOST_ROWS:
            by_load = sorted(rows, key=lambda row: (row["running"], row["at"]))
            rows = [by_load[at * len(by_load) // MOST_ROWS] for at in range(MOST_ROWS)]
        rows.sort(key=lambda row: row["at"])
        begun = _without_duplicates((*old.starts, *normal.starts))  # no two starts take equally long in each phase
        found[normal.kind] = Normal(normal.kind, tuple(rows), tuple(begun[-MOST_STARTS:]))
    return tuple(found.values())[-MOST_KINDS:]


def _without_duplicates(rows: Sequence[Row]) -> list[Row]:
    """Return each row once, with four significant digits; times with tenths of a second."""
    rounded: list[Row] = [
        {name: round(value, 1) if name == "at" else float(f"{value:.4g}") for name, value in row.items()}
        for row in rows
    ]
    return list({tuple(sorted(row.items())): row for row in rounded}.values())


def save(file: Path, new: Baseline) -> Baseline:
    """Add to the file, which is written whole or not at all, and return its content.

    Each window has one line, so that people can read the file and compare two of them.
    """
    with refused_in_words(file), only_writer(file.resolve().parent):
        known = read(file) if exists(file) else ()
        both = merged((*known, *new))
        servers = []
        for kind, windows, begun in both:
            facts: dict[str, object] = {"model": kind.model, "vllm": kind.version, "gpu": kind.gpu}
            facts |= {"flags": dict(kind.flags), "startup_seconds": begun, "columns": NAMES}
            lines = [f'   "{name}": {json.dumps(value)}' for name, value in facts.items()]
            rows = ",\n".join(f"    {json.dumps([row.get(name) for name in NAMES])}" for row in windows)
            servers.append("  {\n" + ",\n".join([*lines, f'   "windows": [\n{rows}\n   ]']) + "\n  }")
        head = f'{{\n "schema": "{SCHEMA}",\n "diag": {json.dumps(__version__)},\n "servers": ['
        text = "\n".join([head, ",\n".join(servers), " ]", "}", ""])
        with written_whole(file) as out:
            out.write(text)
    return both


def read(file: Path) -> Baseline:
    """Read a baseline file; raise BadUsage, with the reason, if it is none."""
    shown = printable(str(file))
    try:
        document = json.loads(read_text(file, MOST_BYTES))
    except OSError as error:
        raise BadUsage(f"the baseline {shown} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadUsage(f"{shown} is no baseline: it is not valid JSON") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise BadUsage(f'{shown} is no baseline of this diag: it needs "schema": "{SCHEMA}" (diag baseline writes it)')
    try:
        return merged(_parse_server(server) for server in _checked(list, document["servers"]))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadUsage(f"{shown} is no valid baseline: {printable(str(error))}") from error


def _parse_server(server: Mapping[str, Any]) -> Normal:
    """Parse one kind of server, with the columns that this release of diag has; a row needs its time and its load."""
    names, begun = _checked(list, server["columns"]), _checked(list, server["startup_seconds"])
    flags = tuple((_checked(str, name), _number(value)) for name, value in _checked(dict, server["flags"]).items())
    model, version, gpu = (_checked(str, server[name]) for name in ("model", "vllm", "gpu"))
    rows = []
    for window in _checked(list, server["windows"]):
        values = dict(zip(names, _checked(list, window), strict=True))
        row = {name: _number(values[name]) for name in NAMES if values.get(name) is not None}
        if not {"at", "running"} <= row.keys():
            raise ValueError('a window without "at" or "running"')
        rows.append(row)
    phases = [{_checked(str, name): _number(spent) for name, spent in _checked(dict, start).items()} for start in begun]
    return Normal(ServerKind(model, version, gpu, flags), tuple(rows), tuple(phases))


def _number(value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or abs(value) > LARGEST
    ):
        raise ValueError(f"{value!r} should be a number")
    return float(value)


def _checked(kind: type[Any], value: object) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.60} should be a {kind.__name__}")
    return value
