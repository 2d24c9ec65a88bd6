"""JSON documents are held to schemas that were checked once: `jsonschema.validate` does so for every document."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator


def validator(schema: Path | Mapping[str, Any]) -> Draft202012Validator:
    """Return a validator for documents; raise SchemaError if the schema itself is wrong."""
    return _of_file(schema) if isinstance(schema, Path) else _checked(schema)


@cache
def _of_file(schema: Path) -> Draft202012Validator:
    return _checked(json.loads(schema.read_text(encoding="utf-8")))


def _checked(schema: Mapping[str, Any]) -> Draft202012Validator:
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)
