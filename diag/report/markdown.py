"""The report for a ticket or a chat, and as an issue of vLLM: GitHub-flavoured Markdown."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diag.core.formatting import escaped, moment, pasted, printable
from diag.diagnosis.proposals import Proposal
from diag.diagnosis.report import Finding, Report
from diag.report import coverage
from diag.report import sentences as words
from diag.report.answer import answers, choose_actions, count_verdicts, fleet_rows, merge_by_cause

NORMAL = 20
MOST_QUOTES = 10
SPECIAL = str.maketrans({char: f"\\{char}" for char in "\\`*_[]<>|#~&$!"})
_LINK = r"(?i)(?<=[A-Za-z]):(?=//)|(?<=www)\."
_MENTION = r"(?i)@(?=\w)|#(?=\d)|(?<=\bGH-)(?=\d)"
"""Text that GitHub turns into a link or a mention even if it is escaped."""


def render(report: Report, verbose: bool = False) -> str:
    """Render the report, one line break at its end; `verbose` names the incidents that are absent or unknown.

    A ticket is read on another day, so every time has its date.
    """
    parts = [f"**{escape(line)}**" for answer in answers(report, moment) for line in answer.lines]
    parts += map(escape, words.shared(report))
    if words.is_fleet(report):
        servers = fleet_rows(report)
        counts = count_verdicts([server.verdict for server in servers])
        ill = [
            (server.verdict, escape(server.instance), server.incidents or server.states, server.when)
            for server in (servers if verbose else merge_by_cause(report, servers, moment))
            if server.verdict != "healthy"
        ]
        parts += [counts, table(("verdict", "server", "incidents", "when"), ill)] if ill else [f"{counts}\n"]
    for finding in words.detailed(report):
        parts += _finding(finding, report, verbose)

    for call in report.roll_calls:
        parts.append(f"## Stacks of {escape(call.server)}\n\n{escape(words.roll_call(call))}")
        parts += [code(call.command)] if call.command else []
        rows = [tuple(map(escape, row)) for row in words.standing_rows(call)]
        parts += [table(("process", "within 2 s", "where it stands"), rows)] if rows else []

    footer = {
        "Source": [coverage.source(report, moment)],
        "Load at the end": coverage.vitals(report),
        "Compared with what is normal": coverage.normality(report)[:NORMAL],
        "GPU limits": words.ceilings(report),
        "Not shown": coverage.not_seen(report) if not report.observed.endings else [],
        "Checked": coverage.checked(report, verbose),
        "Unknown": [*coverage.not_judged(report), *(coverage.undecided(report) if verbose else [])],
        "Not collected": coverage.not_collected(report),
        "Thresholds": list(report.contract),
        "Notes": coverage.notes(report),
    }
    parts += [bullets(title, texts) for title, texts in footer.items() if texts]
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
    diagnosis, actions = finding.diagnosis, choose_actions(finding, report)
    evidence = []
    for reading in (*diagnosis.symptoms, *diagnosis.supports):
        holds = {True: "yes", False: "no", None: "not measured"}[reading.holds]
        name = escape(reading.condition.signal.name)
        evidence.append((name, reading.shown, escape(reading.threshold), holds))
    now = [*(f"- {escape(text)}" for text in actions.advice), *([_proposal(actions.now)] if actions.now else [])]
    relaunch = pasted(actions.relaunch)
    fence = _fence(relaunch, 3)
    parts = [
        f"## {escape(diagnosis.incident.title)}",
        f"{diagnosis.severity}, {escape(words.where(diagnosis))}, {words.when(diagnosis, moment)}",
        _lines("Next time" if actions.is_over else "Do now", now),
        _lines("Fix", [_proposal(actions.fix)] if actions.fix else []),
        f"Relaunch:\n\n{fence}\n{relaunch}\n{fence}" if relaunch else "",
        table(("evidence", "value", "threshold", "holds"), evidence),
        bullets("Log", words.quoted(finding)),
        bullets("Ruled out", [": ".join(pair) for pair in words.ruled_out_by_evidence(diagnosis, report)]),
        bullets("Not ruled out", [": ".join(pair) for pair in words.not_ruled_out(diagnosis, report)]),
        bullets("Consequences", [words.titled(follows.incident) for follows in words.consequences(finding, report)]),
        _lines("Alternatives", [_proposal(proposal) for proposal in actions.alternatives]),
        bullets("Fixes whose value needs more telemetry", words.uncomputed(finding)) if verbose else "",
        bullets("Do not", actions.do_not),
    ]
    return [part for part in parts if part]


def _proposal(proposal: Proposal) -> str:
    """Return an item of a list: the change as code, what it is for, effect, trade-off, rollback."""
    fix, change = proposal.fix, pasted(words.change(proposal))
    texts = (proposal.text, *words.effects(fix).values(), words.released(fix), words.needs(proposal))
    text = " ".join(escape(text) for text in texts if text)
    return f"- {code(change)} {text}" if change else f"- {text}"


def bullets(title: str, texts: Sequence[str]) -> str:
    """Return sentences as a list below a title, "" if there are none."""
    return _lines(title, [f"- {escape(text)}" for text in texts])


def _lines(title: str, items: Sequence[str]) -> str:
    """Return items of Markdown below a title, "" if there are none."""
    return "\n".join([f"{title}:", "", *items]) if items else ""


# -- an issue


def render_issue(report: Report, host: Mapping[str, Any], launch: str) -> str:
    """Render the report in the form that vLLM's template for bugs asks for (400-bug-report.yml).

    Environment, what happens, the launch, the log's lines, and issues that match.
    """
    environment = [printable(f"{name}: {value}") for name, value in host.items() if value]
    environment += [printable(line) for line in coverage.servers(report)]
    quotes = [printable(quote.text) for finding in report.present for quote in finding.quotes][:MOST_QUOTES]
    matching = dict.fromkeys(
        f"- {finding.failure.source}: {escape(finding.failure.means)}"
        for finding in report.present
        if finding.failure and "/issues/" in finding.failure.source
    )
    happens = [f"- {escape(line)}" for answer in answers(report, moment) for line in (*answer.lines, *answer.evidence)]
    parts = [
        "### Your current environment",
        _block("text", environment),
        "### 🐛 Describe the bug",
        "\n".join(happens),
        *(["The launch command:", _block("sh", [pasted(launch)])] if launch else []),
        *(["The log:", _block("text", quotes)] if quotes else []),
        *(
            part
            for call in report.roll_calls
            if not call.unread
            for part in (
                f"Where the processes stand: {escape(words.roll_call(call))}",
                _block("text", [printable("  ".join(row)) for row in words.standing_rows(call)]),
            )
        ),
        *(["Known issues that match:", "\n".join(matching)] if matching else []),
        "### Before submitting a new issue...",
        "- [ ] Make sure you already searched for relevant issues, and asked the chatbot living at the bottom right"
        " corner of the documentation page, which can answer lots of frequently asked questions.",
    ]
    return "\n\n".join(parts) + "\n"


def _block(language: str, lines: list[str]) -> str:
    fence = "`" * max(3, *(line.count("`") + 1 for line in lines), 3)
    return "\n".join([f"{fence}{language}", *lines, fence])
