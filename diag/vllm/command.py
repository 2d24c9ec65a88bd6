"""A command that starts vLLM, as people write it: with an environment, in a script, a container, with a YAML file."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diag.errors import BadUsage
from diag.vllm.flags import Option, understood
from diag.yaml import load

MOST_BYTES = 2**20
_OPERATORS = ";&|<>\n"
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_SERVER = re.compile(r"vllm\.entrypoints\.(?:openai\.api_server|cli\.main|api_server|grpc_server)")
_IMAGE = re.compile(r"(?:\S*/)?vllm(?:-[a-z0-9]+)*(?::\S+|@sha256:\S+)?")
_NUMBER = re.compile(r"-\d+(?:\.\d+)?")
EXPECTED = (
    "expected `vllm serve MODEL --flag value ...`, `python -m vllm.entrypoints.openai.api_server ...` or a file with it"
)


@dataclass(frozen=True)
class Given:
    """One option: as it was `spelled`, its `values` (none for a switch), and the words it takes in the command.

    `option` is None where no release knows it; `words` is empty where a YAML file gives it.
    """

    spelled: str
    values: tuple[str, ...]
    option: Option | None
    words: range = range(0)

    @property
    def name(self) -> str:
        """The flag by its whole name, --tensor-parallel-size for -tp; as it was spelled where it is not known."""
        return self.option.flag.name if self.option else self.spelled


@dataclass(frozen=True)
class Command:
    """What was read: all `words`, those before `arguments` are environment and program; `config` is --config's file."""

    words: tuple[str, ...]
    arguments: int
    environment: Mapping[str, str]
    model: str
    given: tuple[Given, ...]
    strays: tuple[str, ...] = ()
    config: str = ""

    def all(self, flag: str) -> tuple[Given, ...]:
        """Every mention of a flag, what counts last."""
        return tuple(each for each in self.given if each.name == flag and not (each.option and each.option.key))

    def get(self, flag: str) -> str | None:
        """The value of a flag, "" for a switch that is on or off, None where it is not given."""
        found = self.all(flag)
        return " ".join(found[-1].values) if found else None

    def switched(self, flag: str) -> bool | None:
        """Whether a switch is on; None where it is not given."""
        found = [
            each.option.on and "".join(each.values).lower() not in ("false", "0")
            for each in self.all(flag)
            if each.option
        ]
        return found[-1] if found else None


def read(text: str, folder: Path = Path(), version: str = "") -> Command:
    """The command in a text, or in the file that the text names; BadUsage where it starts no server.

    A YAML file of --config is looked for in `folder`.
    """
    environment: dict[str, str] = {}
    for words in _statements(_content(text)):
        start = _arguments(words)
        before = words[: start if start is not None else len(words)]
        environment |= dict(each.split("=", 1) for each in before if _ASSIGNMENT.match(each))
        if start is not None:
            return _command(words, start, environment, folder, version)
        inner = next((each for each in words if "vllm" in each and re.search(r"\s", each)), None)
        if inner is not None:  # sh -c '...'
            return read(inner, folder, version)
    raise BadUsage(f"no command that starts a vLLM server: {EXPECTED}")


def _content(text: str) -> str:
    """The text itself, or what is in the file of that name."""
    file = Path(text)
    try:
        if "\n" in text or not file.is_file():
            return text
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != 36:  # a long command is no name of a file
            raise BadUsage(f"{text} cannot be read: {error.strerror}") from error
        return text
    if len(content) > MOST_BYTES or b"\0" in content:
        raise BadUsage(f"{text} is no text with a command in it")
    command = content.decode("utf-8", "replace")
    return f"vllm serve --config {shlex.quote(text)}" if file.suffix in (".yaml", ".yml") else command


