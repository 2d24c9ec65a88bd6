"""A command that starts vLLM, as people write it: with an environment, in a script, a container, with a YAML file."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diag.errors import BadUsage
from diag.vllm.flags import Option, understood
from diag.vllm.manifest import started
from diag.yaml import load

MOST_BYTES = 2**20
_OPERATORS = ";&|<>\n"
_ASSIGNMENT = re.compile(r"(?:--env=|-e)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"vllm|\$\{?\w*vllm\w*\}?", re.IGNORECASE)
_SERVER = re.compile(r"vllm\.entrypoints\.(?:openai\.api_server|cli\.main|api_server|grpc_server)")
_SCRIPT = re.compile(r"\bserve\s|vllm\.entrypoints\.")
_IMAGE = re.compile(r"(?:\S*/)?[\w.-]*vllm[\w.-]*(?::\S+|@sha256:\S+)?")
_ALONE = re.compile(r"-[itdP]+|--(?:rm|detach|init|privileged|interactive|tty|read-only)")
"""Options of `docker run` that take no value: what follows any other one is not the image."""
_ARRAY = re.compile(r"(?m)^(\s*(?:\w+\s+)*\w+\+?=)\(\s*\n(.*?)^\s*\)", re.DOTALL)
_PIPED = re.compile(r"(?<!\S)([A-Z_][A-Z0-9_]*=)(\d[\d,-]*(?:\|\d[\d,-]*)+)(?=\s)")
"""Cores for each rank, VLLM_CPU_OMP_THREADS_BIND=0|1, noted down without the quotation marks that a shell needs."""
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_SWITCHED = ("true", "false")
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
        return (self.option.flag.alias or self.option.flag.name) if self.option else self.spelled


@dataclass(frozen=True)
class Command:
    """What was read: all `words`, those before `arguments` are environment and program; `config` is --config's file.

    `strays` are the places of words that belong to nothing, `image` is the container's. `more` counts the servers that
    the same text starts after this one; they are not read.
    """

    words: tuple[str, ...]
    arguments: int
    environment: Mapping[str, str]
    model: str
    given: tuple[Given, ...]
    strays: tuple[int, ...] = ()
    config: str = ""
    image: str = ""
    more: int = 0

    @property
    def by_module(self) -> bool:
        """Whether it is `python -m vllm.entrypoints...`, which takes its model from --model only."""
        before = self.words[: self.arguments]
        return any(map(_is_server, before)) and "serve" not in before

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
    return parse(_content(text), version, folder)


def parse(text: str, version: str = "", folder: Path | None = None) -> Command:
    """The command in a text; BadUsage where it starts no server.

    Without a folder no file is opened: a command from another host names files of that host.
    """
    statements = list(_statements(text))
    environment: dict[str, str] = {}
    for at, words in enumerate(statements):
        found = _started(words, environment, folder, version)
        if found:
            later = sum(_arguments(each) is not None and not each[0].startswith("-") for each in statements[at + 1 :])
            return replace(found, more=later)
        environment |= _assigned(words)
    raise BadUsage(f"no command that starts a vLLM server: {EXPECTED}")


def _started(words: Sequence[str], environment: Mapping[str, str], folder: Path | None, version: str) -> Command | None:
    """The server that one command of a script starts, itself or by a script in a word of its: sh -c '...'."""
    start = _explicit(words)
    inner = (
        next((each for each in words if re.search(r"\s", each) and _SCRIPT.search(each)), "") if start is None else ""
    )
    if inner and "vllm" in inner.lower():
        found = parse(inner, version, folder)
        known = {**environment, **_assigned(words), **found.environment}
        return replace(found, environment=known, image=found.image or _image(words)[1])
    start = _arguments(words) if start is None else start
    if start is None:
        return None
    return _command(words, start, {**environment, **_assigned(words[:start])}, folder, version)


def _assigned(words: Sequence[str]) -> dict[str, str]:
    """The variables that these words set: NAME=value, export NAME=value, -e NAME=value."""
    found = (_ASSIGNMENT.fullmatch(each) for each in words)
    return {each[1]: each[2] for each in found if each}


def _content(text: str) -> str:
    """The text itself, or what is in the file of that name; of a manifest the commands of its containers."""
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
    if file.suffix in (".yaml", ".yml"):
        return "\n".join(started(file)) or f"vllm serve --config {shlex.quote(str(file.absolute()))}"
    return content.decode("utf-8", "replace")


def _statements(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell script, without comments and redirections."""
    joined = re.sub(r"(?<=\s)\d(?=>)", "", re.sub(r"\\\r?\n", " ", text))
    quoted = re.sub(r"\$\([^()\n]*\)|`[^`\n]*`", lambda found: shlex.quote(found[0]), joined)
    quoted = _PIPED.sub(r"\1'\2'", quoted)
    whole = _ARRAY.sub(lambda found: re.sub(r"(?m)(?:^|\s)#.*$|\n", " ", found[2]) + "\n", quoted)
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
    start = _explicit(words)
    return start if start is not None else _image(words)[0]


