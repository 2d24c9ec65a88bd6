"""Words as a line to paste into a shell; what was hidden is a variable that has to be set."""

import re
import shlex
from collections.abc import Sequence

from diag.core.lazy_regex import lazy
from diag.vllm.command.command import Command
from diag.vllm.command.script import Bare

HIDDEN = "REDACTED"
"""What stands in a quoted line of a log, and in recordings of older releases, in the place of a secret."""
PLACEHOLDER = lazy(r"\$\{([A-Z][A-Z0-9_]{0,60}):\?\}")
"""What stands in a command in the place of a value: a shell that lacks the variable refuses to run the command."""
_OPEN = lazy(r'[^"`\\!]*\$[A-Za-z_{@*][^"`\\!]*')
_NAMED = lazy(r"(-{0,2}[\w.-]+=)(.*)", re.DOTALL)


def placeholder(name: str) -> str:
    """The variable that stands for a hidden value of that name."""
    return f"${{{re.sub(r'[^A-Z0-9]+', '_', name.upper()).strip('_').lstrip('0123456789_')[:60] or 'VALUE'}:?}}"


def line(words: Sequence[str]) -> str:
    """Quoted where a shell needs it."""
    return " ".join(map(_quoted, words))


def written(command: Command) -> str:
    """The command in one line, with the commands around it that start it and the variables that are exported to it."""
    text = line([*command.exported, *command.words])
    for words, place in reversed(command.around):
        outer = [_quoted(word) for word in words]
        outer[place] = shlex.quote(text)
        text = " ".join(outer)
    return text


def _quoted(word: str) -> str:
    """Of `NAME=value` only the value is quoted, or it would be no assignment."""
    named = _NAMED.fullmatch(word)
    if isinstance(word, Bare):
        return word.raw
    return f"{named[1]}{_value(named[2])}" if named else _value(word)


def _value(text: str) -> str:
    """What a shell puts in later stays open to it; ~/ is a folder only outside of quotation marks."""
    if text.startswith("~/"):
        return f"~/{_value(text[2:])}" if len(text) > 2 else text
    if PLACEHOLDER.search(text):
        return _with_placeholders(text)
    return f'"{text}"' if _OPEN.fullmatch(text) else shlex.quote(text)


def _with_placeholders(text: str) -> str:
    done, end = "", 0
    for found in PLACEHOLDER.finditer(text):
        done += (_value(text[end : found.start()]) if found.start() > end else "") + f'"{found[0]}"'
        end = found.end()
    return done + (_value(text[end:]) if text[end:] else "")
