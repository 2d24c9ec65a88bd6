"""Requests that fail or vanish before the scheduler, and answers that are garbage."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support import rewriting as re
from support.connector_pages import value
from support.scenarios import found

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report

Extra = Callable[[float], str]
"""What stands beside vLLM's page so many seconds after the first scrape."""
DESYNC, CORRUPTED = "multimodal_cache_desync", "output_corrupted"
EVENT = "diag_vllm_log_event_last_timestamp_seconds"


def judged(folder: Path, recording: str, *beside: Extra, multimodal: int = 0) -> Report:
    scrapes = list(re.scrapes(recording))
    start = scrapes[0][0]
    used = (
        (at, host, re.with_value(page, "vllm:mm_cache_queries_total", f"{multimodal}.0")) for at, host, page in scrapes
    )
    pages = ((at, host, page + "".join(each(at - start) for each in beside)) for at, host, page in used)
    return doctor.run(ObserveOptions([str(re.write(folder / "recording", pages))]))


def state(report: Report, incident: str) -> str:
    (diagnosis,) = (each.diagnosis for each in report.findings if each.diagnosis.incident.id == incident)
    return diagnosis.state


def logged(recording: str, **ago: float) -> Extra:
    """A log that is followed, with its last lines of each kind so many seconds before the first scrape."""
    start = next(iter(re.scrapes(recording)))[0]
    times = {"multimodal_cache_miss": 0.0, "input_thread_died": 0.0, **{name: start - at for name, at in ago.items()}}
    lines = "".join(f'{EVENT}{{event="{event}"}} {at}\n' for event, at in times.items())
    progress = f"diag_vllm_startup_last_progress_timestamp_seconds {start - 9000}\n"
    return lambda _: lines + progress


def requests_end(t: float) -> str:
    """Clients give up: their HTTP requests end."""
    return f'http_requests_total{{handler="/v1/chat/completions",method="POST",status="2xx"}} {100 + t // 4}\n'


def refused(t: float) -> str:
    return f'http_requests_total{{handler="/v1/chat/completions",method="POST",status="4xx"}} {100 + t // 4}\n'


def probe(success: int) -> Extra:
    return lambda _: f"diag_probe_success {success}\n"


def engine(cores: float) -> Extra:
    return lambda t: f'diag_vllm_process_cpu_seconds_total{{pid="7",role="engine",rank="0"}} {30 + cores * t}\n'


def test_an_item_that_the_engine_lacks_is_named_while_others_are_served(tmp_path: Path) -> None:
    report = judged(tmp_path, "healthy", logged("healthy", multimodal_cache_miss=60), multimodal=9)
    assert (report.verdict, state(report, DESYNC)) == ("warning", "present")


@pytest.mark.parametrize(
    "beside",
    [(logged("idle", multimodal_cache_miss=4000, input_thread_died=4000),), (engine(1.0), requests_end)],
    ids=["the input thread died an hour ago", "it spins, and requests end over HTTP alone"],
)
def test_requests_that_never_reach_the_scheduler_are_critical(tmp_path: Path, beside: tuple[Extra, ...]) -> None:
    report = judged(tmp_path, "idle", *beside, multimodal=9)
    assert (report.verdict, found(report, DESYNC).diagnosis.primary) == ("critical", True)


def test_failing_probe_without_running_requests_is_desync_only_with_a_busy_thread(tmp_path: Path) -> None:
    """Without a spinning thread or a line of the log it may as well be an engine that hangs in a step."""
    report = judged(tmp_path / "spins", "idle", engine(1.0), probe(0), multimodal=9)
    assert found(report, "engine_stalled").diagnosis.explained_by == DESYNC
    report = judged(tmp_path / "still", "idle", engine(0.0), probe(0), multimodal=9)
    assert found(report, "engine_stalled").diagnosis.primary


