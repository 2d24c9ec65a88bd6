"""A Prometheus that holds what was recorded gives the verdict of the recording, whichever of three engines it is."""

import json
import re
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import yaml
from support import healthy_day, prometheus_server, rewriting, scenarios, timelines
from support import victoria_metrics as victoria
from support.alert_rules import RULES
from support.paths import ALL_RECORDINGS, RECORDINGS
from support.rule_files import groups_of
from support.timelines import blocks
from support.waiting import until

from diag.commands import doctor
from diag.commands.observe import ObserveOptions, prometheus_source
from diag.core.contract import Contract
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Report
from diag.knowledge.catalog import load
from diag.knowledge.formulas import formula
from diag.promql import Block, pretty
from diag.report import json as as_json
from diag.sources.observation import Observation
from diag.sources.prometheus.scope import Scope, TimeSpan
from diag.sources.recording.reader import read
from diag.sources.samples import SampleSource

pytestmark = pytest.mark.prometheus
PLACES = (*prometheus_server.PLACES, "victoria")
NAMES = sorted(path.name for path in ALL_RECORDINGS)
SERVER = {"instance": "h:1", "job": "vllm"}
PROMETHEUS3 = "DIAG_PROMETHEUS3"


class Server(Protocol):
    url: str


def serving(place: str, blocks: list[Block]):
    if place == "victoria":
        return victoria.serving(blocks)
    return prometheus_server.serving(prometheus_server.program(place), blocks)


def named(seen: Observation, name: str) -> list[Block]:
    """The samples of a recording of one server, under that name."""
    blocks = seen.samples.select([])
    return [block._replace(labels=tuple({**each, "instance": name} for each in block.labels)) for block in blocks]


def span(seen: Observation) -> TimeSpan:
    return TimeSpan(since=f"{seen.instants[0] / 1000}", until=f"{seen.instants[-1] / 1000}")


def asked_of(server: Server, seen: Observation, *instances: str) -> Report:
    return doctor.run(ObserveOptions([], prometheus=server.url, scope=Scope(span(seen), instances)))


def kind(name: str) -> tuple[object, ...]:
    """What is the same of recordings that show the same: the truth, and the release where it is an older one."""
    truth = tomllib.loads((RECORDINGS / name / "recording.toml").read_text(encoding="utf-8"))["truth"]
    return truth["verdict"], *truth["present"], *re.findall(r"vllm_[\d_]+", name)


recorded = cache(lambda name: read(RECORDINGS / name))
OF_EACH_KIND = [*{kind(name): name for name in NAMES}.values()]
ENGINES = {PROMETHEUS3: NAMES, "PATH": OF_EACH_KIND, "victoria": OF_EACH_KIND}
"""All recordings in one engine, those that differ in all three."""


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[[str], Server]]:
    """Starts each engine once: each recording is a server of its own name."""
    with ExitStack() as running:

        @cache
        def started(engine: str) -> Server:
            blocks = [block for name in ENGINES[engine] for block in named(recorded(name), name)]
            return running.enter_context(serving(engine, blocks))

        yield started


def states(report: Report) -> dict[tuple[str, str], str]:
    """By incident, and by subject without its instance."""
    return {
        (one.incident.id, str([pair for pair in one.subject if pair[0] != "instance"])): one.state
        for one in (each.diagnosis for each in report.findings)
    }


def quoted(report: Report) -> list[tuple[str, str, int | None]]:
    """What is quoted of the log for each incident, and its line there."""
    return sorted(
        (each.diagnosis.incident.id, quote.text, quote.line) for each in report.present for quote in each.quotes
    )


@cache
def judged(name: str) -> Report:
    """The verdict of the recording itself."""
    return doctor.run(ObserveOptions([f"tests/recordings/{name}"]))


