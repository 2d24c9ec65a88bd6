"""Whether a server is as fast as it normally is at this load: by a baseline file, else by its peers.

What comes out is evidence beside the diagnosis, never an alarm: a server may be slower than ever and serve well.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diag.core.formatting import listed, plural, printable
from diag.core.subjects import Floats, Subject
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Normality, NormalReading
from diag.verify.baseline import Baseline
from diag.verify.measures import Measured, Row, ServerKind, measure, starts
from diag.verify.same_load import SAME_LENGTHS, SAME_LOAD

FEWEST = 5
"""Windows of the baseline at a load, below which nothing is called normal (judged)."""
FEWEST_PEERS = 3
"""Other servers of the model, for the most of them to be normal (judged)."""
MOST_COMPARED = 2_000
"""Windows of all peers that one server is compared with, evenly many of each."""
FEWEST_STARTS = 3
"""Earlier starts of which the median is normal (judged)."""
SPREADS = 3.0
"""Robust standard deviations (1.4826 MAD) that chance explains."""
NOTABLE = 1.25
"""The least factor that is worth a word (judged); two runs of one load differ by up to 1.2 (kv_cascade_base)."""


class Measure(NamedTuple):
    """A column that is compared, the columns that have to be alike for it, and the least difference that matters."""

    column: str
    name: str
    unit: str
    worse: Literal["higher", "lower"]
    given: tuple[str, ...]
    least: float


MEASURES = (
    Measure("itl_seconds", "ITL (mean)", "seconds", "higher", ("running", "prompt_tokens"), 0.002),
    Measure("ttft_seconds", "TTFT (mean)", "seconds", "higher", ("running", "prompt_tokens", "waiting"), 0.05),
    Measure("tokens_per_second", "output tokens / s", "1/s", "lower", ("running", "prompt_tokens"), 1.0),
    Measure("joules_per_token", "GPU energy (J / output token)", "J", "higher", ("running", "prompt_tokens"), 0.0),
    Measure("prefix_hit_share", "prefix cache hit rate", "share", "lower", ("running", "prompt_tokens"), 0.1),
)
START = Measure("startup_seconds", "start-up phase {}", "seconds", "higher", (), 10.0)


class LoadLikeness(NamedTuple):
    """How a load is told, by which factor two that are alike differ, and by which difference small ones do."""

    text: str
    factor: float
    difference: float = 0.0


LOADS = {
    "running": LoadLikeness("{} running requests", SAME_LOAD, 0.5),
    "waiting": LoadLikeness("{} waiting requests", SAME_LOAD, 0.5),
    "prompt_tokens": LoadLikeness("prompts of {} tokens", SAME_LENGTHS),
}


def by_baseline(queries: QueryCache, baseline: Baseline, file: str) -> Normality:
    """Every engine compared with the kind of server in the file that is most like it."""
    found = [_by_file(seen, baseline) for seen in measure(queries)]
    readings = [reading for readings, _ in found for reading in readings]
    reasons = dict.fromkeys(reason for _, reason in found if reason)
    if not found:
        reasons = dict.fromkeys(["no request was running, or too few scrapes were answered"])
    return Normality(file, (*readings, *_startups(queries, baseline)), tuple(reasons))


def _by_file(seen: Measured, baseline: Baseline) -> tuple[list[NormalReading], str]:
    """The readings of one engine; why there are none."""
    kind = _closest(seen.kind, [normal.kind for normal in baseline if normal.rows])
    if kind is None:
        return [], f"the baseline has no server of the model {printable(seen.kind.model)} on this GPU"
    rows = next(normal.rows for normal in baseline if normal.kind == kind)
    against = f"this server's normal{_differs(seen.kind, kind)}"
    readings = list(_readings(seen, rows, against, kind.version))
    if readings:
        return readings, ""
    ours, theirs = _span(seen.rows), _span(rows)
    return [], f"no {FEWEST} windows of the baseline had this load: {ours} requests running, {theirs} in the baseline"


def _span(rows: Sequence[Row]) -> str:
    running = [row["running"] for row in rows]
    return f"{min(running):.0f} - {max(running):.0f}"


def _closest(kind: ServerKind, known: Sequence[ServerKind]) -> ServerKind | None:
    """Of the same model and GPU: with as many of the same flags as there are, then of the same release, then the last.

    A speed on another GPU says nothing. Of a release that is not in the file, the one before it is what was normal.
    """
    same = [
        (place, other)
        for place, other in enumerate(known)
        if other.model == kind.model and (other.gpu == kind.gpu or not (other.gpu and kind.gpu))
    ]

    def likeness(item: tuple[int, ServerKind]) -> tuple[int, bool, int]:
        place, other = item
        return -len(_other_flags(kind, other)), other.version == kind.version, place

    return max(same, key=likeness)[1] if same else None


def _other_flags(one: ServerKind, other: ServerKind) -> list[str]:
    """The flags whose values are known of both, and differ."""
    left, right = dict(one.flags), dict(other.flags)
    return [name for name in left if name in right and left[name] != right[name]]


def _differs(ours: ServerKind, theirs: ServerKind) -> str:
    flags = _other_flags(ours, theirs)
    return f" (with another {listed([f'--{name}'.replace('_', '-') for name in flags])})" if flags else ""


def by_peers(queries: QueryCache, ill: Collection[str]) -> Normality:
    """Some servers compared with the others of their kind; only what is clearly different is said."""
    readings = [reading for group in _groups(measure(queries)) for reading in _by_peers(group, ill)]
    return Normality("", tuple(reading for reading in readings if reading.notable), ())


def _groups(seen: Iterable[Measured]) -> Iterator[list[Measured]]:
    """The engines of one model, GPU and set of flags, whatever their release; where there are enough servers."""
    found: dict[ServerKind, list[Measured]] = {}
    for one in seen:
        if one.kind.model:
            found.setdefault(one.kind._replace(version=""), []).append(one)
    return (group for group in found.values() if len({one.instance for one in group}) > FEWEST_PEERS)


def _by_peers(group: Sequence[Measured], ill: Collection[str]) -> Iterator[NormalReading]:
    """Of each of these engines by the rows of all others; of very many, by some of each."""
    rows = [(one.instance, row) for one in group for row in one.rows]
    rows = rows[:: -(-len(rows) // MOST_COMPARED)]
    for one in group:
        if one.instance in ill:
            others = [row for name, row in rows if name != one.instance]
            peers = len({name for name, _ in rows} - {one.instance})
            yield from _readings(one, others, f"the median of {plural(peers, 'peer')}", "")


def _readings(seen: Measured, rows: Sequence[Row], against: str, version: str) -> Iterator[NormalReading]:
    table = {name: _column(rows, name) for name in (*LOADS, *(measure.column for measure in MEASURES))}
    for measured in MEASURES:
        normals = [(row, band) for row in seen.rows if (band := _band(measured, row, table))]
        if normals:
            yield _reading(measured, seen, normals, against, version)


def _column(rows: Sequence[Row], name: str) -> Floats:
    return np.array([row.get(name, np.nan) for row in rows], np.float64)


class _Band(NamedTuple):
    """Of values at one load: their median, their spread (robust standard deviation), and how many there are."""

    median: float
    spread: float
    windows: float


def _of(values: Floats) -> _Band:
    median = float(np.median(values))
    return _Band(median, 1.4826 * float(np.median(np.abs(values - median))), len(values))


def _band(measured: Measure, row: Row, table: Mapping[str, Floats]) -> _Band | None:
    """What is normal at the load of this row; None where it was not measured, or too rarely."""
    if measured.column not in row:
        return None
    alike = ~np.isnan(table[measured.column])
    for name in measured.given:
        if name in row:
            alike &= _alike(row[name], table[name], LOADS[name])
    values = table[measured.column][alike]
    return _of(values) if len(values) >= FEWEST else None


def _alike(own: float, others: Floats, load: LoadLikeness) -> NDArray[np.bool_]:
    """Which rows have this load; one whose load was not measured has not."""
    low, high = np.minimum(own, others), np.maximum(own, others)
    alike: NDArray[np.bool_] = (high <= load.factor * low) | (high - low <= load.difference)
    return alike


def _reading(
    measured: Measure, seen: Measured, normals: Sequence[tuple[Row, _Band]], against: str, version: str
) -> NormalReading:
    """The median over the windows of the server, against the median of what is normal in each."""
    loads = {name: [row[name] for row, _ in normals if name in row] for name in measured.given}
    band = _Band(*(float(np.median(numbers)) for numbers in zip(*(band for _, band in normals), strict=True)))
    value = float(np.median([row[measured.column] for row, _ in normals]))
    return NormalReading(
        subject=seen.subject,
        measure=measured.name,
        unit=measured.unit,
        worse=measured.worse,
        value=value,
        normal=band.median,
        spread=band.spread,
        given=tuple((LOADS[name].text, float(np.median(values))) for name, values in loads.items() if values),
        against=against,
        version=version,
        own_version=seen.kind.version,
        windows=round(band.windows),
        notable=_notable(value, band, measured.least),
    )


def _notable(value: float, band: _Band, least: float) -> bool:
    """Whether neither chance nor the usual spread explains the difference, and somebody would notice it."""
    apart = abs(value - band.median)
    return max(value, band.median) >= NOTABLE * min(value, band.median) and apart > max(SPREADS * band.spread, least)


def _startups(queries: QueryCache, baseline: Baseline) -> Iterator[NormalReading]:
    """The phases of the last start against those of earlier ones."""
    known = {normal.kind: normal.starts for normal in baseline if normal.starts}
    for instance, kind, phases in starts(queries):
        closest = _closest(kind, list(known))
        for phase, spent in phases.items():
            before = [start[phase] for start in known[closest] if phase in start] if closest else []
            if closest and len(before) >= FEWEST_STARTS:
                yield _startup((("instance", instance),), kind, (phase, spent), (before, closest))


def _startup(
    subject: Subject, kind: ServerKind, now: tuple[str, float], usual: tuple[Sequence[float], ServerKind]
) -> NormalReading:
    (phase, spent), (before, closest) = now, usual
    band = _of(np.array(before))
    return NormalReading(
        subject=subject,
        measure=START.name.format(phase),
        unit=START.unit,
        worse=START.worse,
        value=spent,
        normal=band.median,
        spread=band.spread,
        given=(),
        against=f"this server's normal{_differs(kind, closest)}",
        version=closest.version,
        own_version=kind.version,
        windows=len(before),
        notable=_notable(spent, band, START.least),
    )
