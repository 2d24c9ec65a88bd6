"""Healthy is what was judged and found absent: not what was seen too briefly, and not what got no answer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from support import rewriting
from support.paths import RECORDINGS
from support.simulated_vllm import Engine, Limits, Request, page

from diag.commands import doctor
from diag.commands.observe import ObserveOptions, judge_observation
from diag.core.contract import Contract
from diag.core.errors import NotAnswered
from diag.core.subjects import Floats, Instants, Subject
from diag.diagnosis.query_cache import ENGINES, INSTANCES
from diag.diagnosis.report import Report
from diag.knowledge.catalog import load
from diag.promql import Formula
from diag.report import terminal
from diag.sources.observation import Observation
from diag.sources.recording.reader import read


@dataclass(frozen=True)
class Refusing(Observation):
    """An observation that refuses every query with this text in it."""

    refused: str = ""

    def ask(self, asked: Formula, instants: Instants) -> Mapping[Subject, Floats]:
        if self.refused in asked.written_out():
            raise NotAnswered
        return super().ask(asked, instants)


def judged(recording: str, refused: str) -> Report:
    seen = read(RECORDINGS / recording)
    refusing = Refusing(**{field.name: getattr(seen, field.name) for field in fields(seen)}, refused=refused)
    return judge_observation(refusing, Contract(), load()).report


def test_refused_query_of_an_incident_is_not_healthy() -> None:
    report = judged("kv_cascade", "num_preemptions")
    states = {each.diagnosis.incident.id: each.diagnosis.state for each in report.findings}
    assert (states["kv_eviction_cascade"], report.verdict) == ("unknown", "warning")
    assert "kv_eviction_cascade" in terminal.render(report, quiet=True)
    (line,) = (each.sentence for each in report.not_judged if "refused" in each.sentence)
    assert "kv_eviction_cascade" in line
    assert line in " ".join(terminal.render(report).split())


def test_refused_query_without_influence_keeps_the_verdict() -> None:
    """A supporting sign, of an incident that other conditions rule out."""
    assert judged("healthy", "vllm:iteration_tokens_total_bucket").verdict == "healthy"


@pytest.mark.parametrize("refused", [INSTANCES.split("[")[0], ENGINES.split("[")[0]])
def test_server_is_not_healthy_if_the_subject_query_is_refused(refused: str) -> None:
    assert judged("healthy", refused).verdict == "unknown"


def part(folder: Path, name: str, begin: float, seconds: float) -> Report:
    """Return so many seconds of a recording, from that second on."""
    pages = list(rewriting.scrapes(name))
    start = pages[0][0] + begin
    piece = [page for page in pages if start <= page[0] <= start + seconds]
    return doctor.run(ObserveOptions([str(rewriting.write(folder, piece))]))


@pytest.mark.parametrize(
    ("name", "begin"), [("contention_bigbatch", 4), ("kv_cascade", 0), ("idle", 0), ("healthy", 0)]
)
def test_six_seconds_are_not_enough_for_healthy(tmp_path: Path, name: str, begin: float) -> None:
    report = part(tmp_path, name, begin, 6)
    assert report.verdict == "unknown"
    assert re.search(r"too little seen: [56] s do not rule out \d+ incidents", terminal.render(report))


def test_few_requests_in_twelve_seconds_are_not_enough_for_healthy(tmp_path: Path) -> None:
    """Long prompts among streams: between two of them 10 requests finish, and none of them shows it."""
    reports = [part(tmp_path, "contention_bigbatch", begin, 12) for begin in range(0, 48, 4)]
    assert "healthy" not in {report.verdict for report in reports}


def test_many_requests_in_twelve_seconds_are_enough_for_healthy(tmp_path: Path) -> None:
    assert part(tmp_path, "healthy", 0, 12).verdict == "healthy"


def test_present_incident_is_reported_after_six_seconds(tmp_path: Path) -> None:
    assert part(tmp_path, "kv_cascade", 30, 6).verdict == "critical"


def without(folder: Path, name: str, metrics: str, beside: str = "") -> Report:
    """Return the report of a recording whose pages lack these metrics, without its log."""
    page = rewriting.changed(
        rewriting.scrapes(name),
        lambda page: re.sub(rf"^(# (HELP|TYPE) )?{metrics}.*\n", "", page, flags=re.MULTILINE) + beside,
    )
    return doctor.run(ObserveOptions([str(rewriting.write(folder, page))]))


def test_latency_is_not_seen_without_the_buckets_that_show_pauses(tmp_path: Path) -> None:
    """A scrape job that drops buckets leaves sums and counts, which show no pause of a stream."""
    report = without(tmp_path / "healthy", "healthy", r"vllm:\w+_bucket")
    assert (report.verdict, report.health.lacking) == ("no_incident", ("latency",))
    assert without(tmp_path / "ill", "contention_bigbatch", r"vllm:\w+_bucket").verdict != "healthy"


def test_requests_given_up_at_unknown_ages_are_neither_harm_nor_health(tmp_path: Path) -> None:
    """Editors cancel most of their completions; a gateway that cuts off its clients shows the same share."""
    report = without(tmp_path, "requests_cancelled", r"http_request_duration")
    assert report.verdict == "no_incident"
    assert "requests_aborted" in report.health.lacking


def test_a_wait_in_front_of_the_engine_is_no_health_where_the_cpu_of_the_api_server_is_not_seen(tmp_path: Path) -> None:
    """Nothing tells whether its core is fully used; the users wait either way."""
    report = without(tmp_path, "api_server_bound", r"(diag_vllm_)?process_cpu_seconds")
    assert report.verdict == "warning"
    metrics = {suspect.diagnosis.incident.id: suspect.metrics for suspect in report.health.suspects}
    assert metrics["api_server_bound"] == ("diag_vllm_process_cpu_seconds", "process_cpu_seconds")


@pytest.mark.parametrize("name", ["vllm:prompt_tokens_total", "vllm:num_requests_waiting"])
def test_missing_family_that_shows_progress_is_named(tmp_path: Path, name: str) -> None:
    report = without(tmp_path, "healthy", rf"{name}\b")
    (why,) = (each.why for each in report.not_judged if "lacks" in each.why)
    assert (report.verdict, name in why) == ("unknown", True)


def test_health_check_that_fails_contradicts_the_health_of_a_busy_engine(tmp_path: Path) -> None:
    report = without(tmp_path, "healthy", "no_such_metric", beside="diag_vllm_health_status 503\n")
    assert report.verdict != "healthy"
    assert report.health.missing[0].lacks == "an answer of 200 from /health, which answered 503"


UNANSWERED = "diag_vllm_health_unanswered 1\n"
PROCESS = 'diag_vllm_process_cpu_seconds_total{{role="{}",pid="7",rank="0"}} 9\n'


@pytest.mark.parametrize(
    ("name", "beside", "lacks"),
    [
        ("idle", "", ["an answer from /health"]),
        ("idle", UNANSWERED, ["an answer from /health"]),
        ("idle", f"{UNANSWERED}diag_vllm_health_status 200\n", []),
        ("idle", PROCESS.format("api_server"), ["an answer from /health"]),
        ("idle", PROCESS.format("engine"), []),
        ("healthy", UNANSWERED, []),
    ],
)
def test_health_check_without_an_answer_speaks_of_an_idle_engine(
    tmp_path: Path, name: str, beside: str, lacks: list[str]
) -> None:
    """The page of an idle server, and its process, show its API server alone; a busy one shows its tokens."""
    report = without(tmp_path, name, "no_such_metric", beside=beside)
    assert report.verdict == ("no_incident" if lacks else "healthy")
    assert [each.lacks for each in report.health.missing] == lacks


@pytest.mark.parametrize(("seconds", "verdict"), [(240, "healthy"), (1200, "no_incident")])
def test_an_old_token_shows_no_idle_engine(tmp_path: Path, seconds: int, verdict: str) -> None:
    """The engine may have died since; its API server's page would look the same."""
    engine = Engine(Limits(), 1_795_000_000.0)
    engine.send(Request(engine.now + 30, 500, 300))
    pages = []
    for time in range(15, seconds, 15):
        engine.run(engine.begun + time)
        pages.append((engine.now, "vllm-0:8000", page([engine])))
    assert doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))])).verdict == verdict


def test_fix_whose_condition_was_not_measured_comes_after_those_that_apply(tmp_path: Path) -> None:
    """A page alone does not show whether the refusals are 401, 404 or 400."""
    report = without(tmp_path, "requests_refused_after_success", r"diag_vllm_log_\w+")
    proposals = report.present[0].proposals
    assert proposals[0].text.startswith("Look at the status of these answers")
    assert [each.is_guess for each in proposals] == sorted(each.is_guess for each in proposals)
    assert proposals[-1].is_guess
