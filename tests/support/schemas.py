"""JSON documents are held to schemas that were checked once: `jsonschema.validate` does so for every document."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator


def validator(schema: Path | Mapping[str, Any]) -> Draft202012Validator:
    """Return a validator for documents; raise SchemaError if the schema itself is wrong."""
    content = json.loads(schema.read_text(encoding="utf-8")) if isinstance(schema, Path) else schema
    Draft202012Validator.check_schema(content)
    return Draft202012Validator(content)
