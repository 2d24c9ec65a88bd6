"""The report for a ticket or a chat: GitHub-flavoured Markdown."""

from diag.diagnosis.diagnose import Diagnosis, Reading, against
from diag.diagnosis.proposals import Proposal
from diag.diagnosis.report import Finding, Report
from diag.report import fleet
from diag.report import sentences as words

SPECIAL = str.maketrans({each: f"\\{each}" for each in "\\`*_[]<>|#"})


def render(report: Report) -> str:
    """The report as Markdown, one line break at its end."""
    parts = [f"**{escape(line)}**" for line in words.headline(report, words.told(report))]
    parts += [_fleet(report)] if words.is_fleet(report) else []
    for finding in words.worth_telling(report):
        parts += _finding(finding, report)
    return "\n\n".join([*parts, *_footer(report)]) + "\n"


def escape(text: str) -> str:
    """Text that Markdown leaves alone and that breaks no table."""
    return words.printable(text).translate(SPECIAL)


def _fleet(report: Report) -> str:
    lines = fleet.servers(report, words.told(report))
    ill = [each for each in lines if each.verdict != "healthy"]
    rows = [
        f"| {each.verdict} | {escape(each.instance)} | {each.incidents or each.states} | {each.since} |" for each in ill
    ]
    table = ["| verdict | server | incidents | since |", "|---|---|---|---|", *rows] if rows else []
    return "\n".join([fleet.counts(lines), "", *table])


def _finding(finding: Finding, report: Report) -> list[str]:
    one = finding.diagnosis
    parts = [
        f"## {escape(one.incident.title)}",
        f"{one.severity}, {escape(words.place(one.subject))}, {words.when(one, words.told(report))}",
        _table(one),
        _list("Ruled out", [f"{each.looks_like}: {each.because}" for each in one.refuted]),
        _list("Not ruled out", [f"{each.name}: {each.distinguish}" for each in one.open]),
        _list("Follows", [each.incident.id for each in words.consequences(finding, report)]),
        _list("Fixes", [_fix(each) for each in finding.proposals], raw=True),
        f"Relaunch:\n\n```\n{words.printable(finding.relaunch)}\n```" if finding.relaunch else "",
    ]
    return [part for part in parts if part]


def _table(one: Diagnosis) -> str:
    rows = [_row(each) for each in (*one.symptoms, *one.supports)]
    return "\n".join(["| signal | value | limit | holds |", "|---|---|---|---|", *rows])


def _row(reading: Reading) -> str:
    value = reading.shown
    holds = {True: "yes", False: "no", None: "not measured"}[reading.holds]
    return f"| {escape(reading.condition.signal.name)} | {value} | {escape(against(reading))} | {holds} |"


def _list(title: str, texts: list[str], *, raw: bool = False) -> str:
    lines = [f"- {text if raw else escape(text)}" for text in texts]
    return "\n".join([f"{title}:", "", *lines]) if lines else ""


def _fix(proposal: Proposal) -> str:
    fix = proposal.fix
    code = words.printable(words.change(proposal))
    facts = (f"Effect: {fix.effect}.", fix.risk and f"Risk: {fix.risk}.", fix.rollback and f"Rollback: {fix.rollback}.")
    needs = f"Needs: {', '.join(proposal.needs)}." if proposal.needs else ""
    text = " ".join(escape(part) for part in (proposal.text, *facts, words.versions(proposal), needs) if part)
    return f"`{code}` {text}" if code else text


def _footer(report: Report) -> list[str]:
    facts = {
        "Looked at": [words.looked_at(report, words.told(report))],
        "Checked": [words.checked(report)],
        "Cannot tell": [*words.blind(report), *words.undecided(report)],
        "Not measured": words.measure(report),
        "Contract": list(report.contract),
        "Notes": list(report.observed.notes),
    }
    return [_list(title, texts) for title, texts in facts.items() if texts]
