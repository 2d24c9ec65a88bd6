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
"""Characters of the fixed parts of a message that tell it; without frames it has to be twice as long."""
FEWEST_GAPS = 2
"""Spaces in a message that is a sentence."""
_CLASS = re.compile(r"(?m)^(?:[\w.]{1,120}\.)?(?P<name>[A-Z]\w{2,80}): ")
_OWN = {"ValueError", "AssertionError", "NotImplementedError"}
_OF_PYTHON = re.compile(r"aten::|values to unpack|invalid literal|could not convert|NaN to integer|is not in list")
"""Classes that Python and torch seldom raise in a frame of vLLM's own, and what they say if they do."""
_OF_PYDANTIC = (("Value error, ", "\nValueError: "), ("Assertion failed, ", "\nAssertionError: "))
"""What pydantic makes of an error that vLLM's code raises while it checks its configuration."""


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
    gone = dict(enumerate(content["releases"][:-1]))
    kinds = content["kinds"]
    return tuple(
        (kinds[kind], parts, RaisedError(module, tuple(options.split()), gone.get(last, "")))
        for module, errors in content["modules"].items()
        for kind, _, last, options, *parts in errors
    )


def raised_by_vllm(text: str, frames: str = "") -> RaisedError | None:
    """Return the error of vLLM's code that a line shows, None if it is none; of several that of the longest text.

    `frames` are the innermost frames of its traceback, "" if unknown: a file of that name has to be among them (modules
    move between releases), since other programs copy vLLM's words. What a frame of vLLM's raises that is in no release
    of the file (a newer release, a fork) has no options.
    """
    for said, raised in _OF_PYDANTIC:
        text = text.replace(said, raised)
    *_, name = None, *_CLASS.finditer(text)
    if name is None:
        return None
    message = " ".join(text[name.end() :].split())
    shown = [
        (sum(map(len, parts)), error)
        for kind, parts, error in _messages()
        if kind == name["name"] and parts[0].strip() in message
        if re.search(".*?".join(re.escape(part.strip()) for part in parts), message)
        if not frames or frames.startswith("pydantic") or f"/{error.module.rpartition('/')[2]}:" in frames
    ]
    length, longest = max(shown, key=lambda each: each[0], default=(0, None))
    if length >= (FEWEST if frames else 2 * FEWEST):
        return longest
    module = frames.partition(":")[0]
    is_own = module.startswith("vllm/") and name["name"] in _OWN and message.count(" ") >= FEWEST_GAPS
    return RaisedError(module, (), "") if is_own and not _OF_PYTHON.search(message) else None
