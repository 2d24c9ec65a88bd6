"""Requests that clients give up: their ages and the harm behind them decide, not their share alone."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support import rewriting
from support.scenarios import found

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report
from diag.report import coverage

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


@pytest.mark.parametrize(("queue", "state"), [(0.5, "present"), (0.0, "unknown")])
def test_without_http_metrics_a_queue_is_the_harm(tmp_path: Path, queue: float, state: str) -> None:
    served = pages(lambda t: 3 * t, lambda t: 2 * t, queue)
    assert of(judged(tmp_path, served), ABORTED).state == state


@pytest.mark.parametrize("finished", [1, 0.5], ids=["half", "three quarters"])
def test_what_makes_many_clients_give_up_at_unknown_ages_cannot_be_told(tmp_path: Path, finished: float) -> None:
    """A gateway may cut them off, or they cancel by design: nothing on the page says at which age they end."""
    report = judged(tmp_path, pages(lambda t: 2 * t, lambda t: int(finished * t), 0.0))
    (undecided,) = coverage.suspected(report)
    assert (report.verdict, undecided.question) == ("warning", f"cannot tell which: {ABORTED} or {CANCELLED}")
    assert "ages" in undecided.measured and (of(report, ABORTED).state, of(report, CANCELLED).state) == ("unknown",) * 2


def test_the_counts_of_a_former_process_are_no_requests_that_were_given_up(tmp_path: Path) -> None:
    """A restart sets all counters to 0; of the former process many requests had begun and not been finished."""
    restarted = pages(
        lambda t: 5000 + 3 * t if t < 30 else 3 * (t - 30), lambda t: 2800 + 3 * t if t < 30 else 3 * (t - 30), 0.5
    )
    assert of(judged(tmp_path, restarted), ABORTED).state != "present"


HTTP = "http_request_duration_highr_seconds_bucket"
HTTP_EDGES = ("0.5", "1.0", "1.5", "2.0", "2.5", "5.0", "10.0", "30.0", "60.0", "+Inf")
RATE = 2


def page_with_http(seconds: float, lost: dict[str, float]) -> str:
    """Two requests a second; `lost` is the share of them that ends early, by the first edge at or above its age."""
    asked = RATE * seconds
    finished = asked * (1 - sum(lost.values()))
    lines = [
        f'http_requests_total{{handler="/v1/completions",status="2xx"}} {asked}',
        f'vllm:request_success_total{{engine="0",finished_reason="stop"}} {finished}',
        f'vllm:time_to_first_token_seconds_count{{engine="0"}} {asked}',
        f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="40.0"}} {asked}',
        f'vllm:request_queue_time_seconds_sum{{engine="0"}} {0.01 * finished}',
        f'vllm:e2e_request_latency_seconds_sum{{engine="0"}} {0.8 * finished}',
        f'vllm:generation_tokens_total{{engine="0"}} {50 * asked}',
        'vllm:num_requests_running{engine="0"} 2',
        'vllm:num_requests_waiting{engine="0"} 0',
    ]
    ages = sum(share * 0.8 * float(age) for age, share in lost.items())
    lines.append(f'http_request_duration_seconds_sum{{handler="/v1/completions"}} {0.8 * finished + asked * ages}')
    for edge in HTTP_EDGES:
        ended = asked * sum(share for age, share in lost.items() if float(age) <= float(edge))
        within = finished * (0.4 if edge == "0.5" else 1)
        lines.append(f'{HTTP}{{le="{edge}"}} {within + ended}')
        lines.append(f'vllm:e2e_request_latency_seconds_bucket{{engine="0",le="{edge}"}} {within}')
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("lost", "state"),
    [
        ({"0.5": 0.1, "1.0": 0.15}, "absent"),
        ({"0.5": 0.3}, "absent"),
        ({"1.0": 0.05, "2.5": 0.1, "5.0": 0.1, "30.0": 0.05}, "absent"),
        ({"30.0": 0.25}, "present"),
        ({"5.0": 0.02}, "absent"),
    ],
    ids=["typing, 0.3 to 1 s", "typing, 0.4 s", "users stop at any age", "a proxy's time-out", "a few"],
)
def test_only_harm_makes_requests_that_were_given_up_an_incident(
    tmp_path: Path, lost: dict[str, float], state: str
) -> None:
    served = [(1_700_000_000.0 + t, "h:1", page_with_http(t + 50_000, lost)) for t in range(0, 600, 5)]
    assert of(judged(tmp_path, served), ABORTED).state == state


@pytest.mark.parametrize(("lost", "state"), [({}, "absent"), ({"5.0": 0.3}, "present")], ids=["none", "a time-out"])
def test_clients_of_a_pooling_server_are_counted_as_others_are(
    tmp_path: Path, lost: dict[str, float], state: str
) -> None:
    """Passages that are embedded in batches wait for each other for seconds, and no client gives up."""

    def page(seconds: int) -> str:
        text = page_with_http(seconds, lost).replace("/v1/completions", "/v1/embeddings")
        queued = f'vllm:request_queue_time_seconds_count{{engine="0"}} {RATE * seconds}\n'
        queue = 'vllm:request_queue_time_seconds_sum{engine="0"}'
        return re.sub(f"(?m)^{re.escape(queue)}.*", f"{queue} {1.3 * RATE * seconds}", text) + queued

    report = judged(tmp_path, [(1_700_000_000.0 + t, "h:1", page(t + 50_000)) for t in range(0, 600, 5)])
    assert of(report, ABORTED).state == state
    assert (report.verdict == "warning") == bool(lost)
