"""What is wrong with the telemetry itself, and what to change: where it is thin, silence says nothing about health."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diag.core.formatting import listed, moment, printable
from diag.core.incident import Incident, seconds
from diag.core.subjects import Floats, Instants, Subject
from diag.diagnosis.query_cache import FEWEST_INTERVALS, QueryCache, Window
from diag.sources.prometheus.servers import RENAMED, PrometheusSource

INSTANCE = ("instance",)
MISSING = 0.05
"""The share of missing scrapes from which on a gap is worth a word."""
PATIENCE = 3
"""Scrapes in a row that may be missed before a target counts as no longer scraped."""
ALL_OF = 3
"""More servers than these are called all of them where they are."""
LOOKS, FEWEST_LOOKS = 1_500, 15
"""At how many times scrapes are counted: times servers, and of each server at least."""
SERVES = '{__name__=~"vllm:(num_requests_running|generation_tokens_total)"}'
EXPORTER = "diag_vllm_up"
FAILS = 'max by (instance, collector) (max_over_time(diag_scrape_success{collector!="vllm"}[$window])) == 0'
READ, LISTED = '{__name__=~"diag_gpu_(power_watts|utilization_ratio)"}', "diag_gpu_up"
"""What there is of a GPU whoever sees it, and what only an exporter of ours says."""
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
    """How one server was scraped.

    `interval` is its own usual one in seconds, `missing` the share of its scrapes that its gaps swallowed; `last` is
    the unix second of its last scrape where it is no longer scraped, else None.
    """

    count: int
    failed: int
    interval: float
    missing: float
    last: float | None


def scrapes(queries: QueryCache) -> dict[str, Scrapes]:
    """How every server was scraped over the span."""
    interval = round(queries.source.interval * 1000)
    servers = max(len(queries.subjects(INSTANCE)), 1)
    step = interval * max(1, math.ceil(queries.span * 1000 / interval / max(LOOKS // servers, FEWEST_LOOKS)))
    times = _back(queries, step)
    window = Window(step / 1000, f"{step - 1}ms")  # neither Prometheus counts a scrape twice
    counts, good = (queries.ask(query, INSTANCE, window, times) for query in (SCRAPES, ANSWERED))
    return {_name(who): _scraped(row, good[who], step / 1000, times / 1000) for who, row in counts.items()}


def _back(queries: QueryCache, step: int) -> Instants:
    """From the last instant back, so far apart (ms)."""
    first, last = int(queries.source.instants[0]), int(queries.source.instants[-1])
    return last - step * np.arange((last - first) // step, -1, -1, dtype=np.int64)


def _name(subject: Subject) -> str:
    return dict(subject)["instance"]


def _scraped(counts: Floats, good: Floats, step: float, times: Floats) -> Scrapes:
    there = np.flatnonzero(~np.isnan(counts))
    full = counts[there][1:-1] if len(there) > 2 else counts[there]  # it may have been born, or gone, in between
    apart, due = np.diff(there), float(np.median(full))
    usual = float(np.median(apart)) if len(apart) else 1.0
    regular = apart[apart <= 2 * usual]
    interval = step * (float(regular.mean()) if len(regular) else 1.0) / due
    lost = due * float((apart[apart > 2 * usual] / usual - 1).sum())
    if len(there) > 2:
        lost += float(np.maximum(due - 1 - full, 0).sum())
    total = int(np.nansum(counts))
    left = (len(counts) - 1 - int(there[-1])) * step > PATIENCE * interval
    return Scrapes(
        count=total,
        failed=total - int(np.nansum(good)),
        interval=interval,
        missing=lost / (total + lost),
        last=float(times[there[-1]]) if left else None,
    )


def remarks(
    remote: PrometheusSource, scraped: Mapping[str, Scrapes], incidents: Sequence[Incident], queries: QueryCache
) -> tuple[str, ...]:
    """A sentence for everything that makes the answers worse than they could be."""
    checks = (
        _over(remote),
        _gone(scraped),
        _gaps(scraped),
        _too_slow(scraped, incidents),
        _renamed(scraped, queries),
        _twice(scraped, queries),
        _silent(scraped, queries),
        _failing(queries),
        _unseen(remote, scraped, queries),
        _several_api_servers(scraped, queries),
    )
    return tuple(each for check in checks for each in check)


def _having(metric: str, queries: QueryCache) -> set[str]:
    """The servers that have a metric."""
    query = f"count by (instance) (last_over_time({metric}[$window]))"
    return {_name(subject) for subject in queries.ask(query, INSTANCE, queries.whole)}


def _who(servers: Collection[str], all_of_them: Mapping[str, Scrapes]) -> str:
    """A few by name; all of many as such."""
    if len(servers) == len(all_of_them) > ALL_OF:
        return f"all {len(all_of_them):,} servers"
    return listed([printable(each) for each in sorted(servers)])


def late(remote: PrometheusSource) -> float:
    """The seconds without a scrape of anything at the end of what was asked for, 0 where they are few."""
    since = (remote.end - int(remote.instants[-1])) / 1000
    return since if since > max(PATIENCE * remote.interval, 60.0) else 0.0


def _over(remote: PrometheusSource) -> Iterator[str]:
    """That it ends before what was asked for."""
    if late(remote):
        yield (
            f"nothing was scraped after {moment(int(remote.instants[-1]) / 1000)}, so all of this is how it was then:"
            " see in Prometheus, Status > Targets, whether these servers are still there"
        )


def _gone(scraped: Mapping[str, Scrapes]) -> Iterator[str]:
    gone = {name: each.last for name, each in scraped.items() if each.last is not None}
    if gone:
        since = moment(max(gone.values()))
        yield (
            f"no longer scraped: {_who(gone, scraped)}, since {since} or before; where nobody stopped them, look at"
            " service discovery: what happens to them now is not seen"
        )


def _gaps(scraped: Mapping[str, Scrapes]) -> Iterator[str]:
    holes = {name: each.missing for name, each in scraped.items() if each.missing > MISSING}
    if holes:
        yield (
            f"scrapes missing: {_who(holes, scraped)}, up to {max(holes.values()):.0%} of them, and what happened then"
            " was not seen; a scrape that fails leaves up = 0, so Prometheus was down or overloaded, or had lost them"
            " from its service discovery"
        )


def _too_slow(scraped: Mapping[str, Scrapes], incidents: Sequence[Incident]) -> Iterator[str]:
    """Whose alerts see too few scrapes; a few per cent of jitter are nothing."""
    slow = {name: each.interval for name, each in scraped.items() if _blind(incidents, each)}
    if slow:
        widest = max(slow, key=slow.__getitem__)
        yield (
            f"scraped only every {slow[widest]:.0f} s: {_who(slow, scraped)}; that is too rare for the alerts"
            f" {listed(_blind(incidents, scraped[widest]))}, which fire late or never: set scrape_interval to 15s"
        )


def _blind(incidents: Sequence[Incident], scraped: Scrapes) -> list[str]:
    return [each.id for each in incidents if seconds(each.window) < 0.95 * FEWEST_INTERVALS * scraped.interval]


def _renamed(scraped: Mapping[str, Scrapes], queries: QueryCache) -> Iterator[str]:
    renamed = _having(RENAMED, queries) - _having(SERVES, queries)
    if renamed:
        yield (
            f"stored as vllm_... instead of vllm:..., which no rule sees: the metrics of {_who(renamed, scraped)}; put"
            " the lines of alerts/relabel.yaml into their scrape job, or scrape `diag exporter` instead"
        )


def _twice(scraped: Mapping[str, Scrapes], queries: QueryCache) -> Iterator[str]:
    now = queries.holding(queries.source.interval)  # a job that got another name meanwhile is none too many
    last = queries.source.instants[-1:]
    double = {_name(subject) for subject in queries.ask(TWICE, INSTANCE, now, last)}
    if double:
        jobs = {dict(each).get("job", "") for each in queries.ask(JOBS, INSTANCE, now, last) if _name(each) in double}
        named = f" (jobs {listed(sorted(map(printable, jobs)))})" if len(jobs) > 1 else ""
        yield (
            f"several targets under one name, so that every sum counts double: {_who(double, scraped)}{named}; scrape"
            " each server once, or, where they are different ones, name in diag.toml, [site] labels, what tells them"
            " apart"
        )
    same = [_equal(sorted(map(printable, names))) for names in _same(queries)]
    if same:
        yield (
            f"one and the same server under several names, each judged and alerted on: {listed(same)}; scrape it once,"
            " and where `diag exporter` is one of them, that"
        )


def _equal(names: list[str]) -> str:
    return " = ".join([*names[:ALL_OF], *(["..."] if len(names) > ALL_OF else [])])


def _same(queries: QueryCache) -> list[frozenset[str]]:
    """Servers whose counters were born in the same microsecond."""
    born: dict[tuple[str, float], set[str]] = defaultdict(set)
    for subject, row in queries.ask(CREATED, ("instance", "engine"), queries.whole).items():
        born[dict(subject).get("engine", ""), float(row[-1])].add(_name(subject))
    return sorted({frozenset(names) for names in born.values() if len(names) > 1}, key=sorted)


def _silent(scraped: Mapping[str, Scrapes], queries: QueryCache) -> Iterator[str]:
    silent = _having(HTTP, queries) - _having(SERVES, queries) - _having(RENAMED, queries)
    if silent:
        yield (
            f"answering under /v1/ and publishing nothing of vLLM's: {_who(silent, scraped)}; where that is vLLM and no"
            " proxy, it runs with --disable-log-stats: start it without"
        )


def _failing(queries: QueryCache) -> Iterator[str]:
    """Parts of our exporter that never worked."""
    where: dict[str, list[str]] = defaultdict(list)
    for subject in queries.ask(FAILS, INSTANCE, queries.whole):
        where[dict(subject).get("collector", "")].append(printable(_name(subject)))
    if where:
        parts = [f"{printable(part)} on {listed(sorted(names))}" for part, names in sorted(where.items())]
        yield (
            f"parts of `diag exporter` that failed all the time: {'; '.join(parts)}; it says why on its standard error"
        )


def _unseen(remote: PrometheusSource, scraped: Mapping[str, Scrapes], queries: QueryCache) -> Iterator[str]:
    """GPUs that are not seen, though those of others are, or seen without the reasons for which they throttle."""
    ours, read = _having(LISTED, queries), _having(READ, queries)
    blind = scraped.keys() - ours - read
    if blind and not ours and remote.exists(DCGM):
        yield (
            f"dcgm-exporter's metrics are there, and nothing joins them with {_who(blind, scraped)}: load"
            " alerts/dcgm.yaml, and say in diag.toml, [site] gpu_join, which labels they share"
        )
    elif ours | read and (without := blind - _having(EXPORTER, queries) - set().union(*_same(queries))):
        yield (
            f"GPUs not seen, though those of other servers are: {_who(without, scraped)}; scrape `diag exporter` there"
            " too, instead of vLLM"
        )
    untold = read - ours - _having(THROTTLE, queries)
    if untold:
        yield (
            f"GPUs seen without the reasons for which they throttle: {_who(untold, scraped)}; dcgm-exporter leaves them"
            " out by default, and the head of alerts/dcgm.yaml has the lines that switch them on"
        )


def _several_api_servers(scraped: Mapping[str, Scrapes], queries: QueryCache) -> Iterator[str]:
    several = _having(SERVES, queries) - _having(START, queries)
    if several:
        yield (
            f"no {START}, so that a restart shows only by counters that fall: {_who(several, scraped)}; where the"
            " scrape drops it, keep it; else vLLM runs several API servers, which write no statistics to its log"
            " either: --api-server-count 1 brings both back"
        )
