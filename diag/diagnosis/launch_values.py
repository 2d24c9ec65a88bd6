"""What a server's launch command gives: its flags and variables, each with its value."""

import json
import math
from collections.abc import Mapping
from functools import lru_cache

from diag.core.errors import BadUsage
from diag.vllm.command.command import Command
from diag.vllm.command.parse import parse


@lru_cache(maxsize=256)  # every fix asks
def command_in(launch: str) -> Command | None:
    """The launch command; None where none is known, or none can be read (a note has said so)."""
    try:
        return parse(launch) if launch else None
    except BadUsage:
        return None


@lru_cache(maxsize=64)
def given_values(launch: str) -> Mapping[str, float | str]:
    """What a launch command gives by --flag, --flag.key (behind a dot, or in JSON) and NAME; "" is a switch."""
    command = command_in(launch)
    if command is None:
        return {}
    found = {name: _number(value) for name, value in command.environment.items()}
    for given in (given for given in command.given if given.option and given.option.on):
        text, key = " ".join(given.values), given.option.key if given.option else ""
        found |= {given.name: "" if key else _number(text)}
        keys = {key: text} if key else json_object(text)
        found |= {f"{given.name}.{key}": _number(str(value)) for key, value in keys.items()}
    return found


def json_object(text: str) -> dict[str, object]:
    """A JSON object; empty where the text is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _number(text: str) -> float | str:
    """A number where the text is one; a size with a suffix (8k) is none here, sources publish those."""
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text