def _statements(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell script, without comments and redirections."""
    joined = re.sub(r"(?<=\s)\d(?=>)", "", re.sub(r"\\\r?\n", " ", text))
    whole = re.sub(r"\$\([^()\n]*\)|`[^`\n]*`", lambda found: shlex.quote(found[0]), joined)
    lexer = shlex.shlex(whole, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    skip = comment = False
    try:
        for word in lexer:
            operator = not set(word) - set(_OPERATORS)
            comment = (comment or word.startswith("#")) and "\n" not in word
            if operator and ("<" in word or ">" in word):
                skip = True
            elif operator:
                yield words
                words, skip = [], False
            elif not comment and not skip:
                words.append(word)
            else:
                skip = False
    except ValueError as error:
        raise BadUsage("the command has a quotation that is not closed") from error
    yield words


def _arguments(words: Sequence[str]) -> int | None:
    """Where vLLM's own arguments begin; None where this starts no server."""
    if words and words[0].startswith("-") and understood(words[0].partition("=")[0]):
        return 0
    for at, word in enumerate(words):
        after = words[at + 1] if at + 1 < len(words) else ""
        if Path(word).name == "vllm" and after == "serve":
            return at + 2
        if _SERVER.fullmatch(word) or word.endswith("openai/api_server.py"):
            return at + 2 if after == "serve" else at + 1
        if _IMAGE.fullmatch(word) and "run" in words[:at] and Path(words[at - 1]).name not in ("--name", "-n"):
            return _in_image(words, at + 1)
    return None


def _in_image(words: Sequence[str], at: int) -> int:
    """Past an image, whose entry point may be repeated."""
    rest = list(words[at : at + 2])
    return at + 2 if rest == ["vllm", "serve"] else at + 1 if rest[:1] == ["serve"] else at


def _command(words: Sequence[str], start: int, environment: Mapping[str, str], folder: Path, version: str) -> Command:
    given, loose = _options(words, start, version)
    config = next((each.values[0] for each in given if each.name == "--config" and each.values), "")
    from_file = _from_file(folder / config, version) if config else ()
    model = next((" ".join(each.values) for each in reversed((*from_file, *given)) if each.name == "--model"), "")
    named = loose[0] if loose else model
    return Command(
        words=tuple(words),
        arguments=start,
        environment=environment,
        model=named,
        given=(*from_file, *given),  # what the command line says counts more
        strays=tuple(loose[1:]),
        config=config,
    )


def _options(words: Sequence[str], start: int, version: str) -> tuple[tuple[Given, ...], list[str]]:
    """The options of a command line and the words that belong to none of them."""
    given, loose, at = [], [], start
    while at < len(words):
        if not _is_option(words[at]):
            loose.append(words[at])
            at += 1
            continue
        end = at + 1
        name, joined, value = words[at].partition("=")
        option = understood(name, version)
        if not joined:
            end += _taken(option, words[at + 1 :])
        if re.fullmatch(r"-O\d", name):
            joined, value = "=", name[2:]
        given.append(Given(name, (value,) if joined else tuple(words[at + 1 : end]), option, range(at, end)))
        at = end
    return tuple(given), loose


def _taken(option: Option | None, rest: Sequence[str]) -> int:
    """How many of the following words are this option's values; one, perhaps, of an option that is not known."""
    takes = option.flag.takes if option else "optional"
    if takes == "none" and not (option and option.key):
        return 0
    free = next((at for at, word in enumerate(rest) if _is_option(word)), len(rest))
    return free if takes == "many" else min(free, 1)


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word)


def _from_file(file: Path, version: str) -> tuple[Given, ...]:
    """What a YAML file of --config gives, as vLLM reads it: true is a switch, lists and mappings are values."""
    try:
        content = load(file)
    except OSError as error:
        raise BadUsage(f"--config {file} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise BadUsage(f"--config {file} holds no flags: expected lines such as `max-num-seqs: 64`")
    return tuple(_entry(str(key), value, version) for key, value in content.items())


def _entry(key: str, value: Any, version: str) -> Given:
    name = f"--no-{key}" if value is False else f"--{key}"
    if isinstance(value, bool):
        return Given(name, (), understood(name, version))
    values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
    return Given(name, tuple(map(str, values)), understood(name, version))
