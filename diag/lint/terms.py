"""Conditions of rules.toml: terms over flags, keys of JSON flags, variables, the model, the container and the GPU.

A term is `SUBJECT OPERATION [VALUE]`. A subject is `--flag`, `--flag.key`, `$VARIABLE`, `model`, `image`, `writing`,
`pinned`, `model.x` and `container.x` (attributes), `gpu.capability`, `text` (all of the file) or a number. Operations:
`on`, `not-on`, `off`, `given`, `absent`, `in A,B`, `not-in A,B`, `matches REGEX`, `lacks REGEX`, and `>`, `>=`, `<`
with a second subject. What is unknown holds no term.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from diag.lint.rule import LintTarget, UnknownValue, is_open, number
from diag.vllm.gpus import capability

_UNKNOWN = "a text does not show it"


def all_hold(terms: Iterable[str], target: LintTarget) -> bool:
    """Return True if every term holds; UnknownValue if one of them needs a value that the text does not show."""
    parts = ((*term.split(maxsplit=2), "")[:3] for term in terms)
    return all(_holds(subject, operation, value, target) for subject, operation, value in parts)


def _holds(subject: str, operation: str, value: str, target: LintTarget) -> bool:
    flag, dot, key = subject.partition(".")
    if operation in ("on", "not-on", "off"):
        return target.is_off(subject) if operation == "off" else target.is_on(subject) is (operation == "on")
    if operation == "absent":
        if subject.startswith("--") and not dot:
            command = target.command
            hidden = (command.config and command.elsewhere) or any(is_open(command.words[at]) for at in command.strays)
            return not hidden and command.get(subject) is None
        if subject.startswith("$") and "--env-file" in target.command.words[: target.command.arguments]:
            raise UnknownValue(_UNKNOWN)
        return not value_of(subject, target) and (not dot or not flag.startswith("--") or bool(target.keys(flag)))
    if subject.startswith("--") and not target.has(flag) and not (key and target.keys(flag)):
        return False
    found = value_of(subject, target)
    if operation == "given":
        return bool(found)
    if operation in (">", ">=", "<"):
        low, high = number(found or None), number(value_of(value, target) or None)
        if low is None or high is None:
            return False
        return low > high if operation == ">" else low < high if operation == "<" else low >= high
    if not found:
        return operation == "lacks"
    if subject != "text" and is_open(found):
        raise UnknownValue(_UNKNOWN)
    tests: Mapping[str, object] = {
        "in": found in value.split(","),
        "not-in": found not in value.split(","),
        "matches": operation == "matches" and _matches(value, found),
        "lacks": operation == "lacks" and not _matches(value, found),
    }
    return bool(tests[operation])


@lru_cache(maxsize=64)
def _matches(pattern: str, text: str) -> bool:
    return bool(re.search(pattern, text))


def value_of(subject: str, target: LintTarget) -> str:
    """Return the value of a subject as a text, "" for none."""
    command, (head, _, key) = target.command, subject.partition(".")
    if subject.startswith("--"):
        found = command.keys(head).get(key) if key else command.get(head)
        return "" if found is None else str(found)
    if subject.startswith("$"):
        return command.environment.get(subject[1:], "")
    if head == "text":
        return target.text
    if head == "image" and command.dockerfile and command.image not in command.dockerfile:
        return ""  # the name that a Compose file gives to what it builds
    if head in ("model", "image", "writing", "pinned") and not key:
        return str(getattr(command, head))
    if head == "gpu":  # the one of --gpu or of this host, else the one that the text names
        named = command.container.product if command.container else ""
        names = [gpu.name for gpu in target.used_gpus()[:1]] or named.split()
        return next((str(able) for able in map(capability, names) if able), "")
    known = target.shape if head == "model" else command.container if head == "container" else None
    if head in ("model", "container"):
        if known is None or (head == "model" and target.shape and not target.shape.family):
            raise UnknownValue(_UNKNOWN)
        found = getattr(known, key)
        return " ".join(map(str, found)) if isinstance(found, tuple) else str(found or "")
    return subject
