"""Data-parallel engines that wait for each other, and engines of which one alone stands still."""

from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import pytest
from support import rewriting as re
from support.rewriting import Scrape
from support.scenarios import found, present
from support.simulated_vllm import Engine, Limits, Request, page

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report

LOCKSTEP = "data_parallel_lockstep"


def judged(folder: Path, *engines: Iterable[Scrape]) -> Report:
    return doctor.run(ObserveOptions([str(re.write(folder / "recording", re.as_ranks(*engines)))]))


def still(name: str, **gauges: int) -> list[Scrape]:
    """A recording that stands still at its last page, with these gauges."""
    *_, last = (page for _, _, page in re.scrapes(name) if page)
    for gauge, number in gauges.items():
        last = re.with_value(last, f"vllm:num_requests_{gauge}{{", f"{number}.0")
    return [(1_700_000_000.0 + 2 * at, "h:8000", last) for at in range(31)]


WORK = {"running": 3, "waiting": 0}
NONE = {"running": 0, "waiting": 0}


def test_busy_engine_without_progress_beside_idle_peers_is_lockstep(tmp_path: Path) -> None:
    report = judged(tmp_path, still("healthy", **NONE), still("healthy", **WORK), still("healthy", **NONE))
    lockstep = found(report, LOCKSTEP).diagnosis
    assert (report.verdict, lockstep.primary, lockstep.culprits) == ("critical", True, ("engine 1",))
    assert found(report, "engine_stalled").diagnosis.explained_by == LOCKSTEP


def test_engines_that_all_stall_with_requests_are_lockstep(tmp_path: Path) -> None:
    report = judged(tmp_path, still("healthy", **WORK), still("healthy", **WORK))
    assert found(report, LOCKSTEP).diagnosis.culprits == ("engine 0", "engine 1")


@pytest.mark.parametrize(
    ("engines", "instead"),
    [
        ([still("healthy", **WORK)], {"engine_stalled"}),
        ([still("healthy", **WORK), list(re.scrapes("healthy"))], {"engine_stalled"}),
        ([still("healthy", running=0, waiting=3), still("healthy", **NONE)], None),
        ([still("healthy", **NONE), still("healthy", **NONE)], set()),
        ([list(re.scrapes("healthy")), still("healthy", **NONE)], set()),
        ([list(re.scrapes("contention_long_steps"))] * 2, {"prefill_decode_contention"}),
    ],
    ids=["a single engine", "its peer works", "not admitted", "nobody", "a peer without requests", "long steps"],
)
def test_unequal_engines_with_other_causes_are_no_lockstep(
    tmp_path: Path, engines: list[list[Scrape]], instead: set[str] | None
) -> None:
    told = present(judged(tmp_path, *engines))
    assert LOCKSTEP not in told
    assert instead is None or told == instead


def with_processes(folder: Path, engines: list[list[Scrape]], seen: Callable[[int], int]) -> Report:
    """Return the pages with an API server and so many engine processes at each scrape."""
    line = 'diag_vllm_processes{{role="api_server"}} 1\ndiag_vllm_processes{{role="engine"}} {}\ndiag_vllm_up 1\n'
    pages = re.as_ranks(*engines)
    scrapes = [(time, host, page + line.format(seen(number))) for number, (time, host, page) in enumerate(pages)]
    return doctor.run(ObserveOptions([str(re.write(folder / "recording", scrapes))]))


def test_the_death_of_one_engine_is_the_death_of_the_server(tmp_path: Path) -> None:
    """The API server fails all requests from then on, and its page may go on answering."""
    both = [still("healthy", **WORK), still("healthy", **NONE)]
    report = with_processes(tmp_path, both, lambda scrape: 2 if scrape < 20 else 1)
    assert found(report, "engine_dead").diagnosis.primary
    assert report.progress[0].reason == "the process of one of its engines has ended"


@pytest.mark.parametrize(
    ("engines", "seen"),
    [(2, lambda _: 1), (2, lambda scrape: 3 if scrape == 7 else 2), (1, lambda scrape: 2 if scrape == 7 else 1)],
    ids=["the other one is on another host", "a fork for a moment", "a fork of the only one"],
)
def test_an_engine_process_that_was_never_there_is_not_missing(
    tmp_path: Path, engines: int, seen: Callable[[int], int]
) -> None:
    report = with_processes(tmp_path, [still("healthy", **NONE)] * engines, seen)
    assert (report.verdict, present(report)) == ("no_incident", set()), "nor does a mere count show a live one"


def test_removed_peer_does_not_make_running_engines_dead(tmp_path: Path) -> None:
    both = [list(re.scrapes("healthy"))] * 2
    assert "engine_dead" not in present(with_processes(tmp_path, both, lambda scrape: 2 if scrape < 40 else 1))


@pytest.mark.parametrize(("step", "verdict"), [(0.15, "no_incident"), (0.04, "healthy")])
def test_a_replica_far_slower_than_its_peers_is_no_health(tmp_path: Path, step: float, verdict: str) -> None:
    """One slow card of four: its streams crawl, and neither queue nor cache shows it."""
    draw = Random(5)
    engines = [Engine(Limits(step=pace), 0.0, index) for index, pace in enumerate([0.025, step, 0.025, 0.025])]
    for engine in engines:
        for at in range(0, 240, 4):
            engine.send(Request(at + draw.random(), 300, draw.randint(40, 80)))
    pages = []
    for time in range(100, 240, 5):
        for engine in engines:
            engine.run(time)
        pages.append((1_795_000_000.0 + time, "h:8000", page(engines)))
    report = doctor.run(ObserveOptions([str(re.write(tmp_path / "recording", pages))]))
    assert (report.verdict, report.health.lacking) == (verdict, ("latency",) * (verdict != "healthy"))
