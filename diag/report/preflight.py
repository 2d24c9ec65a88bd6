"""`diag preflight` in print: plain text of at most 40 lines, Markdown for a change ticket, and JSON.

The JSON has the schema "diag.preflight/1" (diag.preflight.schema.json).
"""

from collections.abc import Iterator, Sequence

from diag.core.formatting import escaped, listed, plural
from diag.preflight.check import GROUPS, STATES, CheckResult, State
from diag.preflight.checks import STATUS, Preflight
from diag.report.documents import Document
from diag.report.layout import labelled, paragraph
from diag.report.markdown import table as markdown_table
from diag.report.sentences import grouped
from diag.report.spans import states

MOST_LINES = 40
LABEL = 14
_MARKS: dict[State, str] = {"fail": "FAIL", "warn": "WARN", "not checked": "not checked", "pass": "pass"}


def render(preflight: Preflight, *, verbose: bool = False) -> str:
    """Render as plain text, the worst first; without `verbose`, reasons and then the mildest findings are left out."""
    if verbose:
        return "\n".join(_lines(preflight, reasons=STATES, most=len(preflight.results), every=True)) + "\n"
    findings = len(preflight.of("fail")) + len(preflight.of("warn"))
    forms: list[tuple[tuple[State, ...], int]] = [(("fail", "warn"), findings), (("fail",), findings)]
    forms += [((), most) for most in range(findings, -1, -1)]
    drawn = (_lines(preflight, reasons=reasons, most=most) for reasons, most in forms)
    shortest = _lines(preflight, reasons=(), most=0)
    return "\n".join(next((lines for lines in drawn if len(lines) <= MOST_LINES), shortest)) + "\n"


def _lines(preflight: Preflight, *, reasons: Sequence[str], most: int, every: bool = False) -> list[str]:
    lines = paragraph(headline(preflight))
    findings = (*preflight.of("fail"), *preflight.of("warn"))
    for result in findings[:most]:
        lines += ["", *_block(result, with_reason=result.state in reasons)]
    if most < len(findings):
        lines += ["", f"and {plural(len(findings) - most, 'more finding')} (--verbose)"]
    lines.append("")
    if every:
        for result in (*preflight.of("not checked"), *preflight.of("pass")):
            lines += _block(result, with_reason=True)
    else:
        passed = []
        for group in GROUPS:
            messages = [result.message for result in preflight.of("pass") if result.group == group]
            more = f" and {len(messages) - 3} more" if len(messages) > 3 else ""
            passed += [f"{group}: {', '.join(messages[:3])}{more}"] if messages else []
        reasons_of = grouped((result.message, result.id) for result in preflight.of("not checked"))
        unchecked = [f"{listed(list(dict.fromkeys(ids)))}, because {why}" for why, ids in reasons_of.items()]
        lines += labelled("pass", passed, LABEL) + labelled("not checked", unchecked, LABEL)
        lines += labelled("ignored", [f"{id}: {reason}" for id, reason in preflight.ignored.items()], LABEL)
    return [
        *lines,
        *labelled("more", ["diag explain ID explains a check; [preflight.ignore] in diag.toml drops one"], LABEL),
    ]


def headline(preflight: Preflight) -> str:
    """Return the answer with the counts: "NO GO  Qwen/Qwen3-8B with vLLM 0.32.0: 1 fail, 2 warn, 20 pass"."""
    counts = (f"{len(preflight.of(state))} {state}" for state in STATES if preflight.of(state))
    subject = f"{preflight.target} with vLLM {preflight.version}"
    return f"{states('preflight')[preflight.answer]}  {subject}: {', '.join(counts)}"


def _block(result: CheckResult, *, with_reason: bool) -> Iterator[str]:
    margin = LABEL + 2
    start = f"{_MARKS[result.state]:<{margin}}"
    yield from paragraph(f"{result.group}: {result.message} [{result.id}]", start, " " * margin)
    yield from labelled("why", [result.why] if with_reason and result.why else [], LABEL)
    yield from labelled("do", [result.do] if result.do else [], LABEL)


def render_markdown(found: Preflight) -> str:
    """Render for a change ticket: the answer, and a table of every result, the worst first."""

    def cell(text: str) -> str:
        return escaped(text).replace("|", "\\|").replace("<", "&lt;")

    rows = [
        (_MARKS[result.state], result.group, f"`{result.id}`", cell(result.message), cell(result.do))
        for result in found.results
    ]
    ignored = [f"- `{id}` is ignored: {cell(reason)}" for id, reason in found.ignored.items()]
    head = f"# Preflight: {cell(headline(found))}"
    results = markdown_table(("result", "group", "check", "finding", "do"), rows)
    return "\n".join([head, "", results, *["", *ignored] * bool(ignored)]) + "\n"


DOCUMENT = Document("preflight", {"Preflight": {"exit_status": lambda found: STATUS[found.answer]}})
