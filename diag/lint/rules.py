"""What is wrong with a launch command for a release of vLLM, found before it is rolled out."""

from collections.abc import Iterable, Sequence

from diag.lint import advice, spelling, values
from diag.lint import conflicts as contradictions
from diag.lint.finding import Edit, LintFinding, Rule
from diag.vllm.command.parse import Command
from diag.vllm.flags.registry import release, versions

RULES: tuple[Rule, ...] = (
    spelling.unknown,
    spelling.absent,
    spelling.abbreviated,
    spelling.switches,
    spelling.strays,
    values.missing,
    values.wrong,
    values.executor,
    values.compilation,
    values.model,
    values.repeated_entry,
    contradictions.contradictions,
    advice.engine,
    spelling.variables,
    spelling.idle,
    values.repeated,
    values.dropped,
    advice.blind,
    advice.pool,
    advice.full,
    advice.graphs,
    advice.context,
    advice.caching,
    advice.eager,
    advice.parallel,
)
_ORDER = ("error", "warning", "info")


def lint(command: Command, version: str) -> tuple[LintFinding, ...]:
    """Every finding of a command for a release such as 0.32.0, errors first."""
    return ordered(finding for rule in RULES for finding in rule(command, version))


def ordered(findings: Iterable[LintFinding]) -> tuple[LintFinding, ...]:
    """Errors first, then warnings, then infos; otherwise as they were found."""
    return tuple(sorted(findings, key=lambda each: _ORDER.index(each.severity)))


def corrected(command: Command, findings: Sequence[LintFinding]) -> tuple[str, ...]:
    """The command's words with every mechanical correction in them, those of errors and warnings.

    Of two edits of the same words the one that takes them away counts, otherwise the first.
    """
    words: list[tuple[str, ...]] = [(each,) for each in command.words]
    taken: set[int] = set()
    added: dict[int, tuple[str, ...]] = {}
    for edit in _edits(findings):
        if not edit.words:
            added.setdefault(edit.words.start, edit.new)
        elif taken.isdisjoint(edit.words):
            taken |= {*edit.words}
            for at in edit.words:
                words[at] = edit.new if at == edit.words.start else ()
    return tuple(word for at, each in enumerate([*words, ()]) for word in (*added.get(at, ()), *each))


def _edits(findings: Sequence[LintFinding]) -> list[Edit]:
    edits = [edit for each in findings if each.severity != "info" for edit in each.edits]
    return sorted(edits, key=lambda edit: bool(edit.new))


def is_known(version: str) -> bool:
    """Whether it is a release at all, and no older than the oldest that is known."""
    return bool(release(version)) and release(version) >= release(versions()[0])
