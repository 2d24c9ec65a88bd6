"""The options of a command line or of a --config file: which flag each is, and which words it takes."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from diag.core.lazy_regex import lazy
from diag.vllm.command import config_file
from diag.vllm.flags.registry import Option, understood

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
    """As argparse sees it: a number is none, nor is a word with a space in its name."""
    spaced = re.search(r"\s", word.partition("=")[0])
    return word.startswith("-") and word not in ("-", "--") and not spaced and not _NUMBER.fullmatch(word)


def from_file(content: Mapping[str, Any], version: str) -> tuple[Given, ...]:
    """The options that a --config file gives, without those that vLLM passes over."""
    kept = (
        config_file.words(key, value)
        for key, value in content.items()
        if not config_file.is_dropped(key, value, version)
    )
    return tuple(Given(name, values, understood(name, version)) for name, values in kept)
