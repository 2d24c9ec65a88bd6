"""Every recording of a real server gets the truth that stands in its recording.toml, by its pages and its log."""

import json
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from support import rewriting
from support.paths import ALL_RECORDINGS, RECORDINGS, ROOT
from support.reports import judged, present_only, uncounted
from support.sampling import some
from support.schemas import validator

from diag.commands import doctor
from diag.commands.mcp import answers, server
from diag.commands.mcp.answers import COMPACT, DETAILED, quote_foreign, shorten, to_json
from diag.commands.mcp.targets import own_texts
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report
from diag.knowledge.catalog import load
from diag.report import json as as_json
from diag.report import markdown, terminal
from diag.report.answer import choose_actions

ALL = sorted(path.name for path in ALL_RECORDINGS)
SCHEMA = validator(ROOT / "diag" / "report" / "diag.doctor.schema.json")
ANSWER = validator(TypeAdapter(server.DoctorAnswer).json_schema())


def truth(name: str) -> dict[str, list[str]]:
    about = tomllib.loads((RECORDINGS / name / "recording.toml").read_text(encoding="utf-8"))
    assert "truth" in about, f"{name}: recording.toml lacks [truth] (docs/writing-an-incident.md)"
    return about["truth"]


def present(report: Report) -> set[str]:
    return {each.diagnosis.incident.id for each in report.present}


@pytest.mark.parametrize("name", ALL)
def test_incidents_that_happened_are_found(name: str) -> None:
    assert set(truth(name)["present"]) <= present(judged(name))


@pytest.mark.parametrize("name", ALL)
def test_incidents_that_did_not_happen_are_not_reported(name: str) -> None:
    assert not present(judged(name)) & set(truth(name)["absent"])


OWN = own_texts(ObserveOptions([]))


@pytest.mark.parametrize("name", ALL)
def test_an_agents_answer_fits_its_bound_and_its_schema(name: str) -> None:
    for detail, tokens in ((False, COMPACT), (True, DETAILED)):
        answer = shorten(quote_foreign(answers.report(judged(name), detail), OWN), tokens)
        assert len(to_json(answer)) <= 3 * tokens
        ANSWER.validate(answer)
        assert {each["incident"] for each in answer["diagnoses"]} == present(judged(name))
        assert not [each for each in answer.get("left_out", []) if each.startswith("diagnoses:")]


WELL = ("healthy", "no_incident")


@pytest.mark.parametrize("name", [name for name in ALL if truth(name)["verdict"] in WELL])
def test_a_healthy_server_is_called_healthy(name: str) -> None:
    assert judged(name).verdict == truth(name)["verdict"]


@pytest.mark.parametrize("name", [name for name in ALL if truth(name)["verdict"] == "ill"])
def test_server_with_an_incident_is_not_called_healthy(name: str) -> None:
    assert judged(name).verdict in ("warning", "critical", "unknown")


def without_log(folder: Path, name: str) -> Report:
    return doctor.run(ObserveOptions([str(rewriting.pages_alone(folder, name))]))


@pytest.mark.parametrize("name", [name for name in ALL if "startup" in name or name.startswith("fail")])
def test_start_is_unknown_without_the_log(tmp_path: Path, name: str) -> None:
    report = without_log(tmp_path, name)
    assert report.verdict == "unknown"
    assert "its log would show" in report.not_judged[0].sentence


def test_a_tensor_parallel_stall_is_a_stall_whose_kind_the_page_cannot_tell(tmp_path: Path) -> None:
    stalled = without_log(tmp_path, "tp2_long_stall").present[0].diagnosis
    assert stalled.incident.id == "engine_stalled"
    assert [each.name for each in stalled.open] == ["tp_communication_stall", "engine_dead"]


@pytest.mark.parametrize("name", some((name for name in ALL if (RECORDINGS / name / "server.log").exists()), 10))
def test_a_log_changes_nothing_about_what_the_pages_show(tmp_path: Path, name: str) -> None:
    assert present(without_log(tmp_path, name)) <= present(judged(name))


def test_a_start_in_its_log_is_starting() -> None:
    report = judged("startup_hang")
    assert [each.state for each in report.progress] == ["starting"]
    assert (report.verdict, present(report)) == ("unknown", set())


