"""The command that started a server, with one proposal in it as a line to paste, and the errors that `diag lint` finds.

Secrets are hidden in both.
"""

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from diag.core.incident import Fix, documented
from diag.diagnosis.diagnose import Quote
from diag.diagnosis.proposals import FlagChange, Proposal, Running, command_in, written
from diag.vllm.command.command import Command, json_object
from diag.vllm.command.free_text import hidden
from diag.vllm.command.shown import shown
from diag.vllm.flags.registry import versions

if TYPE_CHECKING:
    from diag.lint.rule import Edit as LintEdit

Edit = tuple[range, list[str]]
"""Words of the command and their replacement; an empty range is a place to insert at."""
CONTAINERS = {"docker", "podman", "nerdctl"}
ELSEWHERE = {"sudo", "kubectl", "ssh"}
"""Programs that do not pass on the environment."""
MOST_ERRORS = 3
"""Lint errors that become proposals."""


def relaunch(launch: str, proposals: Iterable[Proposal]) -> str | None:
    """Return the launch command with the first complete proposal of flags or a variable in it; None if there is none.

    None also if the text starts another server too, or the change finds nothing to change.
    """
    chosen, command = launchable(proposals), command_in(shown(launch))
    if command is None or chosen is None or (started := command_in(launch)) is None or started.more:
        return None
    words = [*command.words]
    edits = [
        _edit_flag(change, command) if change.name.startswith("-") else _edit_variable(change, command)
        for change in chosen.changes
    ]
    if not all(edits):
        return None
    flat = [edit for of_change in edits for edit in of_change]
    for at, new in sorted(flat, key=lambda edit: (edit[0].start, edit[0].stop), reverse=True):  # keeps earlier places
        words[at.start : at.stop] = new
    return command._replace(words=tuple(words)).written()


def launchable(proposals: Iterable[Proposal]) -> Proposal | None:
    """Return the first complete proposal that a launch command can carry."""
    return next((proposal for proposal in proposals if proposal.changes and not proposal.needs), None)


def _edit_flag(change: FlagChange, command: Command) -> list[Edit]:
    """Return the edits that set a flag where it stood, else last; of several mentions the first one is set.

    Empty if a flag to remove stands nowhere, or its JSON cannot be read.
    """
    flag, _, key = change.name.partition(".")
    is_removed = change.after is None
    words = [] if is_removed else [change.name, *([written(change.after)] if change.after != "" else [])]
    mentions = [argument for argument in command.given if argument.name == flag and argument.words]
    whole = [argument for argument in mentions if key and argument.option and not argument.option.key]
    if whole:  # vLLM ignores the JSON beside dotted keys
        content = json_object(" ".join(whole[-1].values))
        stood, words = whole if content else [], [flag, json.dumps({**content, key: change.after})] if content else []
    elif is_removed and flag == "--speculative-config":
        stood = [argument for argument in command.given if argument.name.startswith("--spec") and argument.words]
    else:  # a flag is removed with all of its dotted keys
        keys = [(argument, argument.option.key if argument.option else "") for argument in mentions]
        stood = [argument for argument, its_key in keys if is_removed or its_key == key]
    if not stood:
        return [(range(len(command.words), len(command.words)), words)] if words else []
    return [(argument.words, words if at == 0 else []) for at, argument in enumerate(stood)]


def _edit_variable(change: FlagChange, command: Command) -> list[Edit]:
    """Return the edits that set a variable where it stood, else first; for a container before its image.

    Empty if the variable would not be passed on to vLLM.
    """
    setting = re.compile(rf"(--env=|-e|){change.name}=.*", re.DOTALL)
    stood = [(at, match[1]) for at, match in enumerate(map(setting.fullmatch, command.words)) if match]
    new = f"{change.name}={written(change.after)}"
    if stood:
        return [(range(at, at + 1), [f"{prefix}{new}"]) for at, prefix in stood]
    programs = {word.rpartition("/")[2] for word in command.words[: command.arguments]}
    if programs & CONTAINERS:
        places = [at for at, word in enumerate(command.words) if word == command.image]
        return [(range(places[0], places[0]), ["-e", new])] if places else []
    return [] if programs & ELSEWHERE or not command.arguments else [(range(0), [new])]


def lint_findings(running: Running, quotes: Sequence[Quote]) -> tuple[Proposal, ...]:
    """Return the lint errors of the command of a server that did not start, as proposals.

    If the command is unknown, the arguments that the quoted line of vLLM's parser repeats are judged. All removed flags
    are one proposal; if there is no other error, the relaunch line carries a proposal that only changes flags.
    """
    from diag.lint.rule import LintTarget  # noqa: PLC0415
    from diag.lint.rules import lint  # noqa: PLC0415  # loads every rule of diag lint

    command = command_in(running.launch)
    if command is None:
        unknown = (re.match(r".*unrecognized arguments: (?!(vllm )?serve\b)(.*)", quote.text, re.S) for quote in quotes)
        words = next((match[2].split() for match in unknown if match), [])
        command = command_in(shlex.join(["vllm", "serve", "MODEL", *words])) if words else None
    if command is None:
        return ()
    findings = lint(LintTarget(command, running.version or versions()[-1]))
    errors = [finding for finding in findings if finding.severity == "error"]
    flags = [finding for finding in errors if finding.rule == "removed_flag"]
    groups = ([flags] if flags else []) + [[finding] for finding in errors if finding not in flags]
    proposals: list[Proposal] = []
    for group in groups[:MOST_ERRORS]:
        edits = [edit for finding in group for edit in finding.edits]
        changes = _changes(command, edits) if len(groups) == 1 and all(finding.edits for finding in group) else ()
        sentences = ". ".join(f"{finding.message}. {finding.fix}" for finding in group)
        text = hidden(f"diag lint says {sentences}.")
        fix = Fix(
            flag=changes[0].name if changes else "",
            change=text,
            effect="vLLM accepts the command",
            why=documented(hidden(group[0].why), f"diag explain {group[0].rule}"),
        )
        before = changes[0].before if changes else None
        proposals.append(Proposal(fix, before, None, (), computed=False, name=fix.name, text=text, changes=changes))
    return tuple(proposals)


def _changes(command: Command, edits: Sequence["LintEdit"]) -> tuple[FlagChange, ...]:
    """Return corrections of a command as changes of flags; none if a correction is of other words."""
    from diag.vllm.command.parse import parse  # noqa: PLC0415  # without a launch command, its readers are not needed

    flags = {argument.words: argument for argument in command.given}
    if not all(edit.words in flags for edit in edits):
        return ()
    removed = [flags[edit.words] for edit in edits]
    added = parse(shlex.join(["vllm", "serve", "MODEL", *(word for edit in edits for word in edit.new)])).given
    return (
        *(FlagChange(argument.name, hidden(" ".join(argument.values)) or None, None) for argument in removed),
        *(FlagChange(argument.name, None, hidden(" ".join(argument.values))) for argument in added),
    )
