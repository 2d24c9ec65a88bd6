"""The report for a ticket or a chat: GitHub-flavoured Markdown."""

from collections.abc import Iterable, Sequence

from diag.core.formatting import escaped
from diag.diagnosis.diagnose import Reading
from diag.diagnosis.proposals import Proposal
from diag.diagnosis.report import Finding, Report
from diag.report import fleet
from diag.report import sentences as words

SPECIAL = str.maketrans({char: f"\\{char}" for char in "\\`*_[]<>|#"})


def render(report: Report, verbose: bool = False) -> str:
    """The report as Markdown, one line break at its end; `verbose` names the incidents that are absent or unknown."""
    parts = [f"**{escape(line)}**" for line in words.headline(report, words.time_format(report))]
    parts += [_fleet(report)] if words.is_fleet(report) else []
    for finding in words.detailed(report):
        parts += _finding(finding, report, verbose)
    return "\n\n".join([*parts, *_footer(report, verbose)]) + "\n"


def escape(text: str) -> str:
    """Text that Markdown leaves alone and that breaks no table."""
    return escaped(text).translate(SPECIAL)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" if cells[0] != "---" else f"|{'|'.join(cells)}|" for cells in lines)


def _fleet(report: Report) -> str:
    servers = fleet.servers(report, words.time_format(report))
    rows = [
        (server.verdict, escape(server.instance), server.incidents or server.states, server.when)
        for server in servers
        if server.verdict != "healthy"
    ]
    counts = fleet.counts(servers)
    return f"{counts}\n\n{table(('verdict', 'server', 'incidents', 'when'), rows)}" if rows else f"{counts}\n"


def _finding(finding: Finding, report: Report, verbose: bool) -> list[str]:
    diagnosis = finding.diagnosis
    when = words.when(diagnosis, words.time_format(report))
    head = ("evidence", "value", "threshold", "holds")
    parts = [
        f"## {escape(diagnosis.incident.title)}",
        f"{diagnosis.severity}, {escape(words.place(diagnosis.subject))}, {when}",
        table(head, [_row(reading) for reading in (*diagnosis.symptoms, *diagnosis.supports)]),
        _list("Log", words.quoted(finding)),
        _list("Ruled out", [f"{refuted.name}: {refuted.evidence}" for refuted in diagnosis.refuted]),
        _list("Not ruled out", [f"{look_alike.name}: {look_alike.distinguish}" for look_alike in diagnosis.open]),
        _list("Consequences", [follows.incident.id for follows in words.consequences(finding, report)]),
        _list("Fixes", [_fix(proposal) for proposal in finding.proposals], raw=True),
        _list("Fixes whose value needs more telemetry", words.uncomputed(finding)) if verbose else "",
        f"Relaunch:\n\n```\n{escaped(finding.relaunch)}\n```" if finding.relaunch else "",
    ]
    return [part for part in parts if part]


def _row(reading: Reading) -> tuple[str, str, str, str]:
    holds = {True: "yes", False: "no", None: "not measured"}[reading.holds]
    return escape(reading.condition.signal.name), reading.shown, escape(reading.threshold), holds


def _list(title: str, texts: Sequence[str], *, raw: bool = False) -> str:
    lines = [f"- {text if raw else escape(text)}" for text in texts]
    return "\n".join([f"{title}:", "", *lines]) if lines else ""


def _fix(proposal: Proposal) -> str:
    fix = proposal.fix
    code = escaped(words.change(proposal))
    facts = {"Expected effect": fix.effect, "Trade-off": fix.risk, "Rollback": fix.rollback}
    sentences = [f"{name}: {text}." for name, text in facts.items() if text]
    parts = (proposal.text, *sentences, words.versions(proposal), words.needs(proposal))
    text = " ".join(escape(part) for part in parts if part)
    return f"`{code}` {text}" if code else text


def _footer(report: Report, verbose: bool) -> list[str]:
    facts = {
        "Source": [words.source(report, words.time_format(report))],
        "Checked": words.checked(report, verbose),
        "Unknown": [*words.blind(report), *(words.undecided(report) if verbose else [])],
        "Not collected": words.not_collected(report),
        "Thresholds": list(report.contract),
        "Notes": list(report.observed.notes),
    }
    return [_list(title, texts) for title, texts in facts.items() if texts]
