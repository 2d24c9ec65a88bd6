"""One answer on every surface: the same incident, place, start, first action and fix, in every form of the report."""

import json
import re
from pathlib import Path

import pytest
from support import rewriting
from support.paths import ALL_RECORDINGS
from support.reports import judged
from support.sampling import some
from support.surfaces import plain, shown_surfaces, ticket

from diag.artefacts.generate import files
from diag.commands import doctor
from diag.commands.mcp import answers as mcp
from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract
from diag.core.formatting import clock, moment, pasted
from diag.knowledge.catalog import load
from diag.report import html, layout, terminal
from diag.report import json as report_json
from diag.report import sentences as words
from diag.report.answer import ReportAnswer, answers, fleet_rows
from diag.report.spans import joined, labels
from diag.report.svg import plot, shared_axis

ALL = sorted(path.name for path in ALL_RECORDINGS)
WIDTHS = (60, 80, 100, 160)


def first(name: str) -> ReportAnswer:
    return answers(judged(name), moment)[0]


def to_do(answer: ReportAnswer) -> list[str]:
    """Return the words by which an engineer recognises the first action and the fix."""
    actions = answer.actions
    chosen = [*actions.advice[:1], *(each.text for each in (actions.now,) if each and not actions.advice)]
    if actions.fix:
        chosen.append(pasted(words.change(actions.fix)) or actions.fix.text.rstrip("."))
    return [plain(text) for text in chosen]


@pytest.mark.parametrize("name", some(ALL, 10))
def test_every_surface_has_the_same_verdict_incident_start_action_and_fix(name: str) -> None:
    answer = first(name)
    shown_on = shown_surfaces(name)
    starts = {surface: text.lstrip("* ").startswith(answer.verdict) for surface, text in shown_on.items()}
    assert all(starts.values()), starts
    machine = report_json.DOCTOR.of(judged(name))["answers"][0]
    assert machine["verdict"] == answer.verdict
    if judged(name).verdict not in ("warning", "critical"):  # nothing to do, and since when is no question
        return
    agent = mcp.report(judged(name), detail=False)["answers"][0]
    assert machine["evidence"] == list(answer.evidence)
    for found in (machine, agent):
        assert (found["incident"], found["since"], found["where"]) == (answer.incident, answer.since, answer.where)
        assert found["do_now"] == answer.actions.do_now
        assert found["fix"] == (joined(words.action(answer.actions.fix)) if answer.actions.fix else None)
    assert answer.since is not None
    for surface, text in shown_on.items():
        is_terminal = surface in ("terminal", "verbose")
        written_as = words.time_format(judged(name)) if is_terminal else moment
        assert written_as(answer.since).removesuffix(" UTC") in text, surface
        assert answer.incident in text, surface
        for action in to_do(answer):
            shown = text.replace("`", "")
            assert (action[:35] if surface == "terminal" else action).replace("`", "") in shown, (surface, action)
        signal, value = answer.evidence[0].rpartition(" (")[0].rsplit(": ", 1)
        assert value in text, surface
        assert surface == "terminal" or signal in text, surface
        if answer.actions.do_not and surface != "terminal":
            assert plain(answer.actions.do_not[0]) in text, surface


@pytest.mark.parametrize("name", ["kv_cascade", "tp2_long_stall", "engine_dead"])
def test_only_the_incident_has_a_start_and_a_plot_says_when_its_signal_crossed_the_threshold(name: str) -> None:
    drawn = html.render(judged(name))
    told = [text for text in re.findall(r"<text[^>]*>([^<]*)</text>", drawn) if "since" in text]
    assert not told
    assert "this signal crossed" in drawn


def test_all_plots_of_a_page_show_the_same_time() -> None:
    report = judged("tp2_long_stall")
    axis = shared_axis([found.diagnosis for found in report.present])
    ends = set()
    for finding in report.present:
        for reading in words.evidence(finding.diagnosis):
            labels = re.findall(r"<text[^>]*>([^<]*)</text>", plot(reading, finding.diagnosis, axis))
            ends.add(tuple(label for label in labels if label.startswith("2026-")))
    assert ends == {(moment(axis.start).removesuffix(" UTC"),)}


def test_evidence_that_rules_out_several_look_alikes_is_told_once() -> None:
    for name in ALL:
        for finding in judged(name).present:
            evidence = [sentence for _, sentence in words.ruled_out_by_evidence(finding.diagnosis, judged(name))]
            assert len(evidence) == len(set(evidence))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["kv_cascade", "tp2_long_stall", "healthy", "startup_hang", "gpu_thermal_throttling"])
