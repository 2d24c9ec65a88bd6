"""A YAML file for `vllm serve --config`, as vLLM reads it: true is a switch, lists and mappings are values."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diag.core.errors import BadUsage
from diag.core.yaml import load
from diag.vllm.flags.registry import known, release


def read(file: Path) -> Mapping[str, Any]:
    """Its keys; BadUsage where it cannot be read or holds none."""
    try:
        content = load(file)
    except OSError as error:
        raise BadUsage(f"--config {file} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict) or not _is_configuration(content):
        raise BadUsage(f"--config {file} holds no flags: expected lines such as `max-num-seqs: 64`")
    return {str(key): value for key, value in content.items()}


def _is_configuration(content: Mapping[Any, Any]) -> bool:
    """Whether half of its keys are flags, written out: of another file nothing is to be shown."""
    written_out = [f"--{key}".replace("_", "-") in known() for key in content]
    return sum(written_out) >= len(written_out) / 2


def is_dropped(key: str, value: Any, version: str) -> bool:
    """Whether vLLM passes over it: `false` from 0.9.0 to 0.27.1 at least, since 0.31.0 under a key with underscores.

    Source: `load_config_file` of 0.11.0, 0.16.0, 0.24.0 - 0.27.1, 0.31.0 and 0.32.0.
    """
    at = release(version)
    ignored = release("0.9.0") <= at < release("0.28.0") or ("_" in key and at >= release("0.31.0"))
    return value is False and ignored


def words(key: str, value: Any) -> tuple[str, tuple[str, ...]]:
    """The flag that a key becomes, and its values."""
    if isinstance(value, bool):
        return (f"--{key}" if value else f"--no-{key}"), ()
    values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
    return f"--{key}", tuple(map(str, values))
