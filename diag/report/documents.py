"""JSON documents of the commands: one head, one form of text, the parts of an object by their names."""

import json
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from diag import __version__


def headed(schema: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the name of its schema and the release of diag."""
    return {"schema": schema, "diag": __version__, **content}


def json_text(document: Mapping[str, Any]) -> str:
    """Return a document as indented JSON with one line break at its end; ValueError for NaN and Inf."""
    return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def fields(item: object, names: str) -> dict[str, Any]:
    """Return attributes of an object in the order of their names, tuples as lists: "launch? bucket low=edges.low".

    A name with "?" has null for a value that is empty or 0, one with "=" names the attribute, or the path to it.
    """
    values = {}
    for name in names.split():
        key, _, path = name.partition("=")
        value = attrgetter(path or key.rstrip("?"))(item)
        value = list(value) if isinstance(value, tuple) else value
        values[key.rstrip("?")] = (value or None) if key.endswith("?") else value
    return values