@pytest.mark.parametrize(("engine", "name"), [(engine, name) for engine, names in ENGINES.items() for name in names])
def test_the_verdict_is_that_of_the_recording(engines: Callable[[str], Server], engine: str, name: str) -> None:
    there, here = asked_of(engines(engine), recorded(name), name), judged(name)
    assert states(there) == states(here)
    assert quoted(there) == quoted(here)
    assert [each.state for each in there.progress] == [each.state for each in here.progress]
    assert there.verdict == here.verdict


@pytest.mark.parametrize("place", PLACES)
def test_vllms_own_page_is_enough_for_the_size_of_the_pool(place: str) -> None:
    """Without an exporter it stands in labels only, which PromQL cannot read."""
    recorded = {name: read(RECORDINGS / name) for name in ("kv_undersized", "kv_cascade")}
    blocks = [block for name, seen in recorded.items() for block in named(seen, name)]
    with serving(place, [each for each in blocks if not each.labels[0]["__name__"].startswith("diag_")]) as held:
        small, cascade = (asked_of(held, seen, name) for name, seen in recorded.items())
    assert "kv_pool_undersized" in {each.diagnosis.incident.id for each in small.present}
    assert {each.name: each.after for each in cascade.present[0].proposals}["--max-num-seqs"] == 6


def regular(folder: Path) -> Path:
    """A recording of exporter pages, scraped every two seconds to the millisecond, as Prometheus does it."""
    scrapes = list(rewriting.scrapes(str(scenarios.everything(folder))))
    return rewriting.write(
        folder / "regular", ((1_795_000_000.0 + 2 * at, host, page) for at, (_, host, page) in enumerate(scrapes))
    )


@pytest.fixture(scope="module")
def exporter_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return regular(tmp_path_factory.mktemp("exporter"))


def test_exporter_pages_give_the_same_bytes_from_a_prometheus(exporter_pages: Path) -> None:
    seen = read(exporter_pages)
    with serving(PROMETHEUS3, list(seen.samples.select([]))) as held:
        there = asked_of(held, seen)
    here = doctor.run(ObserveOptions([str(exporter_pages)]))
    assert len(here.present) > 1
    assert without_source(there) == without_source(here)


def without_source(report: Report) -> str:
    document = as_json.document(report)
    document.pop("observed")
    return json.dumps(document)


@pytest.mark.parametrize(("place", "shift"), [(PROMETHEUS3, 0), ("PATH", 137)])
def test_every_signal_has_the_value_of_the_recording(exporter_pages: Path, place: str, shift: int) -> None:
    """Windows of Prometheus 2 are closed on the left: it is asked where none begins at a scrape."""
    seen = read(exporter_pages)
    with serving(place, list(seen.samples.select([]))) as held:
        settings = ObserveOptions([], prometheus=held.url, scope=Scope(span(seen)))
        there = prometheus_source(settings, Contract())
        wrong = [text for text in signals(seen) if not same(text, seen, there, seen.instants[-20:] + shift)]
    assert wrong == []


def signals(seen: Observation) -> list[str]:
    asked = QueryCache(SampleSource(seen.samples, seen.instants, seen.interval), Contract())
    return sorted(
        {
            formula(condition.signal, incident.per, asked.window(incident).text, Contract()).written_out()
            for incident in load()
            for condition in incident.every_condition
        }
    )


def same(text: str, seen: Observation, there: object, instants: object) -> bool:
    ours = SampleSource(seen.samples, seen.instants, seen.interval).ask(text, instants)
    known = {subject: row for subject, row in ours.items() if not np.isnan(row).all()}
    theirs = there.ask(text, instants)
    return known.keys() == theirs.keys() and all(
        np.allclose(known[each], theirs[each], rtol=1e-9, atol=1e-12, equal_nan=True) for each in known
    )


END = 1_790_000_000_000
ONSET = END - 6 * 3_600_000
"""The scrape after which the faults set in."""


@pytest.fixture(scope="module")
def sick_day() -> Iterator[Server]:
    """24 h with a quarter of an hour of a cascade in it."""
    series = timelines.faulty("kv_eviction_cascade")[0]
    with serving("PATH", healthy_day.with_fault(healthy_day.day(END), series, ONSET)) as held:
        yield held


