"""Words as a line to paste into a shell, in which no secret stands."""

import re
import shlex
from collections.abc import Sequence

from diag.core.lazy_regex import lazy

HIDDEN = "REDACTED"
"""What stands in a redacted command in the place of a secret."""
_READ = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
_END = r"""(?=[\s'");&|]|$)"""
_ASSIGNED = lazy(rf"""(['"]?)(?<![\w.-])(-{{0,2}}[A-Za-z][\w.-]*)=(['"]?){HIDDEN}\3\1{_END}""")
_GIVEN = lazy(rf"""(?<![\w.-])(--?[A-Za-z][\w-]*)(['"]?\s+)(['"]?){HIDDEN}\3{_END}""")


def line(words: Sequence[str]) -> str:
    """Quoted where a shell needs it; in the place of what was hidden, the variable that may hold it."""
    return " ".join(_quoted(word, before) for before, word in zip(["", *words], words, strict=False))


def opened(text: str) -> str:
    """A command as it was written, in the place of what was hidden the variable that may hold it."""
    text = _ASSIGNED.sub(lambda found: f'{found[2]}="${_variable(found[2])}"', text)
    return _GIVEN.sub(lambda found: f'{found[1]}{found[2]}"${_variable(found[1])}"', text)


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
    if text.startswith("~/"):
        return f"~/{_value(text[2:], of)}" if len(text) > 2 else text
    return f'"{text}"' if re.fullmatch(r'[^"`\\!]*\$[A-Za-z_{(@][^"`\\!]*', text) else shlex.quote(text)


def _variable(name: str) -> str:
    """The environment variable for a secret: the one vLLM reads, or that of its own name."""
    return _READ.get(name) or re.sub(r"\W", "_", re.sub(r"^-e(?=[A-Z])", "", name).lstrip("-")).upper()
