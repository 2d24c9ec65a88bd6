"""Every recording of a real server gets the truth that stands in its recording.toml, by its pages and its log."""

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from support import rewriting
from support.paths import ALL_RECORDINGS, RECORDINGS, ROOT

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report
from diag.report import json as as_json
from diag.report import layout, markdown, terminal

ALL = sorted(path.name for path in ALL_RECORDINGS)
SCHEMA = json.loads((ROOT / "diag" / "report" / "diag.doctor.schema.json").read_text(encoding="utf-8"))
DETAILED = (
    "kv_cascade",
    "engine_stalled",
    "engine_dead",
    "contention_bigbatch",
    "queue_saturation",
    "startup_hang",
    "startup_crash_blocksize16",
    "tp2_long_stall",
)


def judged(name: str) -> Report:
    return doctor.run(ObserveOptions([str(Path("tests") / "recordings" / name)]))


def truth(name: str) -> dict[str, list[str]]:
    return tomllib.loads((RECORDINGS / name / "recording.toml").read_text(encoding="utf-8"))["truth"]


def present(report: Report) -> set[str]:
    return {each.diagnosis.incident.id for each in report.present}


@pytest.mark.parametrize("name", ALL)
def test_what_truly_happened_is_found(name: str) -> None:
    assert set(truth(name)["present"]) <= present(judged(name))


@pytest.mark.parametrize("name", ALL)
def test_what_did_not_happen_is_not_claimed(name: str) -> None:
    assert not present(judged(name)) & set(truth(name)["absent"])


@pytest.mark.parametrize("name", [name for name in ALL if truth(name)["verdict"] == "healthy"])
def test_a_healthy_server_is_called_healthy(name: str) -> None:
    assert judged(name).verdict == "healthy"


@pytest.mark.parametrize("name", [name for name in ALL if truth(name)["verdict"] == "ill"])
def test_an_ill_server_is_not_called_healthy(name: str) -> None:
    assert judged(name).verdict in ("warning", "critical", "unknown")


def without_log(folder: Path, name: str) -> Report:
    return doctor.run(ObserveOptions([str(rewriting.pages_alone(folder, name))]))


@pytest.mark.parametrize("name", [name for name in ALL if "startup" in name or name.startswith("fail")])
def test_a_start_that_only_the_log_shows_is_not_guessed(tmp_path: Path, name: str) -> None:
    report = without_log(tmp_path, name)
    assert report.verdict == "unknown"
    assert "its log would tell" in report.blind[0]


def test_a_tensor_parallel_stall_is_a_stall_whose_kind_the_page_cannot_tell(tmp_path: Path) -> None:
    stalled = without_log(tmp_path, "tp2_long_stall").present[0].diagnosis
    assert stalled.incident.id == "engine_stalled"
    assert [each.name for each in stalled.open] == ["tp_communication_stall"]


@pytest.mark.parametrize("name", ALL)
def test_a_log_changes_nothing_about_what_the_pages_show(tmp_path: Path, name: str) -> None:
    assert present(without_log(tmp_path, name)) <= present(judged(name))


def test_a_start_in_its_log_is_starting() -> None:
    report = judged("startup_hang")
    assert [each.state for each in report.progress] == ["starting"]
    assert (report.verdict, present(report)) == ("unknown", set())


def test_a_context_that_does_not_fit_comes_with_one_that_does() -> None:
    fix = judged("fail_max_model_len").present[0].proposals[0]
    assert (fix.name, fix.before, fix.after) == ("--max-model-len", 131072, 65408)


def test_the_zone_of_the_log_is_that_of_the_recording(tmp_path: Path) -> None:
    """Three hours off, no line of the start falls into the scrapes."""
    without_log(tmp_path, "startup_crash_blocksize16")
    shutil.copy(RECORDINGS / "startup_crash_blocksize16" / "server.log", tmp_path)
    about = tmp_path / "recording.toml"
    about.write_text("log_utc_offset = -3\n" + about.read_text(encoding="utf-8"), encoding="utf-8")
    assert "startup_failed" not in present(doctor.run(ObserveOptions([str(tmp_path)])))


@pytest.mark.parametrize("name", ALL)
def test_the_json_keeps_its_schema(name: str) -> None:
    jsonschema.validate(json.loads(as_json.render(judged(name))), SCHEMA)


@pytest.mark.parametrize("name", ALL)
def test_no_line_is_wider_than_100_columns_but_one_to_paste(name: str) -> None:
    report, command = terminal.render(judged(name)), judged(name).present and judged(name).present[0].relaunch
    line = f"  {'relaunch':<{layout.LABEL}}{command}\n"
    assert max(map(len, report.replace(line, "").splitlines())) <= layout.WIDTH
    assert not command or line in report


@pytest.mark.parametrize("name", DETAILED)
def test_the_terminal_report(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}.txt", terminal.render(judged(name)))


def test_the_json_report(golden: Callable[[str, str], None]) -> None:
    golden("kv_cascade.json", as_json.render(judged("kv_cascade")))


def test_the_markdown_report(golden: Callable[[str, str], None]) -> None:
    golden("kv_cascade.md", markdown.render(judged("kv_cascade")))


def test_the_same_recording_gives_the_same_bytes() -> None:
    assert as_json.render(judged("kv_cascade")) == as_json.render(judged("kv_cascade"))
