"""Defects of the telemetry, and missing families of it: without telemetry, "no incident" does not mean health."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from diag.core.declarations import PACKAGE, read
from diag.core.incident import Incident, Signal, seconds
from diag.core.metric_prefix import RUNNING, SERVES, metric
from diag.core.subjects import Rows, instance_name, label_value, median
from diag.diagnosis.query_cache import FEWEST_INTERVALS, GPUS, QueryCache, Window
from diag.knowledge.signals import death_claimed
from diag.knowledge.signals.log import CLAIM_TIME

if TYPE_CHECKING:
    from diag.sources.prometheus.servers import PrometheusSource

INSTANCE = ("instance",)
MISSING = 0.05
"""Share of missing scrapes above which gaps are reported."""
PATIENCE = 3
"""Scrapes in a row that may be missed before a target counts as no longer scraped."""
JITTER = 0.95
"""Share of a window that its scrape intervals have to exceed before the window is too short."""
BINS, FEWEST_BINS = 1_500, 15
"""Bins of time in which scrapes are counted: for all servers together, and for each at least."""
MOST_COUNTED = 1e9
"""Scrapes in one bin: a larger number is not a count of scrapes."""
EXPORTER = "diag_vllm_up"
FAILS = 'max by (instance, collector) (max_over_time(diag_scrape_success{collector!="vllm"}[$window])) == 0'
READ, LISTED = '{__name__=~"diag_gpu_(power_watts|utilization_ratio)"}', "diag_gpu_up"
"""GPU metrics that every exporter has, and one that only `diag exporter` has."""
THROTTLE = "diag_gpu_throttle_seconds_total"
DCGM = "DCGM_FI_DEV_GPU_UTIL"
HTTP = 'http_requests_total{handler=~"/v1/.*"}'
START = "process_start_time_seconds"
TWICE = f"max by (instance) (count by (instance, engine) (last_over_time({RUNNING}[$window]))) > 1"
JOBS = f"count by (instance, job) (last_over_time({RUNNING}[$window]))"
CREATED = f"max by (instance, engine) (last_over_time({metric('generation_tokens_created')}[$window]))"
CLAIM_IS_NEWS = 300.0
"""Seconds before the first scrape in which a line of the log still matters."""
LOG_ALONE = (
    "max by (instance) (last_over_time(diag_vllm_log_last_line_timestamp_seconds[$window]))"
    " unless max by (instance) (max_over_time(diag_vllm_up[$window])) > 0"
    ' unless max by (instance) (last_over_time({__name__=~"diag_vllm_process(es|_cpu_seconds_total)"}[$window]))'
    " unless max by (instance) (last_over_time(diag_host_last_oom_kill_timestamp_seconds[$window]))"
)
"""Servers whose log is known, but no page, and neither the processes of the host nor the container."""
SCRAPES = "sum by (instance) (count_over_time(up[$window]))"
ANSWERED = "sum by (instance) (sum_over_time(up[$window]))"


class TelemetryFamily(NamedTuple):
    """Telemetry that vLLM's own /metrics page lacks as a whole: its metrics, what they show, and how to get them.

    `usual` is one of its metrics, with few series per server, so that querying it is cheap.
    """

    metrics: str
    usual: str
    name: str
    shows: str
    hint: str


UNREAD = "xpu|tpu|hpu|neuron"
"""Devices that diag reads no telemetry of, as vLLM calls them."""
FAMILIES = read(PACKAGE / "diagnosis" / "telemetry_families.toml", dict[str, TelemetryFamily])


DefectKind = (
    Literal["ended", "gone", "gaps", "slow"]
    | Literal["renamed", "double", "aliases"]
    | Literal["silent", "collectors", "not joined", "no gpu", "no throttling", "no start"]
    | Literal["claimed", "unproven", "survived", "log alone", "stray"]
)
"""Defects of scrapes, of the names of servers, of what is collected, of a log: contradicted or uncorroborated; and
engines of which it is unknown whose they are."""


class TelemetryDefect(NamedTuple):
    """A defect of the telemetry, with the servers that have it; `of_all` if all servers have it.

    `number` is a unix time ("ended", "gone", and of claims), the largest share of missing scrapes ("gaps") or a
    scrape interval in seconds ("slow"). `names` are the alerts that need more scrapes ("slow"), the jobs ("double"),
    the prefix of the metrics' names and the usual one ("renamed"), processes ("stray"), or a line of the log, its place
    and the events claimed ("claimed", "unproven", "survived"). `groups` are servers by failing collector, or instances
    of one server.
    """

    kind: DefectKind
    servers: frozenset[str] = frozenset()
    number: float = 0.0
    names: tuple[str, ...] = ()
    groups: tuple[tuple[str, frozenset[str]], ...] = ()
    of_all: bool = False


@dataclass(frozen=True)
class Scrapes:
    """The scrapes of one server.

    `interval` is its own usual one in seconds, `missing` the share of its scrapes that are lost in gaps; `last` is the
    unix second of its last scrape if it is no longer scraped, else None.
    """

    count: int
    failed: int
    interval: float
    missing: float
    last: float | None


def scrapes(queries: QueryCache, patience: float = 0.0) -> dict[str, Scrapes]:
    """Estimate the interval and the gaps of each server's scrapes over the span, by their number in bins of time.

    `patience` are the seconds for which a server may lack scrapes at the end before it is no longer scraped.
    """
    interval = round(queries.source.interval * 1000)
    servers = max(len(queries.subjects(INSTANCE)), 1)
    step = interval * max(1, math.ceil(queries.span * 1000 / interval / max(BINS // servers, FEWEST_BINS)))
    first, end = queries.source.first, int(queries.source.instants[-1])
    times = end - step * np.arange((end - first) // step, -1, -1, dtype=np.int64)
    window = Window(step / 1000, f"{step - 1}ms")  # neither Prometheus counts a scrape twice
    counts = _counts(queries.ask(SCRAPES, INSTANCE, window, times), least=1)
    good = _counts(queries.ask(ANSWERED, INSTANCE, window, times), least=0)
    by_server = {}
    for who, row in counts.items():
        if who not in good:  # only one query was answered for it
            continue
        there = np.flatnonzero(~np.isnan(row))
        full = row[there][1:-1] if len(there) > 2 else row[there]  # the first and the last bin may be partial
        apart, due = np.diff(there), median(full)
        usual = median(apart) if len(apart) else 1.0
        regular = apart[apart <= 2 * usual]
        every = window.seconds * (float(regular.mean()) if len(regular) else 1.0) / due
        lost = due * float((apart[apart > 2 * usual] / usual - 1).sum())
        if len(there) > 2:
            lost += float(np.maximum(due - 1 - full, 0).sum())
        total = int(np.nansum(row))
        is_gone = (len(row) - 1 - int(there[-1])) * window.seconds > max(PATIENCE * every, patience)
        by_server[instance_name(who)] = Scrapes(
            count=total,
            failed=total - int(np.nansum(good[who])),
            interval=every,
            missing=lost / (total + lost),
            last=float(times[there[-1]] / 1000) if is_gone else None,
        )
    return by_server


def vanished(scraped: Mapping[str, Scrapes]) -> frozenset[str]:
    """Return the servers that are no longer scraped; none if that is true of all: they are judged as they were last."""
    gone = frozenset(name for name, scrapes in scraped.items() if scrapes.last is not None)
    return gone if gone < scraped.keys() else frozenset()


def departures(scraped: Mapping[str, Scrapes]) -> Iterator[TelemetryDefect]:
    """Yield the servers that are no longer scraped."""
    if gone := {name: scrapes.last for name, scrapes in scraped.items() if scrapes.last is not None}:
        yield TelemetryDefect("gone", frozenset(gone), max(gone.values()))


def _counts(rows: Rows, least: int) -> Rows:
    """Return the rows that have counts of scrapes; implausible counts become NaN."""
    held = {who: np.where((row >= least) & (row < MOST_COUNTED), row, np.nan) for who, row in rows.items()}
    return Rows({who: row for who, row in held.items() if not np.isnan(row).all()})


def defects(
    remote: "PrometheusSource", scraped: Mapping[str, Scrapes], incidents: Sequence[Incident], queries: QueryCache
) -> tuple[TelemetryDefect, ...]:
    """Return the defects of the telemetry: of the scrapes, of the names of servers, and of what is collected."""
    created: dict[tuple[str, float], set[str]] = defaultdict(set)
    for subject, row in queries.ask(CREATED, ("instance", "engine"), queries.whole).items():
        created[label_value(subject, "engine"), float(row[-1])].add(instance_name(subject))
    # instances are one server if their counters were created in the same microsecond
    aliases = sorted({frozenset(names) for names in created.values() if len(names) > 1}, key=sorted)
    every_defect = [TelemetryDefect("ended", number=int(remote.instants[-1]) / 1000)] if late(remote) else []
    every_defect += departures(scraped)
    if gaps := {name: scrapes.missing for name, scrapes in scraped.items() if scrapes.missing > MISSING}:
        every_defect.append(TelemetryDefect("gaps", frozenset(gaps), max(gaps.values())))

    def too_short(interval: float) -> tuple[str, ...]:
        shortest = JITTER * FEWEST_INTERVALS * interval
        return tuple(incident.id for incident in incidents if seconds(incident.window) < shortest)

    if slow := {name: scrapes.interval for name, scrapes in scraped.items() if too_short(scrapes.interval)}:
        widest = max(slow.values())
        every_defect.append(TelemetryDefect("slow", frozenset(slow), widest, too_short(widest)))
    for prefix, servers in remote.renamed.items():
        every_defect.append(TelemetryDefect("renamed", servers, names=(prefix, remote.prefix)))
    if double := frozenset(map(instance_name, _at_the_end(TWICE, queries))):  # a job that was renamed is no second one
        jobs = {label_value(labels, "job") for labels in _at_the_end(JOBS, queries) if instance_name(labels) in double}
        every_defect.append(TelemetryDefect("double", double, names=tuple(jobs)))
    if aliases:
        every_defect.append(TelemetryDefect("aliases", groups=tuple(("", names) for names in aliases)))

    # telemetry that is not collected: vLLM's statistics, collectors that fail
    served = _having(SERVES, queries)
    if silent := _having(HTTP, queries) - served:
        every_defect.append(TelemetryDefect("silent", frozenset(silent)))
    failing: dict[str, set[str]] = defaultdict(set)
    for subject in queries.ask(FAILS, INSTANCE, queries.whole):
        failing[label_value(subject, "collector")].add(instance_name(subject))
    if failing:
        groups = tuple((name, frozenset(failing[name])) for name in sorted(failing))
        every_defect.append(TelemetryDefect("collectors", groups=groups))

    # servers without GPU telemetry, though others have it, or without any about throttling
    ours = _having(LISTED, queries)
    others = scraped.keys() - ours
    read = _having(READ, queries) if others else set()
    blind = others - read
    if blind and not ours and remote.exists(DCGM):
        every_defect.append(TelemetryDefect("not joined", frozenset(blind)))
    elif ours | read and (without := (blind - _having(EXPORTER, queries)).difference(*aliases)):
        every_defect.append(TelemetryDefect("no gpu", frozenset(without)))
    foreign = read - ours
    if foreign and (untold := foreign - _having(THROTTLE, queries)):
        every_defect.append(TelemetryDefect("no throttling", frozenset(untold)))

    # behind an agent of Ray vLLM's metrics lack those of the process as well
    if several := (served - _having(START, queries)).difference(*remote.renamed.values()):
        every_defect.append(TelemetryDefect("no start", frozenset(several)))
    return tuple(defect._replace(of_all=len(defect.servers) == len(scraped)) for defect in every_defect)


def _at_the_end(query: str | Signal, queries: QueryCache) -> Rows:
    """Return the rows of a query over the last interval: what was there before it does not count."""
    return queries.ask(query, INSTANCE, queries.holding(queries.source.interval), queries.source.instants[-1:])


def _having(metric: str, queries: QueryCache) -> set[str]:
    """Return the servers that have a metric."""
    query = f"count by (instance) (last_over_time({metric}[$window]))"
    return {instance_name(subject) for subject in queries.ask(query, INSTANCE, queries.whole)}


def late(remote: "PrometheusSource") -> float:
    """Return the seconds without any scrape at the end of the requested span, 0 if they are few."""
    since = (remote.end - int(remote.instants[-1])) / 1000
    return since if since > max(PATIENCE * remote.interval, 60.0) else 0.0


def claims(queries: QueryCache, kind: Literal["claimed", "survived"]) -> Iterator[TelemetryDefect]:
    """Yield for each server the events that its log claims, although it goes on.

    The metrics show that it goes on ("claimed"; "unproven" where they do not decide about its engine), or the log
    itself does, by work that follows ("survived").
    """
    query = f"max by (instance, event, file, line, text, state) (last_over_time({CLAIM_TIME}[$window]))"
    undecided = set(map(instance_name, _at_the_end(death_claimed, queries)))
    claimed: dict[str, list[tuple[float, Mapping[str, str]]]] = defaultdict(list)
    for subject, row in _at_the_end(query, queries).items():
        if row[0] >= queries.source.first / 1000 - CLAIM_IS_NEWS:
            claimed[instance_name(subject)].append((float(row[0]), dict(subject)))
    for name, lines in sorted(claimed.items()):
        at, first = min(lines, key=lambda line: (line[0], label_value(line[1], "line").zfill(12)))
        place = ":".join(filter(None, (label_value(first, "file"), label_value(first, "line"))))
        events = sorted({label_value(labels, "event") for _, labels in lines})
        names = (label_value(first, "text"), place, *events)
        yield TelemetryDefect("unproven" if name in undecided else kind, frozenset({name}), at, names)


def log_alone(ill: frozenset[str], queries: QueryCache) -> Iterator[TelemetryDefect]:
    """Yield the servers among `ill` of which only the log is known."""
    if alone := ill and ill & set(map(instance_name, queries.ask(LOG_ALONE, INSTANCE, queries.whole))):
        yield TelemetryDefect("log alone", frozenset(alone))


def strays(queries: QueryCache) -> Iterator[TelemetryDefect]:
    """Yield the engines on a server's host whose API server has ended, and that no proof says to be this server's."""
    query = "max by (instance, pid, host) (last_over_time(diag_vllm_stray_engine[$window]))"
    if engines := _at_the_end(query, queries):
        names = sorted(f"PID {label_value(labels, 'pid')} on {label_value(labels, 'host')}" for labels in engines)
        yield TelemetryDefect("stray", frozenset(map(instance_name, engines)), names=tuple(names))


def not_measured(queries: QueryCache) -> tuple[str, ...]:
    """Return the families of telemetry that no server has; a family whose query was refused may be there."""
    by_server = "count by (instance) (last_over_time({}[$window]))"
    absent = []
    for name, family in FAMILIES.items():
        if name == "device" or queries.ask(by_server.format(family.usual), (), queries.whole):
            continue
        query = by_server.format(f'{{__name__=~"{family.metrics}"}}')
        query = GPUS if name == "gpu" else query  # which servers have GPUs is queried anyway
        if not queries.ask(query, (), queries.whole) and query not in queries.unanswered:
            absent.append(name)
    unread = by_server.format(f'diag_vllm_info{{device=~"{UNREAD}"}}')
    if "gpu" in absent and queries.ask(unread, (), queries.whole):
        absent[absent.index("gpu")] = "device"
    return tuple(absent)
