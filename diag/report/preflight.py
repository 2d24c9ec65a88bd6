"""`diag preflight` in print: plain text of at most 40 lines, Markdown for a change ticket, and JSON.

The JSON has the schema "diag.preflight/1" (diag.preflight.schema.json).
"""

import json
from collections.abc import Iterator, Sequence

from diag import __version__
from diag.core.formatting import escaped, listed, plural
from diag.preflight.check import GROUPS, STATES, CheckResult, State
from diag.preflight.checks import STATUS, Answer, Preflight
from diag.report.layout import labelled, paragraph

SCHEMA = "diag.preflight/1"
MOST_LINES = 40
LABEL = 14
_HEADLINES: dict[Answer, str] = {
    "go": "GO",
    "warnings": "GO, WITH WARNINGS",
    "no go": "NO GO",
    "cannot tell": "CANNOT TELL",
}
_MARKS: dict[State, str] = {"fail": "FAIL", "warn": "WARN", "not checked": "not checked", "pass": "pass"}


def render(found: Preflight, *, verbose: bool = False) -> str:
    """Render as plain text, the worst first; without `verbose`, reasons and then the mildest findings are left out."""
    if verbose:
        return "\n".join(_lines(found, reasons=STATES, most=len(found.results), every=True)) + "\n"
    findings = len(found.of("fail")) + len(found.of("warn"))
    forms: list[tuple[tuple[State, ...], int]] = [(("fail", "warn"), findings), (("fail",), findings)]
    forms += [((), most) for most in range(findings, -1, -1)]
    shown = (_lines(found, reasons=reasons, most=most) for reasons, most in forms)
    return (
        "\n".join(next((lines for lines in shown if len(lines) <= MOST_LINES), _lines(found, reasons=(), most=0)))
        + "\n"
    )


def _lines(found: Preflight, *, reasons: Sequence[str], most: int, every: bool = False) -> list[str]:
    lines = paragraph(headline(found))
    findings = (*found.of("fail"), *found.of("warn"))
    for result in findings[:most]:
        lines += ["", *_block(result, with_reason=result.state in reasons)]
    if most < len(findings):
        lines += ["", f"and {plural(len(findings) - most, 'more finding')} (--verbose)"]
    lines.append("")
    if every:
        for result in (*found.of("not checked"), *found.of("pass")):
            lines += _block(result, with_reason=True)
    else:
        lines += [line for label, texts in _folded(found) for line in labelled(label, texts, LABEL)]
    return [
        *lines,
        *labelled("more", ["diag explain ID explains a check; [preflight.ignore] in diag.toml drops one"], LABEL),
    ]


def headline(found: Preflight) -> str:
    """Return the answer with the counts: "NO GO  Qwen/Qwen3-8B with vLLM 0.32.0: 1 fail, 2 warn, 20 pass"."""
    counts = (f"{len(found.of(state))} {state}" for state in STATES if found.of(state))
    return f"{_HEADLINES[found.answer]}  {found.target} with vLLM {found.version}: {', '.join(counts)}"


def _block(result: CheckResult, *, with_reason: bool) -> Iterator[str]:
    margin = LABEL + 2
    start = f"{_MARKS[result.state]:<{margin}}"
    yield from paragraph(f"{result.group}: {result.message} [{result.id}]", start, " " * margin)
    yield from labelled("why", [result.why] if with_reason and result.why else [], LABEL)
    yield from labelled("do", [result.do] if result.do else [], LABEL)


def _folded(found: Preflight) -> Iterator[tuple[str, list[str]]]:
    """Yield the checks without a finding in a line for each group: what passed, and why something was not checked."""
    passed = []
    for group in GROUPS:
        messages = [result.message for result in found.of("pass") if result.group == group]
        more = f" and {len(messages) - 3} more" if len(messages) > 3 else ""
        passed += [f"{group}: {', '.join(messages[:3])}{more}"] if messages else []
    yield "pass", passed
    reasons: dict[str, list[str]] = {}
    for result in found.of("not checked"):
        reasons.setdefault(result.message, []).append(result.id)
    yield "not checked", [f"{listed(list(dict.fromkeys(ids)))}, because {reason}" for reason, ids in reasons.items()]
    yield "ignored", [f"{id}: {reason}" for id, reason in found.ignored.items()]


def render_markdown(found: Preflight) -> str:
    """Render for a change ticket: the answer, and a table of every result, the worst first."""
    rows = [
        f"| {_MARKS[each.state]} | {each.group} | `{each.id}` | {_cell(each.message)} | {_cell(each.do)} |"
        for each in found.results
    ]
    ignored = [f"- `{id}` is ignored: {_cell(reason)}" for id, reason in found.ignored.items()]
    head = [
        "# Preflight: " + _cell(headline(found)),
        "",
        "| result | group | check | finding | do |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, *["", *ignored] * bool(ignored)]) + "\n"


def _cell(text: str) -> str:
    return escaped(text).replace("|", "\\|").replace("<", "&lt;")


def render_json(found: Preflight) -> str:
    document = {
        "schema": SCHEMA,
        "diag": __version__,
        "target": found.target,
        "vllm": found.version,
        "answer": found.answer,
        "exit_status": STATUS[found.answer],
        "results": [
            {
                "id": each.id,
                "group": each.group,
                "state": each.state,
                "message": each.message,
                "why": each.why,
                "do": each.do or None,
            }
            for each in found.results
        ],
        "ignored": dict(found.ignored),
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
