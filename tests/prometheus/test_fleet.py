"""A fleet in a real Prometheus: each instance is whole, and every one of many gets its own verdict at once."""

from pathlib import Path

import pytest
from support import fleet_in_prometheus as fleet
from support.prometheus_server import PLACES, program
from support.timelines import SICK, STEP

from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract
from diag.core.formatting import moment
from diag.diagnosis.fleet import judge
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Report
from diag.knowledge.catalog import load
from diag.knowledge.formulas import conjunction
from diag.knowledge.health import PARTS
from diag.report import coverage
from diag.report.answer import answers, fleet_rows
from diag.sources.prometheus.scope import Scope, TimeSpan
from diag.sources.source import open_prometheus

END = 1_790_000_000.5
MEMBERS = {"gpu_thermal_throttling": 3, "healthy": 2, "kv_eviction_cascade": 2}
INCIDENTS = {each.id: each for each in load()}


@pytest.mark.prometheus
@pytest.mark.parametrize("place", PLACES)
def test_generated_fleet_has_complete_pages_and_its_faults(tmp_path: Path, place: str) -> None:
    fleet.write(tmp_path, MEMBERS, END)
    names = {kind: set(fleet.instances(kind, count)) for kind, count in MEMBERS.items()}
    now, before = round(END * 1000), round((END - SICK - STEP) * 1000)
    with fleet.serving(program(place), tmp_path) as server:
        held = server.query('count by (instance) ({job="vllm"})', now)
        counted = {dict(key)["instance"]: count for key, count in held.items()}
        assert counted.keys() == set.union(*names.values())
        assert all(len({counted[name] for name in each}) == 1 for each in names.values())
        for kind in INCIDENTS.keys() & MEMBERS.keys():
            asked = conjunction(INCIDENTS[kind], INCIDENTS[kind].window, Contract()).written_out()
            assert {dict(key)["instance"] for key in server.query(asked, now)} == names[kind]
            assert not server.query(asked, before)


SICK_OF = {"kv_eviction_cascade": "critical", "gpu_thermal_throttling": "warning"}
SIZES = {
    10: {"healthy": 8, "kv_eviction_cascade": 1, "gpu_thermal_throttling": 1},
    50: {"healthy": 25, "kv_eviction_cascade": 3, "gpu_thermal_throttling": 22},
}


def judged(folder: Path, size: int) -> tuple[Report, int]:
    """The report of a whole fleet, and how many queries it took."""
    folder.mkdir()
    fleet.write(folder, SIZES[size], END, scrapes=45)
    with fleet.serving(program("DIAG_PROMETHEUS3"), folder) as server:
        settings = ObserveOptions([], prometheus=server.url, scope=Scope(TimeSpan(at=f"{END}")))
        remote = open_prometheus(settings, Contract())
        return judge(remote, load(), QueryCache(remote, Contract())), remote.queries


BESIDES = 48
"""Queries for progress, servers, scrapes, HTTP metrics, the kind of GPU and the numbers of the fixes."""


def distinct() -> int:
    """How many queries health and the catalogue are: each expression by kind of subject and window."""
    of_health = len(PARTS) + 1  # and /health of an idle engine
    return of_health + len(
        {
            (
                condition.signal.promql,
                each.per if "$by" in condition.signal.promql else (),
                each.live_window,
                each.window,
            )
            for each in INCIDENTS.values()
            for condition in each.every_condition
        }
    )


@pytest.mark.nightly
@pytest.mark.prometheus
def test_fifty_servers_take_as_many_queries_as_ten(tmp_path: Path) -> None:
    (few, queries_of_few), (many, queries) = (judged(tmp_path / str(size), size) for size in SIZES)
    assert queries <= queries_of_few <= distinct() + BESIDES
    for size, report in ((10, few), (50, many)):
        told = {line.instance: line.verdict for line in fleet_rows(report)}
        expected = [(kind, name) for kind, count in SIZES[size].items() for name in fleet.instances(kind, count)]
        assert told == {name: SICK_OF.get(kind, "healthy") for kind, name in expected}
    assert [each.partition(",")[0] for each in coverage.notes(many)] == ["evaluated every 30 s"]
    assert answers(many, moment)[1].lines[0].startswith("WARNING GPU thermal throttling (gpu_thermal_throttling) on 22")
