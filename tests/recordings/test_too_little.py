"""Too little is not "no": few events, a watch that ends unseen, and gauges that are not exported leave it unknown."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import rewriting
from support.rewriting import Scrape

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report
from diag.report import terminal
from diag.report.coverage import lacking

PREFIXES = "prefix_cache_ineffective"
TOKENS = re.compile(r"^(vllm:generation_tokens_total\S*) (\S+)$", re.MULTILINE)


def judged(folder: Path, scrapes: list[Scrape]) -> Report:
    return doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", scrapes))]))


def of(report: Report, incident: str) -> Diagnosis:
    (found,) = (each.diagnosis for each in report.findings if each.diagnosis.incident.id == incident)
    return found


def with_tokens(page: str, more: int) -> str:
    """The page after so many more tokens."""
    return TOKENS.sub(lambda found: f"{found[1]} {float(found[2]) + more}", page)


def slow(name: str, seconds: float) -> Iterator[Scrape]:
    """The first seconds of a server whose requests take thirty times as long, scraped every 2 s."""
    pages = list(rewriting.scrapes(name))
    start = pages[0][0]
    for at in range(round(seconds / 2)):
        _, instance, page = pages[at // 15]
        yield start + 2 * at, instance, with_tokens(page, at % 15)


def test_reasoning_model_is_judged_over_the_whole_observation(tmp_path: Path) -> None:
    """It finishes some three requests a minute."""
    report = judged(tmp_path, list(slow("prefix_unique", 320)))
    assert (report.verdict, of(report, PREFIXES).state) == ("healthy", "present")


def test_reasoning_model_observed_for_30_seconds_is_unknown_with_a_reason(tmp_path: Path) -> None:
    report = judged(tmp_path, list(slow("prefix_unique", 60)))
    assert (report.verdict, of(report, PREFIXES).state) == ("healthy", "unknown")
    assert "prompts miss the prefix cache not measured, it needs at least 10 finished requests" in lacking(
        of(report, PREFIXES)
    )
    shown = " ".join(terminal.render(report, verbose=True).split())
    assert "prompts miss the prefix cache not measured, it needs at least 10 finished requests" in shown


@pytest.mark.parametrize(("scrapes", "state"), [(6, "absent"), (7, "unknown")])
def test_incident_not_seen_in_a_short_look_is_absent_if_thirty_requests_finished(
    tmp_path: Path, scrapes: int, state: str
) -> None:
    """25 requests that finish from the first scrape to the last are, by increase(), 30 in 12 s, and 29.2 in 14 s."""

    page = list(rewriting.scrapes("healthy"))[20][2]

    def after(share: float) -> str:
        return re.sub(
            r"^(vllm:request_success_total\S*\"stop\"\S*) \S+$", rf"\1 {1000 + 25 * share}", page, flags=re.MULTILINE
        )

    times = [1_700_000_000.0 + 2 * at for at in range(scrapes)]
    report = judged(tmp_path, [(time, "h:1", after(at / (scrapes - 1))) for at, time in enumerate(times)])
    assert of(report, "kv_eviction_cascade").state == state


@pytest.mark.parametrize("incident", [PREFIXES, "engine_underfed"])
def test_idle_server_gets_no_statements_about_clients(incident: str) -> None:
    report = doctor.run(ObserveOptions(["tests/recordings/idle"]))
    assert (report.verdict, of(report, incident).state) == ("no_incident", "unknown")
    assert of(report, "gpu_thermal_throttling").state == "unknown"
    undecided = {diagnosis.incident.id for diagnosis in report.undecided}
    assert incident in undecided and "gpu_thermal_throttling" not in undecided  # no GPU was measured


def test_incidents_of_a_dead_server_are_unknown_at_the_end() -> None:
    """It answers for 24 s, and then no more: nobody knows whether it still preempts."""
    states = {each.diagnosis.incident.id: each.diagnosis.state for each in dead().findings}
    assert states["engine_dead"] == "present"
    assert states["kv_eviction_cascade"] == states["queue_saturation"] == "unknown"


def dead() -> Report:
    return doctor.run(ObserveOptions(["tests/recordings/engine_dead"]))


def test_prefill_progress_is_unknown_without_cache_usage(tmp_path: Path) -> None:
    """The first 40 s of a stall: without the gauge a prefill in chunks has the same page."""

    def without(page: str) -> str:
        return "\n".join(line for line in page.split("\n") if "kv_cache_usage_perc" not in line)

    report = judged(tmp_path, list(rewriting.changed(list(rewriting.scrapes("engine_stalled"))[:31], without)))
    assert of(report, "engine_stalled").state == "unknown"
    assert report.verdict == "unknown"
    assert "/metrics has no KV cache usage" in report.not_judged[0].sentence


def test_an_old_release_does_not_say_why_requests_wait_beside_adapters(tmp_path: Path) -> None:
    """Before vLLM 0.20 a request that waits for an adapter slot looks like one that waits for capacity."""

    def without(page: str) -> str:
        return "\n".join(line for line in page.split("\n") if "waiting_by_reason" not in line)

    report = judged(tmp_path, list(rewriting.changed(rewriting.scrapes("lora_thrash"), without)))
    assert of(report, "queue_saturation").state == "unknown"
    assert any("deferred share" in lack for lack in lacking(of(report, "queue_saturation")))


def test_requests_that_begin_while_load_grows_are_not_given_up(tmp_path: Path) -> None:
    """The extrapolation of increase() is no request: here it would be every fourth one."""
    labels = 'engine="0",model_name="m"'

    def page(t: float) -> str:
        begun, ended = (100 + 6 * max(0, t - since) for since in (84, 93))
        return (
            f"vllm:num_requests_running{{{labels}}} {begun - ended}\nvllm:num_requests_waiting{{{labels}}} 0\n"
            f"vllm:time_to_first_token_seconds_count{{{labels}}} {begun}\n"
            f'vllm:request_success_total{{{labels},finished_reason="stop"}} {ended}\n'
        )

    report = judged(tmp_path, [(1_700_000_000.0 + t, "h:1", page(t)) for t in range(0, 101, 10)])
    assert of(report, "requests_aborted").state != "present"


@pytest.mark.parametrize(("idle", "busy", "state"), [(150, 5, "absent"), (0, 25, "present")])
def test_an_engine_that_is_idle_half_of_the_time_is_not_saturated(
    tmp_path: Path, idle: int, busy: int, state: str
) -> None:
    """Every burst queues; demand is above capacity where the queue does not end."""
    (start, host, first), *rest = list(rewriting.scrapes("queue_saturation"))[20 : 20 + busy]
    gauges = r"^(vllm:num_requests_(?:running|waiting|waiting_by_reason)\{.*) \S+$"
    empty = re.sub(gauges, r"\1 0", first, flags=re.MULTILINE)
    before = [(start - 2 * at, host, empty) for at in range(idle, 0, -1)]
    assert of(judged(tmp_path, [*before, (start, host, first), *rest]), "queue_saturation").state == state


@pytest.mark.parametrize(
    ("hours", "restarted", "running", "verdict"),
    [
        (0.8, True, 5, "no_incident"),
        (0.8, True, 0, "no_incident"),
        (0.8, False, 5, "healthy"),
        (0.05, True, 0, "healthy"),
    ],
    ids=["another process behind it", "most of the time is missing", "the same process", "a short one"],
)
def test_a_gap_in_which_a_process_ended_unseen_is_no_health(
    tmp_path: Path, hours: float, restarted: bool, running: int, verdict: str
) -> None:
    pages = list(rewriting.thinned(rewriting.scrapes("healthy"), 5))
    half, start = len(pages) // 2, pages[0][0]
    shown = []
    for place, (at, host, page) in enumerate(pages):
        is_later = place >= half
        begun = start + 3600 * hours - 60 if is_later and restarted else start - 7200
        moved = rewriting.with_value(page, "process_start_time_seconds", f"{begun}")
        if place == half - 1:
            moved = rewriting.with_value(moved, "vllm:num_requests_running{", f"{running}")
        shown.append((at + 3600 * hours * is_later, host, moved))
    assert judged(tmp_path, shown).verdict == verdict
