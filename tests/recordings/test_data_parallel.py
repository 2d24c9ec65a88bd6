"""Data-parallel engines that wait for each other, and engines of which one alone stands still."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from support import rewriting as re
from support.rewriting import Scrape
from support.scenarios import found, present

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


def test_one_engine_with_work_and_peers_without_any_that_none_moves(tmp_path: Path) -> None:
    report = judged(tmp_path, still("healthy", **NONE), still("healthy", **WORK), still("healthy", **NONE))
    lockstep = found(report, LOCKSTEP).diagnosis
    assert (report.verdict, lockstep.primary, lockstep.culprits) == ("critical", True, ("engine 1",))
    assert found(report, "engine_stalled").diagnosis.explained_by == LOCKSTEP


def test_engines_that_all_hold_requests_and_none_moves(tmp_path: Path) -> None:
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
    ],
    ids=["a single engine", "its peer works", "not admitted", "nobody", "a peer without requests"],
)
def test_what_looks_like_engines_out_of_step_and_is_none(
    tmp_path: Path, engines: list[list[Scrape]], instead: set[str] | None
) -> None:
    told = present(judged(tmp_path, *engines))
    assert LOCKSTEP not in told
    assert instead is None or told == instead
