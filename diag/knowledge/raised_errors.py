"""The errors that vLLM's own code raises: which module raises a message, and which options it concerns.

failures/raised.json has the fixed parts of every message of every release that is judged (from vLLM's sources, by
tests/support/raised_errors.py). It is read when no kind of the table knows an error: that takes some 15 ms.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from diag.core.declarations import PACKAGE

FEWEST = 14
"""Characters of the fixed parts of a message that tell it."""
_CLASS = re.compile(r"^(?:[\w.]{1,120}\.)?(?P<name>[A-Z]\w{2,80}): ")


class RaisedError(NamedTuple):
    """An error of vLLM's code: its module, and the options that its message or the condition above it reads.

    `last` is the newest of the releases in the file that raises it, "" if the newest one still does.
    """

    module: str
    options: tuple[str, ...]
    last: str


@lru_cache(maxsize=1)
def _messages() -> tuple[tuple[str, Sequence[str], RaisedError], ...]:
    """Return the class, the fixed parts and the origin of each message."""
    content = json.loads((PACKAGE / "knowledge" / "failures" / "raised.json").read_text(encoding="utf-8"))
    *older, _ = content["releases"]
    return tuple(
        (content["kinds"][kind], parts, RaisedError(module, tuple(options.split()), dict(enumerate(older)).get(last, "")))
        for module, errors in content["modules"].items()
        for kind, _, last, options, *parts in errors
    )


def raised_by_vllm(text: str, frames: str = "") -> RaisedError | None:
    """Return the error of vLLM's code that a line shows, None if it is none; of several that of the longest text.

    `frames` are the innermost frames of its traceback, "" if unknown: a file of that name has to be among them (modules
    move between releases), since other programs copy vLLM's words.
    """
    name = _CLASS.match(text)
    if name is None:
        return None
    message = " ".join(text[name.end() :].split())
    found: tuple[bool, int, RaisedError] | None = None
    for kind, parts, error in _messages():
        length = sum(map(len, parts))
        is_elsewhere = bool(frames) and f"/{error.module.rpartition('/')[2]}:" not in frames
        if kind != name["name"] or length < FEWEST or is_elsewhere or not _holds(message, parts):
            continue
        if found is None or (error.module in frames, length) > found[:2]:
            found = error.module in frames, length, error
    return found[2] if found else None


def _holds(message: str, parts: Sequence[str]) -> bool:
    """Return True if a message has these parts in their order."""
    at = 0
    for part in map(str.strip, parts):
        at = message.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True
