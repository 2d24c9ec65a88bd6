"""What is normal for a server: rows of its speed under its load, kept in a file and added to with time.

The file is JSON, "diag.baseline/1" (diag/verify/diag.baseline.schema.json): for each model, release, GPU and set of
flags a table of windows, and the seconds of its start-up phases. Rows rather than quantiles are kept, so that what is
normal *at this load* can be asked for any load.
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
from diag.verify.measures import COLUMNS, Row, ServerKind, measure, starts

SCHEMA = "diag.baseline/1"
MOST_BYTES = 8 * 2**20
MOST_ROWS, MOST_STARTS, MOST_KINDS = 1_000, 50, 50
"""Of one kind of server, and kinds; of more rows, those are kept that show each load that there was."""
NAMES = ("at", *COLUMNS)


class Normal(NamedTuple):
    """What one kind of server does: rows, and its starts, each the seconds of its phases."""

    kind: ServerKind
    rows: tuple[Row, ...] = ()
    starts: tuple[Row, ...] = ()


Baseline = tuple[Normal, ...]


def learn(queries: QueryCache, but: Iterable[str] = ()) -> Baseline:
    """What was observed, without some of the servers."""
    left_out = set(but)
    rows = (Normal(found.kind, found.rows) for found in measure(queries) if found.instance not in left_out)
    begun = (Normal(kind, (), (phases,)) for name, kind, phases in starts(queries) if name not in left_out)
    return merged((*rows, *begun))


def merged(normals: Iterable[Normal]) -> Baseline:
    """Those of one kind together, each row once; the kinds that were seen last are kept."""
    found: dict[ServerKind, Normal] = {}
    for normal in normals:
        old = found.pop(normal.kind, Normal(normal.kind))
        begun = _once((*old.starts, *normal.starts))[-MOST_STARTS:]  # no two starts take equally long in each phase
        found[normal.kind] = Normal(normal.kind, _rows((*old.rows, *normal.rows)), tuple(begun))
    return tuple(found.values())[-MOST_KINDS:]


def _rows(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Each row once, in order of time; of too many, evenly many of every load."""
    once = _once(rows)
    if len(once) > MOST_ROWS:
        by_load = sorted(once, key=lambda row: (row["running"], row["at"]))
        once = [by_load[at * len(by_load) // MOST_ROWS] for at in range(MOST_ROWS)]
    return tuple(sorted(once, key=lambda row: row["at"]))


def _once(rows: Sequence[Row]) -> list[Row]:
    """Each of them once, with four significant digits."""
    rounded = ({name: _rounded(name, value) for name, value in row.items()} for row in rows)
    return list({tuple(sorted(row.items())): row for row in rounded}.values())


def _rounded(name: str, value: float) -> float:
    return round(value, 1) if name == "at" else float(f"{value:.4g}")


def save(file: Path, new: Baseline) -> Baseline:
    """Add to the file, which is written whole or not at all; what it holds now."""
    with refused_in_words(file), only_writer(file.resolve().parent):
        known = read(file) if exists(file) else ()
        both = merged((*known, *new))
        with written_whole(file) as out:
            out.write(_text(both))
    return both


def _text(baseline: Baseline) -> str:
    """One line for each window, so that people can read the file and compare two of them."""
    servers = ",\n".join(_server(normal) for normal in baseline)
    head = f'{{\n "schema": "{SCHEMA}",\n "diag": {json.dumps(__version__)},\n "servers": ['
    return f"{head}\n{servers}\n ]\n}}\n"


def _server(normal: Normal) -> str:
    kind = normal.kind
    facts: dict[str, object] = {"model": kind.model, "vllm": kind.version, "gpu": kind.gpu, "flags": dict(kind.flags)}
    facts |= {"startup_seconds": normal.starts, "columns": NAMES}
    lines = [f'   "{name}": {json.dumps(value)}' for name, value in facts.items()]
    rows = ",\n".join(f"    {json.dumps([row.get(name) for name in NAMES])}" for row in normal.rows)
    return "  {\n" + ",\n".join([*lines, f'   "windows": [\n{rows}\n   ]']) + "\n  }"


def read(file: Path) -> Baseline:
    """The content of a baseline file; BadUsage, with the reason, where it is none."""
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
        return merged(_normal(server) for server in _of(list, document["servers"]))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadUsage(f"{shown} is no valid baseline: {printable(str(error))}") from error


def _normal(server: Mapping[str, Any]) -> Normal:
    names, begun = _of(list, server["columns"]), _of(list, server["startup_seconds"])
    flags = tuple((_of(str, name), _number(value)) for name, value in _of(dict, server["flags"]).items())
    model, version, gpu = (_of(str, server[name]) for name in ("model", "vllm", "gpu"))
    kind = ServerKind(model, version, gpu, flags)
    rows = [_row(dict(zip(names, _of(list, values), strict=True))) for values in _of(list, server["windows"])]
    phases = [{_of(str, name): _number(spent) for name, spent in _of(dict, start).items()} for start in begun]
    return Normal(kind, tuple(rows), tuple(phases))


def _row(values: Mapping[str, Any]) -> Row:
    """The columns that this diag knows; a row without its time or its load is of no use."""
    row = {name: _number(values[name]) for name in NAMES if values.get(name) is not None}
    if not {"at", "running"} <= row.keys():
        raise ValueError('a window without "at" or "running"')
    return row


def _number(value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or abs(value) > LARGEST
    ):
        raise ValueError(f"{value!r} should be a number")
    return float(value)


def _of(kind: type[Any], value: object) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.60} should be a {kind.__name__}")
    return value
