"""Words as a line to paste into a shell, in which no secret stands."""

import re
import shlex
from collections.abc import Sequence

from diag.core.lazy_regex import lazy

HIDDEN = "REDACTED"
"""What stands in a redacted command in the place of a secret."""
_READ = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
_SECRET = lazy(rf"""(?P<mark>["']?){HIDDEN}(?P=mark)""")
_QUOTED = lazy(r"""\\.|(?P<quoted>'[^']*'|"(?:\\.|[^"\\])*")""", re.DOTALL)
_OF_OPTION = lazy(r"""(?<![\w.-])(?:(-{0,2}[A-Za-z][\w.-]*)=|(--?[A-Za-z][\w-]*)['"]?(?:\s|\\\r?\n)+)$""")
_OF_FIELD = lazy(r"""([A-Za-z][\w.-]*)\\*["']?\s*[:=]\s*(?:(?i:bearer|basic|digest|token)\s+)?\\*["']?$""")
_OF_LIST = lazy(r"""\$\{([A-Z][A-Z0-9_]*?)(?:_(\d+))?:\?\}["']?\s+$""")
"""What stands before a secret and names it; before another value of the same option, the variable of the last one."""


def line(words: Sequence[str]) -> str:
    """Quoted where a shell needs it; what was hidden stays hidden."""
    return " ".join(map(_quoted, words))


def opened(text: str) -> str:
    """A command as it was written, in the place of each secret the variable that may hold it.

    Where that is not set or empty, a shell refuses to run the command ("${NAME:?}"): without its key a server is open
    to everybody.
    """
    done, end = "", 0
    for found in _SECRET.finditer(text):
        done += text[end : found.start()]
        mark, (around, content) = found["mark"], _around(text, found.start())
        variable = f"${{{_variable(done)}:?}}"
        if around == "'" and not (_is_script(content) and (_OF_OPTION.search(done) or _OF_LIST.search(done))):
            done += f"""{mark}'"{variable}"'{mark}"""
        else:
            done += f"{mark}{variable}{mark}" if mark and around else variable if around == '"' else f'"{variable}"'
        end = found.end()
    return done + text[end:]


def _around(text: str, at: int) -> tuple[str, str]:
    """The quotation mark that the place lies between, and what it quotes; both "" where it lies between none."""
    quoted = (found for found in _QUOTED.finditer(text) if found.start() < at < found.end() and found.lastgroup)
    return next(((found[0][0], found[0][1:-1]) for found in quoted), ("", ""))


def _is_script(content: str) -> bool:
    """Whether it is for another shell, sh -c '...', which fills in its variables itself."""
    return bool(re.search(r"\s", content)) and not content.startswith(("{", "["))


def _quoted(word: str) -> str:
    """Of `NAME=value` only the value is quoted, or it would be no assignment."""
    name, equals, value = word.partition("=")
    if not equals or not re.fullmatch(r"-{0,2}[\w.-]+", name):
        return _value(word)
    return f"{name}={_value(value)}"


def _value(text: str) -> str:
    """The value of an option; what a shell puts in later stays open to it."""
    if text.startswith("~/"):
        return f"~/{_value(text[2:])}" if len(text) > 2 else text
    return f'"{text}"' if re.fullmatch(r'[^"`\\!]*\$[A-Za-z_{(@][^"`\\!]*', text) else shlex.quote(text)


def _variable(before: str) -> str:
    """The environment variable for a secret behind that text: the one that vLLM reads, or that of its own name."""
    another = _OF_LIST.search(before)
    if another:
        return f"{another[1]}_{int(another[2] or 1) + 1}"
    named = _OF_OPTION.search(before) or _OF_FIELD.search(before)
    name = next(filter(None, named.groups()), "") if named else "SECRET"
    return _READ.get(name) or re.sub(r"\W", "_", re.sub(r"^-e(?=[A-Z])", "", name).lstrip("-")).upper()
