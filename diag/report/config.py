"""The running configuration for a person at a terminal (at most 100 columns) and for a machine.

The machine's is schema "diag.config/2", held by diag.config.schema.json beside this file.
"""

import json
from collections.abc import Sequence
from typing import Any

from diag import __version__
from diag.core.formatting import gibibytes
from diag.diagnosis.configuration import ConfigEntry, Configuration
from diag.report.layout import labelled, paragraph, table
from diag.vllm.server.config import EXPORTER, PAGE, SourcedValue
from diag.vllm.server.launch import FLAGS, SET, Value

SCHEMA = "diag.config/2"
_SOURCES = {PAGE: f"{PAGE}: cache_config_info", EXPORTER: f"{EXPORTER}: diag_vllm_config"}
"""Sources whose metric is worth naming."""


def render(servers: Sequence[Configuration], notes: Sequence[str]) -> str:
    """The configurations as plain text, one line break at its end."""
    parts = ["\n".join(_server(server)) for server in servers]
    return "\n\n".join([*parts, *(["\n".join(labelled("note", notes))] if notes else [])]) + "\n"


def _server(server: Configuration) -> list[str]:
    runs = f"vLLM {server.version or 'version unknown'}, {server.model or 'model unknown'}"
    is_set = [entry for entry in server.entries if entry.value is not None]
    not_set = ", ".join(entry.name for entry in server.entries if entry.value is None)
    environment = "  ".join(f"{name}={value}" for name, value in server.environment.items())
    unknown = [f"{', '.join(names)}: {reason}" for reason, names in server.unknown.items()]
    return [
        *paragraph(f"{server.instance}: {runs}, {_gpus(server)}"),
        *(table([_row(entry) for entry in is_set]) if is_set else []),
        *labelled("not set", [not_set] if not_set else []),
        *labelled("environment", [environment] if environment else []),
        *labelled("incomplete", [f"more flags may be set: {server.incomplete}"] if server.incomplete else []),
        *labelled("unknown", unknown),
    ]


def _gpus(server: Configuration) -> str:
    kinds = [f"{gpu.name} ({gibibytes(gpu.memory, 0)})" for gpu in server.gpus]
    counted = [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]
    return ", ".join(counted) or "no GPU found"


def _row(entry: ConfigEntry) -> tuple[str, str, str]:
    remarks = ["value hidden or unreadable"] if entry.value == SET else []
    remarks += [f"{_source(other.source)} has {shown(entry.name, other.value)}" for other in entry.conflicts]
    return entry.name, shown(entry.name, entry.value), "; ".join([_source(entry.source), *remarks])


def _source(source: str) -> str:
    return _SOURCES.get(source, source)


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
        "servers": [_document(server) for server in servers],
        "notes": list(notes),
    }
    return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _document(server: Configuration) -> dict[str, Any]:
    return {
        "instance": server.instance,
        "version": server.version or None,
        "model": server.model or None,
        "gpus": [{"gpu": gpu.number, "name": gpu.name, "memory_bytes": int(gpu.memory)} for gpu in server.gpus],
        "settings": [_setting(entry) for entry in server.entries],
        "unknown": [{"name": name, "reason": reason} for reason, names in server.unknown.items() for name in names],
        "incomplete": server.incomplete or None,
        "environment": dict(server.environment),
    }


def _setting(entry: ConfigEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "value": _plain(entry.name, entry.value),
        "source": entry.source or None,
        "is_default": entry.is_default,
        "other_sources": [_other(entry.name, other) for other in entry.others],
    }


def _other(name: str, other: SourcedValue) -> dict[str, Any]:
    return {"value": _plain(name, other.value), "source": other.source}
