"""The command that started a server, with one proposal in it: a line to paste, in which no secret stands."""

import json
import re
from collections.abc import Iterable, Sequence

from diag.diagnosis.launch_values import command_in, json_object
from diag.diagnosis.proposals import FlagChange, Proposal, written
from diag.vllm.command import shell
from diag.vllm.command.command import Command, Given
from diag.vllm.command.shown import shown

Edit = tuple[range, list[str]]
"""Which words of the command, and what stands there instead; an empty range is a place to put them."""
_CONTAINERS = {"docker", "podman", "nerdctl"}
_ELSEWHERE = {"sudo", "kubectl", "ssh"}
"""Programs that do not pass on the environment."""


def relaunch(launch: str, proposals: Iterable[Proposal]) -> str | None:
    """The launch command with the first complete proposal of flags or a variable in it; None where there is none.

    None also where the text starts another server too, and where the change finds nothing to change.
    """
    chosen, command = launchable(proposals), command_in(shown(launch))
    if command is None or chosen is None or (started := command_in(launch)) is None or started.more:
        return None
    edits = [_edits(change, command) for change in chosen.changes]
    return shell.written(_edited(command, edits)) if all(edits) else None


def launchable(proposals: Iterable[Proposal]) -> Proposal | None:
    """The first complete proposal that a launch command can carry."""
    return next((proposal for proposal in proposals if proposal.changes and not proposal.needs), None)


def _edited(command: Command, edits: Sequence[Sequence[Edit]]) -> Command:
    """With all edits in it, the last first."""
    words = [*command.words]
    for at, new in sorted((edit for of_change in edits for edit in of_change), key=_place, reverse=True):
        words[at.start : at.stop] = new
    return command._replace(words=tuple(words))


def _place(edit: Edit) -> tuple[int, int]:
    return edit[0].start, edit[0].stop


def _edits(change: FlagChange, command: Command) -> list[Edit]:
    """A flag where it stood, or last; none where one to remove stands nowhere, or its JSON cannot be read."""
    if not change.name.startswith("-"):
        return _variable(change, command)
    flag, _, key = change.name.partition(".")
    whole = [given for given in _given(command, flag) if key and given.option and not given.option.key]
    stood, words = whole or _stood(command, change), _words(change)
    if whole:  # vLLM takes dotted keys beside it for all that is given
        content = json_object(" ".join(whole[-1].values))
        stood, words = whole if content else [], [flag, json.dumps({**content, key: change.after})] if content else []
    if not stood:
        return [(range(len(command.words), len(command.words)), words)] if words else []
    return [(given.words, words if at == 0 else []) for at, given in enumerate(stood)]


def _given(command: Command, flag: str) -> list[Given]:
    """Each mention of a flag in the command itself, with its dotted keys."""
    return [given for given in command.given if given.name == flag and given.words]


def _stood(command: Command, change: FlagChange) -> list[Given]:
    """The words that set a flag; of a flag that is removed, also those that set a part of it."""
    flag, _, key = change.name.partition(".")
    if change.after is None and flag == "--speculative-config":
        return [given for given in command.given if given.name.startswith("--spec") and given.words]
    gone = change.after is None
    return [given for given in _given(command, flag) if gone or (given.option.key if given.option else "") == key]


def _words(change: FlagChange) -> list[str]:
    """A flag with its value, or a switch; nothing for a flag that is removed."""
    if change.after is None:
        return []
    return [change.name, *([written(change.after)] if change.after != "" else [])]


def _variable(change: FlagChange, command: Command) -> list[Edit]:
    """A variable where it stood, or first; of a container before its image; none where it would not be passed on."""
    given = re.compile(rf"(--env=|-e|){change.name}=.*", re.DOTALL)
    stood = [(at, found[1]) for at, found in enumerate(map(given.fullmatch, command.words)) if found]
    new = f"{change.name}={written(change.after)}"
    if stood:
        return [(range(at, at + 1), [f"{prefix}{new}"]) for at, prefix in stood]
    programs = {word.rpartition("/")[2] for word in command.words[: command.arguments]}
    if programs & _CONTAINERS:
        places = [at for at, word in enumerate(command.words) if word == command.image]
        return [(range(places[0], places[0]), ["-e", new])] if places else []
    if programs & _ELSEWHERE or not command.arguments:
        return []
    return [(range(0), [new])]
