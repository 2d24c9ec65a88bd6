"""Rule files as data."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml


def groups_of(file: Path) -> list[dict[str, Any]]:
    """The groups of a rule file, read by libyaml: PyYAML's own parser takes half a second for that of the alerts."""
    return _groups(file.read_text(encoding="utf-8"))


@lru_cache(maxsize=8)  # many tests choose some rules of the same file
def _groups(text: str) -> list[dict[str, Any]]:
    content: dict[str, list[dict[str, Any]]] = yaml.load(text, yaml.CSafeLoader)
    return content["groups"]
