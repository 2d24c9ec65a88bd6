"""A scheduler that admits nobody is told from an engine that hangs, and advised without a restart."""

from pathlib import Path

import pytest
from support import rewriting
from support.scenarios import found

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report

GAUGE = 'vllm:num_requests_{}{{engine="0",model_name="tiny"'


def still(folder: Path, *, running: int = 0, waiting: int = 0, deferred: int = 0, beside: str = "") -> Report:
    """An idle server's pages, on which nothing moves, with these requests in it."""

    def page(text: str) -> str:
        for name, value in {"running": running, "waiting": waiting}.items():
            text = rewriting.with_value(text, GAUGE.format(name), f"{value}.0")
        text = rewriting.with_value(text, GAUGE.format("waiting_by_reason") + ',reason="deferred"', f"{deferred}.0")
        return text + beside

    return doctor.run(
        ObserveOptions([str(rewriting.write(folder, rewriting.changed(rewriting.scrapes("idle"), page)))])
    )


def present(report: Report) -> set[str]:
    """The critical ones."""
    return {each.diagnosis.incident.id for each in report.present if each.diagnosis.severity == "critical"}


@pytest.mark.parametrize("waiting", [1, 5])
def test_requests_that_wait_while_none_runs_are_not_admitted(tmp_path: Path, waiting: int) -> None:
    report = still(tmp_path, waiting=waiting)
    assert present(report) == {"admission_deadlock"}
    assert [progress.state for progress in report.progress] == ["stalled"]


def test_requests_that_run_hang(tmp_path: Path) -> None:
    assert present(still(tmp_path, running=2, waiting=3)) == {"engine_stalled"}


def test_a_halted_engine_admits_nobody_either(tmp_path: Path) -> None:
    halted = 'diag_vllm_process_state{pid="7",host="h",role="engine",rank="0",state="stopped"} 1\n'
    assert present(still(tmp_path, waiting=3, beside=f"{halted}diag_vllm_up 1\n")) == {"engine_stalled"}


def test_requests_that_are_all_deferred_wait_for_something_else(tmp_path: Path) -> None:
    assert "admission_deadlock" not in present(still(tmp_path, waiting=3, deferred=3))


def test_nothing_that_is_advised_for_now_is_a_restart(tmp_path: Path) -> None:
    proposals = found(still(tmp_path, waiting=3), "admission_deadlock").proposals
    now = [proposal for proposal in proposals if not proposal.fix.restart]
    assert "Drop the request" in now[0].text
    assert [proposal.text for proposal in proposals if "restart it" in proposal.text.lower()] == []
