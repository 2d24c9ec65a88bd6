"""The report for a ticket or a chat, and as an issue of vLLM: GitHub-flavoured Markdown."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diag.core.formatting import escaped, moment, pasted, printable
from diag.diagnosis.report import Report
from diag.report import coverage
from diag.report import sentences as words
from diag.report.answer import answers, count_verdicts, fleet_rows, merge_by_cause
from diag.report.spans import ReportPart, joined, spans
from diag.report.tree import finding_parts, head_parts, report_parts

MOST_QUOTES = 10
EVIDENCE_HEAD = ("value", "threshold", "history")
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
            (server.verdict, escape(server.instance), server.found, server.when)
            for server in (servers if verbose else merge_by_cause(report, servers, moment))
            if server.verdict != "healthy"
        ]
        parts += [counts, table(("verdict", "server", "incidents", "when"), ill)] if ill else [f"{counts}\n"]
    parts += drawn(head_parts(report).values())
    for finding in words.detailed(report):
        diagnosis = finding.diagnosis
        parts.append(f"## {escape(diagnosis.incident.title)}")
        parts.append(f"{diagnosis.severity}, {escape(words.where(diagnosis))}")
        about = finding_parts(finding, report, moment)
        parts += drawn(part for name, part in about.items() if verbose or name != "not_computed")

    for call in report.roll_calls:
        parts.append(f"## Stacks of {escape(call.server)}\n\n{escape(words.roll_call(call))}")
        parts += [code(call.command)] if call.command else []
        rows = [tuple(map(escape, row)) for row in words.standing_rows(call)]
        parts += [table(("process", "within 2 s", "where it stands"), rows)] if rows else []

    parts += drawn(report_parts(report, moment, verbose=verbose).values())
    return "\n\n".join(parts) + "\n"


def drawn(parts: Iterable[ReportPart]) -> list[str]:
    """Draw parts as tables, lists and a command in a block of its own."""
    blocks = []
    for part in parts:
        title = f"{part.label[:1].upper()}{part.label[1:]}:"
        if part.rows:
            head = [escape(name) for name in part.head or (part.label.lower(), *EVIDENCE_HEAD)]
            blocks.append(table(head, [[escape(cell) for cell in row] for row in part.rows]))
        elif part.name == "relaunch":
            blocks += [title, _block("", [pasted(joined(text)) for text in part.texts])]
        elif part.texts or part.parts:
            runs = map(spans, (*part.texts, *(inside.whole for inside in part.parts)))
            items = [
                "".join(code(pasted(run)) if role == "command" else escape(run) for run, role in text) for text in runs
            ]
            listed = "\n".join([title, "", *(f"- {item}" for item in items)])
            blocks.append(listed if items[1:] or part.parts else f"{title} {items[0]}")
    return blocks


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
    fence = _fence("\n".join(lines), 3)
    return "\n".join([f"{fence}{language}", *lines, fence])
