"""A good declaration is found by its file; a bad one is refused in one sentence that names file and reason."""

from pathlib import Path

import pytest

from diag.core.errors import BadIncident
from diag.knowledge import incidents
from diag.knowledge.catalog import load

GOOD = """
from diag.incident import Incident, LookAlike, Signal, judged

errors = Signal("errors", {promql!r}, "{{value}} errors", "errors")
incident = Incident(
    id={id!r}, title="Errors", severity={severity!r}, per=("instance", "engine"), cause="", impact="",
    symptoms=(errors.above({limit!r}, {why}),), looks_like=(), fixes=(), explains={explains!r}, window={window!r},
)
"""
FINE = {
    "promql": 'sum by ($by) (increase(vllm:request_success_total{finished_reason="error"}[$window]))',
    "id": "mine",
    "severity": "warning",
    "limit": 3,
    "why": 'judged("because")',
    "explains": (),
    "window": "5m",
}


def write(folder: Path, name: str = "mine", **changes: object) -> Path:
    (folder / f"{name}.py").write_text(GOOD.format(**{**FINE, "id": name, **changes}), encoding="utf-8")
    return folder


def test_our_incidents_are_found_by_file() -> None:
    files = [file.stem for file in Path(incidents.__path__[0]).glob("*.py") if file.stem != "__init__"]
    assert [each.id for each in load()] == sorted(files)


def test_a_users_folder_adds_to_ours(tmp_path: Path) -> None:
    assert "mine" in [each.id for each in load(write(tmp_path))]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"promql": "sum by ($by) (increase(x[$window])"}, "signal 'errors'"),
        ({"promql": "sum by ($by) (info(x))"}, "info"),
        ({"promql": "sum by ($by) (sin(increase(x[$window])))"}, "sin"),
        ({"promql": "sum by ($by) (x)"}, "reads x at an instant"),
        ({"promql": "increase(x[$window])"}, "aggregate it by ($by)"),
        ({"promql": "sum by (instance, pod) (increase(x[$window]))"}, "aggregate it by ($by)"),
        ({"promql": "sum(increase(x[$window]))"}, "aggregate it by ($by)"),
        ({"promql": "sum by ($by) (increase(x[$span]))"}, "unknown placeholder $span"),
        ({"limit": "no_such_entry"}, "no entry of the contract"),
        ({"why": 'judged(" ")'}, "does not say where it comes from"),
        ({"why": '__import__("diag.incident").incident.Source("measured", "0.3", "")'}, "does not say where"),
        ({"severity": "fatal"}, "severity 'fatal'"),
        ({"explains": ("nothing_known",)}, "explains 'nothing_known', which is no incident"),
        ({"explains": ("mine",)}, "explains itself: mine -> mine"),
        ({"explains": ("engine_dead",)}, "later than it"),
        ({"window": "5 minutes"}, "'5 minutes' is not a duration"),
    ],
)
def test_a_bad_declaration_is_refused_in_one_sentence(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(BadIncident) as refused:
        load(write(tmp_path, **changes))
    sentence = str(refused.value)
    assert reason in sentence
    assert sentence.startswith(str(tmp_path / "mine.py"))
    assert "\n" not in sentence


def test_a_cycle_of_two_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "one", explains=("two",))
    write(tmp_path, "two", explains=("one",))
    with pytest.raises(BadIncident, match="explains itself: one -> two -> one"):
        load(tmp_path)


def test_an_id_that_is_not_the_files_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadIncident, match="the id 'other' is not the file's name"):
        load(write(tmp_path, id="other"))


def test_an_id_that_exists_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadIncident, match=r"'engine_dead' exists in .*engine_dead[.]py"):
        load(write(tmp_path, "engine_dead"))


@pytest.mark.parametrize("text", ["1 / 0", "def (", "x = 1", "raise SystemExit(3)"])
def test_a_file_that_does_not_run_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    with pytest.raises(BadIncident, match=str(tmp_path / "mine.py")):
        load(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadIncident, match="is not a folder of incident files"):
        load(tmp_path / "nowhere")