def _explicit(words: Sequence[str]) -> int | None:
    """Past `vllm serve` or the module, wherever they stand."""
    for at, word in enumerate(words):
        after = words[at + 1] if at + 1 < len(words) else ""
        if _PROGRAM.fullmatch(Path(word).name) and after == "serve":
            return at + 2
        if _is_server(word):
            return at + 2 if after == "serve" else at + 1
    return None


def _is_server(word: str) -> bool:
    return bool(_SERVER.fullmatch(word)) or word.endswith("openai/api_server.py")


def _image(words: Sequence[str]) -> tuple[int | None, str]:
    """Past the image of `docker run IMAGE ...`, whose entry point may be repeated, and the image."""
    run = words.index("run") if "run" in words else len(words)
    for at in range(run + 1, len(words)):
        before = words[at - 1]
        is_value = before.startswith("-") and "=" not in before and not _ALONE.fullmatch(before)
        if not is_value and _IMAGE.fullmatch(words[at]):
            return at + 1 + (list(words[at + 1 : at + 2]) == ["serve"]), words[at]
    return None, ""


def _command(
    words: Sequence[str], start: int, environment: Mapping[str, str], folder: Path | None, version: str
) -> Command:
    told = [_expanded(each, environment) for each in words]
    given, loose = _options(told, start, version)
    config = next((each.values[0] for each in given if each.name == "--config" and each.values), "")
    from_file = _from_file(folder / config, version) if folder is not None and config and "$" not in config else ()
    command = Command(
        words=tuple(words),
        arguments=start,
        environment=environment,
        model="",
        given=(*from_file, *given),  # what the command line says counts more
        config=config,
        image=_image(words)[1],
    )
    takes_one = bool(loose) and not any(each.words for each in command.all("--model"))
    named = told[loose[0]] if takes_one else command.get("--model") or ""
    return replace(command, model=named, strays=tuple(loose[takes_one:]))


def _expanded(word: str, environment: Mapping[str, str]) -> str:
    """With the variables that the text itself sets to something plain; what comes from elsewhere stays $NAME."""
    plain = {name: value for name, value in environment.items() if "$" not in value and "`" not in value}
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda found: plain.get(found[1] or found[2], found[0]), word)


def _options(words: Sequence[str], start: int, version: str) -> tuple[tuple[Given, ...], list[int]]:
    """The options of a command line and the places of the words that belong to none of them."""
    given, loose, at = [], [], start
    while at < len(words):
        if not _is_option(words[at]):
            loose += [at] if words[at] != "--" else []
            at += 1
            continue
        end = at + 1
        name, joined, value = words[at].partition("=")
        option = understood(name, version)
        if re.fullmatch(r"-O\w+", name):
            joined, value = "=", name[2:]
        if name == "-O":  # a level, or JSON
            level = value if joined else "".join(words[at + 1 : at + 2])
            option = understood(f"-O{level}" if level.isdigit() else name, version)
        if not joined:
            end += _taken(option, words[at + 1 :])
        given.append(Given(name, (value,) if joined else tuple(words[at + 1 : end]), option, range(at, end)))
        at = end
    return tuple(given), loose


def _taken(option: Option | None, rest: Sequence[str]) -> int:
    """How many of the following words are this option's values; one, perhaps, of an option that is not known."""
    takes = option.flag.takes if option else "optional"
    if takes == "none" and not (option and option.key):
        return int(bool(rest) and rest[0].lower() in _SWITCHED)  # as some releases up to 0.8 had it
    free = next((at for at, word in enumerate(rest) if _is_option(word)), len(rest))
    return free if takes == "many" else min(free, 1)


def _is_option(word: str) -> bool:
    """As argparse sees it: a number is none, nor is a word with a space in its name."""
    spaced = re.search(r"\s", word.partition("=")[0])
    return word.startswith("-") and word not in ("-", "--") and not spaced and not _NUMBER.fullmatch(word)


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
