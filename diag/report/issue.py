"""The report as an issue in the form that vLLM's template for bugs asks for (400-bug-report.yml)."""

from collections.abc import Mapping
from typing import Any

from diag.core.formatting import moment, pasted, printable
from diag.diagnosis.report import Report
from diag.report import coverage
from diag.report import sentences as words
from diag.report.answer import answers
from diag.report.markdown import escape

MOST_QUOTES = 10


def render(report: Report, host: Mapping[str, Any], launch: str) -> str:
    """Return the text in Markdown: environment, what happens, the launch, the log's lines, and issues that match."""
    environment = [printable(f"{name}: {value}") for name, value in host.items() if value]
    environment += [printable(line) for line in coverage.servers(report)]
    quotes = [printable(quote.text) for finding in report.present for quote in finding.quotes][:MOST_QUOTES]
    known = dict.fromkeys(
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
        *(["Known issues that match:", "\n".join(known)] if known else []),
        "### Before submitting a new issue...",
        "- [ ] Make sure you already searched for relevant issues, and asked the chatbot living at the bottom right"
        " corner of the documentation page, which can answer lots of frequently asked questions.",
    ]
    return "\n\n".join(parts) + "\n"


def _block(language: str, lines: list[str]) -> str:
    fence = "`" * max(3, *(line.count("`") + 1 for line in lines), 3)
    return "\n".join([f"{fence}{language}", *lines, fence])
