"""The report for a ticket or a chat: GitHub-flavoured Markdown."""

import re
from collections.abc import Iterable, Sequence

from diag.core.formatting import escaped, pasted
from diag.core.lazy_regex import lazy
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.proposals import Proposal
from diag.diagnosis.report import Finding, Report
from diag.report import fleet
from diag.report import sentences as words

NORMAL = 20
SPECIAL = str.maketrans({char: f"\\{char}" for char in "\\`*_[]<>|#~&$!"})
_LINK = lazy(r"(?<=[A-Za-z]):(?=//)|(?<=www)\.", re.IGNORECASE)
_MENTION = lazy(r"@(?=\w)|#(?=\d)|(?<=\bGH-)(?=\d)", re.IGNORECASE)
"""What GitHub makes a link of, or a message to somebody, though it is escaped."""


def render(report: Report, verbose: bool = False) -> str:
    """The report as Markdown, one line break at its end; `verbose` names the incidents that are absent or unknown."""
    parts = [f"**{escape(line)}**" for line in words.headline(report, words.time_format(report))]
    parts += map(escape, words.shared(report))
    parts += [_fleet(report, verbose)] if words.is_fleet(report) else []
    for finding in words.detailed(report):
        parts += _finding(finding, report, verbose)
    return "\n\n".join([*parts, *_footer(report, verbose)]) + "\n"


def escape(text: str) -> str:
    """Text that Markdown leaves alone: it breaks no table, is no link, and mentions nobody."""
    text = _LINK.sub(r"\\\g<0>", escaped(text).translate(SPECIAL))
    return _MENTION.sub(r"\g<0><!-- -->", text)


def code(text: str) -> str:
    """A span of code around one line, whatever backticks are in it."""
    mark, space = _fence(text, 1), " " if "`" in text else ""
    return f"{mark}{space}{text}{space}{mark}"


def _block(text: str) -> str:
    return f"{_fence(text, 3)}\n{text}\n{_fence(text, 3)}"


def _fence(text: str, least: int) -> str:
    """More backticks than stand together in the text."""
    return "`" * max(least, *(len(run) + 1 for run in re.findall("`+", text)), 0)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" if cells[0] != "---" else f"|{'|'.join(cells)}|" for cells in lines)


def _fleet(report: Report, verbose: bool) -> str:
    written_as = words.time_format(report)
    servers = fleet.servers(report, written_as)
    rows = [
        (server.verdict, escape(server.instance), server.incidents or server.states, server.when)
        for server in (servers if verbose else fleet.causes(report, servers, written_as))
        if server.verdict != "healthy"
    ]
    counts = fleet.counts([server.verdict for server in servers])
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
        f"Relaunch:\n\n{_block(pasted(finding.relaunch))}" if finding.relaunch else "",
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
    change = pasted(words.change(proposal))
    facts = {"Expected effect": fix.effect, "Trade-off": fix.risk, "Rollback": fix.rollback}
    sentences = [f"{name}: {text}." for name, text in facts.items() if text]
    parts = (proposal.text, *sentences, words.versions(proposal), words.needs(proposal))
    text = " ".join(escape(part) for part in parts if part)
    return f"{code(change)} {text}" if change else text


def _footer(report: Report, verbose: bool) -> list[str]:
    facts = {
        "Source": [words.source(report, words.time_format(report))],
        "Compared with what is normal": words.normality(report)[:NORMAL],
        "Ceiling": words.ceilings(report),
        "Checked": words.checked(report, verbose),
        "Unknown": [*words.not_judged(report), *(words.undecided(report) if verbose else [])],
        "Not collected": words.not_collected(report),
        "Thresholds": list(report.contract),
        "Notes": list(report.observed.notes),
    }
    return [_list(title, texts) for title, texts in facts.items() if texts]
