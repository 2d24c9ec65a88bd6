"""The command that started a server, with one proposal in it: a line to paste, in which no secret stands."""

import re
import shlex
from collections.abc import Iterable

from diag.fixes import Change, Proposal, command_in, written
from diag.vllm.command import Command

HIDDEN = "REDACTED"
"""What stands in a recorded command in the place of a secret."""
KEY_VARIABLES = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}


def relaunch(launch: str, proposals: Iterable[Proposal]) -> str | None:
    """The launch command with the first complete proposal of flags or a variable in it; None where there is none.

    Secrets have been replaced by "REDACTED" already; here each becomes the variable that may hold it.
    """
    chosen = relaunched(proposals)
    command = command_in(launch)
    if command is None or chosen is None:
        return None
    words = _changed(command, chosen.changes)
    return " ".join(_quoted(word, before) for before, word in zip(["", *words], words, strict=False))


def relaunched(proposals: Iterable[Proposal]) -> Proposal | None:
    """The first complete proposal that a launch command can carry."""
    return next((each for each in proposals if each.changes and not each.needs), None)


def _changed(command: Command, changes: Iterable[Change]) -> list[str]:
    """The words with each flag at its value, where it stood first or else at the end; None takes it away."""
    places = [[word] for word in command.words] + [[]]
    for change in changes:
        if change.name.startswith("-"):
            gone = [at for each in _mentions(command, change.name) for at in each]
            for at in gone:
                places[at] = []
            new = (
                [] if change.after is None else [change.name, *([written(change.after)] if change.after != "" else [])]
            )
            places[min(gone, default=-1)] += new
        else:
            gone = [at for at, word in enumerate(command.words) if word.startswith(f"{change.name}=")]
            for at in gone:
                places[at] = []
            places[0] = [f"{change.name}={change.after}", *places[0]]
    return [word for each in places for word in each]


def _mentions(command: Command, name: str) -> list[range]:
    flag, _, key = name.partition(".")
    return [each.words for each in command.given if each.option and (each.name, each.option.key) == (flag, key)]


def _quoted(word: str, before: str) -> str:
    """Quoted for a shell; of `NAME=value` only the value, or it would be no assignment."""
    name, equals, value = word.partition("=")
    if not equals or not re.fullmatch(r"-{0,2}[\w.-]+", name):
        return _value(word, before)
    return f"{name}={_value(value, name)}"


def _value(text: str, of: str) -> str:
    """The value of an option; what a shell puts in later stays open to it."""
    if text == HIDDEN:
        return f'"${_variable(of)}"'
    return f'"{text}"' if re.fullmatch(r'[^"`\\!]*\$[A-Za-z_{(][^"`\\!]*', text) else shlex.quote(text)


def _variable(name: str) -> str:
    """The environment variable for a secret: that of its own name, or the one vLLM reads."""
    return KEY_VARIABLES.get(name) or re.sub(r"\W", "_", name.lstrip("-")).upper()
