"""Compare the speed of a server with the normal speed at its load: by a baseline file, else by its peers.

The comparison is evidence beside the diagnosis, never an alarm: a server may be slower than ever and serve well.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from diag.core.formatting import listed, plural, printable
from diag.core.subjects import Floats
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import SAME_LENGTHS, SAME_LOAD, Normality, NormalReading
from diag.normal.baseline import COLUMNS, Baseline, Measured, Row, ServerKind, measure, starts

FEWEST = 5
"""Windows of the baseline at a load, below which no speed is called normal (judged)."""
FEWEST_PEERS = 3
"""Other servers of the model, below which no speed is called normal (judged)."""
MOST_COMPARED = 2_000
"""Windows of all peers that one server is compared with; if there are more, every n-th one."""
FEWEST_STARTS = 3
"""Earlier starts below which their median is not called normal (judged)."""
SPREADS = 3.0
"""Robust standard deviations (1.4826 MAD) that chance explains."""
NOTABLE = 1.25
"""The least factor that is reported (judged); two runs of one load differ by up to 1.2 (kv_cascade_base)."""


LEAST_OF_START = 10.0
"""Seconds by which a phase of a start has to differ to be notable (judged)."""


class LoadLikeness(NamedTuple):
    """A column of the load: its text, and the factor (for small loads, the difference) in which two are alike."""

    text: str
    factor: float
    difference: float = 0.0


LOADS = {
    "running": LoadLikeness("{} running requests", SAME_LOAD, 0.5),
    "waiting": LoadLikeness("{} waiting requests", SAME_LOAD, 0.5),
    "prompt_tokens": LoadLikeness("prompts of {} tokens", SAME_LENGTHS),
}


def by_baseline(queries: QueryCache, baseline: Baseline, file: str) -> Normality:
    """Compare every engine with the kind of server in the file that is most like it."""
    measured = measure(queries)
    compared = _compared(measured, starts(queries), baseline, file)
    none = "no request was running, or too few scrapes were answered"
    return compared if measured else compared._replace(reasons=(none,))


def between(before: Baseline, after: Baseline, file: str) -> Normality:
    """Compare the servers of one baseline with those of an earlier one, by the medians of their windows and starts."""
    measured = [Measured((), normal.kind, normal.rows) for normal in after if normal.rows]
    begun = []
    for normal in after:
        phases: dict[str, list[float]] = defaultdict(list)
        for start in normal.starts:
            for phase, spent in start.items():
                phases[phase].append(spent)
        begun += [("", normal.kind, {phase: float(np.median(spent)) for phase, spent in phases.items()})]
    return _compared(measured, begun, before, file)


def _compared(
    measured: Sequence[Measured],
    begun: Sequence[tuple[str, ServerKind, Mapping[str, float]]],
    baseline: Baseline,
    file: str,
) -> Normality:
    readings: list[NormalReading] = []
    reasons: dict[str, None] = {}
    for server in measured:
        kind = _closest(server.kind, [normal.kind for normal in baseline if normal.rows])
        if kind is None:
            reasons[f"the baseline has no server of the model {printable(server.kind.model)} on this GPU"] = None
            continue
        rows = next(normal.rows for normal in baseline if normal.kind == kind)
        of_server = list(_readings(server, rows, _normal_of(server.kind, kind), kind.version))
        readings += of_server
        if not of_server:
            running = [[row["running"] for row in some] for some in (server.rows, rows)]
            ours, theirs = (f"{min(values):.0f} - {max(values):.0f}" for values in running)
            load = f"{ours} requests running, {theirs} in the baseline"
            reasons[f"no {FEWEST} windows of the baseline had this load: {load}"] = None
    earlier = {normal.kind: normal.starts for normal in baseline if normal.starts}
    for instance, kind, phases in begun:
        closest = _closest(kind, list(earlier))
        if closest is None:
            continue
        for phase, spent in phases.items():
            before = [start[phase] for start in earlier[closest] if phase in start]
            if len(before) >= FEWEST_STARTS:
                band = _Band.of(np.array(before))
                reading = NormalReading(
                    subject=(("instance", instance),),
                    measure=f"start-up phase {phase}",
                    unit="seconds",
                    worse="higher",
                    value=spent,
                    normal=band.median,
                    spread=band.spread,
                    given=(),
                    against=_normal_of(kind, closest),
                    version=closest.version,
                    own_version=kind.version,
                    windows=len(before),
                    notable=band.is_notable(spent, LEAST_OF_START),
                )
                readings.append(reading)
    return Normality(file, tuple(readings), tuple(reasons))


def _closest(kind: ServerKind, kinds: Sequence[ServerKind]) -> ServerKind | None:
    """Return the closest kind of the same model and GPU: the one with the fewest other flags, then of the same release,
    then the last.

    A speed on another GPU proves nothing. If the file lacks the release, the one before it has the normal speed.
    """
    same = [
        other
        for other in reversed(kinds)
        if other.model == kind.model and (other.gpu == kind.gpu or not (other.gpu and kind.gpu))
    ]
    return max(same, key=lambda other: (-len(_other_flags(kind, other)), other.version == kind.version), default=None)


def _other_flags(one: ServerKind, other: ServerKind) -> list[str]:
    """Return the flags whose values are known for both, and differ."""
    left, right = dict(one.flags), dict(other.flags)
    return [name for name in left if name in right and left[name] != right[name]]


def _normal_of(ours: ServerKind, theirs: ServerKind) -> str:
    flags = [f"--{name}".replace("_", "-") for name in _other_flags(ours, theirs)]
    return f"this server's normal{f' (with another {listed(flags)})' if flags else ''}"


def by_peers(queries: QueryCache, ill: Collection[str]) -> Normality:
    """Compare ill servers with the others of their model, GPU and flags, whatever their release.

    Only clear differences are reported, and only if there are enough servers.
    """
    groups: dict[ServerKind, list[Measured]] = defaultdict(list)
    for server in measure(queries):
        if server.kind.model:
            groups[server.kind._replace(version="")].append(server)
    readings: list[NormalReading] = []
    for group in groups.values():
        rows = [(server.instance, row) for server in group for row in server.rows]
        rows = rows[:: -(-len(rows) // MOST_COMPARED)]
        is_enough = len({server.instance for server in group}) > FEWEST_PEERS
        for server in group if is_enough else ():
            if server.instance in ill:
                others = [row for name, row in rows if name != server.instance]
                peers = len({name for name, _ in rows} - {server.instance})
                readings += _readings(server, others, f"the median of {plural(peers, 'peer')}", "")
    return Normality("", tuple(reading for reading in readings if reading.notable), ())


class _Band(NamedTuple):
    """Values at one load: their median, their spread (robust standard deviation), and how many there are."""

    median: float
    spread: float
    windows: float

    @classmethod
    def of(cls, values: Floats) -> "_Band":
        median = float(np.median(values))
        return cls(median, 1.4826 * float(np.median(np.abs(values - median))), len(values))

    def is_notable(self, value: float, least: float) -> bool:
        """Return True if a value differs by more than chance, the usual spread and the least notable difference."""
        apart = abs(value - self.median)
        is_far = max(value, self.median) >= NOTABLE * min(value, self.median)
        return is_far and apart > max(SPREADS * self.spread, least)


def _readings(server: Measured, rows: Sequence[Row], against: str, version: str) -> Iterator[NormalReading]:
    """Compare the median over the windows of the server with the median of the normal speeds at the load of each.

    Rows whose load was not measured do not count.
    """
    table = {name: np.array([row.get(name, np.nan) for row in rows], np.float64) for name in COLUMNS}
    for name, column in COLUMNS.items():
        normals = []
        for row in server.rows if column.measure else ():
            alike = ~np.isnan(table[name]) & (name in row)
            for load in column.given:
                if load in row:
                    low, high = np.minimum(row[load], table[load]), np.maximum(row[load], table[load])
                    alike &= (high <= LOADS[load].factor * low) | (high - low <= LOADS[load].difference)
            if alike.sum() >= FEWEST:
                normals.append((row, _Band.of(table[name][alike])))
        if not normals:
            continue
        loads = {load: [row[load] for row, _ in normals if load in row] for load in column.given}
        band = _Band(*(float(np.median(numbers)) for numbers in zip(*(band for _, band in normals), strict=True)))
        value = float(np.median([row[name] for row, _ in normals]))
        yield NormalReading(
            subject=server.subject,
            measure=column.measure,
            unit=column.unit,
            worse=column.worse,
            value=value,
            normal=band.median,
            spread=band.spread,
            given=tuple((LOADS[load].text, float(np.median(values))) for load, values in loads.items() if values),
            against=against,
            version=version,
            own_version=server.kind.version,
            windows=round(band.windows),
            notable=band.is_notable(value, column.least),
        )
