"""Every lint rule, and what they find in a launch command for a release of vLLM."""

from collections.abc import Iterable, Mapping, Sequence

from diag.lint import (
    advice,
    flags,
    host,
    model_name,
    removed,
    scheduling_conflicts,
    setting_conflicts,
    values,
    variables,
    words,
)
from diag.lint.finding import SEVERITIES, Edit, LintFinding
from diag.lint.rule import LintRule
from diag.lint.target import LintTarget
from diag.vllm.command.command import Command
from diag.vllm.flags.registry import release, versions

MODULES = (
    flags,
    removed,
    words,
    values,
    model_name,
    scheduling_conflicts,
    setting_conflicts,
    variables,
    advice,
    host,
)
RULES: Mapping[str, LintRule] = {rule.id: rule for module in MODULES for rule in module.RULES}
"""By id."""


def lint(target: LintTarget) -> tuple[LintFinding, ...]:
    """Every finding in a command for a release, errors first.

    What vLLM's own parser refuses is a finding of its own only where no rule explains it.
    """
    findings = ordered(finding for rule in RULES.values() for finding in rule.findings(target))
    explained = any(finding.severity == "error" and finding.rule != host.REFUSED.id for finding in findings)
    return tuple(finding for finding in findings if not (explained and finding.rule == host.REFUSED.id))


def ordered(findings: Iterable[LintFinding]) -> tuple[LintFinding, ...]:
    """Errors first, then warnings, then infos; otherwise as they were found."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def corrected(command: Command, findings: Sequence[LintFinding]) -> tuple[str, ...]:
    """The command's words with every mechanical correction in them, those of errors and warnings.

    Of two edits of the same words the one that removes them counts, otherwise the first.
    """
    words: list[tuple[str, ...]] = [(word,) for word in command.words]
    taken: set[int] = set()
    added: dict[int, tuple[str, ...]] = {}
    for edit in _edits(findings):
        if not edit.words:
            added.setdefault(edit.words.start, edit.new)
        elif taken.isdisjoint(edit.words):
            taken |= {*edit.words}
            for at in edit.words:
                words[at] = edit.new if at == edit.words.start else ()
    return tuple(word for at, kept in enumerate([*words, ()]) for word in (*added.get(at, ()), *kept))


def _edits(findings: Sequence[LintFinding]) -> list[Edit]:
    edits = [edit for finding in findings if finding.severity != "info" for edit in finding.edits]
    return sorted(edits, key=lambda edit: bool(edit.new))


def is_known(version: str) -> bool:
    """Whether it is a release at all, and no older than the oldest that is known."""
    return bool(release(version)) and release(version) >= release(versions()[0])
