"""The command that started a server, with one proposal in it: a line to paste, in which no secret stands.

It stays as it was written, with its quotation marks and all that stands around it; only what changes is replaced.
"""

import json
import re
from collections.abc import Iterable, Sequence

from diag.core.lazy_regex import lazy
from diag.diagnosis.proposals import FlagChange, Proposal, command_in, json_object, written
from diag.vllm.command.command import Command
from diag.vllm.command.options import Given
from diag.vllm.command.script import PIPED, statements
from diag.vllm.command.secrets import is_secret
from diag.vllm.command.shell import HIDDEN, line, opened

Span = tuple[int, int]
Edit = tuple[Span, str]
"""From and to which character of the text, and what stands there instead."""
_WORD = lazy(r"""(?:\$\([^()]*\)|[^\s'"`\\;&|<>()]|\\.|'[^']*'|"(?:\\.|[^"\\])*"|`[^`]*`)+""", re.DOTALL)
_QUOTED = lazy(r"""'[^']*'|"[^"\\]*\"""")
_BEFORE = lazy(r"(?:export|cd|source|set|ulimit)\s[^#<]*[^#<&|;\s]")
"""A line of a script that can stand before the command in the same line."""
_PASSED_ON = lazy(r"(?<!\S)(?:-e|--env)(?:\s+|=)?([A-Z]\w*)(?=\s)")
"""A variable of the shell that a container is given under its own name."""
_AROUND = {"export", "cd", "source", ".", "set", "ulimit", "tee", "[", "test", "true", "fi", "done", "}", "wait"}
"""Commands that may stand beside it: the words of any other may be secrets that cannot be recognised."""
_CONTAINERS = {"docker", "podman", "nerdctl"}
_ELSEWHERE = {"sudo", "kubectl", "ssh"}
"""Programs that do not pass on the environment."""


def relaunch(launch: str, proposals: Iterable[Proposal]) -> str | None:
    """The launch command with the first complete proposal of flags or a variable in it; None where there is none.

    None also where the text cannot be one line or has other commands in it, and where the change finds nothing to
    change. Secrets have been replaced by "REDACTED" already; here each becomes the variable that has to hold it.
    """
    chosen, command, text = launchable(proposals), command_in(launch), _one_line(launch)
    if command is None or chosen is None or text is None:
        return None
    changed = _changed(text, command, chosen.changes)
    return None if changed is None else opened(_PASSED_ON.sub(_as_secret, changed))


def _as_secret(found: re.Match[str]) -> str:
    return f"{found[0]}={HIDDEN}" if is_secret(found[1]) else found[0]


def launchable(proposals: Iterable[Proposal]) -> Proposal | None:
    """The first complete proposal that a launch command can carry."""
    return next((proposal for proposal in proposals if proposal.changes and not proposal.needs), None)


def _one_line(launch: str) -> str | None:
    """The text in one line, the exports of a script before its command; None where it has more lines than these."""
    lines = [line.strip() for line in re.sub(r"\\\r?\n", " ", launch).splitlines()]
    *before, last = [line for line in lines if line and not line.startswith("#")] or [""]
    plain = all(map(_BEFORE.fullmatch, before))
    return "; ".join([*before, PIPED.sub(r"\1'\2'", last)]) if plain else None


def _changed(text: str, command: Command, changes: Sequence[FlagChange]) -> str | None:
    """The text with the changes where the command stands in it, itself or in the word of another shell: sh -c '...'."""
    if sum(map(_is_other, statements(text))) > 1:
        return None
    spans = _spans(text, command.words)
    if spans is not None:
        return _edited(text, [_edits(change, command, spans) for change in changes])
    for word in _QUOTED.finditer(text):
        inner = _changed(word[0][1:-1], command, changes)
        if inner is not None:
            return None if word[0][0] in inner else f"{text[: word.start() + 1]}{inner}{text[word.end() - 1 :]}"
    return None


def _is_other(statement: tuple[str, Sequence[str]]) -> bool:
    """Whether it is a command that does more than prepare another one."""
    words = [word for word in statement[1] if not re.match(r"\w+=", word)]
    return bool(words) and words[0] not in _AROUND


def _spans(text: str, words: Sequence[str]) -> list[Span] | None:
    """Where the words stand in the text; None unless they stand there in a row, and once."""
    found = [(match.span(), _bare(match[0])) for match in _WORD.finditer(text)]
    wanted = [_bare(word) for word in words]
    starts = [at for at in range(len(found)) if [bare for _, bare in found[at : at + len(wanted)]] == wanted]
    return [span for span, _ in found[starts[0] : starts[0] + len(wanted)]] if len(starts) == 1 else None


def _bare(word: str) -> str:
    """Without what quotes, to compare."""
    return re.sub(r"""['"\\\s]""", "", word)


def _edited(text: str, edits: Sequence[Sequence[Edit]]) -> str | None:
    """The text with all edits in it, the last first; None where one change has no place."""
    if not all(edits):
        return None
    for (start, end), new in sorted((edit for of_change in edits for edit in of_change), reverse=True):
        text = f"{text[:start]}{new}{text[end:]}"
    return text


def _edits(change: FlagChange, command: Command, spans: Sequence[Span]) -> list[Edit]:
    """A flag where it stood, or last; none where one to remove stands nowhere, or its JSON cannot be read."""
    if not change.name.startswith("-"):
        return _variable(change, command, spans)
    flag, _, key = change.name.partition(".")
    whole = [given for given in _given(command, flag) if key and given.option and not given.option.key]
    stood, words = whole or _stood(command, change), _words(change)
    if whole:  # vLLM takes dotted keys beside it for all that is given
        content = json_object(" ".join(whole[-1].values))
        stood, words = whole if content else [], [flag, json.dumps({**content, key: change.after})] if content else []
    end = spans[-1][1]
    if not stood:
        return [((end, end), f" {line(words)}")] if words else []
    starts = [spans[given.words.start - 1][1] if given.words.start else 0 for given in stood]
    places = [(start, spans[given.words.stop - 1][1]) for start, given in zip(starts, stood, strict=True)]
    return [(place, f" {line(words)}" if words and at == 0 else "") for at, place in enumerate(places)]


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


def _variable(change: FlagChange, command: Command, spans: Sequence[Span]) -> list[Edit]:
    """A variable where it stood, or first; of a container before its image; none where it would not be passed on."""
    given = re.compile(rf"(--env=|-e|){change.name}=.*", re.DOTALL)
    stood = [(at, found[1]) for at, found in enumerate(map(given.fullmatch, command.words)) if found]
    new = f"{change.name}={written(change.after)}"
    if stood:
        return [(spans[at], f"{prefix}{new}") for at, prefix in stood]
    programs = {word.rpartition("/")[2] for word in command.words[: command.arguments]}
    if programs & _CONTAINERS:
        places = [spans[at][0] for at, word in enumerate(command.words) if word == command.image]
        return [((places[0], places[0]), f"-e {new} ")] if places else []
    if programs & _ELSEWHERE or not command.arguments:
        return []
    return [((spans[0][0], spans[0][0]), f"{new} ")]
