"""The observation of live or recorded servers: their samples, queries over them, and notes about the scrapes."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from diag import promql
from diag.core.formatting import clock, listed, plural, printable
from diag.core.log_events import LogEnding
from diag.core.metric_prefix import CACHE_INFO, OWN, relabelling
from diag.core.subjects import LARGEST, Floats, Instants, Subject
from diag.exposition.scrapes import MOST_SERIES, FaultKind, Scrape, ScrapeTable, Target, median_interval, rounds
from diag.promql import Block, Labels, Samples, is_stale
from diag.vllm import running_config
from diag.vllm.command.shown import shown
from diag.vllm.metric_names import exported_by
from diag.vllm.running_config import RunningConfig, ServerFacts

USUAL_INTERVAL = 2.0
"""Seconds between two scrapes, if there is only one scrape and the origin names no interval."""
LATE = r"time-?out|timed out|no connection within|sent nothing for|stopped sending|did not finish|HTTP(?: Error)? 504\b"
"""Words of a reason, ours, another program's or a gateway's: no answer came in time. A dead server refuses the
connection."""
OTHER_ANSWER = r"HTTP(?: Error)? [34]\d\d\b|certificate|other than metrics|has no (?:page|metrics)|is no vLLM server"
"""Words of a reason: something answers, but with no page (a lost route, a proxy), while vLLM may go on behind it. A
502 or 503 is none of them: a proxy that reaches no server answers so."""
_FAULTS: dict[FaultKind, str] = {
    "malformed": "{pages} of {host} contained invalid lines, which were skipped; the first: {first}",
    "duplicate": "{pages} of {host} repeated series (for example {first}): one with several values counts as missing",
    "timestamp": "{pages} of {host} contained timestamps: the scrape times were used instead",
    "truncated": "{pages} of {host} ended in the middle of a line: the rest counts as missing",
    "renamed": f"{{pages}} of {{host}} named vLLM's metrics {{first}}... instead of {OWN}...; they were judged, but"
    " rules do not see them until the scrape job has {relabelling}",
    "crowded": f"{{pages}} of {{host}} had more than {MOST_SERIES:,} series: the rest was skipped",
}
Row = tuple[Labels, Floats]


@dataclass(frozen=True, eq=False, repr=False)
class SampleSource:
    """A `TelemetrySource` over samples in memory; `instants` are unix milliseconds, `interval` is in seconds."""

    samples: promql.Samples
    instants: Instants
    interval: float

    @property
    def first(self) -> int:
        """The time of the first scrape."""
        return int(self.instants[0])

    @cached_property
    def _evaluator(self) -> promql.Evaluator:
        return promql.Evaluator(self.samples)

    def ask(self, asked: promql.Formula | str, instants: Instants) -> Mapping[Subject, Floats]:
        """Evaluate a query: one row per subject; a missing or implausibly large sample is NaN."""
        if not self._evaluator.may_hold(asked):
            return {}
        vector = self._evaluator.evaluate(asked, instants)
        values = np.where(vector.present & (np.abs(vector.values) < LARGEST), vector.values, np.nan)
        return {tuple(sorted(labels.items())): row for labels, row in zip(vector.labels, values, strict=True)}


class PodContainer(NamedTuple):
    """A container in a pod, by the names that kubectl takes; `context` is "" for the current one."""

    context: str
    namespace: str
    pod: str
    container: str


MOST_JUDGED = 1_000_000
"""Servers, engines and GPUs times instants that are judged: each takes 600 bytes over all conditions."""


@dataclass(frozen=True, eq=False, repr=False)
class Observation(SampleSource):
    """The scrapes of one or more targets: their samples, with the facts beside them.

    target: a path or URLs, without credentials. instants: one for each round over all targets. interval: the usual time
    between two scrapes of one target. silent_scrapes: successful scrapes without metrics of vLLM, for example of an
    exporter alone. instances: the label `instance` of each target, the key of `settled`, and of `versions` (of vLLM),
    `models` and `launch` (without secrets) if they are known. mixed: by instance, a metric of vLLM or its exporter that
    lacks the label that tells its series apart. endings: by instance, how a log ends that is the only evidence.
    containers: by instance, the containers of a Kubernetes cluster that run. exported_by: by instance, the first and
    the last release that have the metrics of its pages. logs: by instance, how the log beside the pages ends.
    """

    source: Literal["recording", "scrape", "log"]
    target: str
    scrapes: int
    failed_scrapes: int
    silent_scrapes: int
    notes: tuple[str, ...]
    instances: tuple[str, ...]
    versions: Mapping[str, str]
    models: Mapping[str, str]
    launch: Mapping[str, str]
    settled: Mapping[str, RunningConfig]
    mixed: Mapping[str, str]
    endings: Mapping[str, LogEnding] = field(default_factory=dict)
    containers: Mapping[str, PodContainer] = field(default_factory=dict)
    exported_by: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    logs: Mapping[str, LogEnding] = field(default_factory=dict)


class Origin(NamedTuple):
    """The source of the scrapes, and its own facts; `every` is the interval if the scrapes do not show one."""

    source: Literal["recording", "scrape", "log"]
    target: str
    every: float = 0.0
    notes: tuple[str, ...] = ()


def observation(origin: Origin, targets: Sequence[Target], facts: Mapping[str, ServerFacts]) -> Observation:
    """Build the observation of scraped targets; each has at least one scrape."""
    tables = [target.table() for target in targets]
    facts = {table.instance: facts.get(table.instance, ServerFacts()) for table in tables}
    settled = {}  # by the page's own series, the facts, and `diag_vllm_config` of an exporter
    for table in tables:
        infos = table.last(CACHE_INFO)
        by_page = running_config.from_page(infos, table.pages[-1].layout.engines if table.pages else 0)
        last = next((scrape.page for scrape in reversed(table.scrapes) if scrape.page), None)
        values = zip(last.layout.rows.tolist(), last.values.tolist(), strict=True) if last else ()
        flags = {
            row: table.labels[row]["flag"] for row in table.rows("diag_vllm_config") if "flag" in table.labels[row]
        }
        exported = {flags[row]: value for row, value in values if row in flags}
        settled[table.instance] = running_config.settle(
            {**by_page, **running_config.words_of_page(infos)}, facts[table.instance], exported
        )
    interval = median_interval(tables, origin.every) or USUAL_INTERVAL
    remarks = [
        note for table in tables for note in (*scrape_notes(table), *settled[table.instance].notes(table.instance))
    ]
    instants = rounds(tables, interval)
    parts = {
        (table.instance, name, labels[name])
        for table in tables
        for labels in table.labels
        for name in ("engine", "gpu")
        if name in labels
    }
    most = max(1, MOST_JUDGED // (len(tables) + len(parts)))
    if len(instants) > most:
        remarks.append(
            f"only the last {most:,} of {len(instants):,} evaluation times were judged: too many servers, engines and"
            " GPUs"
        )
    return Observation(
        source=origin.source,
        target=origin.target,
        samples=Samples(part for table in tables for part in _blocks(table, facts[table.instance], settled)),
        instants=instants[-most:],
        interval=interval,
        scrapes=sum(len(table.scrapes) for table in tables),
        failed_scrapes=sum(len(table.failed) for table in tables),
        silent_scrapes=sum(not page.layout.vllm for table in tables for page in table.pages),
        notes=tuple(dict.fromkeys([*origin.notes, *remarks])),
        instances=tuple(table.instance for table in tables),
        versions=_stated({table.instance: _version(table, facts[table.instance]) for table in tables}),
        models=_stated({table.instance: _models(table, facts[table.instance]) for table in tables}),
        launch=_stated({name: shown(server.launch or server.process) for name, server in facts.items()}),
        settled=settled,
        mixed=_stated({table.instance: table.mixed for table in tables}),
        exported_by={table.instance: exported_by({labels["__name__"] for labels in table.labels}) for table in tables},
        logs={name: server.log_ending for name, server in facts.items() if server.log_ending},
    )


def _stated(texts: Mapping[str, str]) -> Mapping[str, str]:
    return {name: text for name, text in texts.items() if text}


def _version(table: ScrapeTable, facts: ServerFacts) -> str:
    return facts.version or next((info.get("version", "") for info in table.last("diag_vllm_info")), "")


def _models(table: ScrapeTable, facts: ServerFacts) -> str:
    """Return the models that the last page with any names, else those of an exporter or /v1/models."""
    by_page = next((page.layout.models for page in reversed(table.pages) if page.layout.models), ())
    by_exporter = next((info.get("model", "") for info in table.last("diag_vllm_info")), "")
    return ", ".join(by_page) or by_exporter or ", ".join(facts.models)


def _blocks(table: ScrapeTable, facts: ServerFacts, settled: Mapping[str, RunningConfig]) -> Iterator[Block]:
    """Yield the page's own series, then the derived series that the page (of an exporter, for example) lacks.

    The page may lack single flags of the configuration, so each flag is compared as a series of its own.
    """
    of_page = {(labels["__name__"], labels.get("flag", "")) for labels in table.labels}
    derived = [
        (labels, values)
        for labels, values in _derived_series(table, facts, settled[table.instance])
        if (labels["__name__"], labels.get("flag", "")) not in of_page
    ]
    if table.labels:
        yield Block(table.labels, table.times, table.values)
    if derived:
        yield Block(tuple(labels for labels, _ in derived), table.times, np.stack([values for _, values in derived]))


def _derived_series(table: ScrapeTable, facts: ServerFacts, settled: RunningConfig) -> Iterator[Row]:
    """Yield the series that `diag exporter` would publish for these scrapes."""

    def row(name: str, values: object, **labels: str) -> Row:
        row = np.broadcast_to(np.asarray(values, np.float64), table.times.shape)
        return {"__name__": name, "instance": table.instance, **labels}, row

    yield row("up", [not scrape.reason for scrape in table.scrapes])
    yield row("diag_vllm_up", [scrape.page is not None and scrape.page.layout.vllm for scrape in table.scrapes])
    for name, words in (("diag_vllm_late", f"{LATE}|{OTHER_ANSWER}"), ("diag_vllm_lost", OTHER_ANSWER)):
        failed_so = [bool(scrape.reason and re.search(words, scrape.reason, re.IGNORECASE)) for scrape in table.scrapes]
        if any(failed_so):
            yield row(name, failed_so)
    prefixes = [scrape.page.faults.get("renamed", "") if scrape.page else "" for scrape in table.scrapes]
    for prefix in sorted({page.faults["renamed"] for page in table.pages if "renamed" in page.faults}):
        yield row("diag_vllm_metrics_renamed", [one == prefix for one in prefixes], prefix=prefix)
    version, models = _version(table, facts), _models(table, facts)
    if version or models or settled.device:
        begun = facts.releases or ((0.0, version),)
        running = [[name for since, name in begun if since * 1000 <= scrape.at][-1] for scrape in table.scrapes]
        for name in dict.fromkeys(running):
            shown = [1.0 if name == one else promql.STALE for one in running]
            yield row("diag_vllm_info", shown, version=name, model=models, device=settled.device)
    for flag, value in sorted(settled.numbers.items()):
        yield row("diag_vllm_config", value, flag=flag)
    for info in (labels for labels in table.labels if labels["__name__"] == "diag_gpu_info"):
        from diag.core.metric_families import families  # noqa: PLC0415  # most pages name no GPU
        from diag.vllm.work import gpu_samples  # noqa: PLC0415

        for name, labels, value in gpu_samples(info.get("name", ""), (info.get("gpu", ""), info.get("uuid", ""))):
            yield row(name, value, **dict(zip(families()[name].labels, labels, strict=True)))


def scrape_notes(table: ScrapeTable) -> Iterator[str]:
    """Yield the notes about the scrapes of one target: failures, order, restarts, models, damaged pages."""
    host = printable(table.instance)
    if failed := table.failed:
        reasons = Counter(printable(scrape.reason) for scrape in failed).most_common()
        why = reasons[0][0] if len(reasons) == 1 else listed([f"{reason} ({count})" for reason, count in reasons])
        many = f"{len(failed)} of {plural(len(table.scrapes), 'scrape')}"
        yield f"{many} of {host} failed: {why} ({_failure_times(table.scrapes, failed)})"

    if table.out_of_order:
        yield f"{plural(table.out_of_order, 'scrape')} of {host} out of order: sorted by time"
    if table.dropped:
        yield f"{plural(table.dropped, 'scrape')} of {host} skipped: at the same time as another one"

    yield from _restarts(table)

    models = [(scrape.at, scrape.page.layout.models) for scrape in table.scrapes if scrape.page]
    for (_, before), (at, after) in pairwise((at, names) for at, names in models if names):
        if before != after:
            change = f"from {printable(', '.join(before))} to {printable(', '.join(after))}"
            yield f"the served model of {host} changed {change} at {clock(at / 1000)}"

    for kind, sentence in _FAULTS.items():
        firsts = [page.faults[kind] for page in table.pages if kind in page.faults]
        if firsts:
            pages, first = f"{len(firsts)} of {plural(len(table.pages), 'page')}", firsts[0]
            yield sentence.format(pages=pages, host=host, first=printable(first), relabelling=relabelling(first))


def _failure_times(scrapes: Sequence[Scrape], failed: Sequence[Scrape]) -> str:
    first, last = failed[0], failed[-1]
    if len(failed) == len(scrapes):
        return "all of them"
    if len(failed) == 1:
        return f"at {clock(first.at / 1000)}"
    unbroken = len(failed) == sum(first.at <= scrape.at <= last.at for scrape in scrapes)
    if unbroken and last is scrapes[-1]:
        return f"from {clock(first.at / 1000)} on"
    return f"{'' if unbroken else 'intermittently '}from {clock(first.at / 1000)} to {clock(last.at / 1000)}"


def _restarts(table: ScrapeTable) -> Iterator[str]:
    """Detect restarts by `process_start_time_seconds`, or, if the page lacks it (several API servers), by counters."""

    def steps(values: Floats) -> Floats:
        """Differences between neighbouring samples, 0 if one is missing."""
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(np.diff(np.where(is_stale(values), np.nan, values), axis=1), nan=0.0)

    def at(times: Instants) -> str:
        return listed([clock(int(time) / 1000) for time in times])

    host, starts = printable(table.instance), table.rows("process_start_time_seconds")
    names = [labels["__name__"] for labels in table.labels]
    counters = [row for row, name in enumerate(names) if name.startswith(OWN) and name.endswith(("_total", "_count"))]
    answered = np.array([scrape.page is not None for scrape in table.scrapes], bool)
    times, values = table.times[answered], table.values[:, answered]
    moved, back = steps(values[starts]), (steps(values[counters]) < 0).any(axis=0)
    in_turn = not starts and answered.all() and back.sum() > 2
    if in_turn or (moved < 0).any():
        why = f"its counters go back {back.sum()} times" if in_turn else "the process start time alternates"
        yield f"more than one server answers at {host} ({why}): scrape each by its own address"
        return
    restarted = (moved > 0).any(axis=0)
    if restarted.any():
        yield f"{host} restarted at {at(times[1:][restarted])} (process_start_time_seconds changed)"
    fell = times[1:][back & ~restarted]
    if len(fell) and starts:
        yield f"counters of {host} decreased at {at(fell)} without a restart"
    elif len(fell):
        yield f"{host} restarted at {at(fell)} (counters decreased)"
