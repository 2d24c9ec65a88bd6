"""An incident that diag.toml ignores: named with its reason in every report, no part of the verdict, and not health."""

from pathlib import Path

import pytest
from support.paths import RECORDINGS

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report
from diag.report import html, markdown, terminal
from diag.report import json as as_json

REASON = "OPS-123: a larger cache comes on Monday"


def report(recording: str, incident: str, until: str, folder: Path) -> Report:
    file = folder / "diag.toml"
    file.write_text(f'[ignore.{incident}]\nreason = "{REASON}"\nuntil = {until}\n')
    return doctor.run(ObserveOptions([str(RECORDINGS / recording)], contract=file))


def test_ignored_incident_is_named_with_reason_and_end_and_is_no_health(tmp_path: Path) -> None:
    found = report("kv_cascade", "kv_eviction_cascade", "2099-12-07", tmp_path)
    assert (found.verdict, doctor.EXIT[found.verdict]) == ("no_incident", 0)
    for text in (terminal.render(found), markdown.render(found), html.render(found), str(as_json.DOCTOR.of(found))):
        words = " ".join(text.replace("\\", "").split())  # Markdown escapes names
        assert "kv_eviction_cascade is ignored until 2099-12-07" in words
        assert REASON in words
    assert terminal.render(found).startswith("NO INCIDENT FOUND  (ignored: kv_eviction_cascade)")


@pytest.mark.parametrize("target", ["engine_dead", "engine_dead/server.log"])
def test_a_dead_engine_that_is_ignored_is_no_pass(target: str, tmp_path: Path) -> None:
    found = report(target, "engine_dead", "2099-12-07", tmp_path)
    assert (found.verdict, doctor.EXIT[found.verdict]) == ("unknown", 3)
    assert terminal.render(found).startswith("CANNOT TELL  (ignored: engine_dead)")
    assert "(ignored: engine\\_dead)" in markdown.render(found).splitlines()[0]
    assert "[ignore] accepts engine_dead" in found.not_judged[-1].why


def test_it_counts_again_after_its_last_day(tmp_path: Path) -> None:
    found = report("kv_cascade", "kv_eviction_cascade", "2020-12-07", tmp_path)
    assert found.verdict == "critical"
    assert any("counts again" in note and "ended on 2020-12-07" in note for note in found.observed.notes)


@pytest.mark.parametrize(("recording", "verdict"), [("healthy", "healthy"), ("engine_dead", "critical")])
def test_an_ignored_incident_that_is_absent_changes_nothing(recording: str, verdict: str, tmp_path: Path) -> None:
    found = report(recording, "kv_eviction_cascade", "2099-12-07", tmp_path)
    assert found.verdict == verdict
    assert not any("kv_eviction_cascade" in note for note in found.observed.notes)
