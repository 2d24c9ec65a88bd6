"""What a lint rule looks at: a command, the vLLM release, and what is known of the model and of this host."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from diag.core.formatting import flag_integer
from diag.lint.host_gpus import HostGpus
from diag.vllm.command.command import Command, Given
from diag.vllm.flags.registry import known, release
from diag.vllm.memory.model import Model

HELP = ("--help", "-h")
"""What argparse itself adds."""


@dataclass(frozen=True)
class LintTarget:
    """A command and the release that it is checked for.

    `shape` is what the model's config.json says, `gpus` are those of this host: None where they cannot be seen here.
    `folder_without_config` is the model's folder where it holds no config.json; `parser_error` is what vLLM's own
    parser says.
    """

    command: Command
    version: str
    shape: Model | None = None
    gpus: HostGpus | None = None
    folder_without_config: str = ""
    parser_error: str = ""

    def since(self, version: str) -> bool:
        """Whether the command is checked for that release or a later one."""
        return at_least(self.version, version)

    def accepted(self) -> Iterator[Given]:
        """The options whose flag this release has."""
        return (given for given in self.command.given if given.option and given.option.flag.in_release(self.version))

    def number(self, flag: str) -> float | None:
        """A number above zero; None where the flag is not given, or is no such number."""
        value = number(self.command.get(flag))
        return value if value is not None and value > 0 else None

    def ranks(self, flag: str) -> int:
        """A number of parallel ranks, 1 where it is not given."""
        return ranks(self.command, flag)

    def is_on(self, flag: str) -> bool:
        """Whether a switch is on."""
        return bool(self.command.switched(flag))

    def is_off(self, flag: str) -> bool:
        """Whether a switch is given, and off."""
        return self.command.switched(flag) is False

    def has(self, flag: str) -> bool:
        """Whether the flag is given, in any way, and this release has it."""
        return self.command.get(flag) is not None and flag in known() and known()[flag].in_release(self.version)

    def keys(self, flag: str) -> Mapping[str, object]:
        """The keys of a flag that takes JSON, those of its dotted form too."""
        found: dict[str, object] = {}
        for given in self.command.given:
            if given.name == flag and given.option:
                text = " ".join(given.values)
                found |= {given.option.key: text} if given.option.key else _object(text)
        return found


def _object(text: str) -> dict[str, object]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def is_open(text: str) -> bool:
    """Whether a shell, a template or Kubernetes fills something in later: it cannot be checked."""
    return "$" in text or "`" in text or "{{" in text


def number(text: str | None) -> float | None:
    """A value as vLLM reads it, 8k as 8000 and 8K as 8192; None where it is none, or not a number."""
    if text is None:
        return None
    whole = flag_integer(text.strip())
    if whole is not None:
        return whole
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def ranks(command: Command, flag: str) -> int:
    """How many ranks a parallel size asks for, 1 where it is not given or is no number."""
    return max(1, int(number(command.get(flag)) or 1))


def at_least(version: str, since: str) -> bool:
    """Whether a release is that one or a later one."""
    return release(version) >= release(since)
