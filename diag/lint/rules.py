"""All lint rules, their findings in a launch command, and the corrected command."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from diag.core.declarations import Mistake
from diag.lint import advice, conflicts, flags, host, memory, parallel, pods, removed, values, weights, words
from diag.lint.rule import SEVERITIES, LintFinding, LintRule, LintTarget
from diag.vllm.command.command import Command
from diag.vllm.flags.registry import release, versions

DECLARED: tuple[LintRule, ...] = (
    *flags.RULES,
    *removed.RULES,
    *words.RULES,
    *values.RULES,
    *words.MODEL_RULES,
    *conflicts.RULES,
    *parallel.RULES,
    *weights.ADAPTER_RULES,
    *weights.RULES,
    *flags.VARIABLE_RULES,
    *advice.RULES,
    *memory.RULES,
    *pods.CONTAINER_RULES,
    *host.RULES,
    *pods.RULES,
)
"""In the order in which findings of one severity are reported."""
RULES: Mapping[str, LintRule] = {rule.id: rule for rule in DECLARED}
"""All rules by id."""
for _module in (advice, conflicts, flags, host, memory, parallel, pods, removed, values, weights, words):
    for _rule in vars(_module).values():
        if isinstance(_rule, LintRule) and _rule.id not in RULES:
            raise Mistake(
                f"the rule {_rule.id} is in no RULES of {_module.__name__}: no command would be checked for it"
            )


def lint(target: LintTarget) -> tuple[LintFinding, ...]:
    """Return every finding in a command, errors first.

    The error of vLLM's own parser is a finding only if no rule found an error. The flags of a build that is not vLLM's
    own are not certain: an error about them is a warning.
    """
    findings = ordered(_soften(finding, target) for rule in RULES.values() for finding in rule.findings(target))
    refused = host.refused_by_the_parser.id
    explained = any(finding.severity == "error" and finding.rule != refused for finding in findings)
    return tuple(finding for finding in findings if not (explained and finding.rule == refused))


_OF_A_BUILD = {
    *(removed.removed_flag.id, flags.taken_for_another.id, values.not_a_choice.id),
    *(flags.unknown_flag.id, flags.flag_of_a_later_release.id, flags.ambiguous_flag.id),
}
"""Errors that another build of a release may not have."""


def _soften(finding: LintFinding, target: LintTarget) -> LintFinding:
    if finding.severity != "error":
        return finding
    if target.build and finding.rule in _OF_A_BUILD:
        why = f"{finding.why}; {target.build} is a build of its own, which may have other flags"
    else:
        return finding
    return replace(finding, severity="warning", why=why)


def of_assumed(
    findings: Iterable[LintFinding], older: Iterable[Iterable[LintFinding]], version: str
) -> tuple[LintFinding, ...]:
    """Make each error a warning that an older release does not have; `version` is assumed, `older` has its findings.

    An error of an older release is the same one if it is about the same flag, by the first word of its message.
    """
    subjects = [{finding.message.split()[0] for finding in found if finding.severity == "error"} for found in older]
    why = f". It is an error if the server runs {version}: the text names no release (--vllm-version sets it)"
    return ordered(
        replace(finding, severity="warning", why=finding.why + why)
        if finding.severity == "error" and not all(finding.message.split()[0] in found for found in subjects)
        else finding
        for finding in findings
    )


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
