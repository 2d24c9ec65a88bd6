"""Words as a line to paste into a shell, in which no secret stands."""

import re
import shlex
from collections.abc import Sequence

HIDDEN = "REDACTED"
"""What stands in a redacted command in the place of a secret."""
_READ = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}


def line(words: Sequence[str]) -> str:
    """Quoted where a shell needs it; in the place of what was hidden, the variable that may hold it."""
    return " ".join(_quoted(word, before) for before, word in zip(["", *words], words, strict=False))


def _quoted(word: str, before: str) -> str:
    """Of `NAME=value` only the value is quoted, or it would be no assignment."""
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
    """The environment variable for a secret: the one vLLM reads, or that of its own name."""
    return _READ.get(name) or re.sub(r"\W", "_", name.lstrip("-")).upper()
