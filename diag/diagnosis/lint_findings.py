"""What `diag lint` makes of the command of a server that did not start, as proposals."""

import re
import shlex
from collections.abc import Sequence

from diag.core.errors import BadUsage
from diag.core.incident import Fix, documented
from diag.core.lazy_regex import lazy
from diag.diagnosis.launch_values import command_in
from diag.diagnosis.proposals import FlagChange, Proposal, Running
from diag.diagnosis.quotes import Quote
from diag.lint.rule import LintFinding
from diag.lint.rules import lint
from diag.lint.target import LintTarget
from diag.vllm.command.command import Command
from diag.vllm.command.parse import parse
from diag.vllm.command.secrets import hidden
from diag.vllm.flags.registry import versions

MOST = 3
_UNRECOGNIZED = lazy(r".*error: unrecognized arguments: (.*)", re.DOTALL)


def lint_findings(running: Running, quotes: Sequence[Quote]) -> tuple[Proposal, ...]:
    """What keeps the command from starting; of a command that is not known, what the quoted line repeats of it.

    A single flag to remove is a change that the relaunch line can carry.
    """
    command = command_in(running.launch) or _refused(quotes)
    if command is None:
        return ()
    target = LintTarget(command, running.version or versions()[-1])
    errors = [finding for finding in lint(target) if finding.severity == "error"]
    return tuple(_proposal(finding, command, len(errors) == 1) for finding in errors[:MOST])


def _refused(quotes: Sequence[Quote]) -> Command | None:
    """The arguments that vLLM's parser did not know, as a command."""
    words = next((found[1].split() for quote in quotes if (found := _UNRECOGNIZED.match(quote.text))), [])
    try:
        return parse(shlex.join(["vllm", "serve", "MODEL", *words])) if words else None
    except BadUsage:
        return None


def _proposal(finding: LintFinding, command: Command, alone: bool) -> Proposal:
    change = _removal(finding, command) if alone else ()
    text = hidden(f"diag lint says {finding.message}. {finding.fix}.")
    fix = Fix(
        flag=change[0].name if change else "",
        change=text,
        effect="vLLM accepts the command",
        why=documented(hidden(finding.why), f"diag explain {finding.rule}"),
    )
    before = change[0].before if change else None
    return Proposal(fix, before, None, (), computed=False, name=fix.name, text=text, changes=change)


def _removal(finding: LintFinding, command: Command) -> tuple[FlagChange, ...]:
    """The flag that the finding's one edit takes out; nothing where it does anything else."""
    gone = [edit.words for edit in finding.edits if not edit.new]
    flags = [given for given in command.given if [given.words] == gone]
    return tuple(FlagChange(given.name, hidden(" ".join(given.values)) or None, None) for given in flags)
