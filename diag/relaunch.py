"""The command that started a server, with one proposal in it: a line to paste, in which no secret stands."""

from collections.abc import Iterable

from diag.fixes import Change, Proposal, command_in, written
from diag.vllm.command import Command
from diag.vllm.shell import line


def relaunch(launch: str, proposals: Iterable[Proposal]) -> str | None:
    """The launch command with the first complete proposal of flags or a variable in it; None where there is none.

    Secrets have been replaced by "REDACTED" already; here each becomes the variable that may hold it.
    """
    chosen = relaunched(proposals)
    command = command_in(launch)
    if command is None or chosen is None:
        return None
    return line(_changed(command, chosen.changes))


def relaunched(proposals: Iterable[Proposal]) -> Proposal | None:
    """The first complete proposal that a launch command can carry."""
    return next((each for each in proposals if each.changes and not each.needs), None)


def _changed(command: Command, changes: Iterable[Change]) -> list[str]:
    """The words with each change where the flag or the variable stood; a new flag stands last, a variable first."""
    places = [[], *([word] for word in command.words), []]
    for change in changes:
        stood = [at + 1 for at in _stood(command, change.name)]
        for at in stood:
            places[at] = []
        places[min(stood, default=-1 if change.name.startswith("-") else 0)] += _words(change)
    return [word for each in places for word in each]


def _stood(command: Command, name: str) -> list[int]:
    """The places of the words that give a flag or a variable."""
    if not name.startswith("-"):
        return [at for at, word in enumerate(command.words) if word.startswith(f"{name}=")]
    flag, _, key = name.partition(".")
    given = (each for each in command.given if each.option and (each.name, each.option.key) == (flag, key))
    return [at for each in given for at in each.words]


def _words(change: Change) -> list[str]:
    """A flag at its value, a switch, a variable; nothing for a flag that goes."""
    if not change.name.startswith("-"):
        return [f"{change.name}={change.after}"]
    if change.after is None:
        return []
    return [change.name, *([written(change.after)] if change.after != "" else [])]
