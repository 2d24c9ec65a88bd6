"""Requests that clients give up: their ages and the harm behind them decide, not their share alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support import rewriting
from support.scenarios import found

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report

ABORTED, CANCELLED = "requests_aborted", "requests_cancelled"


def judged(folder: Path, pages: list[rewriting.Scrape]) -> Report:
    return doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", pages))]))


def of(report: Report, incident: str) -> Diagnosis:
    (diagnosis,) = (each.diagnosis for each in report.findings if each.diagnosis.incident.id == incident)
    return diagnosis


def test_the_time_out_is_named_by_the_measured_age(tmp_path: Path) -> None:
    """The clients of this recording hang up after 4 s."""
    finding = found(judged(tmp_path, list(rewriting.scrapes(ABORTED))), ABORTED)
    assert "Find the time-out of about 4 s in the gateway" in finding.proposals[0].text


def test_completions_that_are_cancelled_by_design_are_an_info(tmp_path: Path) -> None:
    report = judged(tmp_path, list(rewriting.scrapes(CANCELLED)))
    assert report.verdict == "healthy"
    assert (of(report, ABORTED).state, of(report, CANCELLED).state) == ("absent", "present")


def pages(begun: Callable[[int], int], ended: Callable[[int], int], queue: float) -> list[rewriting.Scrape]:
    """Return a minute of pages without the metrics of vLLM's HTTP server; `queue` is the share of queue time."""
    labels = 'engine="0",model_name="m"'

    def page(t: int) -> str:
        return (
            f"vllm:num_requests_running{{{labels}}} 2\nvllm:num_requests_waiting{{{labels}}} 0\n"
            f"vllm:time_to_first_token_seconds_count{{{labels}}} {begun(t)}\n"
            f'vllm:request_success_total{{{labels},finished_reason="stop"}} {ended(t)}\n'
            f"vllm:request_queue_time_seconds_sum{{{labels}}} {queue * begun(t)}\n"
            f"vllm:e2e_request_latency_seconds_sum{{{labels}}} {begun(t)}\n"
        )

    return [(1_700_000_000.0 + t, "h:1", page(t)) for t in range(0, 61, 2)]


@pytest.mark.parametrize(("queue", "state"), [(0.5, "present"), (0.0, "absent")])
def test_without_http_metrics_a_queue_is_the_harm(tmp_path: Path, queue: float, state: str) -> None:
    served = pages(lambda t: 3 * t, lambda t: 2 * t, queue)
    assert of(judged(tmp_path, served), ABORTED).state == state


def test_the_counts_of_a_former_process_are_no_requests_that_were_given_up(tmp_path: Path) -> None:
    """A restart sets all counters to 0; of the former process many requests had begun and not been finished."""
    restarted = pages(
        lambda t: 5000 + 3 * t if t < 30 else 3 * (t - 30), lambda t: 2800 + 3 * t if t < 30 else 3 * (t - 30), 0.5
    )
    assert of(judged(tmp_path, restarted), ABORTED).state != "present"
