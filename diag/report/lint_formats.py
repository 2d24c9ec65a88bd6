"""`diag lint` for a repository's CI: SARIF 2.1.0, annotations of GitHub Actions, JUnit XML, Markdown."""

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import PurePath
from urllib.parse import quote

from markupsafe import Markup

from diag import __version__
from diag.core.contract import PUBLISHED
from diag.core.formatting import escaped, plural
from diag.lint.rule import LintResult
from diag.lint.rules import RULES
from diag.report.documents import json_text
from diag.report.markdown import escape, table
from diag.report.settings import LINT, place, render_lint


def _drawn(form: str, result: LintResult) -> str:
    """Draw the template of a format: lint.FORMAT.j2."""
    from diag.report.templates import environment  # loads jinja2

    found = [(report, finding) for report in result.launches for finding in report.findings]
    rules = sorted({finding.rule for _, finding in found})
    return (
        environment()
        .get_template(f"lint.{form}.j2")
        .render(
            result=result,
            found=found,
            rules=[RULES[rule] for rule in rules],
            rule_ids=rules,
            version=__version__,
            site=PUBLISHED.partition("generated/")[0],
            levels={"error": "error", "warning": "warning", "info": "note"},
            commands={"error": "error", "warning": "warning", "info": "notice"},
            place=place,
            text=lambda finding: escaped(". ".join(filter(None, (finding.message, finding.why, finding.fix)))),
            line=lambda report, finding: finding.line or report.line or 1,
            uri=lambda file: quote(PurePath(file).as_posix()),
            fingerprint=lambda report, finding: sha256(  # it stays when lines move
                "\0".join((report.file, report.place, finding.rule, finding.message)).encode()
            ).hexdigest(),
            message=_message,
            property=lambda text: Markup(_message(text).replace(":", "%3A").replace(",", "%2C")),
        )
    )


def _message(text: str) -> Markup:
    """Quote the text of a workflow command of GitHub Actions, which is no HTML."""
    return Markup(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _markdown(result: LintResult) -> str:
    rows: list[tuple[str, ...]] = [
        (finding.severity, place(report) or report.model, finding.message, finding.fix, finding.rule)
        for report in result.launches
        for finding in report.findings
    ]
    rows += [("not read", name, why, "", "") for name, why in result.unread.items()]
    counted = f"{plural(len(result.launches), 'server')} in {plural(result.files, 'file')}"
    head = ("level", "where", "finding", "fix", "rule")
    body = table(head, [[*map(escape, row)] for row in rows]) if rows else "Nothing found."
    return f"**diag lint**: {escape(counted)}\n\n{body}\n"


FORMATS: Mapping[str, Callable[[LintResult], str]] = {
    "text": render_lint,
    "json": LINT.text,
    "sarif": lambda result: json_text(json.loads(_drawn("sarif", result))),
    "github": lambda result: _drawn("github", result),
    "junit": lambda result: _drawn("junit", result),
    "markdown": _markdown,
}
"""The writer of each value of --format."""
