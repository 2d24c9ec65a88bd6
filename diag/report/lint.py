"""The findings of `diag lint` as plain text of at most 100 columns and as JSON.

Its schema, "diag.lint/2", is held by diag.lint.schema.json beside this file.
"""

import json
from collections.abc import Iterator
from typing import Any

from diag import __version__
from diag.core.formatting import plural
from diag.lint.rule import SEVERITIES, LintFinding, LintReport
from diag.report.layout import labelled, paragraph, verbatim

SCHEMA = "diag.lint/2"
LABEL = 13
PARTLY = 18


def text(report: LintReport) -> str:
    """The report for a terminal."""
    lines = paragraph(_head(report))
    for finding in report.findings:
        lines += ["", *finding_lines(finding)]
    if report.corrected and report.errors_left:
        left = plural(report.errors_left, "error is", "errors are")
        lines += ["", *labelled("partly corrected", [f"{left} left"], PARTLY), *verbatim("", report.corrected, LABEL)]
    elif report.corrected:
        lines += ["", *verbatim("corrected", report.corrected, LABEL)]
    notes = [line for label, texts in _notes(report).items() for line in labelled(label, texts, LABEL)]
    return "\n".join([*lines, *[""] * bool(notes), *notes]) + "\n"


def _head(report: LintReport) -> str:
    severities = [finding.severity for finding in report.findings]
    counts = [plural(severities.count(name), name) for name in SEVERITIES if name in severities]
    name = report.model or "a server"
    return f"{name} with vLLM {report.version} ({report.version_source}): {', '.join(counts) or 'nothing found'}"


def finding_lines(finding: LintFinding) -> Iterator[str]:
    """A finding with its rule's id behind the message."""
    margin = LABEL + 2
    yield from paragraph(f"{finding.message} [{finding.rule}]", f"{finding.severity.upper():<{margin}}", " " * margin)
    yield from labelled("why", [finding.why], LABEL)
    yield from labelled("fix", [finding.fix], LABEL)


def _notes(report: LintReport) -> dict[str, list[str]]:
    notes: dict[str, list[str]] = {}
    if report.parser_error is not None:
        answer = f"refuses it: {report.parser_error}" if report.parser_error else "accepts the command"
        notes["parser"] = [f"that of the installed vLLM {report.version} {answer}"]
    notes["not checked"] = list(report.not_checked)
    if report.ignored:
        notes["ignored"] = [f"{plural(len(report.ignored), 'finding')} ({', '.join(dict.fromkeys(report.ignored))})"]
    if report.findings:
        notes["more"] = ["diag explain RULE explains a finding, diag lint --ignore RULE drops it"]
    return notes


def render(report: LintReport) -> str:
    """The report as indented JSON, one line break at its end."""
    return json.dumps(document(report), indent=1, ensure_ascii=False) + "\n"


def document(report: LintReport) -> dict[str, Any]:
    """The report as plain values; `corrected_command` is null where nothing can be corrected mechanically."""
    return {
        "schema": SCHEMA,
        "diag": __version__,
        "vllm_version": report.version,
        "vllm_version_source": report.version_source,
        "model": report.model,
        "exit_status": report.status,
        "findings": [
            {
                "rule": finding.rule,
                "severity": finding.severity,
                "message": finding.message,
                "why": finding.why,
                "fix": finding.fix,
                "corrected": bool(finding.edits) and finding.severity != "info",
            }
            for finding in report.findings
        ],
        "ignored": {rule: report.ignored.count(rule) for rule in report.ignored},
        "corrected_command": report.corrected or None,
        "errors_left": report.errors_left,
        "parser_error": report.parser_error,
        "not_checked": list(report.not_checked),
    }
