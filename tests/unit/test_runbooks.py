"""The runbooks: every section there, every limit with its source, every link and command one that works."""

import re
from pathlib import Path

import pytest
from support.paths import ROOT
from typer.testing import CliRunner

from diag.cli import app
from diag.core.contract import Contract
from diag.core.incident import Incident
from diag.knowledge.catalog import load
from diag.promql import parse
from diag.vllm.flags.registry import releases

RUNBOOKS = sorted((ROOT / "runbooks").glob("*.md"))
SECTIONS = (
    "Meaning",
    "Impact",
    "Is it real? (two minutes)",
    "Diagnose",
    "What looks like it",
    "Mitigate",
    "Fix",
    "Verify",
    "Escalate",
    "Do NOT",
    "Where the limits come from",
    "The whole of it as PromQL",
)
EVERY_INCIDENT = pytest.mark.parametrize("incident", load(), ids=lambda each: each.id)


def section(incident: Incident, title: str) -> str:
    text = (ROOT / "runbooks" / f"{incident.id}.md").read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def words(text: str) -> str:
    return " ".join(text.split())


@EVERY_INCIDENT
def test_nothing_is_missing_at_three_in_the_morning(incident: Incident) -> None:
    missing = [title for title in SECTIONS if not section(incident, title).strip()]
    assert missing == ([] if incident.do_not else ["Do NOT"])


@EVERY_INCIDENT
def test_what_to_expect_is_what_the_doctor_prints(incident: Incident) -> None:
    shown = section(incident, "Is it real? (two minutes)")
    assert f"{incident.severity.upper()} {incident.id} on <instance>" in shown
    assert all(condition.signal.name in shown for condition in incident.symptoms)


@EVERY_INCIDENT
def test_every_limit_says_where_it_comes_from(incident: Incident) -> None:
    table = section(incident, "Where the limits come from")
    for each in incident.every_condition:
        limit = Contract().limit(each.limit)
        row = next(line for line in table.splitlines() if f"{each.signal.name} {each.op} {limit:g} " in line)
        assert each.why.says.replace("|", "\\|") in row
        assert each.why.reference in row and each.why.kind in row


@EVERY_INCIDENT
def test_every_fix_comes_with_its_price_and_how_to_take_it_back(incident: Incident) -> None:
    told = section(incident, "Fix")
    for number, fix in enumerate(incident.fixes, 1):
        one = told.partition(f"\n{number}. ")[2].partition(f"\n{number + 1}. ")[0]
        assert fix.change.replace("{value}", "<computed>") in one and f"effect: {fix.effect}" in one
        assert all(text in one for text in (fix.risk, fix.rollback, *releases(fix.flag, fix.versions)))
        assert f"restart: {'needed' if fix.restart else 'not needed'}" in one


@EVERY_INCIDENT
def test_what_must_move_is_the_other_side_of_every_limit(incident: Incident) -> None:
    told = section(incident, "Verify")
    for each in incident.symptoms:
        other = {">": "<=", ">=": "<", "<": ">=", "<=": ">"}[each.op]
        assert f"- {each.signal.name} {other} {Contract().limit(each.limit):g}" in told
    assert f"within {incident.window} and two scrapes" in told


@EVERY_INCIDENT
def test_every_look_alike_comes_with_what_tells_it_apart(incident: Incident) -> None:
    told = section(incident, "What looks like it")
    for look in incident.looks_like:
        row = next(line for line in told.splitlines() if line.startswith((f"| {look.name} |", f"| [{look.name}](")))
        assert look.distinguish.replace("|", "\\|") in row
        assert not look.requires or look.requires.signal.name in row


@pytest.mark.parametrize("file", RUNBOOKS, ids=lambda file: file.stem)
def test_links_lead_somewhere_and_promql_is_promql(file: Path) -> None:
    text = file.read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert [link for link in links if not link.startswith("http") and not (file.parent / link).exists()] == []
    for block in re.findall(r"```promql\n(.*?)```", text, re.DOTALL):
        parse(block)
    assert text.count("```") % 2 == 0


def test_every_incident_is_in_the_index_and_every_alert_has_its_page() -> None:
    index = (ROOT / "runbooks" / "README.md").read_text()
    assert all(f"[{each.id}]({each.id}.md)" in index for each in load())
    alerts = re.findall(r"runbook_url: (runbooks/\S+)", (ROOT / "alerts" / "diag.rules.yaml").read_text())
    assert alerts and all((ROOT / each).is_file() for each in alerts)


def test_the_commands_that_are_named_exist() -> None:
    text = "".join(file.read_text() for file in RUNBOOKS)
    for command in set(re.findall(r"`?diag (\w+)[^`\n]*", text)) - {"generate"}:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0, command
    shown = words(CliRunner().invoke(app, ["record", "--help"], terminal_width=200).output)
    assert "--for" in shown and "--log" in shown
