"""The line of a vLLM log that says why a start failed or a server died: where it began, not what followed from it.

A worker logs its exception, then EngineCore that a worker failed, then the API server that EngineCore failed: the first
line that says more than that another process failed counts. What clients send is logged too, so only lines are quoted
that vLLM or Python writes about the end of a process, and events of the table.
"""

import re
from collections.abc import Iterator

from diag.core.formatting import printable
from diag.core.lazy_regex import lazy
from diag.core.metric_families import Sample
from diag.exporter.log.traceback import MOST_READ, Raised
from diag.vllm.command.redaction import hidden, is_like_a_flag
from diag.vllm.command.shell import HIDDEN

MOST_TEXT, MOST_CAUSE, MOST_NAME = 300, 160, 200
"""Characters of the quoted line, of its cause, and of a file's name."""
SURVIVED = 300.0
"""Seconds after which an exception is not what the server died of: it went on."""
SIGNALLED = "[shutdown] EngineCore: trigger received signal="
"""What an engine logs that was told to stop, also one that was still starting; its exceptions follow from that."""
_SAYS_WHO = lazy(
    r"\S{1,300}: UserWarning: |\w*Error: Worker failed with error "
    r"|terminate called "
    r"|.{0,200}(?:died unexpectedly|exited unexpectedly|died, exit code: )"
)
"""What only warns, passes on a part of why another process failed, or names it."""
_SAYS_NOTHING = lazy(
    r"EngineDeadError|EngineCore encountered an issue|EngineCore encountered a fatal error|EngineCore hit an exception"
    r"|failed to start|startup failed|initialization failed|output_handler failed|background task failed"
    r"|[Ss]ee (?:root cause|(?:the )?stack trace)|Background loop|Engine loop"
)
_UNRECOGNIZED = lazy(r"(.*error: unrecognized arguments: )(.*)", re.DOTALL)
_NUMBER = lazy(r"[\d.,]{1,12}")
_REPEATED = lazy(r" ?\[type=\w+, input_value=.*", re.DOTALL)
"""All that pydantic was given, which may be anything."""

_WHY = 3


class LogError:
    """Of the lines of one start, the one to quote; none before an event shows that something did end."""

    def __init__(self, file: str) -> None:
        self._file = _shown(file, MOST_NAME)
        self._found: Raised | None = None
        self._ended = False

    def begin(self) -> None:
        """A new start: what ended the last one is no more."""
        self._found, self._ended = None, False

    def add(self, raised: Raised) -> None:
        """A line that may be the one; the first of those that say most stays."""
        known = self._found
        if known is not None and raised.at - known.at > SURVIVED and (_weight(raised) == _WHY or not self._ended):
            self.begin()
        if self._found is None or _weight(raised) > _weight(self._found):
            self._found = raised

    def end(self) -> None:
        """An event says that a start failed, the engine died, or a device or its memory failed."""
        self._ended = True

    def samples(self) -> Iterator[Sample]:
        """The line as labels, its time as the value."""
        found = self._found
        if found is None or not self._ended:
            return
        line = str(found.number) if found.number and self._file else ""
        text, cause = _shown(found.text, MOST_TEXT), _shown(found.cause, MOST_CAUSE)
        labels = (found.event, _shown(found.process, MOST_NAME), self._file, line, text, cause)
        yield "diag_vllm_log_error_timestamp_seconds", labels, found.at


def _weight(raised: Raised) -> int:
    """3 says why, 2 who failed, 1 who was told to stop, which the server tells its other engines then, 0 nothing."""
    if _SAYS_WHO.match(raised.text):
        return 2
    if raised.text.startswith(SIGNALLED):
        return 1
    return 0 if _SAYS_NOTHING.search(raised.text) else _WHY


def _shown(text: str, most: int) -> str:
    """Printable, without secrets, and not longer than that."""
    text = _REPEATED.sub("", text[:MOST_READ].strip())
    if unrecognized := _UNRECOGNIZED.match(text):
        text = unrecognized[1] + " ".join(map(_argument, unrecognized[2].split()))
    return printable(hidden(text), most)


def _argument(word: str) -> str:
    """Of an argument that vLLM does not know the name: its value may be a key with a misspelt name."""
    name, is_set, _ = word.partition("=")
    if word.startswith("-") and not is_like_a_flag(name):
        return f"--{HIDDEN}"
    if not word.startswith("-"):
        return word if _NUMBER.fullmatch(word) else HIDDEN
    return f"{name}={HIDDEN}" if is_set else word
