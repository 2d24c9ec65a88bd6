"""A command that starts vLLM, as it was read."""

from collections.abc import Mapping
from typing import NamedTuple

from diag.core.lazy_regex import lazy
from diag.vllm.command.options import Given

_SERVER = lazy(r"vllm\.entrypoints\.(?:openai\.api_server|cli\.main|api_server|grpc_server)")


class Command(NamedTuple):
    """What was read: all `words`, those before `arguments` are environment and program; `config` is --config's file.

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
        """Whether it is `python -m vllm.entrypoints...`, which takes its model from --model only."""
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
        """Whether a switch is on; None where it is not given."""
        found = [
            given.option.on and "".join(given.values).lower() not in ("false", "0")
            for given in self.all(flag)
            if given.option
        ]
        return found[-1] if found else None


def is_server(word: str) -> bool:
    """Whether a word is the module of vLLM's API server, or its file."""
    return bool(_SERVER.fullmatch(word)) or word.endswith("openai/api_server.py")
