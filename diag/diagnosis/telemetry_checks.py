"""Defects of the telemetry itself, and how to fix them: without telemetry, finding no incident does not mean health."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diag.core.formatting import listed, moment, printable
from diag.core.incident import Incident, seconds
from diag.core.metric_prefix import relabelling
from diag.core.subjects import Rows, Subject
from diag.diagnosis.query_cache import FEWEST_INTERVALS, QueryCache, Window
from diag.sources.prometheus.servers import PrometheusSource

INSTANCE = ("instance",)
MISSING = 0.05
"""Share of missing scrapes above which gaps are reported."""
PATIENCE = 3
"""Scrapes in a row that may be missed before a target counts as no longer scraped."""
ALL_OF = 3
"""Servers above which a defect of every server is reported as one of "all servers"."""
JITTER = 0.95
"""Share of a window that its scrape intervals have to exceed before the window is too short."""
BINS, FEWEST_BINS = 1_500, 15
"""Bins of time in which scrapes are counted: for all servers together, and for each at least."""
MOST_COUNTED = 1e9
"""Scrapes in one bin: a larger number is not a count of scrapes."""
SERVES = '{__name__=~"vllm:(num_requests_running|generation_tokens_total)"}'
EXPORTER = "diag_vllm_up"
FAILS = 'max by (instance, collector) (max_over_time(diag_scrape_success{collector!="vllm"}[$window])) == 0'
READ, LISTED = '{__name__=~"diag_gpu_(power_watts|utilization_ratio)"}', "diag_gpu_up"
"""GPU metrics that every exporter has, and one that only `diag exporter` has."""
THROTTLE = "diag_gpu_throttle_seconds_total"
DCGM = "DCGM_FI_DEV_GPU_UTIL"
HTTP = 'http_requests_total{handler=~"/v1/.*"}'
START = "process_start_time_seconds"
TWICE = "max by (instance) (count by (instance, engine) (last_over_time(vllm:num_requests_running[$window]))) > 1"
JOBS = "count by (instance, job) (last_over_time(vllm:num_requests_running[$window]))"
CREATED = "max by (instance, engine) (last_over_time(vllm:generation_tokens_created[$window]))"
SCRAPES = "sum by (instance) (count_over_time(up[$window]))"
ANSWERED = "sum by (instance) (sum_over_time(up[$window]))"


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


def scrapes(queries: QueryCache) -> dict[str, Scrapes]:
    """Estimate the interval and the gaps of each server's scrapes over the span, by their number in bins of time."""
    interval = round(queries.source.interval * 1000)
    servers = max(len(queries.subjects(INSTANCE)), 1)
    step = interval * max(1, math.ceil(queries.span * 1000 / interval / max(BINS // servers, FEWEST_BINS)))
    first, end = queries.source.first, int(queries.source.instants[-1])
    times = end - step * np.arange((end - first) // step, -1, -1, dtype=np.int64)
    window = Window(step / 1000, f"{step - 1}ms")  # neither Prometheus counts a scrape twice
    counts = _counts(queries.ask(SCRAPES, INSTANCE, window, times), least=1)
    good = _counts(queries.ask(ANSWERED, INSTANCE, window, times), least=0)
    found = {}
    for who, row in counts.items():
        if who not in good:  # only one query was answered for it
            continue
        there = np.flatnonzero(~np.isnan(row))
        full = row[there][1:-1] if len(there) > 2 else row[there]  # the first and the last bin may be partial
        apart, due = np.diff(there), float(np.median(full))
        usual = float(np.median(apart)) if len(apart) else 1.0
        regular = apart[apart <= 2 * usual]
        every = window.seconds * (float(regular.mean()) if len(regular) else 1.0) / due
        lost = due * float((apart[apart > 2 * usual] / usual - 1).sum())
        if len(there) > 2:
            lost += float(np.maximum(due - 1 - full, 0).sum())
        total = int(np.nansum(row))
        is_gone = (len(row) - 1 - int(there[-1])) * window.seconds > PATIENCE * every
        found[_name(who)] = Scrapes(
            count=total,
            failed=total - int(np.nansum(good[who])),
            interval=every,
            missing=lost / (total + lost),
            last=float(times[there[-1]] / 1000) if is_gone else None,
        )
    return found


def _counts(rows: Rows, least: int) -> Rows:
    """Return the rows that have counts of scrapes; implausible counts become NaN."""
    held = {who: np.where((row >= least) & (row < MOST_COUNTED), row, np.nan) for who, row in rows.items()}
    return Rows({who: row for who, row in held.items() if not np.isnan(row).all()})


def remarks(
    remote: PrometheusSource, scraped: Mapping[str, Scrapes], incidents: Sequence[Incident], queries: QueryCache
) -> tuple[str, ...]:
    """Return a sentence for each defect of the telemetry."""
    return (
        *_scrape_remarks(remote, scraped, incidents),
        *_identity_remarks(remote, scraped, queries),
        *_collection_remarks(remote, scraped, queries),
    )


def _having(metric: str, queries: QueryCache) -> set[str]:
    """Return the servers that have a metric."""
    query = f"count by (instance) (last_over_time({metric}[$window]))"
    return {_name(subject) for subject in queries.ask(query, INSTANCE, queries.whole)}


def _name(subject: Subject) -> str:
    return dict(subject)["instance"]


def _listed_servers(servers: Collection[str], scraped: Mapping[str, Scrapes]) -> str:
    """Return the first few servers by name, or "all 12 servers"."""
    if len(servers) == len(scraped) > ALL_OF:
        return f"all {len(scraped):,} servers"
    return listed([printable(name) for name in sorted(servers)])


def late(remote: PrometheusSource) -> float:
    """Return the seconds without any scrape at the end of the requested span, 0 if they are few."""
    since = (remote.end - int(remote.instants[-1])) / 1000
    return since if since > max(PATIENCE * remote.interval, 60.0) else 0.0


def _scrape_remarks(
    remote: PrometheusSource, scraped: Mapping[str, Scrapes], incidents: Sequence[Incident]
) -> Iterator[str]:
    """Yield what is wrong with the scrapes: they ended, servers vanished, gaps, or too long an interval."""
    if late(remote):
        yield (
            f"nothing was scraped after {moment(int(remote.instants[-1]) / 1000)}, so this report shows the state at"
            " that time; check in Prometheus, Status > Targets, whether these servers still exist"
        )
    gone = {name: scrapes.last for name, scrapes in scraped.items() if scrapes.last is not None}
    if gone:
        since = moment(max(gone.values()))
        yield (
            f"no longer scraped: {_listed_servers(gone, scraped)}, since {since} or earlier, so their state is unknown;"
            " if nobody stopped them, check the service discovery of Prometheus"
        )
    holes = {name: scrapes.missing for name, scrapes in scraped.items() if scrapes.missing > MISSING}
    if holes:
        yield (
            f"scrapes missing: {_listed_servers(holes, scraped)}, up to {100 * max(holes.values()):.0f} % of them; what"
            " happened in these gaps is unknown. A failed scrape would leave up = 0, so Prometheus was down or"
            " overloaded, or its service discovery had lost these targets"
        )
    blind = {
        name: [
            incident.id
            for incident in incidents
            if seconds(incident.window) < JITTER * FEWEST_INTERVALS * scrapes.interval
        ]
        for name, scrapes in scraped.items()
    }
    slow = {name: scraped[name].interval for name, alerts in blind.items() if alerts}
    if slow:
        widest = max(slow, key=slow.__getitem__)
        yield (
            f"scraped only every {slow[widest]:.0f} s: {_listed_servers(slow, scraped)}; too rare for the alerts"
            f" {listed(blind[widest])}, which fire late or never: set scrape_interval to 15s"
        )


def _identity_remarks(remote: PrometheusSource, scraped: Mapping[str, Scrapes], queries: QueryCache) -> Iterator[str]:
    """Yield what is wrong with names: metrics of another prefix, several servers as one, one server as several."""
    for prefix, servers in remote.renamed.items():
        yield (
            f"metrics stored as {prefix}... instead of {remote.prefix}..., which no rule matches:"
            f" {_listed_servers(servers, scraped)}; judged all the same; add to the scrape job {relabelling(prefix)}"
            f' (alerts/relabel.yaml), or state prefix = "{prefix}" in diag.toml, [site]'
        )
    now = queries.holding(queries.source.interval)  # a job that was renamed meanwhile is not a second one
    last = queries.source.instants[-1:]
    double = {_name(subject) for subject in queries.ask(TWICE, INSTANCE, now, last)}
    if double:
        known = queries.ask(JOBS, INSTANCE, now, last)
        jobs = {dict(subject).get("job", "") for subject in known if _name(subject) in double}
        named = f" (jobs {listed(sorted(map(printable, jobs)))})" if len(jobs) > 1 else ""
        yield (
            "several targets have the same instance label, so that sums count twice:"
            f" {_listed_servers(double, scraped)}{named}; scrape each server once, or, if they are different servers,"
            " name the labels that distinguish them in diag.toml, [site] labels"
        )
    aliases = [sorted(map(printable, names)) for names in _aliases(queries)]
    same = [" = ".join([*names[:ALL_OF], *(["..."] if len(names) > ALL_OF else [])]) for names in aliases]
    if same:
        yield (
            f"the same server is scraped as several instances, each diagnosed and alerted on: {listed(same)}; scrape it"
            " once, through `diag exporter` where there is one"
        )


def _aliases(queries: QueryCache) -> list[frozenset[str]]:
    """Return the instances that are one server: their counters were created in the same microsecond."""
    created: dict[tuple[str, float], set[str]] = defaultdict(set)
    for subject, row in queries.ask(CREATED, ("instance", "engine"), queries.whole).items():
        created[dict(subject).get("engine", ""), float(row[-1])].add(_name(subject))
    return sorted({frozenset(names) for names in created.values() if len(names) > 1}, key=sorted)


def _collection_remarks(remote: PrometheusSource, scraped: Mapping[str, Scrapes], queries: QueryCache) -> Iterator[str]:
    """Yield which telemetry is not collected: vLLM's statistics, collectors that fail, GPUs, the process."""
    silent = _having(HTTP, queries) - _having(SERVES, queries)
    if silent:
        yield (
            "requests are served under /v1/, but there are no vLLM metrics:"
            f" {_listed_servers(silent, scraped)}; if that is vLLM and no proxy, it runs with --disable-log-stats:"
            " remove that flag"
        )
    where: dict[str, list[str]] = defaultdict(list)
    for subject in queries.ask(FAILS, INSTANCE, queries.whole):
        where[dict(subject).get("collector", "")].append(printable(_name(subject)))
    if where:
        parts = [f"{printable(part)} on {listed(sorted(names))}" for part, names in sorted(where.items())]
        yield (
            f"collectors of `diag exporter` that failed all the time: {'; '.join(parts)}; its standard error has the"
            " reason"
        )
    yield from _gpu_remarks(remote, scraped, queries)
    # behind an agent of Ray vLLM's metrics lack those of the process as well
    several = (_having(SERVES, queries) - _having(START, queries)).difference(*remote.renamed.values())
    if several:
        yield (
            f"no {START}, so that a restart shows only as counters that fall:"
            f" {_listed_servers(several, scraped)}; if the scrape configuration drops it, keep it; otherwise vLLM runs"
            " several API servers, which write no statistics to the log either: --api-server-count 1 restores both"
        )


def _gpu_remarks(remote: PrometheusSource, scraped: Mapping[str, Scrapes], queries: QueryCache) -> Iterator[str]:
    """Yield which servers have no GPU telemetry, though others have it, or none about throttling."""
    ours = _having(LISTED, queries)
    others = scraped.keys() - ours
    read = _having(READ, queries) if others else frozenset()
    blind = others - read
    if blind and not ours and remote.exists(DCGM):
        yield (
            f"dcgm-exporter's metrics exist, but are not joined with {_listed_servers(blind, scraped)}: load"
            " alerts/dcgm.yaml, and name the labels that they share in diag.toml, [site] gpu_join"
        )
    elif ours | read and (without := blind - _having(EXPORTER, queries) - set().union(*_aliases(queries))):
        yield (
            f"no GPU telemetry, though other servers have it: {_listed_servers(without, scraped)}; scrape"
            " `diag exporter` there too, instead of vLLM"
        )
    foreign = read - ours
    if untold := foreign and foreign - _having(THROTTLE, queries):
        yield (
            f"GPU telemetry without throttle reasons: {_listed_servers(untold, scraped)}; dcgm-exporter leaves them out"
            " by default, and the head of alerts/dcgm.yaml has the lines that enable them"
        )