def test_the_report_fits_the_window(name: str, width: int) -> None:
    report = judged(name)
    report = report._replace(observed=report.observed._replace(target=name))  # the path of a checkout may be too long
    with layout.columns(width):
        lines = terminal.render(report).splitlines()
        whole = terminal.render(report, verbose=True).splitlines()
    assert max(map(len, lines)) <= width
    words_of = set(re.findall(r"[A-Za-z_]{4,30}", terminal.render(report, verbose=True)))
    ends = [re.search(r"([A-Za-z_]{4,})$", line) for line in whole if "Relaunch" not in line]
    assert {found[1] for found in ends if found} <= words_of, "a word is broken at the end of a line"


def test_every_time_of_a_ticket_has_its_date() -> None:
    text = ticket("kv_cascade")
    since = first("kv_cascade").since
    assert since is not None and moment(since) in text
    assert clock(since) in text and text.count(clock(since)) == text.count(moment(since))


def test_a_restart_is_drawn_where_it_happened(tmp_path: Path) -> None:
    scrapes = list(rewriting.scrapes("kv_cascade"))
    restart = scrapes[len(scrapes) * 3 // 4][0]
    began = re.compile(r"^process_start_time_seconds .*$", re.MULTILINE)
    changed = [
        (at, name, began.sub(f"process_start_time_seconds {restart if at > restart else restart - 3600}", page))
        for at, name, page in scrapes
    ]
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path, changed))]))
    assert [signs.restarts for signs in report.vitals] == [(restart,)]
    assert 'class="restart"' in html.render(report)
    assert 'class="restart"' not in html.render(judged("kv_cascade"))


def test_a_slow_server_is_not_called_healthy_beside_others() -> None:
    report = judged("healthy")
    slow = report._replace(progress=tuple(each._replace(state="slow") for each in report.progress))
    assert [row.verdict for row in fleet_rows(slow)] == ["slow"]
    assert [row.verdict for row in fleet_rows(report)] == ["healthy"]


def test_json_has_the_vital_signs_of_every_server() -> None:
    (signs,) = json.loads(report_json.render(judged("healthy")))["vitals"]
    assert signs["server"] == "127.0.0.1:8100"
    assert {"running", "waiting", "kv", "ttft50", "itl50"} <= signs["now"].keys()


RARE = {
    *("ends", "episodes", "example", "first_sign", "gpu_limits", "missing", "needs", "normal", "not_computed"),
    *("slo", "timeline", "unknown"),
}
"""Labels that the recordings below do not need."""


def test_a_label_changed_in_one_place_is_changed_on_every_surface(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("kv_cascade", "tp2_long_stall", "engine_dead", "healthy", "startup_hang", "fail_max_model_len")
    old = {(name, surface): text for name in names for surface, text in shown_surfaces(name).items()}
    before = dict(labels())
    after = {name: f"Q{at:02}{'z' * (len(words) - 3)}" for at, (name, words) in enumerate(before.items())}
    for name, other in after.items():
        monkeypatch.setitem(labels(), name, other)  # type: ignore[arg-type]
    new = {(name, surface): text for name in names for surface, text in shown_surfaces(name).items()}
    for label, other in after.items():
        for place, text in new.items():
            assert text.count(other) == 0 or before[label] in old[place], (label, place)
            assert not re.search(rf"(?<!\w ){before[label]}: ", text), (label, place)
    assert {label for label, other in after.items() if other not in " ".join(new.values())} <= RARE
    lines = "".join(terminal.render(judged(name), verbose=verbose) for name in names for verbose in (False, True))
    assert not re.findall(rf"(?m)^  (?:{'|'.join(before.values())})  ", lines)

    incidents = load()
    made = files(incidents, Contract(), per_incident=True)
    runbook = made["runbooks/kv_eviction_cascade.md"]
    assert all(f"*{after[name]}*: " in runbook for name in ("effect", "trade_off", "rollback"))
    assert all(f"## {after[name]}\n" in runbook for name in ("do_now", "fix", "do_not"))
    assert {section["title"] for section in mcp.runbook(runbook, "", False)["sections"]} >= {
        after["fix"],
        after["do_not"],
    }
    assert f"*{after['do_now']}:*" in made["alerts/templates/diag.tmpl"]
    assert f"**{after['do_now']}**" in made["dashboards/kv_eviction_cascade.json"]
