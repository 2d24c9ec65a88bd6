"""A Prometheus that holds what was recorded gives the verdict of the recording, whichever of three engines it is."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from support import healthy_day, prometheus_server, recorded_series, rewriting, scenarios, timelines
from support import victoria_metrics as victoria
from support.paths import OF_ONE_SERVER, RECORDINGS, SEVERAL_SERVERS
from support.reports import judged
from support.sampling import THOROUGH, some
from support.timelines import blocks

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract
from diag.core.subjects import Instants
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Report
from diag.knowledge.catalog import load
from diag.knowledge.formulas import formula
from diag.promql import Block, Samples
from diag.report import json as as_json
from diag.sources.observation import Observation
from diag.sources.prometheus.scope import Scope, TimeSpan
from diag.sources.recording.reader import read
from diag.sources.source import open_prometheus

pytestmark = pytest.mark.prometheus
PLACES = (*prometheus_server.PLACES, "victoria")
NAMES = sorted(path.name for path in OF_ONE_SERVER)
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
    """Return the key that equivalent recordings share: the truth, and the release if it is an older one."""
    truth = tomllib.loads((RECORDINGS / name / "recording.toml").read_text(encoding="utf-8"))["truth"]
    return truth["verdict"], *truth["present"], *re.findall(r"vllm_[\d_]+", name)


recorded = cache(lambda name: read(RECORDINGS / name))
OF_EACH_KIND = [*{kind(name): name for name in NAMES}.values()]
FEW = some(OF_EACH_KIND, 6)
IN_THREE = {PROMETHEUS3: FEW[::3], "PATH": FEW[1::3], "victoria": FEW[2::3]}
IN_TWO = {PROMETHEUS3: NAMES, "PATH": OF_EACH_KIND[::2], "victoria": OF_EACH_KIND[1::2]}
ENGINES = IN_TWO if THOROUGH else IN_THREE
"""Some kinds in one of the engines each; thoroughly, all recordings in one of them and each kind in a second one."""


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
    """Return the states by incident and by subject without its instance."""
    return {
        (one.incident.id, str([pair for pair in one.subject if pair[0] != "instance"])): one.state
        for one in (each.diagnosis for each in report.findings)
    }


def quoted(report: Report) -> list[tuple[str, str, int | None]]:
    """Return the quoted log line of each incident, with its line number."""
    return sorted(
        (each.diagnosis.incident.id, quote.text, quote.line) for each in report.present for quote in each.quotes
    )


@pytest.mark.parametrize(("engine", "name"), [(engine, name) for engine, names in ENGINES.items() for name in names])
def test_the_verdict_is_that_of_the_recording(engines: Callable[[str], Server], engine: str, name: str) -> None:
    there, here = asked_of(engines(engine), recorded(name), name), judged(name)
    assert states(there) == states(here)
    assert quoted(there) == quoted(here)
    assert [each.state for each in there.progress] == [each.state for each in here.progress]
    assert there.verdict == here.verdict


@pytest.mark.parametrize("name", sorted(SEVERAL_SERVERS))
def test_several_exporters_of_one_server_get_the_verdict_of_the_recording(name: str) -> None:
    seen = recorded(name)
    blocks = [
        block._replace(labels=tuple({**each, "job": "vllm"} for each in block.labels))
        for block in seen.samples.select([])
    ]
    with serving(PROMETHEUS3, blocks) as held:
        there, here = asked_of(held, seen), judged(name)
    assert [(each.diagnosis.subject, each.diagnosis.culprits) for each in there.present] == [
        (each.diagnosis.subject, each.diagnosis.culprits) for each in here.present
    ]
    assert (there.verdict, states(there)) == (here.verdict, states(here))


@pytest.mark.parametrize("place", some(PLACES, 1))
def test_kv_cache_size_is_read_from_vllms_own_page(place: str) -> None:
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
    document = as_json.DOCTOR.of(report)
    document.pop("observed")
    return json.dumps(document)


@pytest.mark.parametrize(("place", "shift"), [(PROMETHEUS3, 0), ("PATH", 137)])
def test_every_signal_has_the_value_of_the_recording(exporter_pages: Path, place: str, shift: int) -> None:
    """Windows of Prometheus 2 are closed on the left: it is asked where none begins at a scrape."""
    seen = read(exporter_pages)
    with serving(place, list(seen.samples.select([]))) as held:
        settings = ObserveOptions([], prometheus=held.url, scope=Scope(span(seen)))
        there = open_prometheus(settings, Contract())
        asked = [text for text in signals(seen) if not (shift and RATE_OF_A_YOUNG_COUNTER in text)]
        wrong = [text for text in asked if not same(text, seen, there, seen.instants[-20:] + shift)]
    assert wrong == []


RATE_OF_A_YOUNG_COUNTER = "(sum by (instance, engine) (rate(vllm:e2e_request_latency_seconds_sum[128s]))) and"
"""Not compared with Prometheus 2, whose increase of this young counter was 0.5 % larger; Prometheus 3 agrees."""


def signals(seen: Observation) -> list[str]:
    asked = QueryCache(seen, Contract())
    return sorted(
        {
            formula(condition.signal, incident.per, asked.window(incident).text, Contract()).written_out()
            for incident in load()
            for condition in incident.every_condition
        }
    )


def same(text: str, seen: Observation, there: object, instants: object) -> bool:
    ours = seen.ask(text, instants)
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
    with serving(prometheus_server.ANY, healthy_day.with_fault(healthy_day.day(END), series, ONSET)) as held:
        yield held


@pytest.mark.parametrize(("window", "finest"), [("8h", 30), pytest.param("24h", 60, marks=pytest.mark.nightly)])
def test_hours_later_the_onset_is_found_within_one_step(sick_day: Server, window: str, finest: int) -> None:
    report = past(sick_day, TimeSpan(at=f"{END / 1000}", window=window))
    (found,) = [each.diagnosis for each in report.present if each.diagnosis.incident.severity != "info"]
    step = found.instants[1] - found.instants[0]
    assert found.incident.id == "kv_eviction_cascade"
    assert 0 <= found.since - ONSET / 1000 <= step == finest
    assert found.until - ONSET / 1000 == pytest.approx(timelines.SICK, abs=300)
    assert (found.severity, found.ongoing) == ("info", False), "it is over: the verdict is that of the end of the range"
    assert (report.verdict, report.progress[0].state) == ("healthy", "busy")


def test_incident_that_ended_before_the_time_range_is_not_reported(sick_day: Server) -> None:
    hours_later = TimeSpan(since=f"{ONSET / 1000 + 2 * 3600}", until=f"{ONSET / 1000 + 3 * 3600}")
    assert past(sick_day, hours_later).verdict == "healthy"


def past(server: Server, span: TimeSpan) -> Report:
    return doctor.run(ObserveOptions([], prometheus=server.url, scope=Scope(span)))


SCRAPED = timelines.TIMES[-61:]
"""The scrapes of a quarter of an hour, which a doctor judges over the windows of the alerts."""
LAST = SCRAPED.size


def quarter(name: str) -> tuple[list[Block], Instants]:
    """The last quarter of an hour of a timeline, as a server of that name with a model of its own; its instants."""
    series = timelines.timeline(name) if name == "healthy" else timelines.faulty(name)[0]
    (block,) = blocks(series, END / 1000 - float(timelines.TIMES[-1]))
    own = {"instance": f"{name}:1", "job": "vllm"}
    labels = tuple({**each, **own, **({"model_name": name} if "model_name" in each else {})} for each in block.labels)
    return [block._replace(labels=labels)], block.times[-LAST:]


JUDGED = ("healthy", *some(sorted({*timelines.RECORDED, *timelines.HOSTS} - {*timelines.PEERS}), 6))


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Server, Server]]:
    """A server for each incident: in a Prometheus without rules, and in one with what our rules recorded."""
    pages = {name: quarter(name) for name in JUDGED}
    raw = [block for held, _ in pages.values() for block in held]
    made = [block for held, instants in pages.values() for block in recorded_series.recorded(Samples(held), instants)]
    with serving(PROMETHEUS3, raw) as without, serving(PROMETHEUS3, [*raw, *made]) as rules:
        yield without, rules


def of_fleet(server: Server, *, only_suspects: bool = False, at: float = END / 1000) -> tuple[Report, bool]:
    """The report of all servers, and whether recorded series were read for it."""
    settings = ObserveOptions([], prometheus=server.url, scope=Scope(TimeSpan(at=f"{at}")))
    used = bool(open_prometheus(settings, Contract(), load()).recorded)
    return doctor.run(settings, only_suspects=only_suspects), used


def test_recorded_rules_give_every_server_the_verdict_of_the_expressions(both: tuple[Server, Server]) -> None:
    (without, none), (rules, used) = map(of_fleet, both)
    assert (none, used) == (False, True)
    assert without_source(rules) == without_source(without)


def present(report: Report) -> list[object]:
    return [each for each in as_json.DOCTOR.of(report)["diagnoses"] if each["state"] == "present"]


def test_a_fleet_judged_in_two_steps_has_the_same_incidents(both: tuple[Server, Server]) -> None:
    whole, _ = of_fleet(both[0])
    few, used = of_fleet(both[1], only_suspects=True)
    assert used and len(few.findings) <= len(whole.findings)
    assert present(few) == present(whole)
    assert (few.verdict, few.progress, few.not_judged) == (whole.verdict, whole.progress, whole.not_judged)
    assert (few.checked, few.needs_telemetry, few.absent) == (whole.checked, whole.needs_telemetry, whole.absent)


def test_rules_of_another_generation_are_not_read(both: tuple[Server, Server]) -> None:
    settings = ObserveOptions([], prometheus=both[1].url, scope=Scope(TimeSpan(at=f"{END / 1000}")))
    assert not open_prometheus(settings, Contract(freeze_seconds=2.5), load()).recorded
    assert not open_prometheus(settings, Contract(), load()[:1]).recorded


def test_rules_that_recorded_only_a_part_of_the_span_are_not_read(both: tuple[Server, Server]) -> None:
    settings = ObserveOptions([], prometheus=both[1].url, scope=Scope(TimeSpan(at=f"{END / 1000}", window="24m")))
    assert not open_prometheus(settings, Contract(), load()).recorded
