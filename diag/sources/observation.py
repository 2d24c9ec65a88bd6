"""What a source saw of its targets: samples in memory, and what else is known of the servers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from diag.exposition.scrapes import Floats, Millis, Scrape, ScrapeTable, Target, median_interval, rounds
from diag.promql import Block, Labels, Samples
from diag.sources import scrape_notes as notes
from diag.vllm.command.shown import shown
from diag.vllm.server import config
from diag.vllm.server.config import RunningConfig, ServerFacts

USUAL_INTERVAL = 2.0
"""Seconds between two scrapes, where there is only one and nobody says."""
Row = tuple[Labels, Floats]


class Observation(NamedTuple):
    """The scrapes of one or more targets.

    target: a path or URLs, without credentials. instants: unix ms, one for each round over all targets, ascending.
    interval: the usual seconds between two scrapes of one target. silent_scrapes: those that were answered, by an
    exporter for one, but without metrics of vLLM. instances: the label `instance` of each target, which `versions` (of
    vLLM), `models` and `launch` (without secrets) are keyed by, where they are known; `settled` has all of them.
    truth: what a recording says really happened.
    """

    source: Literal["recording", "scrape"]
    target: str
    samples: Samples
    instants: Millis
    interval: float
    scrapes: int
    failed_scrapes: int
    silent_scrapes: int
    notes: tuple[str, ...]
    instances: tuple[str, ...]
    versions: Mapping[str, str]
    models: Mapping[str, str]
    launch: Mapping[str, str]
    truth: Mapping[str, object]
    settled: Mapping[str, RunningConfig]


class Origin(NamedTuple):
    """Where the scrapes come from and what is known beside them; `every` is the interval where a scrape shows none."""

    source: Literal["recording", "scrape"]
    target: str
    every: float = 0.0
    notes: tuple[str, ...] = ()
    truth: Mapping[str, object] | None = None


def observation(origin: Origin, targets: Sequence[Target], facts: Mapping[str, ServerFacts]) -> Observation:
    """Lay out what was gathered of the targets; each has at least one scrape."""
    tables = [target.table() for target in targets]
    facts = {table.instance: facts.get(table.instance, ServerFacts()) for table in tables}
    settled = {table.instance: _settled(table, facts[table.instance]) for table in tables}
    interval = median_interval(tables, origin.every) or USUAL_INTERVAL
    remarks = [note for table in tables for note in (*notes.of(table), *settled[table.instance].notes(table.instance))]
    return Observation(
        source=origin.source,
        target=origin.target,
        samples=Samples(part for table in tables for part in _blocks(table, facts[table.instance], settled)),
        instants=rounds(tables, interval),
        interval=interval,
        scrapes=sum(len(table.scrapes) for table in tables),
        failed_scrapes=sum(len(table.failed) for table in tables),
        silent_scrapes=sum(not page.layout.vllm for table in tables for page in table.pages),
        notes=tuple(dict.fromkeys([*origin.notes, *remarks])),
        instances=tuple(table.instance for table in tables),
        versions=_known({table.instance: _version(table, facts[table.instance]) for table in tables}),
        models=_known({table.instance: _models(table, facts[table.instance]) for table in tables}),
        launch=_known({name: shown(known.launch or known.process) for name, known in facts.items()}),
        truth=origin.truth or {},
        settled=settled,
    )


def _settled(table: ScrapeTable, facts: ServerFacts) -> RunningConfig:
    infos = table.last("vllm:cache_config_info")
    by_page = config.from_page(infos, table.pages[-1].layout.engines if table.pages else 0)
    return config.settle({**by_page, **config.words_of_page(infos)}, facts, _exported(table))


def _exported(table: ScrapeTable) -> dict[str, float]:
    """What an exporter of ours has settled, on its last page."""
    page = next((scrape.page for scrape in reversed(table.scrapes) if scrape.page), None)
    values = zip(page.layout.rows.tolist(), page.values.tolist(), strict=True) if page else ()
    rows = set(table.rows("diag_vllm_config"))
    return {table.labels[row]["flag"]: value for row, value in values if row in rows and "flag" in table.labels[row]}


def _known(texts: Mapping[str, str]) -> Mapping[str, str]:
    return {name: text for name, text in texts.items() if text}


def _version(table: ScrapeTable, facts: ServerFacts) -> str:
    return facts.version or next((info.get("version", "") for info in table.last("diag_vllm_info")), "")


def _models(table: ScrapeTable, facts: ServerFacts) -> str:
    """By the last page that names a model, else by /v1/models."""
    by_page = next((page.layout.models for page in reversed(table.pages) if page.layout.models), ())
    by_exporter = next((info.get("model", "") for info in table.last("diag_vllm_info")), "")
    return ", ".join(by_page) or by_exporter or ", ".join(facts.models)


def _blocks(table: ScrapeTable, facts: ServerFacts, settled: Mapping[str, RunningConfig]) -> Iterator[Block]:
    """The page's own series, and those that every source publishes unless the page has them, an exporter's for one.

    Of the configuration each flag is a series by itself: who started the server may know more of them.
    """
    own = {_key(labels) for labels in table.labels}
    ours = [series for series in _ours(table, facts, settled[table.instance]) if _key(series[0]) not in own]
    if table.labels:
        yield Block(table.labels, table.times, table.values)
    if ours:
        yield Block(tuple(labels for labels, _ in ours), table.times, np.stack([values for _, values in ours]))


def _key(labels: Labels) -> tuple[str, str]:
    return labels["__name__"], labels.get("flag", "")


def _ours(table: ScrapeTable, facts: ServerFacts, settled: RunningConfig) -> Iterator[Row]:
    def row(name: str, values: object, **labels: str) -> Row:
        row = np.broadcast_to(np.asarray(values, np.float64), table.times.shape)
        return {"__name__": name, "instance": table.instance, **labels}, row

    yield row("up", [not scrape.reason for scrape in table.scrapes])
    yield row("diag_vllm_up", [scrape.page is not None and scrape.page.layout.vllm for scrape in table.scrapes])
    for prefix in sorted({page.faults["renamed"] for page in table.pages if "renamed" in page.faults}):
        yield row("diag_vllm_metrics_renamed", [_prefix(scrape) == prefix for scrape in table.scrapes], prefix=prefix)
    version, models = _version(table, facts), _models(table, facts)
    if version or models or settled.device:
        yield row("diag_vllm_info", 1, version=version, model=models, device=settled.device)
    for flag, value in sorted(settled.numbers.items()):
        yield row("diag_vllm_config", value, flag=flag)
    for labels in (labels for labels in table.labels if labels["__name__"] == "diag_gpu_info"):
        for name, value, own in _data_sheet(labels):
            yield row(name, value, **own)


def _data_sheet(info: Labels) -> Iterator[tuple[str, float, Labels]]:
    """The names, values and labels of what is known of a GPU by its name."""
    from diag.core.metric_families import FAMILIES  # noqa: PLC0415  # most pages name no GPU
    from diag.vllm.capacity.series import of_gpu  # noqa: PLC0415

    for name, labels, value in of_gpu(info.get("name", ""), (info.get("gpu", ""), info.get("uuid", ""))):
        yield name, value, dict(zip(FAMILIES[name].labels, labels, strict=True))


def _prefix(scrape: Scrape) -> str:
    """What vLLM's metrics on its page began with instead of `vllm:`."""
    return scrape.page.faults.get("renamed", "") if scrape.page else ""
