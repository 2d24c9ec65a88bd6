"""YAML as people write it: long texts as blocks, keys in their order.

This is the only file that imports PyYAML, when a file is read or written. A few hundred bytes with nested aliases stand
for billions of values, and deep nesting takes quadratic time: the events of a text are counted before it is loaded.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diag.core.errors import BadUsage
from diag.core.files import read_bytes
from diag.core.formatting import printable

MOST_BYTES = 2**20
MOST_VALUES, MOST_DEPTH = 100_000, 64
"""Keys and values with their aliases written out, and how deep they may be nested."""
LONGEST_NUMBER = 64


def dump(head: str, content: Mapping[str, Any]) -> str:
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head.splitlines())
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # the one in C is optional
        """A dumper without references to earlier values."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, block)
    return comment + yaml.dump(content, Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)


def load(file: Path) -> Any:
    """Load the only document of a file; BadUsage if it is no bounded YAML, OSError if it cannot be read."""
    found = documents(file)
    if len(found) > 1:
        raise BadUsage(f"{printable(str(file))}: expected one YAML document, found {len(found):,}")
    return found[0] if found else None


def documents(file: Path) -> list[Any]:
    """Load the documents of a file, of which a Kubernetes manifest has several; raises as `load` does."""
    return parse_documents(read_bytes(file, MOST_BYTES), printable(str(file)))


def parse_documents(content: bytes | str, name: str) -> list[Any]:
    """Load the documents of a text; `name` is what a BadUsage calls it."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the one in C is optional
        """A loader that refuses numbers that Python itself refuses to print."""

        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            if len(node.value) > LONGEST_NUMBER:
                raise ValueError(f"a number has more than {LONGEST_NUMBER} digits")
            return int(super().construct_yaml_int(node))

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    try:
        _count(yaml.parse(content, Loader=Loader))
        return list(yaml.load_all(content, Loader=Loader))
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        problem = printable(str(getattr(error, "problem", None) or "not readable"))
        raise BadUsage(f"{name}{line}: this is no YAML: {problem}") from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise BadUsage(f"{name}: this YAML is not read: {printable(str(error))}") from error


def _count(events: Iterator[Any]) -> None:
    """Raise ValueError if the values are too many or too deep; an alias counts as all values that it stands for."""
    import yaml

    anchors: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    values = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise ValueError(f"the alias *{event.anchor} has no value yet")
            values += anchors[event.anchor]
        elif isinstance(event, yaml.CollectionStartEvent):
            anchors.pop(event.anchor or "", None)  # an alias inside would be part of itself
            open_nodes.append((event.anchor, values))
            values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            anchors |= {anchor: values - before} if anchor else {}
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
            anchors |= {event.anchor: 1} if event.anchor else {}
        if values > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values")
        if len(open_nodes) > MOST_DEPTH:
            raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
