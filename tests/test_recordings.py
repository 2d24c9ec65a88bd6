"""Every recording of a real server gets the truth that stands in its recording.toml, as far as its pages show it."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from conftest import RECORDINGS, ROOT

from diag import doctor
from diag.judgement import Judgement
from diag.report import json as as_json
from diag.report import markdown, terminal

ALL = sorted(path.name for path in RECORDINGS.iterdir())
SCHEMA = json.loads((ROOT / "diag" / "report" / "diag.doctor.schema.json").read_text(encoding="utf-8"))
NOT_ON_THE_PAGE = {"tp_communication_stall", "startup_failed"}
"""What only a log, the process table or a GPU can show: the doctor must say that it cannot tell."""
DETAILED = ("kv_cascade", "engine_stalled", "engine_dead", "contention_bigbatch", "queue_saturation", "startup_hang")


def judged(name: str) -> Judgement:
    return doctor.run(doctor.Settings([str(Path("tests") / "recordings" / name)]))


def truth(name: str) -> dict[str, list[str]]:
    return tomllib.loads((RECORDINGS / name / "recording.toml").read_text(encoding="utf-8"))["truth"]


def present(judgement: Judgement) -> set[str]:
    return {each.diagnosis.incident.id for each in judgement.present}


@pytest.mark.parametrize("name", ALL)
def test_what_truly_happened_is_found(name: str) -> None:
    assert set(truth(name)["present"]) - NOT_ON_THE_PAGE <= present(judged(name))


@pytest.mark.parametrize("name", ALL)
def test_what_did_not_happen_is_not_claimed(name: str) -> None:
    assert not present(judged(name)) & set(truth(name)["absent"])


@pytest.mark.parametrize("name", [name for name in ALL if truth(name)["verdict"] == "healthy"])
def test_a_healthy_server_is_called_healthy(name: str) -> None:
    assert judged(name).verdict == "healthy"


@pytest.mark.parametrize("name", [name for name in ALL if truth(name)["verdict"] == "ill"])
def test_an_ill_server_is_not_called_healthy(name: str) -> None:
    assert judged(name).verdict in ("warning", "critical", "unknown")


@pytest.mark.parametrize("name", [name for name in ALL if "startup" in name or name.startswith("fail")])
def test_a_start_that_only_the_log_shows_is_not_guessed(name: str) -> None:
    judgement = judged(name)
    assert judgement.verdict == "unknown"
    assert "its log would tell" in judgement.blind[0]


def test_a_tensor_parallel_stall_is_a_stall_whose_kind_the_page_cannot_tell() -> None:
    stalled = judged("tp2_long_stall").present[0].diagnosis
    assert stalled.incident.id == "engine_stalled"
    assert [each.name for each in stalled.open] == ["tp_communication_stall"]


@pytest.mark.parametrize("name", ALL)
def test_the_json_keeps_its_schema(name: str) -> None:
    jsonschema.validate(json.loads(as_json.render(judged(name))), SCHEMA)


@pytest.mark.parametrize("name", ALL)
def test_no_line_is_wider_than_100_columns(name: str) -> None:
    lines = terminal.render(judged(name)).splitlines()
    assert max(map(len, lines)) <= terminal.WIDTH


@pytest.mark.parametrize("name", DETAILED)
def test_the_terminal_report(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}.txt", terminal.render(judged(name)))


def test_the_json_report(golden: Callable[[str, str], None]) -> None:
    golden("kv_cascade.json", as_json.render(judged("kv_cascade")))


def test_the_markdown_report(golden: Callable[[str, str], None]) -> None:
    golden("kv_cascade.md", markdown.render(judged("kv_cascade")))


def test_the_same_recording_gives_the_same_bytes() -> None:
    assert as_json.render(judged("kv_cascade")) == as_json.render(judged("kv_cascade"))
