"""YAML as people write it: long texts as blocks, keys in their order. The only file that speaks PyYAML,
which is loaded where a file is read or written.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diag.core.errors import BadUsage


def dump(head: str, content: Mapping[str, Any]) -> str:
    """A document under a comment."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head.splitlines())
    import yaml

    class Dumper(yaml.SafeDumper):
        """Without references to an earlier value."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, block)
    return comment + yaml.dump(content, Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)


def load(file: Path) -> Any:
    """What a file holds; BadUsage where it is no YAML, OSError where it cannot be read."""
    import yaml

    return _read(file, yaml.safe_load)


def documents(file: Path) -> list[Any]:
    """The documents of a file, of which a Kubernetes manifest has several; raises as `load` does."""
    import yaml

    found: list[Any] = _read(file, lambda content: list(yaml.safe_load_all(content)))
    return found


def _read(file: Path, parse: Callable[[bytes], Any]) -> Any:
    import yaml

    try:
        return parse(file.read_bytes())
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise BadUsage(f"{file}{line}: this is no YAML") from error
