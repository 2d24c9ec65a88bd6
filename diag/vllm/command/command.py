"""A parsed launch command of vLLM: its words, its options and the YAML file of --config."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diag.core.errors import BadUsage
from diag.core.files import parse_json, read_yaml
from diag.vllm.command.container import Container
from diag.vllm.flags.registry import Option, known, release, understood

_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_SERVER = re.compile(r"vllm\.entrypoints\.(?:openai\.api_server|cli\.main|api_server|grpc_server)")


class Given(NamedTuple):
    """One option: its spelling, its `values` (none for a switch), and the words it takes in the command.

    `option` is None if no release has it; `words` is empty if a YAML file gives it.
    """

    spelled: str
    values: tuple[str, ...]
    option: Option | None
    words: range = range(0)

    @property
    def name(self) -> str:
        """The whole name of the flag, --tensor-parallel-size for -tp; the spelling of an unknown one."""
        return (self.option.flag.alias or self.option.flag.name) if self.option else self.spelled


def options(words: Sequence[str], start: int, version: str) -> tuple[tuple[Given, ...], list[int]]:
    """Split a command line into options; also return the places of the words that belong to no option."""
    given, loose, at = [], [], start
    while at < len(words):
        if not _is_option(words[at]):
            loose += [at] if words[at] != "--" else []
            at += 1
            continue

        name, joined, value = words[at].partition("=")
        option = understood(name, version)
        if re.fullmatch(r"-O\w+", name):
            joined, value = "=", name[2:]
        if name == "-O":  # a level, or JSON
            level = value if joined else "".join(words[at + 1 : at + 2])
            option = understood(f"-O{level}" if level.isdigit() else name, version)

        end = at + 1
        takes = option.flag.takes if option else "optional"
        if not joined and takes == "none" and not (option and option.key):
            end += "".join(words[end : end + 1]).lower() in ("true", "false")  # a word of its own up to 0.8
        elif not joined:
            most = len(words) if takes == "many" else min(end + 1, len(words))
            while end < most and words[end] != "--" and not _is_option(words[end]):
                end += 1
        given.append(Given(name, (value,) if joined else tuple(words[at + 1 : end]), option, range(at, end)))
        at = end
    return tuple(given), loose


def _is_option(word: str) -> bool:
    """Return True for an option as argparse sees it: no number, and no space in its name."""
    spaced = re.search(r"\s", word.partition("=")[0])
    return word.startswith("-") and word not in ("-", "--") and not spaced and not _NUMBER.fullmatch(word)


def read_config_file(file: Path) -> Mapping[str, Any]:
    """Read the keys of a --config file; BadUsage if it cannot be read or has none."""
    try:
        content = read_yaml(file)
    except OSError as error:
        raise BadUsage(f"--config {file} cannot be read: {error.strerror}") from error
    flags = [f"--{key}".replace("_", "-") in known() for key in content] if isinstance(content, dict) else []
    # nothing of a file is shown unless half of its keys are flags, written out
    if not isinstance(content, dict) or sum(flags) < len(flags) / 2:
        raise BadUsage(f"--config {file} holds no flags: expected lines such as `max-num-seqs: 64`")
    return {str(key): value for key, value in content.items()}


def is_dropped(key: str, value: Any, version: str) -> bool:
    """Return True if vLLM ignores a key: `false` from 0.9.0 to 0.27.1, since 0.31.0 under a key with underscores.

    Source: `load_config_file` of 0.11.0, 0.16.0, 0.24.0 - 0.27.1, 0.31.0 and 0.32.0.
    """
    at = release(version)
    ignored = release("0.9.0") <= at < release("0.28.0") or ("_" in key and at >= release("0.31.0"))
    return value is False and ignored


def from_file(content: Mapping[str, Any], version: str) -> tuple[Given, ...]:
    """Return the options that a --config file gives, without those that vLLM drops."""
    found = []
    for key, value in content.items():
        if is_dropped(key, value, version):
            continue
        flag = f"--no-{key}" if value is False else f"--{key}"
        texts = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        values = () if isinstance(value, bool) else tuple(map(str, texts))
        found.append(Given(flag, values, understood(flag, version)))
    return tuple(found)


class Command(NamedTuple):
    """A launch command: `words[:arguments]` are environment and program, the rest vLLM's; `config` is --config's file.

    `strays` are the places of words that belong to no option, `image` is the container's, and `entry` the place from
    which on words go to the image's own entry point (None: to a program that is named). `elsewhere` names the location
    of its folders if they are not on this host. `dropped` are keys of the config file whose `false` vLLM ignores.
    `more` counts later servers of the same text, where one is read. `around` holds the commands around this one
    (sh -c '...'), the outermost first, each with the place of the word that holds it; `exported` are the assignments of
    the script before it. `writing` names the notation that was read, "" for a plain command; `container` is what it
    runs in. `place` is its service, container or function, `line` that of its text (0: unknown), `branches` are the
    same server with the words of other branches of the script. `is_background` is True if the script goes on while it
    runs, `pinned` is the vLLM release that the text installs.
    """

    words: tuple[str, ...]
    arguments: int
    environment: Mapping[str, str]
    model: str
    given: tuple[Given, ...]
    strays: tuple[int, ...] = ()
    config: str = ""
    image: str = ""
    entry: int | None = None
    elsewhere: str = ""
    dropped: tuple[str, ...] = ()
    more: int = 0
    around: tuple[tuple[tuple[str, ...], int], ...] = ()
    exported: tuple[str, ...] = ()
    writing: str = ""
    container: Container | None = None
    place: str = ""
    line: int = 0
    branches: tuple["Command", ...] = ()
    is_background: bool = False
    pinned: str = ""

    @property
    def by_module(self) -> bool:
        """True for `python -m vllm.entrypoints...`, which takes its model from --model only."""
        before = self.words[: self.arguments]
        return any(map(is_server, before)) and "serve" not in before

    def all(self, flag: str) -> tuple[Given, ...]:
        """Return every mention of a flag; the last one counts."""
        return tuple(given for given in self.given if given.name == flag and not (given.option and given.option.key))

    def get(self, flag: str) -> str | None:
        """Return the value of a flag, "" for a switch, None if it is not given."""
        found = self.all(flag)
        return " ".join(found[-1].values) if found else None

    def keys(self, flag: str) -> Mapping[str, object]:
        """Return the keys of a flag that takes JSON, also of its dotted form; {} if the value is no JSON object."""
        found: dict[str, object] = {}
        for given in self.given:
            if given.name == flag and given.option:
                text = " ".join(given.values)
                found |= {given.option.key: text} if given.option.key else json_object(text)
        return found

    def switched(self, flag: str) -> bool | None:
        """Return True or False for a switch; None if it is not given."""
        found = [
            given.option.on and "".join(given.values).lower() not in ("false", "0")
            for given in self.all(flag)
            if given.option
        ]
        return found[-1] if found else None


def is_server(word: str) -> bool:
    """Return True if a word is the module of vLLM's API server, or its file."""
    return bool(_SERVER.fullmatch(word)) or word.endswith("openai/api_server.py")


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object; empty if the text is not one."""
    try:
        content = parse_json(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
