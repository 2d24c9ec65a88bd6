"""JSON documents of the commands: one head, one form of text, the parts of an object under their own names."""

import json
from collections.abc import Mapping
from typing import Any

from diag import __version__


def headed(schema: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the name of its schema and the release of diag."""
    return {"schema": schema, "diag": __version__, **content}


def json_text(document: Mapping[str, Any]) -> str:
    """Return a document as indented JSON with one line break at its end; ValueError for NaN and Inf."""
    return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def fields(item: object, names: str, *, or_null: bool = False) -> dict[str, Any]:
    """Return attributes by their names, in this order: tuples as lists; with `or_null`, empty ones and 0 as null."""
    values = {name: getattr(item, name) for name in names.split()}
    if or_null:
        values = {name: value or None for name, value in values.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
