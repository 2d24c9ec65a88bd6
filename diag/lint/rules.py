"""All lint rules, their findings in a launch command, and the words of the corrected one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from diag.core.declarations import Mistake
from diag.lint import advice, conflicts, devices, flags, host, pods, removed, values, weights, words
from diag.lint.rule import SEVERITIES, LintFinding, LintRule, LintTarget, texts
from diag.vllm.command.command import Command
from diag.vllm.flags.registry import release, versions

_MODULES = (advice, conflicts, devices, flags, host, pods, removed, values, weights, words)
_CHECKED = {rule.id: rule for module in _MODULES for rule in vars(module).values() if isinstance(rule, LintRule)}
_CHECKED |= {rule.id: rule for rule in conflicts.CONFLICTS}
if _lacking := texts().keys() - _CHECKED:
    raise Mistake(f"the rule {min(_lacking)} of diag/lint/rules.toml has no check: no command would be checked for it")
RULES: Mapping[str, LintRule] = {id: _CHECKED[id] for id in texts()}
"""All rules by id, in the order in which findings of one severity are reported."""


def lint(target: LintTarget) -> tuple[LintFinding, ...]:
    """Return every finding in a command, errors first.

    The error of vLLM's own parser is a finding only if no rule found an error. The flags of a build that is not vLLM's
    own are not certain: an error about them is a warning.
    """
    matched = [finding for rule in RULES.values() for finding in rule.findings(target)]
    if target.build:
        why = f"; {target.build} is a build of its own, which may have other flags"
        matched = milder(matched, lambda each: RULES[each.rule].differs_by_build, why)
    findings = ordered(matched)
    refused = "refused_by_the_parser"
    explained = any(finding.severity == "error" and finding.rule != refused for finding in findings)
    return tuple(finding for finding in findings if not (explained and finding.rule == refused))


def milder(findings: Iterable[LintFinding], is_unsure: Callable[[LintFinding], bool], why: str) -> list[LintFinding]:
    """Make each error a warning, with the reason, that is not sure."""
    return [
        replace(each, severity="warning", why=each.why + why) if each.severity == "error" and is_unsure(each) else each
        for each in findings
    ]


def ordered(findings: Iterable[LintFinding]) -> tuple[LintFinding, ...]:
    """Sort findings by severity, errors first; findings of one severity keep their order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def corrected(command: Command, findings: Sequence[LintFinding]) -> tuple[str, ...]:
    """Return the words of the command with the mechanical corrections of all errors and warnings.

    If two edits concern the same words, one that removes them wins, otherwise the first.
    """
    edits = [edit for finding in findings if finding.severity != "info" for edit in finding.edits]
    words: list[tuple[str, ...]] = [(word,) for word in command.words]
    taken: set[int] = set()
    added: dict[int, tuple[str, ...]] = {}
    for edit in sorted(edits, key=lambda edit: bool(edit.new)):
        if not edit.words:
            added.setdefault(edit.words.start, edit.new)
        elif taken.isdisjoint(edit.words):
            taken |= {*edit.words}
            for at in edit.words:
                words[at] = edit.new if at == edit.words.start else ()
    return tuple(word for at, kept in enumerate([*words, ()]) for word in (*added.get(at, ()), *kept))


def is_known(version: str) -> bool:
    """Return True for a release that is not older than the oldest known one."""
    return bool(release(version)) and release(version) >= release(versions()[0])
