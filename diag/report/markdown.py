"""The report for a ticket or a chat: GitHub-flavoured Markdown."""

import re
from collections.abc import Iterable, Sequence

from diag.core.formatting import escaped, pasted
from diag.diagnosis.report import Finding, Report
from diag.report import sentences as words
from diag.report.summary import count_verdicts, fleet_rows, merge_by_cause

NORMAL = 20
SPECIAL = str.maketrans({char: f"\\{char}" for char in "\\`*_[]<>|#~&$!"})
_LINK = r"(?i)(?<=[A-Za-z]):(?=//)|(?<=www)\."
_MENTION = r"(?i)@(?=\w)|#(?=\d)|(?<=\bGH-)(?=\d)"
"""Text that GitHub turns into a link or a mention even if it is escaped."""


def render(report: Report, verbose: bool = False) -> str:
    """Render the report, one line break at its end; `verbose` names the incidents that are absent or unknown."""
    written_as = words.time_format(report)
    parts = [f"**{escape(line)}**" for line in words.headline(report, written_as)]
    parts += map(escape, words.shared(report))
    if words.is_fleet(report):
        servers = fleet_rows(report, written_as)
        counts = count_verdicts([server.verdict for server in servers])
        ill = [
            (server.verdict, escape(server.instance), server.incidents or server.states, server.when)
            for server in (servers if verbose else merge_by_cause(report, servers, written_as))
            if server.verdict != "healthy"
        ]
        parts += [counts, table(("verdict", "server", "incidents", "when"), ill)] if ill else [f"{counts}\n"]
    for finding in words.detailed(report):
        parts += _finding(finding, report, verbose)

    footer = {
        "Source": [words.source(report, written_as)],
        "Compared with what is normal": words.normality(report)[:NORMAL],
        "Ceiling": words.ceilings(report),
        "Checked": words.checked(report, verbose),
        "Unknown": [*words.not_judged(report), *(words.undecided(report) if verbose else [])],
        "Not collected": words.not_collected(report),
        "Thresholds": list(report.contract),
        "Notes": words.notes(report),
    }
    parts += [_list(title, texts) for title, texts in footer.items() if texts]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Escape text for Markdown: it breaks no table, is no link, and mentions no user."""
    text = re.sub(_LINK, r"\\\g<0>", escaped(text).translate(SPECIAL))
    return re.sub(_MENTION, r"\g<0><!-- -->", text)


def code(text: str) -> str:
    """Return a span of code around one line that may contain backticks."""
    mark, space = _fence(text, 1), " " if "`" in text else ""
    return f"{mark}{space}{text}{space}{mark}"


def _fence(text: str, least: int) -> str:
    """Return more backticks than stand together in the text."""
    return "`" * max(least, *(len(run) + 1 for run in re.findall("`+", text)), 0)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown already."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def _finding(finding: Finding, report: Report, verbose: bool) -> list[str]:
    diagnosis = finding.diagnosis
    when = words.when(diagnosis, words.time_format(report))
    evidence = []
    for reading in (*diagnosis.symptoms, *diagnosis.supports):
        holds = {True: "yes", False: "no", None: "not measured"}[reading.holds]
        name = escape(reading.condition.signal.name)
        evidence.append((name, reading.shown, escape(reading.threshold), holds))
    fixes = []
    for proposal in finding.proposals:
        fix, change = proposal.fix, pasted(words.change(proposal))
        facts = {"Expected effect": fix.effect, "Trade-off": fix.risk, "Rollback": fix.rollback}
        sentences = [f"{name}: {text}." for name, text in facts.items() if text]
        texts = (proposal.text, *sentences, words.released(fix), words.needs(proposal))
        text = " ".join(escape(text) for text in texts if text)
        fixes.append(f"- {code(change)} {text}" if change else f"- {text}")
    relaunch = pasted(finding.relaunch or "")
    fence = _fence(relaunch, 3)
    parts = [
        f"## {escape(diagnosis.incident.title)}",
        f"{diagnosis.severity}, {escape(words.place(diagnosis.subject))}, {when}",
        table(("evidence", "value", "threshold", "holds"), evidence),
        _list("Log", words.quoted(finding)),
        _list("Ruled out", [": ".join(pair) for pair in words.ruled_out(diagnosis)]),
        _list("Not ruled out", [f"{look_alike.name}: {look_alike.distinguish}" for look_alike in diagnosis.open]),
        _list("Consequences", [follows.incident.id for follows in words.consequences(finding, report)]),
        "\n".join(["Fixes:", "", *fixes]) if fixes else "",
        _list("Fixes whose value needs more telemetry", words.uncomputed(finding)) if verbose else "",
        f"Relaunch:\n\n{fence}\n{relaunch}\n{fence}" if finding.relaunch else "",
    ]
    return [part for part in parts if part]


def _list(title: str, texts: Sequence[str]) -> str:
    return "\n".join([f"{title}:", "", *(f"- {escape(text)}" for text in texts)]) if texts else ""
