"""Requests that clients gave up: a time-out and a queue are told from clients that cancel by design."""

from pathlib import Path

import pytest
from support import rewriting as re

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.diagnose import Diagnosis

ID = "requests_aborted"
HTTP = "http_request_duration_highr_seconds_bucket"
HTTP_EDGES = ("0.5", "1.0", "1.5", "2.0", "2.5", "5.0", "10.0", "30.0", "60.0", "+Inf")
RATE = 2


def page(seconds: float, lost: dict[str, float]) -> str:
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
    for edge in HTTP_EDGES:
        ended = asked * sum(share for age, share in lost.items() if float(age) <= float(edge))
        within = finished * (0.4 if edge == "0.5" else 1)
        lines.append(f'{HTTP}{{le="{edge}"}} {within + ended}')
        lines.append(f'vllm:e2e_request_latency_seconds_bucket{{engine="0",le="{edge}"}} {within}')
    return "\n".join(lines) + "\n"


def judged(folder: Path, lost: dict[str, float], restart: float = 1e9) -> Diagnosis:
    """Judge ten minutes; all counters begin anew at `restart`."""
    times = range(0, 600, 5)
    pages = ((1.7e9 + at, "h:8000", page(at + 5e4 if at < restart else at - restart, lost)) for at in times)
    report = doctor.run(ObserveOptions([str(re.write(folder / "recording", pages))]))
    return next(each.diagnosis for each in report.findings if each.diagnosis.incident.id == ID)


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
def test_only_harm_makes_lost_requests_an_incident(tmp_path: Path, lost: dict[str, float], state: str) -> None:
    assert judged(tmp_path, lost).state == state


def test_no_difference_is_taken_across_a_restart(tmp_path: Path) -> None:
    """Before it, the counters held a lifetime in which a tenth of the requests was lost."""
    diagnosis = judged(tmp_path, {"1.0": 0.1}, restart=400)
    share = next(each for each in diagnosis.symptoms if "given up by their clients" in each.condition.signal.name)
    assert diagnosis.state == "absent" and max(value or 0 for value in share.history) < 0.15


def test_no_sentence_states_how_long_the_lost_requests_would_have_taken() -> None:
    report = doctor.run(ObserveOptions([str(Path("tests") / "recordings" / ID)]))
    finding = next(each for each in report.present if each.diagnosis.incident.id == ID)
    assert any("is not measured" in proposal.text for proposal in finding.proposals)
    assert not any("would have taken longer" in proposal.text for proposal in finding.proposals)
