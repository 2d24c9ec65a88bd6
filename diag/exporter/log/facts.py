"""What a log says of how the server runs: version, model and configuration, by an allow-list."""

import re
from collections.abc import Mapping

from diag.core.formatting import printable
from diag.exporter.log.pattern import Pattern
from diag.exporter.log.recognise import values
from diag.vllm.command.redaction import hidden
from diag.vllm.server.config import words
from diag.vllm.server.launch import FLAGS, number

_TOKEN = re.compile(
    r"""(?P<string>'(?:[^'\\]|\\.)*+'?|"(?:[^"\\]|\\.)*+"?)|(?P<open>[\[{(])|(?P<close>[\]})])"""
    r"""|(?P<word>[^\s'"\[\]{}(),:=]+)|(?P<is>[=:])"""
)
"""An open quote takes the rest: else that would be searched for the end of each of many."""
_ALIASES = {"max_seq_len": "max_model_len", "chunked_prefill_enabled": "enable_chunked_prefill"}


def settings(text: str) -> dict[str, str]:
    """Names and values at the outermost level of what vLLM prints of its arguments; of a list, the first element.

    "non-default args: {'a': 1}", "args: Namespace(a=1)", "Initializing ... with config: a=1, b=..." What is nested,
    such as the settings of a draft model, is another's.
    """
    body = re.split(r"(?:args|config): ", text, maxsplit=1)[-1]
    outer = 1 if body.startswith(("{", "Namespace(")) else 0
    found: dict[str, str] = {}
    depth, before, key = 0, "", ""
    for token in _TOKEN.finditer(body):
        kind, word = token.lastgroup, token[0].strip("'\"")
        if kind in ("open", "close"):
            depth += 1 if kind == "open" else -1
        elif kind == "is":
            key = before if depth == outer else ""
        elif key:
            found.setdefault(key, word)
            key = ""
        elif depth == outer:
            before = word
    return found


def named(model: str) -> str:
    """A model's name: as it is served, or the last part of a path, without anything that looks like a secret."""
    name = model.strip().rstrip("/")
    is_path = name.startswith(("/", ".", "~")) or "://" in name or "\\" in name
    return printable(hidden(re.split(r"[/\\]", name)[-1] if is_path else name), 200)


class LogFacts:
    """Version, model and configuration of the latest start: numbers and words of the allow-lists, nothing else."""

    def __init__(self) -> None:
        self.config: dict[str, float] = {}
        self.words: Mapping[str, str] = {}
        self.version = ""
        self.model = ""
        self.whole = False
        """Whether vLLM's own list of what was set was among it."""
        self.compiles = True
        self._served = False

    def read(self, pattern: Pattern, text: str) -> None:
        """What a line of the table says."""
        found = values(pattern, text)
        if pattern.name in ("args", "config"):
            found |= settings(text)
        self.whole = self.whole or pattern.name == "args"
        self.version = printable(found.get("version", self.version), 40)
        self._name(found)
        self.words = {**self.words, **words(found)}
        for name, value in found.items():
            flag = _ALIASES.get(name, name)
            size = number(value.replace(",", "")) if flag in FLAGS else None
            if size is not None and size >= 0:
                self.config[flag] = size
        if pattern.name == "config":
            self.compiles = "a V1 LLM" in text and not self.config.get("enforce_eager")

    def _name(self, found: Mapping[str, str]) -> None:
        served = found.get("served_model_name", "None")
        if served != "None":
            self.model, self._served = named(served), True
        elif not self._served and found.get("model", "None") != "None":
            self.model = named(found["model"])
