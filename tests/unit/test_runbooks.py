"""The runbooks: every section there, every threshold with its source, every link and command one that works."""

import re
from pathlib import Path

import pytest
from support.paths import RECORDINGS, ROOT
from typer.testing import CliRunner

from diag.cli.app import app
from diag.core import formatting
from diag.core.contract import Contract
from diag.core.incident import Condition, Incident
from diag.knowledge.catalog import load
from diag.promql import parse
from diag.vllm.flags.registry import releases

RUNBOOKS = sorted((ROOT / "runbooks").glob("*.md"))
LOOK_ALIKES, FIX = "What looks like it, how to distinguish", "Fix (remediation), trade-off, rollback"
SECTIONS = (
    "Meaning",
    "Impact",
    "Confirm",
    "Immediate mitigation",
    "Symptoms (all must hold)",
    "Supporting evidence",
    LOOK_ALIKES,
    FIX,
    "Verify",
    "Escalate and hand over",
    "Do NOT",
    "Threshold rationale",
    "Alert expression",
)
OPPOSITE = {">": "<=", ">=": "<", "<": ">=", "<=": ">"}
EVERY_INCIDENT = pytest.mark.parametrize("incident", load(), ids=lambda incident: incident.id)
EVERY_RUNBOOK = pytest.mark.parametrize("file", RUNBOOKS, ids=lambda file: file.stem)


def section(incident: Incident, title: str) -> str:
    text = (ROOT / "runbooks" / f"{incident.id}.md").read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def threshold(condition: Condition, comparison: str) -> str:
    return formatting.threshold(comparison, Contract().limit(condition.limit), condition.signal.unit)


def words(text: str) -> str:
    return " ".join(text.split())


@EVERY_INCIDENT
def test_runbook_has_every_section(incident: Incident) -> None:
    missing = {title for title in SECTIONS if not section(incident, title).strip()}
    optional = {"Do NOT": incident.do_not, "Supporting evidence": (*incident.supports, incident.escalates)}
    assert missing == {title for title, content in optional.items() if not any(content)}


@EVERY_INCIDENT
def test_the_expected_report_has_severity_subject_and_every_symptom_with_its_threshold(incident: Incident) -> None:
    shown = section(incident, "Confirm")
    info = f"`Also` lists `info  {incident.id}`"
    verdict = f"the report begins with `{incident.severity.upper()}  {incident.id}   <instance>"
    assert (info if incident.severity == "info" else verdict) in shown
    for condition in incident.symptoms:
        line = rf"{re.escape(condition.signal.name)} +<value>  {re.escape(threshold(condition, condition.op))}"
        assert re.search(rf"^{line}$", shown, re.MULTILINE)


def test_the_doctor_prints_the_evidence_that_the_runbook_expects() -> None:
    expected = section(next(incident for incident in load() if incident.id == "kv_eviction_cascade"), "Confirm")
    printed = CliRunner().invoke(app, ["doctor", str(RECORDINGS / "kv_cascade")]).output
    assert printed.startswith("CRITICAL  kv_eviction_cascade   ")
    evidence = re.findall(r"^(\S.*?) +<value>  (.+)$", expected, re.MULTILINE)
    assert evidence
    for name, limit in evidence:
        assert any(name in line and limit in line for line in printed.splitlines()), (name, limit, printed)


def test_the_doctor_lists_an_info_incident_as_the_runbook_says() -> None:
    printed = CliRunner().invoke(app, ["doctor", str(RECORDINGS / "speculation_ineffective")]).output
    assert printed.startswith("HEALTHY ")
    assert re.search(r"  Also .*\n? .*info  speculation_ineffective  ", printed)


@EVERY_INCIDENT
def test_every_runbook_threshold_has_a_rationale(incident: Incident) -> None:
    table = section(incident, "Threshold rationale").splitlines()
    for condition in incident.every_condition:
        start = f"| {condition.signal.name} {threshold(condition, condition.op)} |"
        rows = [row for row in table if row.startswith(start)]
        why = condition.why
        assert any(why.says.replace("|", "\\|") in row and why.reference in row and why.kind in row for row in rows)


@EVERY_INCIDENT
def test_a_symptom_is_a_line_of_the_alert(incident: Incident) -> None:
    text, alert = section(incident, "Symptoms (all must hold)"), section(incident, "Alert expression")
    for condition in incident.symptoms:
        limit = f"{Contract().limit(condition.limit):g}"
        assert f"**{condition.signal.name} {threshold(condition, condition.op)}**" in text
        (line,) = re.findall(
            rf"```promql\n([\w:]+ {condition.op} {limit})\n```", text[text.index(f"**{condition.signal.name} ") :]
        )[:1]
        assert line in alert and f"\n{line.split()[0]} =\n" in alert


@EVERY_INCIDENT
def test_every_fix_comes_with_its_trade_off_and_rollback(incident: Incident) -> None:
    text = section(incident, FIX)
    for number, fix in enumerate(incident.fixes, 1):
        item = text.partition(f"\n{number}. ")[2].partition(f"\n{number + 1}. ")[0]
        assert fix.change.replace("{value}", "`<computed>`") in item and f"expected effect: {fix.effect}" in item
        assert all(part in item for part in (fix.risk, *releases(fix.flag, fix.versions)))
        assert fix.rollback in item.replace("`", "")
        assert f"restart: {'needed' if fix.restart else 'not needed'}" in item


@EVERY_INCIDENT
def test_verification_of_a_fix_is_the_other_side_of_every_threshold(incident: Incident) -> None:
    text = section(incident, "Verify")
    for condition in incident.symptoms:
        assert f"- {condition.signal.name} {threshold(condition, OPPOSITE[condition.op])}\n" in text
    assert f"within {incident.window} and two scrapes" in text


@EVERY_INCIDENT
def test_every_look_alike_has_a_distinction(incident: Incident) -> None:
    text = section(incident, LOOK_ALIKES)
    for look in incident.looks_like:
        row = next(line for line in text.splitlines() if line.startswith((f"| {look.name} |", f"| [{look.name}](")))
        assert look.distinguish.replace("|", "\\|") in row
        assert not look.requires or look.requires.signal.name in row


@EVERY_RUNBOOK
def test_runbook_links_have_targets_and_promql_is_valid(file: Path) -> None:
    text = file.read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert [link for link in links if not link.startswith("http") and not (file.parent / link).exists()] == []
    for block in re.findall(r"```promql\n(.*?)```", text, re.DOTALL):
        parse(block)
    assert text.count("```") % 2 == 0


@EVERY_RUNBOOK
def test_a_placeholder_stands_in_code(file: Path) -> None:
    """Markdown takes `<value>` in a sentence for HTML and shows nothing."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", file.read_text(), flags=re.DOTALL)
    assert re.findall(r"<(?!https?://)[a-z][\w ]*>", prose) == []


def test_every_incident_is_in_the_index_and_every_alert_has_its_page() -> None:
    index = (ROOT / "runbooks" / "README.md").read_text()
    assert all(f"[{incident.id}]({incident.id}.md)" in index for incident in load())
    pages = re.findall(r"runbook_url: (runbooks/\S+)", (ROOT / "alerts" / "diag.rules.yaml").read_text())
    assert pages and all((ROOT / page).is_file() for page in pages)


def test_commands_in_runbooks_exist() -> None:
    text = "".join(file.read_text() for file in RUNBOOKS)
    for command in set(re.findall(r"`?diag (\w+)[^`\n]*", text)) - {"generate"}:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0, command
    shown = words(CliRunner().invoke(app, ["record", "--help"], terminal_width=200).output)
    assert "--for" in shown and "--log" in shown
