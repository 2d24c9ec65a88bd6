"""Notes about the scrapes themselves: failed ones, restarts, damaged pages."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from diag.core.formatting import clock, listed, plural, printable
from diag.core.metric_prefix import relabelling
from diag.exposition.scrapes import MOST_SERIES, FaultKind, Floats, Millis, Scrape, ScrapeTable
from diag.promql import is_stale

_FAULTS: dict[FaultKind, str] = {
    "malformed": "{pages} of {host} contained invalid lines, which were skipped; the first: {first}",
    "duplicate": "{pages} of {host} contained duplicate series (for example {first}): the first of each was kept",
    "timestamp": "{pages} of {host} contained timestamps: the scrape times were used instead",
    "truncated": "{pages} of {host} ended in the middle of a line: the rest counts as missing",
    "renamed": "{pages} of {host} named vLLM's metrics {first}... instead of vllm:...; they were judged, but rules do"
    " not see them until the scrape job has {relabelling}",
    "crowded": f"{{pages}} of {{host}} had more than {MOST_SERIES:,} series: the rest was skipped",
}


def of(table: ScrapeTable) -> Iterator[str]:
    """Every note about one target."""
    yield from _failures(table)
    yield from _order(table)
    yield from _restarts(table)
    yield from _models(table)
    yield from _faults(table)


def _failures(table: ScrapeTable) -> Iterator[str]:
    failed = table.failed
    if not failed:
        return
    reasons = Counter(printable(scrape.reason) for scrape in failed).most_common()
    why = reasons[0][0] if len(reasons) == 1 else listed([f"{reason} ({count})" for reason, count in reasons])
    many = f"{len(failed)} of {plural(len(table.scrapes), 'scrape')}"
    yield f"{many} of {printable(table.instance)} failed: {why} ({_when(table.scrapes, failed)})"


def _when(scrapes: Sequence[Scrape], failed: Sequence[Scrape]) -> str:
    first, last = failed[0], failed[-1]
    if len(failed) == len(scrapes):
        return "all of them"
    if len(failed) == 1:
        return f"at {clock(first.at / 1000)}"
    unbroken = len(failed) == sum(first.at <= scrape.at <= last.at for scrape in scrapes)
    if unbroken and last is scrapes[-1]:
        return f"from {clock(first.at / 1000)} on"
    return f"{'' if unbroken else 'intermittently '}from {clock(first.at / 1000)} to {clock(last.at / 1000)}"


def _order(table: ScrapeTable) -> Iterator[str]:
    host = printable(table.instance)
    if table.out_of_order:
        yield f"{plural(table.out_of_order, 'scrape')} of {host} out of order: sorted by time"
    if table.dropped:
        yield f"{plural(table.dropped, 'scrape')} of {host} skipped: at the same time as another one"


def _restarts(table: ScrapeTable) -> Iterator[str]:
    """`process_start_time_seconds` changed; or, where there is none (several API servers), counters decreased."""
    host = printable(table.instance)
    answered = np.array([scrape.page is not None for scrape in table.scrapes], bool)
    times, values = table.times[answered], table.values[:, answered]
    moved = _steps(values[table.rows("process_start_time_seconds")])
    fell = (_steps(values[_counters(table)]) < 0).any(axis=0)
    if (moved < 0).any():
        why = "the process start time alternates"
        yield f"more than one server answers at {host} ({why}): scrape each by its own address"
        return
    restarted = (moved > 0).any(axis=0)
    known = bool(table.rows("process_start_time_seconds"))
    yield from _at(f"{host} restarted at {{}} (process_start_time_seconds changed)", times[1:][restarted])
    how = "counters of {} decreased at {{}} without a restart" if known else "{} restarted at {{}} ({})"
    yield from _at(how.format(host, "counters decreased"), times[1:][fell & ~restarted])


def _steps(values: Floats) -> Floats:
    """Differences between neighbours, 0 beside a hole."""
    with np.errstate(invalid="ignore"):
        steps: Floats = np.diff(np.where(is_stale(values), np.nan, values), axis=1)
    return np.nan_to_num(steps, nan=0.0)


def _counters(table: ScrapeTable) -> list[int]:
    names = [labels["__name__"] for labels in table.labels]
    return [i for i, name in enumerate(names) if name.startswith("vllm:") and name.endswith(("_total", "_count"))]


def _at(sentence: str, times: Millis) -> Iterator[str]:
    if len(times):
        yield sentence.format(listed([clock(int(time) / 1000) for time in times]))


def _models(table: ScrapeTable) -> Iterator[str]:
    """Where the name of the served model changed from one page to the next."""
    seen = [
        (scrape.at, scrape.page.layout.models) for scrape in table.scrapes if scrape.page and scrape.page.layout.models
    ]
    for (_, before), (at, after) in pairwise(seen):
        if before != after:
            change = f"from {printable(', '.join(before))} to {printable(', '.join(after))}"
            yield f"the served model of {printable(table.instance)} changed {change} at {clock(at / 1000)}"


def _faults(table: ScrapeTable) -> Iterator[str]:
    for kind, sentence in _FAULTS.items():
        firsts = [page.faults[kind] for page in table.pages if kind in page.faults]
        if firsts:
            pages = f"{len(firsts)} of {plural(len(table.pages), 'page')}"
            yield sentence.format(
                pages=pages,
                host=printable(table.instance),
                first=printable(firsts[0]),
                relabelling=relabelling(firsts[0]),
            )