@pytest.mark.parametrize(
    ("recording", "beside", "used", "expected"),
    [
        ("healthy", (), 0, "absent"),
        ("healthy", (), 9, "unknown"),
        ("healthy", (logged("healthy"),), 9, "absent"),
        ("idle", (logged("idle", multimodal_cache_miss=4000),), 9, "absent"),
        ("idle", (logged("idle", multimodal_cache_miss=9500, input_thread_died=9500),), 9, "absent"),
        ("idle", (engine(1.0), probe(1)), 9, "absent"),
        ("idle", (engine(1.0), refused), 9, "unknown"),
        ("idle", (engine(0.0), requests_end), 9, "absent"),
    ],
    ids=[
        "text only",
        "images, and nothing that would show it",
        "a log without such a line",
        "an hour ago",
        "before the last start",
        "the probe is answered",
        "requests that are refused",
        "the engine waits",
    ],
)
def test_failures_with_other_causes_are_no_desync(
    tmp_path: Path, recording: str, beside: tuple[Extra, ...], used: int, expected: str
) -> None:
    assert state(judged(tmp_path, recording, *beside, multimodal=used), DESYNC) == expected


def nans(share: float) -> Callable[[str], str]:
    """The page of a server that counts NaN in logits."""
    length = 'vllm:request_success_total{engine="0",finished_reason="length"'
    series = 'vllm:corrupted_requests_total{engine="0",model_name="tiny"}'
    return lambda page: f"{page}{series} {value(page, length) * share // 1}\n"


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, "present"), (0.02, "present"), (0.0, "absent"), (None, "unknown")]
)
def test_nan_in_logits_is_reported_if_counted(tmp_path: Path, share: float | None, expected: str) -> None:
    pages = re.scrapes("healthy") if share is None else re.changed(re.scrapes("healthy"), nans(share))
    report = doctor.run(ObserveOptions([str(re.write(tmp_path / "recording", pages))]))
    assert state(report, CORRUPTED) == expected
    assert report.verdict == {0.5: "critical", 0.02: "warning"}.get(share or 0.0, "healthy")


QUANTIZED = ('cache_dtype="auto"', 'cache_dtype="fp8"')


@pytest.mark.parametrize(
    ("lines", "label", "fix"),
    [
        ({"float16_cast": 90}, ("", ""), ("--dtype", "bfloat16")),
        ({"kv_scales_missing": 90}, QUANTIZED, ("--kv-cache-dtype", "auto")),
        ({"kv_scales_missing": 90}, ("", ""), ("", None)),
        ({"kv_scales_missing": 5000}, QUANTIZED, ("", None)),
        ({}, QUANTIZED, ("", None)),
    ],
    ids=["a cast to float16", "no scales", "a KV cache that needs none", "an earlier start", "nothing said"],
)
def test_nan_is_blamed_on_what_the_log_of_this_start_names(
    tmp_path: Path, lines: dict[str, float], label: tuple[str, str], fix: tuple[str, object]
) -> None:
    start = next(iter(re.scrapes(CORRUPTED)))[0]
    beside = logged(CORRUPTED, **{"float16_cast": start, "kv_scales_missing": start, **lines})
    began = f"process_start_time_seconds {start - 100}\n"
    pages = ((at, host, page.replace(*label) + beside(0) + began) for at, host, page in re.scrapes(CORRUPTED))
    report = doctor.run(ObserveOptions([str(re.write(tmp_path / "recording", pages))]))
    first = found(report, CORRUPTED).proposals[0]
    assert (first.name, first.after) == fix


@pytest.mark.parametrize(("share", "checked"), [(0.0, True), (0.5, False)])
def test_a_peer_without_nan_sends_to_the_weights_and_the_gpu(tmp_path: Path, share: float, checked: bool) -> None:
    peer = re.changed(re.scrapes("healthy"), nans(share))
    pages = re.side_by_side(re.scrapes(CORRUPTED), peer)
    report = doctor.run(ObserveOptions([str(re.write(tmp_path / "recording", pages))]))
    texts = [proposal.text for proposal in found(report, CORRUPTED).proposals]
    assert any(text.startswith("Check the weights") for text in texts) == checked
