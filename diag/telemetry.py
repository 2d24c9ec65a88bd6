"""What is wrong with the telemetry itself, and what to change: where it is thin, silence says nothing about health."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diag.asking import Asked, Floats, Window, seconds
from diag.incident import Incident
from diag.sources.remote import RENAMED, Member, Remote
from diag.sources.text import clock, listed, printable

INSTANCE = ("instance",)
MISSING = 0.05
"""The share of missing scrapes from which on a gap is worth a word."""
ALL_OF = 3
"""More servers than these are called all of them where they are."""
THROTTLE = "diag_gpu_throttle_seconds_total"
GPU = '{__name__=~"diag_gpu_(power_watts|utilization_ratio)"}'
DCGM = "DCGM_FI_DEV_GPU_UTIL"
HTTP = 'http_requests_total{handler=~"/v1/.*"}'
START = "process_start_time_seconds"
CREATED = "max by (instance, engine) (last_over_time(vllm:generation_tokens_created[$window]))"
SCRAPES = "sum by (instance) (count_over_time(up[$window]))"
ANSWERED = "sum by (instance) (sum_over_time(up[$window]))"


@dataclass(frozen=True)
class Scrapes:
    """How one server was scraped: `missing` is a share of what was due from the first scrape to the last.

    `last` is the unix second of its last scrape where it is no longer scraped, else None.
    """

    count: int
    failed: int
    missing: float
    last: float | None


def scrapes(asked: Asked) -> dict[str, Scrapes]:
    """How every server was scraped over the span."""
    times = asked.answers.instants
    step = int(times[1] - times[0]) if len(times) > 1 else round(asked.answers.interval * 1000)
    window = Window(step / 1000, f"{step - 1}ms")  # neither Prometheus counts a scrape twice
    counts, good = (asked.ask(query, INSTANCE, window, times) for query in (SCRAPES, ANSWERED))
    due = step / 1000 / asked.answers.interval
    return {_name(who): _scraped(row, good[who], due, times / 1000) for who, row in counts.items()}


def _name(subject: tuple[tuple[str, str], ...]) -> str:
    return dict(subject)["instance"]


def _scraped(counts: Floats, good: Floats, due: float, times: Floats) -> Scrapes:
    there = np.flatnonzero(~np.isnan(counts))
    first, last = int(there[0]), int(there[-1])
    total = int(np.nansum(counts))
    left = (len(counts) - 1 - last) * due > ALL_OF
    return Scrapes(
        count=total,
        failed=total - int(np.nansum(good)),
        missing=max(0.0, 1 - total / max((last - first + 1) * due, 1.0)),
        last=float(times[last]) if left else None,
    )


def remarks(
    remote: Remote, scraped: Mapping[str, Scrapes], incidents: Sequence[Incident], asked: Asked
) -> tuple[str, ...]:
    """A sentence for everything that makes the answers worse than they could be."""
    members = remote.members
    checks = (
        _gone(scraped),
        _gaps(scraped),
        _too_slow(incidents, asked),
        _renamed(members),
        _twice(members, asked),
        _silent(members, asked),
        _unseen(remote, asked),
        _several_api_servers(members, asked),
    )
    return tuple(each for check in checks for each in check)


def _having(metric: str, asked: Asked) -> set[str]:
    """The servers that have a metric."""
    query = f"count by (instance) (last_over_time({metric}[$window]))"
    return {_name(subject) for subject in asked.ask(query, INSTANCE, asked.whole)}


def _who(servers: Collection[str], members: Mapping[str, object]) -> str:
    """A few by name; all of many as such."""
    if len(servers) == len(members) > ALL_OF:
        return f"all {len(members):,} servers"
    return listed([printable(each) for each in sorted(servers)])


def _gone(scraped: Mapping[str, Scrapes]) -> Iterator[str]:
    gone = {name: each.last for name, each in scraped.items() if each.last is not None}
    if gone:
        since = clock(1000 * max(gone.values()))
        yield (
            f"no longer scraped: {_who(gone, scraped)}, the last since {since}: where that is no surprise nothing is"
            " lost, else look at service discovery; what happens to them now is not seen"
        )


def _gaps(scraped: Mapping[str, Scrapes]) -> Iterator[str]:
    holes = {name: each.missing for name, each in scraped.items() if each.missing > MISSING}
    if holes:
        yield (
            f"up to {max(holes.values()):.0%} of the scrapes of {_who(holes, scraped)} are missing, and what happened"
            " then was not seen: see whether Prometheus was down or too slow (its own `up` and rule durations tell)"
        )


def _too_slow(incidents: Sequence[Incident], asked: Asked) -> Iterator[str]:
    interval = asked.answers.interval
    blind = [each.id for each in incidents if seconds(each.window) < 3 * interval]
    if blind:
        yield (
            f"a scrape every {interval:g} s is too rare for alerts that look over a minute: {listed(blind)} cannot be"
            " judged by them; set scrape_interval to 15s"
        )


def _renamed(members: Mapping[str, Member]) -> Iterator[str]:
    renamed = {name for name, member in members.items() if RENAMED in member.metrics <= {RENAMED, "up"}}
    if renamed:
        yield (
            f"the metrics of {_who(renamed, members)} are stored as vllm_... instead of vllm:..., so no rule sees them:"
            " put the relabelling of alerts/relabel.yaml into the scrape configuration, or scrape `diag exporter`"
        )


def _twice(members: Mapping[str, Member], asked: Asked) -> Iterator[str]:
    by_job = {name for name, member in members.items() if len(member.targets) > 1}
    if by_job:
        jobs = sorted({" ".join(target) for name in by_job for target in members[name].targets})
        yield (
            f"several targets share one name ({_who(by_job, members)}: {listed(jobs)}), so every sum over it counts"
            " double: keep one of the jobs, or name in diag.toml, [site] labels, what tells the servers apart"
        )
    for names in _same(asked):
        yield (
            f"one and the same server is scraped as {listed([printable(name) for name in names])}: scrape"
            " `diag exporter` instead of vLLM, not beside it"
        )


def _same(asked: Asked) -> list[list[str]]:
    """Servers whose counters were born in the same microsecond."""
    born: dict[tuple[str, float], set[str]] = defaultdict(set)
    for subject, row in asked.ask(CREATED, ("instance", "engine"), asked.whole).items():
        born[dict(subject).get("engine", ""), float(row[-1])].add(_name(subject))
    pairs = {tuple(sorted(names)) for names in born.values() if len(names) > 1}
    return [list(names) for names in sorted(pairs)]


def _silent(members: Mapping[str, Member], asked: Asked) -> Iterator[str]:
    silent = {name for name in _having(HTTP, asked) if members[name].metrics <= {"up"}}
    if silent:
        yield (
            f"{_who(silent, members)} serves requests and publishes nothing of vLLM's: it was started with"
            " --disable-log-stats; start it without"
        )


def _unseen(remote: Remote, asked: Asked) -> Iterator[str]:
    """GPUs that are not seen, though those of others are, or seen without the reasons for which they throttle."""
    members = remote.members
    seen = _having(GPU, asked)
    blind = members.keys() - seen
    if blind and remote.exists(DCGM):
        yield (
            f"dcgm-exporter's metrics are there, but nothing joins them with {_who(blind, members)}: load"
            " alerts/dcgm.yaml, and say in diag.toml, [site] gpu_join, which labels they share"
        )
    elif blind and seen:
        yield f"the GPUs of {_who(blind, members)} are not seen: scrape `diag exporter` there too, instead of vLLM"
    without = seen - _having(THROTTLE, asked)
    if without:
        yield (
            f"the GPUs of {_who(without, members)} come without the reasons for which they throttle: dcgm-exporter"
            " leaves them out by default; the head of alerts/dcgm.yaml has the lines that switch them on"
        )


def _several_api_servers(members: Mapping[str, Member], asked: Asked) -> Iterator[str]:
    several = _having("vllm:generation_tokens_total", asked) - _having(START, asked)
    if several:
        yield (
            f"{_who(several, members)} has no {START}, as with several API servers: a restart shows only by counters"
            " that fall, and the log has no line of statistics; --api-server-count 1 brings both back"
        )
