"""The reference of the lint rules, and the page of each: `diag explain RULE` prints it."""

import re
from collections.abc import Iterator

from diag.artefacts.names import GENERATED_MARK
from diag.lint.rule import LintFinding, LintRule
from diag.lint.rules import RULES
from diag.lint.target import LintTarget
from diag.report.lint import finding_lines
from diag.vllm.command.parse import read

_FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*(?:=\w+)?")
_MEANING = {
    "error": "vLLM does not start with it",
    "warning": "vLLM starts, and something has no effect or does harm",
    "info": "worth considering",
}


def page(rule: LintRule) -> str:
    """What a rule finds, why it matters, an example, the fix and how to ignore it, as Markdown."""
    return f"""# {rule.id}: {_marked(rule.title)}

Severity: {rule.severity} ({_MEANING[rule.severity]}).

## What it finds

{_sentence(rule.finds)}

## Why it matters

{_sentence(rule.why)}

## Example

{_example(rule)}

## How to fix it

{_sentence(rule.fix)}

## How to ignore it

`diag lint --ignore {rule.id}`, or for every run in `diag.toml`:

```toml
[lint]
ignore = ["{rule.id}"]
```
"""


def _example(rule: LintRule) -> str:
    """The command, and what `diag lint` prints of it where the command alone is enough."""
    example = rule.example
    lines = "\n".join(line.rstrip() for finding in _found(rule) for line in finding_lines(finding))
    result = f"\n\n```text\n{lines}\n```" if lines else ""
    where = f", where {example.requires}" if example.requires else ""
    return f"With vLLM {example.version}{where}:\n\n```sh\n{example.command}\n```{result}"


def _found(rule: LintRule) -> Iterator[LintFinding]:
    if not rule.example.requires:
        version = rule.example.version
        yield from rule.findings(LintTarget(read(rule.example.command, version=version), version))


def reference() -> str:
    """docs/lint-rules.md: a table of all rules, and the page of each."""
    rows = "\n".join(
        f"| [{rule.id}](#{rule.id}) | {rule.severity} | {_marked(rule.title)} |" for rule in RULES.values()
    )
    pages = "\n".join(_section(rule) for rule in RULES.values())
    return f"""<!-- {GENERATED_MARK} -->

# Lint rules

`diag lint` checks the command that launches vLLM against these {len(RULES)} rules. An error: {_MEANING["error"]}. A
warning: {_MEANING["warning"]}. An info: {_MEANING["info"]}.

| rule | severity | finds |
|---|---|---|
{rows}

{pages}"""


def _section(rule: LintRule) -> str:
    """The page of a rule one level deeper, under its id alone: what the links of the table name."""
    text = page(rule).replace("\n## ", "\n**").splitlines()
    body = [f"{line}**" if line.startswith("**") else line for line in text[1:]]
    return "\n".join([f"## {rule.id}", *body]) + "\n"


def _sentence(text: str) -> str:
    return _marked(text if text.endswith(".") else f"{text}.")


def _marked(text: str) -> str:
    """Markdown with each flag as code: elsewhere two dashes become one."""
    parts = text.split("`")
    return "`".join(part if at % 2 else _FLAG.sub(r"`\g<0>`", part) for at, part in enumerate(parts))