def test_a_day_later_the_onset_is_found_within_one_step(sick_day: Server) -> None:
    report = past(sick_day, TimeSpan(at=f"{END / 1000}", window="24h"))
    (found,) = [each.diagnosis for each in report.present if each.diagnosis.severity != "info"]
    step = found.instants[1] - found.instants[0]
    assert found.incident.id == "kv_eviction_cascade"
    assert 0 <= found.since - ONSET / 1000 <= step == 60
    assert found.until - ONSET / 1000 == pytest.approx(timelines.SICK, abs=300)
    assert (found.ongoing, report.progress[0].state) == (False, "busy")


def test_what_was_over_before_the_span_is_not_told(sick_day: Server) -> None:
    hours_later = TimeSpan(since=f"{ONSET / 1000 + 7200}", until=f"{END / 1000}")
    assert past(sick_day, hours_later).verdict == "healthy"


def past(server: Server, span: TimeSpan) -> Report:
    return doctor.run(ObserveOptions([], prometheus=server.url, scope=Scope(span)))


RECORDING_RULES = [rule for group in groups_of(RULES) for rule in group["rules"] if "record" in rule]
"""What diag.rules.yaml records."""
MARK = 7.0
"""A value that no signal has: who tells it has asked for what is recorded."""


def recording(folder: Path, rules: list[dict[str, str]], recorded: list[str], since: int = 0) -> AbstractContextManager:
    """A healthy server's quarter of an hour, these rules loaded, and under these names MARK, from some time on."""
    (page,) = blocks(timelines.timeline("healthy"), END / 1000 - float(timelines.TIMES[-1]))
    up = Block(({"__name__": "up", **SERVER},), page.times, np.ones((1, page.times.size)))
    late = page.times[page.times >= since]
    told = tuple({"__name__": name, **SERVER, "engine": "0"} for name in recorded)
    marks = [Block(told, late, np.full((len(told), late.size), MARK))] if told else []
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "r", "interval": "1s", "rules": rules}]}))
    config = yaml.safe_dump({"rule_files": [str(folder / "rules.yaml")]})
    return prometheus_server.serving(prometheus_server.program("PATH"), [page, up, *marks], config)


def values(server: Server, promql: str) -> set[float]:
    """What the source answers for an expression, at all of its instants."""
    remote = prometheus_source(
        ObserveOptions([], prometheus=server.url, scope=Scope(TimeSpan(at=f"{END / 1000}"))), Contract()
    )
    (row,) = remote.ask(promql, remote.instants).values()
    return set(row.tolist())


@pytest.mark.parametrize(
    ("change", "since", "is_used"),
    [("", 0, True), (" * 1", 0, False), ("", END - 300_000, False)],
    ids=["the very same expression", "another expression", "recorded for a part of the time"],
)
def test_what_rules_record_is_asked_by_its_name(tmp_path: Path, change: str, since: int, is_used: bool) -> None:
    rule = next(each for each in RECORDING_RULES if "num_requests_waiting[5m]" in each["expr"])
    with recording(tmp_path, [{**rule, "expr": rule["expr"] + change}], [rule["record"]], since) as held:
        until(lambda: loaded(held))
        assert (MARK in values(held, rule["expr"])) == is_used


def loaded(server: Server) -> bool:
    """Whether its rules have been evaluated."""
    with urllib.request.urlopen(f"{server.url}/api/v1/rules", timeout=30) as response:
        groups = json.load(response)["data"]["groups"]
    return bool(groups) and all(rule["health"] == "ok" for group in groups for rule in group["rules"])


def test_all_that_the_rules_record_is_what_the_doctor_asks() -> None:
    asked = {
        pretty(formula(condition.signal, incident.per, incident.window, Contract()).written_out())
        for incident in load()
        for condition in incident.every_condition
    }
    assert {pretty(each["expr"]) for each in RECORDING_RULES} <= asked
