"""The running configuration for a person at a terminal (at most 100 columns) and for a machine.

The machine's is schema "diag.config/1", held by diag.config.schema.json beside this file.
"""

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from diag import __version__
from diag.core.formatting import gibibytes
from diag.diagnosis.configuration import ConfigEntry, Configuration
from diag.report.sentences import printable
from diag.vllm.server.config import EXPORTER, PAGE, SourcedValue
from diag.vllm.server.launch import FLAGS, SET, Value

SCHEMA = "diag.config/1"
WIDTH = 100
_LABEL = 14
_WHERE = {PAGE: "its page: cache_config_info", EXPORTER: "its exporter: diag_vllm_config"}


def render(servers: Sequence[Configuration], notes: Sequence[str]) -> str:
    """The configurations as plain text, one line break at its end."""
    parts = ["\n".join(_server(each)) for each in servers]
    told = "\n".join(line for each in notes for line in _row("note", each))
    return "\n\n".join([*parts, *([told] if told else [])]) + "\n"


def _server(one: Configuration) -> list[str]:
    runs = f"vLLM {one.version or 'version not known'}, {one.model or 'model not known'}"
    lines = textwrap.wrap(printable(f"{one.instance}: {runs}, {_gpus(one)}"), WIDTH, subsequent_indent="  ")
    given = [each for each in one.entries if each.value is not None]
    name = max((len(each.name) for each in given), default=0)
    value = max((len(shown(each.name, each.value)) for each in given), default=0)
    lines += [line for each in given for line in _entry(each, name, value)]
    unset = ", ".join(each.name for each in one.entries if each.value is None)
    lines += _row("not set", unset) if unset else []
    if one.environment:
        lines += _row("environment", "  ".join(f"{name}={value}" for name, value in one.environment.items()))
    if one.unread:
        lines += _row("may be more", f"the command that started it is not all known: {one.unread}")
    return lines + [
        line for why, names in one.unknown.items() for line in _row("not known", f"{', '.join(names)}: {why}")
    ]


def _gpus(one: Configuration) -> str:
    kinds = [f"{each.name} ({gibibytes(each.memory, 0)})" for each in one.gpus]
    counted = [f"{kinds.count(each)} x {each}" for each in dict.fromkeys(kinds)]
    return ", ".join(counted) or "no GPU seen"


def _entry(each: ConfigEntry, name: int, value: int) -> list[str]:
    says = ["not shown, or not readable"] if each.value == SET else []
    says += [f"{_where(other.source)} says {shown(each.name, other.value)}" for other in each.differ]
    first = f"  {each.name:<{name}}  {shown(each.name, each.value):<{value}}  "
    return _wrapped("; ".join([_where(each.source), *says]), first)


def _where(source: str) -> str:
    return _WHERE.get(source, source)


def _row(label: str, text: str) -> list[str]:
    return _wrapped(text, f"  {label:<{_LABEL}}")


def _wrapped(text: str, first: str) -> list[str]:
    rest = " " * len(first)
    return textwrap.wrap(printable(text), WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def shown(name: str, value: Value | None) -> str:
    """A value as a person writes it: switches on and off, counts whole."""
    plain = _plain(name, value)
    if isinstance(plain, bool):
        return "on" if plain else "off"
    return "not set" if plain is None else f"{plain:g}" if isinstance(plain, float) else str(plain)


def _plain(name: str, value: Value | None) -> Value | int | bool | None:
    if isinstance(value, float) and FLAGS.get(name.removeprefix("--").replace("-", "_")) == "switch":
        return bool(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def render_json(servers: Sequence[Configuration], notes: Sequence[str]) -> str:
    """The configurations as indented JSON, one line break at its end."""
    document = {
        "schema": SCHEMA,
        "diag": __version__,
        "servers": [_document(each) for each in servers],
        "notes": list(notes),
    }
    return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _document(one: Configuration) -> dict[str, Any]:
    return {
        "instance": one.instance,
        "version": one.version or None,
        "model": one.model or None,
        "gpus": [{"gpu": each.number, "name": each.name, "memory_bytes": int(each.memory)} for each in one.gpus],
        "settings": [_setting(each) for each in one.entries],
        "not_known": [{"name": name, "why": why} for why, names in one.unknown.items() for name in names],
        "may_be_more": one.unread or None,
        "environment": dict(one.environment),
    }


def _setting(each: ConfigEntry) -> dict[str, Any]:
    return {
        "name": each.name,
        "value": _plain(each.name, each.value),
        "from": each.source or None,
        "default": each.assumed,
        "others": [_said(each.name, other) for other in each.others],
    }


def _said(name: str, other: SourcedValue) -> dict[str, Any]:
    return {"value": _plain(name, other.value), "from": other.source}
