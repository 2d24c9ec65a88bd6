"""YAML as people write it: long texts as blocks, keys in their order. The only file that speaks PyYAML."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from diag.core.errors import BadUsage


class _Dumper(yaml.SafeDumper):
    """Without references to what was said before."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(head: str, content: Mapping[str, Any]) -> str:
    """A document under a comment."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head.splitlines())
    return comment + yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def load(file: Path) -> Any:
    """What a file holds; BadUsage where it is no YAML, OSError where it cannot be read."""
    return _read(file, yaml.safe_load)


def documents(file: Path) -> list[Any]:
    """The documents of a file, of which a Kubernetes manifest has several; raises as `load` does."""
    found: list[Any] = _read(file, lambda content: list(yaml.safe_load_all(content)))
    return found


def _read(file: Path, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(file.read_bytes())
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise BadUsage(f"{file}{line}: this is no YAML") from error
