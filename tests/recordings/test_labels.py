"""Every label may be missing, empty, repeated or foreign: no crash, no false name, no incident of a healthy server."""

import re
import shutil
import tomllib
from functools import cache
from pathlib import Path

import pytest
from support import rewriting
from support.paths import ALL_RECORDINGS, RECORDINGS
from support.sampling import some

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.subjects import filled, in_words
from diag.diagnosis.report import Report
from diag.report import terminal

FOREIGN = "abc; rm {value} {rank} -rf"
VALUES = {"missing": None, "empty": "", "repeated": "0", "foreign": FOREIGN}
NAMELESS = re.compile(r"\b(?:rank|engine|worker|GPU|PID|pid|Xid|vLLM) +(?:[),;]|$)|\(\)|\{\w+\}", re.MULTILINE)
"""A word that names something, without the name."""


@cache
def original(name: str) -> list[rewriting.Scrape]:
    """The scrapes, 4 s apart: what a label is called does not depend on how often it is scraped."""
    return list(rewriting.thinned(rewriting.scrapes(name), 4))


@cache
def recordings_with(label: str) -> list[str]:
    return [each.name for each in ALL_RECORDINGS if label in names(each.name)]


@cache
def names(name: str) -> list[str]:
    pages = {page for _, _, page in original(name)[::10]}
    return sorted({label for page in pages for label in rewriting.label_names(page)})


@cache
def every_label() -> list[str]:
    return sorted({label for each in ALL_RECORDINGS for label in names(each.name)})


def relabelled(folder: Path, name: str, label: str, value: str | None) -> Report:
    """Return the report of a recording, whose log is as it was."""
    pages = rewriting.changed(original(name), lambda page: rewriting.relabelled(page, label, value))
    for file in (RECORDINGS / name).iterdir():
        shutil.copy(file, folder)
    return doctor.run(ObserveOptions([str(rewriting.write(folder, pages))]))


def possible_verdicts(name: str) -> tuple[str, ...]:
    """The verdicts that a recording may get without a label."""
    truth = tomllib.loads((RECORDINGS / name / "recording.toml").read_text("utf-8"))["truth"]
    is_well = truth["verdict"] in ("healthy", "no_incident")
    return ("healthy", "no_incident", "unknown", *(() if is_well else ("warning", "critical")))


def text(report: Report) -> str:
    wrapped = r"\s+".join(map(re.escape, FOREIGN.split()))
    whole = re.sub(wrapped, "abc", terminal.render(report, verbose=True))
    return re.sub(r"…[^…\n]*-rf ", "abc ", whole)  # where a long name is elided


def test_a_label_that_is_lost_or_forged_makes_no_false_name_and_no_false_claim(tmp_path: Path) -> None:
    """Each change in another recording that has the label; `python -m tests.fuzz labels` has all of them in all."""
    wrong = []
    for place, label in some(enumerate(every_label()), 9):
        having = recordings_with(label)
        for number, (change, value) in some(enumerate(VALUES.items()), 2, label):
            name = having[(place + 7 * number) % len(having)]
            report = relabelled(tmp_path, name, label, value)
            if NAMELESS.search(text(report)) or report.verdict not in possible_verdicts(name):
                wrong.append((label, change, name, report.verdict, NAMELESS.findall(text(report))))
            for file in tmp_path.iterdir():
                file.unlink()
    assert wrong == []


@pytest.mark.parametrize(("name", "value"), [("healthy", None), ("data_parallel_one_busy", "0")])
def test_a_healthy_server_without_a_label_has_no_incident(name: str, value: str | None, tmp_path: Path) -> None:
    for label in some(names(name), 4, name):
        assert relabelled(tmp_path, name, label, value).verdict in ("healthy", "unknown"), label


@pytest.mark.parametrize(
    ("label", "value", "named"),
    [
        ("rank", None, "engine ? PID 31259"),
        ("rank", "", "engine ? PID 31259"),
        ("pid", None, "engine 0 PID ?"),
        ("role", None, "? 0 PID 31259"),
        ("rank", "abc", "engine abc PID 31259"),
    ],
)
def test_a_culprit_without_a_label_is_named_by_its_others(
    label: str, value: str | None, named: str, tmp_path: Path
) -> None:
    report = relabelled(tmp_path, "host_cpu_starved", label, value)
    (found,) = (each.diagnosis for each in report.present if each.diagnosis.incident.id == "host_cpu_starved")
    assert named in found.culprits
    assert named in text(report)


def test_a_culprit_without_any_label_is_not_named() -> None:
    assert filled("{role} {rank} PID {pid}", {"instance": "h:1"}, value="3") == ""
    assert filled("{phase} for {value}", {}, value="3 s") == ""
    assert filled("rank {rank}", {"rank": ""}) == ""
    assert filled("{role} {rank} PID {pid}", {"role": "worker", "rank": "", "pid": "7"}) == "worker ? PID 7"


def test_a_subject_without_a_server_or_with_an_empty_label_is_in_words() -> None:
    assert in_words((("engine", ""), ("instance", "h:1"))) == "h:1"
    assert in_words((("engine", "1"),)) == "? engine 1"


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("contention_long_prefill", "le"),
        ("gpu_thermal_throttling", "reason"),
        ("data_parallel_lockstep", "engine"),
        ("kv_cascade", "finished_reason"),
    ],
)
def test_series_whose_parts_no_label_tells_apart_are_told_and_make_no_ill_server_healthy(
    name: str, label: str, tmp_path: Path
) -> None:
    report = relabelled(tmp_path, name, label, None)
    assert report.verdict != "healthy"
    assert any("several values for one series of" in unjudged.why for unjudged in report.not_judged)
