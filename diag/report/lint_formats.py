"""`diag lint` for a repository's CI: SARIF 2.1.0, annotations of GitHub Actions, JUnit XML, Markdown."""

from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import PurePath
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape as xml
from xml.sax.saxutils import quoteattr

from diag import __version__
from diag.core.contract import PUBLISHED
from diag.core.formatting import escaped, plural
from diag.lint.rule import LintFinding, LintReport, LintResult
from diag.lint.rules import RULES
from diag.report.documents import json_text
from diag.report.markdown import escape, table
from diag.report.settings import LINT, place, render_lint

_SITE = PUBLISHED.partition("generated/")[0]
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
"""Levels of SARIF."""
_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}
"""Workflow commands of GitHub Actions."""


def _found(result: LintResult) -> Iterator[tuple[LintReport, LintFinding]]:
    return ((report, finding) for report in result.launches for finding in report.findings)


def _line(report: LintReport, finding: LintFinding) -> int:
    return finding.line or report.line or 1


def _text(finding: LintFinding) -> str:
    return escaped(". ".join(filter(None, (finding.message, finding.why, finding.fix))))


def _sarif(result: LintResult) -> str:
    rules = sorted({finding.rule for _, finding in _found(result)})
    run = {
        "tool": {
            "driver": {
                **{"name": "diag lint", "version": __version__, "informationUri": _SITE},
                "rules": [_rule(id) for id in rules],
            }
        },
        "invocations": [
            {
                "executionSuccessful": True,
                "toolExecutionNotifications": [
                    {"level": "warning", "message": {"text": f"not read: {why}"}, "locations": [_location(name)]}
                    for name, why in result.unread.items()
                ],
            }
        ],
        "results": [_result(report, finding, rules) for report, finding in _found(result)],
    }
    schema = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
    return json_text({"$schema": schema, "version": "2.1.0", "runs": [run]})


def _rule(id: str) -> dict[str, Any]:
    rule = RULES[id]
    return {
        "id": id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.finds},
        "help": {"text": f"{rule.why}. {rule.fix}"},
        "helpUri": f"{_SITE}lint-rules/{rule.topic}.html#{id}",
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _location(file: str, line: int = 1) -> dict[str, Any]:
    place = {"artifactLocation": {"uri": quote(PurePath(file).as_posix())}, "region": {"startLine": line}}
    return {"physicalLocation": place}


def _result(report: LintReport, finding: LintFinding, rules: list[str]) -> dict[str, Any]:
    # the same finding keeps its name when lines move
    name = "\0".join((report.file, report.place, finding.rule, finding.message))
    return {
        **{"ruleId": finding.rule, "ruleIndex": rules.index(finding.rule), "level": _LEVELS[finding.severity]},
        "message": {"text": _text(finding)},
        "locations": [_location(report.file, _line(report, finding))] if report.file else [],
        "partialFingerprints": {"diagLint/v1": sha256(name.encode()).hexdigest()},
    }


def _github(result: LintResult) -> str:
    """Write a workflow command for each finding, which GitHub shows beside its line."""
    lines = [
        (_COMMANDS[finding.severity], report.file, _line(report, finding), finding.rule, _text(finding))
        for report, finding in _found(result)
    ]
    lines += [("warning", name, 1, "not read", why) for name, why in result.unread.items()]
    return "".join(
        f"::{level}{f' file={_property(file)},line={line},' if file else ' '}title={_property(f'diag: {title}')}"
        f"::{_message(text)}\n"
        for level, file, line, title, text in lines
    )


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def _quoted(text: str) -> str:
    return quoteattr(escaped(text))


def _junit(result: LintResult) -> str:
    """Write a test case for each server: it fails for its errors, warnings are its output."""
    cases = []
    for report in result.launches:
        failed = [finding for finding in report.findings if finding.severity == "error"]
        others = [f"{finding.severity}: {_text(finding)}" for finding in report.findings if finding not in failed]
        parts = [
            f"<failure type={_quoted(finding.rule)} message={_quoted(finding.message)}>{xml(_text(finding))}</failure>"
            for finding in failed
        ]
        parts += [f"<system-out>{xml(chr(10).join(others))}</system-out>"] if others else []
        cases.append((place(report) or report.model or "a server", report.file, "".join(parts)))
    for name, why in result.unread.items():
        cases.append((name, name, f'<error type="not read" message={_quoted(why)}/>'))
    counts = [sum(mark in parts for _, _, parts in cases) for mark in ("<failure", "<error ")]
    head = f'<testsuite name="diag lint" tests="{len(cases)}" failures="{counts[0]}" errors="{counts[1]}">'
    rows = (
        f"<testcase name={_quoted(name)} classname={_quoted(file or 'command')}>{parts}</testcase>\n"
        for name, file, parts in cases
    )
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>{head}\n{"".join(rows)}</testsuite></testsuites>\n'


def _markdown(result: LintResult) -> str:
    rows = [
        tuple(
            map(escape, (finding.severity, place(report) or report.model, finding.message, finding.fix, finding.rule))
        )
        for report, finding in _found(result)
    ]
    rows += [tuple(map(escape, ("not read", name, why, "", ""))) for name, why in result.unread.items()]
    counted = f"{plural(len(result.launches), 'server')} in {plural(result.files, 'file')}"
    body = table(("level", "where", "finding", "fix", "rule"), rows) if rows else "Nothing found."
    return f"**diag lint**: {escape(counted)}\n\n{body}\n"


FORMATS: Mapping[str, Callable[[LintResult], str]] = {
    "text": render_lint,
    "json": LINT.text,
    "sarif": _sarif,
    "github": _github,
    "junit": _junit,
    "markdown": _markdown,
}
"""The writer of each value of --format."""
