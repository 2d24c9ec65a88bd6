"""The runbooks: every section there, every threshold with its source, every link and command one that works."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.paths import RECORDINGS, ROOT
from support.rows import each_row
from typer.testing import CliRunner

from diag.artefacts.runbook import PLATFORMS, operations
from diag.cli.app import app
from diag.core import formatting
from diag.core.contract import PAGE, PUBLISHED, Contract
from diag.core.incident import Condition, Incident
from diag.knowledge.catalog import load
from diag.promql import parse
from diag.vllm.flags.registry import releases

RUNBOOKS = sorted((ROOT / "runbooks").glob("*.md"))
SECTIONS = (
    "Impact",
    "Meaning",
    "Is it real",
    "Do now",
    "What else it could be",
    "Fix",
    "Verify",
    "Escalate",
    "Do not",
    "Silence",
    "Recent changes",
)
PROMQL = (ROOT / "runbooks" / "promql.md").read_text()
OPPOSITE = {">": "<=", ">=": "<", "<": ">=", "<=": ">"}
EVERY_INCIDENT = each_row("incident", load())
EVERY_RUNBOOK = each_row("file", RUNBOOKS)


def section(incident: Incident, title: str) -> str:
    text = (ROOT / "runbooks" / f"{incident.id}.md").read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def threshold(condition: Condition, comparison: str) -> str:
    return formatting.threshold(comparison, Contract().limit(condition.limit), condition.signal.unit)


def words(text: str) -> str:
    return " ".join(text.split())


def definitions(incident: Incident) -> str:
    """Return the part of the reference page on an incident."""
    return PROMQL.partition(f"\n## {incident.id}\n")[2].partition("\n## ")[0]


@EVERY_INCIDENT
def test_runbook_has_every_section_in_order(incident: Incident) -> None:
    text = (ROOT / "runbooks" / f"{incident.id}.md").read_text()
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    expected = [title for title in SECTIONS if title != "Do not" or incident.do_not]
    assert [title for title in titles if title != "On AMD GPUs"] == expected
    assert all(section(incident, title).strip() for title in titles)


def test_runbook_fits_on_two_printed_pages_and_the_card_on_one() -> None:
    """`nox -s pictures` prints them all in Chromium and counts: 9,100 characters with 87 lines are two pages."""
    texts = {file.stem: file.read_text() for file in RUNBOOKS if file.stem not in ("README", "promql")}
    assert {name: len(text) for name, text in texts.items() if len(text) > 9_300} == {}
    assert {name: text.count("\n") for name, text in texts.items() if text.count("\n") > 95} == {}
    assert texts["oncall"].count("\n") <= 60


def test_the_card_has_every_alert_that_may_page_among_the_pages() -> None:
    pages, tickets = (ROOT / "runbooks" / "oncall.md").read_text().split("\n## ")[1:]
    known = load()
    may_page = {each.id for each in known if each.severity == "critical" or each.escalates}
    assert {*re.findall(r"\[(\w+)\]", pages)} == may_page
    assert {*re.findall(r"\[(\w+)\]", tickets)} == {each.id for each in known if each.severity == "warning"} - may_page


@EVERY_INCIDENT
def test_two_commands_show_whether_it_is_real(incident: Incident) -> None:
    shown = section(incident, "Is it real")
    commands = re.findall(r"^\$ (.+)$", shown, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["diag", "promtool"]
    selector = shlex.split(commands[1])[-1]
    parse(selector)
    info = f"`info  {incident.title} ({incident.id})`"
    verdict = f"`{incident.severity.upper()}  {incident.id}   <instance>"
    assert (info if incident.severity == "info" else verdict) in shown
    for condition in incident.symptoms:
        assert f"{condition.signal.name} {threshold(condition, condition.op)}" in shown
        assert any(name.partition(":")[2] for name in re.findall(r"[\w:]+", selector) if name in definitions(incident))


def test_what_an_alert_requires_is_not_called_unnecessary() -> None:
    graded = [(one, one.serious.signal.name) for one in load() if one.serious]
    counts = {one.id: section(one, "Is it real").count(f"{name} = yes") for one, name in graded}
    assert counts and {*counts.values()} == {1}, counts


def test_the_doctor_prints_the_evidence_that_the_runbook_expects() -> None:
    incident = next(incident for incident in load() if incident.id == "kv_eviction_cascade")
    printed = CliRunner().invoke(app, ["doctor", str(RECORDINGS / "kv_cascade")]).output
    assert printed.startswith("CRITICAL  kv_eviction_cascade   ")
    for condition in incident.symptoms:
        limit = threshold(condition, condition.op)
        assert any(condition.signal.name in line and limit in line for line in printed.splitlines()), printed


def test_the_doctor_lists_an_info_incident_as_the_runbook_says() -> None:
    asked = ["doctor", str(RECORDINGS / "speculation_ineffective")]
    printed = CliRunner().invoke(app, asked, env={"COLUMNS": "100"}).output
    assert printed.startswith("HEALTHY ")
    assert re.search(r" Also .*info [^()]*\(speculation_ineffective\)", " ".join(printed.split()))


@EVERY_INCIDENT
def test_do_now_has_each_mitigation_and_its_commands_on_each_platform(incident: Incident) -> None:
    text = section(incident, "Do now")
    assert all(f"- {step}\n" in text for step in incident.mitigate)
    commands = text.partition("```bash\n")[2].partition("```")[0]
    assert bool(commands) == bool(incident.operations)
    for platform in PLATFORMS:
        of_platform = commands.partition(f"# {platform}\n")[2]
        for operation in incident.operations:
            assert operations()[operation][platform].partition("   # ")[0] in of_platform


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_command_of_an_operation_is_valid_shell(platform: str) -> None:
    """Each placeholder is filled in with a word; the programs are those of the platform."""
    programs = {"Kubernetes": {"kubectl"}, "compose": {"docker"}, "systemd": {"systemctl", "journalctl", "nginx"}}
    for operation in operations().values():
        command = re.sub(r"<(\w+)>", r"\1", operation[platform])
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0
        parts = [] if command.startswith("#") else command.partition("   # ")[0].split(" && ")
        assert {part.removeprefix("sudo ").split()[0] for part in parts} <= programs[platform]


@EVERY_INCIDENT
def test_every_threshold_has_a_rationale(incident: Incident) -> None:
    table = definitions(incident).splitlines()
    for condition in incident.every_condition:
        start = f"| {condition.signal.name} {threshold(condition, condition.op)} |"
        rows = [row for row in table if row.startswith(start)]
        why = condition.why
        assert any(why.says.replace("|", "\\|") in row and why.reference in row and why.kind in row for row in rows)
    for fix in incident.fixes:
        assert fix.why.says.lower() in definitions(incident).lower()


@EVERY_INCIDENT
def test_a_symptom_is_a_line_of_the_alert_and_its_series_is_defined_once(incident: Incident) -> None:
    alert = definitions(incident).partition("```promql\n")[2]
    for condition in incident.symptoms:
        limit = f"{Contract().limit(condition.limit):g}"
        if not incident.burns:
            assert re.search(rf"[\w:]+ {condition.op} {re.escape(limit)}\n", alert)
    for series in re.findall(r"\binstance\w*:[\w:]+", alert):
        assert PROMQL.count(f"\n{series} =\n") == 1


@EVERY_INCIDENT
def test_every_fix_comes_with_its_trade_off_and_rollback(incident: Incident) -> None:
    text = section(incident, "Fix")
    for number, fix in enumerate(incident.fixes, 1):
        item = text.partition(f"\n{number}. ")[2].partition(f"\n{number + 1}. ")[0]
        assert fix.change.replace("{value}", "`N`") in item and f"*Expected effect*: {fix.effect}" in item
        assert all(part in item for part in (fix.risk, *releases(fix.flag, fix.versions)))
        assert fix.rollback in item.replace("`", "")
        assert ("Needs a restart." if fix.restart else "No restart.") in item
        for condition in fix.only_if:
            name = f"{condition.signal.name} {threshold(condition, condition.op)}"
            assert name in item.partition("*: ")[0]


@EVERY_INCIDENT
def test_verification_of_a_fix_is_the_other_side_of_a_threshold(incident: Incident) -> None:
    text = section(incident, "Verify")
    signal = incident.ended_by or incident.symptoms[0].signal
    (condition,) = [condition for condition in incident.symptoms if condition.signal == signal]
    assert f": {condition.signal.name} {threshold(condition, OPPOSITE[condition.op])}. The alert" in text
    assert f"within {incident.window} and two scrapes" in text


@EVERY_INCIDENT
def test_every_look_alike_has_a_distinction(incident: Incident) -> None:
    text = section(incident, "What else it could be")
    for look in incident.looks_like:
        starts = (f"- {look.name[:1].upper()}{look.name[1:]}: ", f"- [{look.name}](")
        (item,) = [line for line in text.splitlines() if line.startswith(starts) and look.distinguish in line]
        assert not look.requires or look.requires.signal.name in item


def test_a_runbook_names_as_muted_only_alerts_of_no_higher_severity() -> None:
    rank = {"info": 0, "warning": 1, "critical": 2}
    known = {incident.id: incident for incident in load()}
    for incident in known.values():
        muted = section(incident, "Meaning").partition("Alertmanager mutes ")[2]
        named = {known[name] for name in re.findall(r"\[(\w+)\]", muted)}
        assert {each.id for each in named} <= {*incident.explains}
        assert named >= {known[name] for name in incident.explains if known[name].severity == incident.severity}
        highest = 2 if incident.escalates else rank[incident.severity]
        assert all(rank[each.severity] <= highest for each in named)


def test_the_card_has_the_first_action_of_each_page_and_ticket() -> None:
    card = (ROOT / "runbooks" / "oncall.md").read_text()
    for incident in load():
        rows = [line for line in card.splitlines() if line.endswith(f"| [{incident.id}]({incident.id}.md) |")]
        assert len(rows) == (0 if incident.severity == "info" else 1)
        assert all(incident.mitigate[0].partition(":")[0].rstrip(".") in row for row in rows)


@EVERY_RUNBOOK
def test_runbook_links_have_targets_and_promql_is_valid(file: Path) -> None:
    text = file.read_text()
    links = re.findall(r"\]\(([^)#]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert [link for link in links if not link.startswith("http") and not (file.parent / link).exists()] == []
    for block in re.findall(r"```promql\n(.*?)```", text, re.DOTALL):
        parse(block)
    assert text.count("```") % 2 == 0


@EVERY_RUNBOOK
def test_a_placeholder_stands_in_code(file: Path) -> None:
    """Markdown takes `<value>` in a sentence for HTML and shows nothing."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", file.read_text(), flags=re.DOTALL)
    assert re.findall(r"<(?!https?://)[a-z][\w ]*>", prose.replace("<details>", "").replace("<summary>", "")) == []


def test_every_incident_is_in_the_index_and_every_alert_has_its_page() -> None:
    index = (ROOT / "runbooks" / "README.md").read_text()
    assert all(f"[{incident.id}]({incident.id}.md)" in index for incident in load())
    published = re.escape(PUBLISHED).replace(re.escape(PAGE), "(.*)")
    urls = re.findall(r"runbook_url: (\S+)", (ROOT / "alerts" / "diag.rules.yaml").read_text())
    found = [re.fullmatch(published, url) for url in urls]
    assert found and all(page and (ROOT / "runbooks" / f"{page[1]}.md").is_file() for page in found)


def test_commands_in_runbooks_exist() -> None:
    text = "".join(file.read_text() for file in RUNBOOKS)
    for command in set(re.findall(r"`?diag (\w+)[^`\n]*", text)) - {"generate"}:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0, command
    shown = words(CliRunner().invoke(app, ["record", "--help"], terminal_width=200).output)
    assert "--for" in shown and "--log" in shown
