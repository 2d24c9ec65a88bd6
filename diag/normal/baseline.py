"""The normal speed of a server: rows of its speed under its load, kept in a file and added to with time.

A row has the load (requests running and waiting, lengths) beside latency, throughput and energy of one engine in one
short window, so that two times of a server, two releases or two replicas are compared at the same load only.

The file is JSON, "diag.baseline/1" (diag/normal/diag.baseline.schema.json): for each model, release, GPU and set of
flags a table of windows, and the seconds of its start-up phases. Rows rather than quantiles are kept, so that the
normal speed can be looked up for any load.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diag import __version__
from diag.core.declarations import PACKAGE
from diag.core.declarations import read as read_declarations
from diag.core.errors import BadUsage
from diag.core.files import exists, only_writer, read_json, refused_in_words, written_whole
from diag.core.formatting import printable
from diag.core.subjects import LARGEST, Rows, Subject, instance_name, label_value
from diag.diagnosis.query_cache import FEWEST_INTERVALS, GPU_NAMES, MODELS, VERSIONS, QueryCache
from diag.knowledge.signals.expressions import configured
from diag.knowledge.signals.startup import PHASE, SPENT

WINDOW = 10.0
"""Seconds of one row; three scrape intervals if these are longer than 3 s."""
ENGINE = ("instance", "engine")
SPEED_FLAGS = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_num_seqs"),
    *("max_num_batched_tokens", "max_model_len", "enforce_eager", "enable_prefix_caching", "block_size"),
)
"""The settings that decide on the speed, as far as they are numbers."""
PHASES = f"max by (instance, phase) (last_over_time({SPENT}[$window]))"
READY = f'max by (instance) (last_over_time({PHASE}{{phase="ready"}}[$window]))'
Bools = NDArray[np.bool_]
Row = Mapping[str, float]
"""`at` (the end of the window, unix seconds) and the columns that were measured."""


class Column(NamedTuple):
    """A column of a row: its PromQL, and how its values are compared if it is a `measure`, by its name in a report.

    `worse` is the direction that is bad for users, `given` the columns of the load that have to be alike, `least` the
    least notable difference.
    """

    promql: str
    measure: str = ""
    unit: str = ""
    worse: Literal["higher", "lower"] = "higher"
    given: tuple[str, ...] = ()
    least: float = 0.0


COLUMNS = read_declarations(PACKAGE / "normal" / "columns.toml", dict[str, Column])


class ServerKind(NamedTuple):
    """Model, release, GPU and flags of a server, "" if unknown: rows of different kinds are not mixed."""

    model: str
    version: str
    gpu: str
    flags: tuple[tuple[str, float], ...] = ()


class Measured(NamedTuple):
    """The rows of one engine under one release, in order of time."""

    subject: Subject
    kind: ServerKind
    rows: tuple[Row, ...]

    @property
    def instance(self) -> str:
        return instance_name(self.subject)


def measure(queries: QueryCache) -> list[Measured]:
    """Return the rows of every engine, for windows that follow each other; without windows in which no request ran."""
    window = queries.holding(max(WINDOW, FEWEST_INTERVALS * queries.source.interval))
    every = max(1, round(window.seconds / queries.source.interval))
    instants = queries.source.instants[every::every]
    if not len(instants):
        return []
    columns = {name: queries.ask(column.promql, ENGINE, window, instants) for name, column in COLUMNS.items()}
    versions = _labelled(queries.ask(VERSIONS, ENGINE, window, instants), "version")
    kind = _kinds(queries)
    rows: dict[tuple[Subject, str], list[Row]] = defaultdict(list)
    for subject in columns["running"]:
        by_name = {name: values for name, column in columns.items() if (values := column.of(subject)) is not None}
        for place in np.flatnonzero(by_name["running"] > 0):
            ran = [name for name, there in versions[instance_name(subject)] if there[place]]
            if len(ran) <= 1:  # a window with an upgrade shows the speed of neither release
                row = {name: float(series[place]) for name, series in by_name.items() if not np.isnan(series[place])}
                rows[subject, "".join(ran)].append({"at": float(instants[place]) / 1000, **row})
    return [
        Measured(subject, kind(instance_name(subject), version), tuple(windows))
        for (subject, version), windows in rows.items()
    ]


def _kinds(queries: QueryCache) -> Callable[[str, str], ServerKind]:
    """Return a function from a server and its release to its kind: model, GPU and flags over all that was observed."""

    def names(promql: str, label: str) -> Mapping[str, str]:
        by_server = _labelled(queries.ask(promql, (), queries.whole), label)
        return {name: ", ".join(sorted({text for text, _ in texts})) for name, texts in by_server.items()}

    models, gpus = names(MODELS, "model_name"), names(GPU_NAMES, "name")
    settings = {flag: queries.ask(configured(flag), (), queries.whole) for flag in SPEED_FLAGS}

    def kind(instance: str, version: str) -> ServerKind:
        values = ((flag, rows.get((("instance", instance),))) for flag, rows in settings.items())
        flags = tuple((flag, float(row[-1])) for flag, row in values if row is not None and not np.isnan(row[-1]))
        return ServerKind(models.get(instance, ""), version, gpus.get(instance, ""), flags)

    return kind


def starts(queries: QueryCache) -> list[tuple[str, ServerKind, Mapping[str, float]]]:
    """Return the servers whose start the log shows from its beginning to its end: seconds of each phase."""
    kind, versions = _kinds(queries), _labelled(queries.ask(VERSIONS, (), queries.whole), "version")
    spent: dict[str, dict[str, float]] = defaultdict(dict)
    for subject, row in queries.ask(PHASES, (), queries.whole).items():
        if row[-1] > 0:
            spent[instance_name(subject)][label_value(subject, "phase")] = float(row[-1])
    ready = [instance_name(subject) for subject, row in queries.ask(READY, (), queries.whole).items() if row[-1] == 1]
    return [(name, kind(name, versions[name][-1][0] if versions[name] else ""), spent[name]) for name in ready]


def _labelled(rows: Rows, name: str) -> dict[str, list[tuple[str, Bools]]]:
    """Return for each instance the texts of a label that are not empty, and at which instants each is there."""
    texts: dict[str, list[tuple[str, Bools]]] = defaultdict(list)
    for subject, row in sorted(rows.items()):
        if text := label_value(subject, name):
            texts[instance_name(subject)].append((text, ~np.isnan(row)))
    return texts


# -- the file ----------------------------------------------------------------------------------------------------------


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
    rows = (Normal(server.kind, server.rows) for server in measure(queries) if server.instance not in left_out)
    begun = (Normal(kind, (), (phases,)) for name, kind, phases in starts(queries) if name not in left_out)
    return merged((*rows, *begun))


def merged(normals: Iterable[Normal]) -> Baseline:
    """Merge rows and starts of one kind, each once, in order of time; the kinds that were seen last are kept.

    If there are too many rows, evenly many of every load are kept.
    """
    by_kind: dict[ServerKind, Normal] = {}
    for normal in normals:
        old = by_kind.pop(normal.kind, Normal(normal.kind))
        rows = _without_duplicates((*old.rows, *normal.rows))
        if len(rows) > MOST_ROWS:
            by_load = sorted(rows, key=lambda row: (row["running"], row["at"]))
            rows = [by_load[at * len(by_load) // MOST_ROWS] for at in range(MOST_ROWS)]
        rows.sort(key=lambda row: row["at"])
        begun = _without_duplicates((*old.starts, *normal.starts))  # no two starts take equally long in each phase
        by_kind[normal.kind] = Normal(normal.kind, tuple(rows), tuple(begun[-MOST_STARTS:]))
    return tuple(by_kind.values())[-MOST_KINDS:]


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
        document = read_json(file, MOST_BYTES)
    except OSError as error:
        raise BadUsage(f"the baseline {shown} cannot be read: {error.strerror}") from error
    except ValueError as error:
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise ValueError(f"{value!r} should be a number")
    return float(value)


def _checked(kind: type[Any], value: object) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.60} should be a {kind.__name__}")
    return value