def test_context_that_does_not_fit_gets_a_proposed_one_that_fits() -> None:
    report = judged("fail_max_model_len")
    assert not choose_actions(report.present[0], report).advice  # a start that failed serves nobody: its cure is first
    fix = report.present[0].proposals[0]
    assert (fix.name, fix.before, fix.after) == ("--max-model-len", 131072, 65408)


def test_time_zone_of_the_log_comes_from_the_recording(tmp_path: Path) -> None:
    """Three hours off, no line of the start falls into the scrapes."""
    without_log(tmp_path, "startup_crash_blocksize16")
    shutil.copy(RECORDINGS / "startup_crash_blocksize16" / "server.log", tmp_path)
    about = tmp_path / "recording.toml"
    about.write_text("log_utc_offset = -3\n" + about.read_text(encoding="utf-8"), encoding="utf-8")
    assert "startup_failed" not in present(doctor.run(ObserveOptions([str(tmp_path)])))


@pytest.mark.parametrize("name", some(ALL, 24))
def test_the_json_keeps_its_schema(name: str) -> None:
    SCHEMA.validate(json.loads(as_json.render(judged(name))))


def test_the_json_report(golden: Callable[[str, str], None]) -> None:
    golden("kv_cascade.json", present_only(judged("kv_cascade")))


def test_the_markdown_report(golden: Callable[[str, str], None]) -> None:
    golden("kv_cascade.md", uncounted(markdown.render(judged("kv_cascade"))))


def test_the_json_has_every_incident_of_the_catalogue() -> None:
    document = json.loads(as_json.render(judged("kv_cascade")))
    assert {diagnosis["incident"] for diagnosis in document["diagnoses"]} == {incident.id for incident in load()}


MORE = """
from diag.incident import Incident, Signal, judged

signal = Signal("requests", "max by ($by) (max_over_time({metric}[$window]))", "{{value}} requests", "requests")
incident = Incident(
    id="{name}", title="Another", severity="warning", per=("instance", "engine"), cause="", impact="",
    symptoms=(signal.above(1_000_000, judged("more than any server has")),), looks_like=(), fixes=(),
)
"""


@pytest.fixture
def more_incidents(tmp_path: Path) -> Path:
    """A folder with one incident that is absent and one that is unknown."""
    for name, metric in (("another_absent", "vllm:num_requests_running"), ("another_unknown", "vllm:not_there")):
        (tmp_path / f"{name}.py").write_text(MORE.format(name=name, metric=metric), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", ["kv_cascade", "engine_stalled", "healthy"])
def test_another_incident_changes_a_report_on_others_by_its_count_only(name: str, more_incidents: Path) -> None:
    before = judged(name)
    after = doctor.run(ObserveOptions([f"tests/recordings/{name}"], incidents=more_incidents))
    assert (len(after.checked), len(after.needs_telemetry)) == (
        len(before.checked) + 1,
        len(before.needs_telemetry) + 1,
    )
    for verbose in (False, True):
        one, other = (terminal.render(report, verbose=verbose) for report in (before, after))
        assert verbose or name == "healthy" or one == other
        assert uncounted(one) == uncounted(other)
    assert uncounted(markdown.render(after)) == uncounted(markdown.render(before))
    assert present_only(after) == present_only(before)


def test_verbose_report_lists_absent_and_unknown_incidents(more_incidents: Path) -> None:
    report = doctor.run(ObserveOptions(["tests/recordings/kv_cascade"], incidents=more_incidents))
    for text in (terminal.render(report, verbose=True), markdown.render(report, verbose=True).replace("\\", "")):
        flat = " ".join(text.split())
        assert re.search(r"absent: Scheduler admits no request \(admission_deadlock\), [^,]* \(another_absent\),", flat)
        ids = r"\(another_unknown\), [^()]* \(gpu_compute_contended\), [^()]* \(gpu_fault\),"
        assert re.search(rf"need more telemetry: [^()]* {ids}", flat)
        assert "(another_unknown) on 127.0.0.1:8101 engine 0: requests not measured" in flat
    assert "another_" not in terminal.render(report) + markdown.render(report)


def test_the_same_recording_gives_the_same_bytes() -> None:
    assert as_json.render(judged("kv_cascade")) == as_json.render(judged.__wrapped__("kv_cascade"))
