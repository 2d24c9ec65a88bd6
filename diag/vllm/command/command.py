"""A parsed launch command of vLLM: its words, its options and the YAML file of --config."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diag.core.errors import BadUsage
from diag.core.lazy_regex import lazy
from diag.core.yaml import load
from diag.vllm.flags.registry import Option, known, release, understood


def read_config_file(file: Path) -> Mapping[str, Any]:
    """Its keys; BadUsage where it cannot be read or holds none."""
    try:
        content = load(file)
    except OSError as error:
        raise BadUsage(f"--config {file} cannot be read: {error.strerror}") from error
    written_out = [f"--{key}".replace("_", "-") in known() for key in content] if isinstance(content, dict) else []
    # nothing of a file is shown unless half of its keys are flags, written out
    if not isinstance(content, dict) or sum(written_out) < len(written_out) / 2:
        raise BadUsage(f"--config {file} holds no flags: expected lines such as `max-num-seqs: 64`")
    return {str(key): value for key, value in content.items()}


def is_dropped(key: str, value: Any, version: str) -> bool:
    """Return True if vLLM ignores a key: `false` from 0.9.0 to 0.27.1, since 0.31.0 under a key with underscores.

    Source: `load_config_file` of 0.11.0, 0.16.0, 0.24.0 - 0.27.1, 0.31.0 and 0.32.0.
    """
    at = release(version)
    ignored = release("0.9.0") <= at < release("0.28.0") or ("_" in key and at >= release("0.31.0"))
    return value is False and ignored


def config_words(key: str, value: Any) -> tuple[str, tuple[str, ...]]:
    """The flag that a key becomes, and its values."""
    if isinstance(value, bool):
        return (f"--{key}" if value else f"--no-{key}"), ()
    values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
    return f"--{key}", tuple(map(str, values))


_NUMBER = lazy(r"-\d+|-\d*\.\d+")
_SWITCHED = ("true", "false")


class Given(NamedTuple):
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


def options(words: Sequence[str], start: int, version: str) -> tuple[tuple[Given, ...], list[int]]:
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
    free = next((at for at, word in enumerate(rest) if word == "--" or _is_option(word)), len(rest))
    return free if takes == "many" else min(free, 1)


def _is_option(word: str) -> bool:
    """Return True for an option as argparse sees it: no number, and no space in its name."""
    spaced = re.search(r"\s", word.partition("=")[0])
    return word.startswith("-") and word not in ("-", "--") and not spaced and not _NUMBER.fullmatch(word)


def from_file(content: Mapping[str, Any], version: str) -> tuple[Given, ...]:
    """The options that a --config file gives, without those that vLLM passes over."""
    kept = (config_words(key, value) for key, value in content.items() if not is_dropped(key, value, version))
    return tuple(Given(name, values, understood(name, version)) for name, values in kept)


_SERVER = lazy(r"vllm\.entrypoints\.(?:openai\.api_server|cli\.main|api_server|grpc_server)")


class Command(NamedTuple):
    """A launch command: `words[:arguments]` are environment and program, the rest vLLM's; `config` is --config's file.

    `strays` are the places of words that belong to nothing, `image` is the container's, and `entry` the place from
    which on words go to the image's own entry point (None: to a program that is named). `elsewhere` says where its
    folders are when they are not here. `dropped` are keys of the config file whose `false` vLLM passes over. `more`
    counts the servers that the same text starts after this one; they are not read. `around` are the commands in a
    word of which this one stands (sh -c '...'), the outermost first, each with the place of that word; `exported` are
    the assignments of the script before it.
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

    @property
    def by_module(self) -> bool:
        """True for `python -m vllm.entrypoints...`, which takes its model from --model only."""
        before = self.words[: self.arguments]
        return any(map(is_server, before)) and "serve" not in before

    def all(self, flag: str) -> tuple[Given, ...]:
        """Every mention of a flag, what counts last."""
        return tuple(given for given in self.given if given.name == flag and not (given.option and given.option.key))

    def get(self, flag: str) -> str | None:
        """The value of a flag, "" for a switch that is on or off, None where it is not given."""
        found = self.all(flag)
        return " ".join(found[-1].values) if found else None

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
