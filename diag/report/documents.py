"""JSON documents of the commands, each drawn by its schema, which alone says what is in a document, in its order."""

import json
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from diag import __version__
from diag.report.spans import joined

Derived = Mapping[str, Mapping[str, Callable[[Any], Any]]]
Shape = Mapping[str, Any]
_LEAST = ("minItems", "minLength", "minimum", "exclusiveMinimum")


class Document:
    """The documents of diag.NAME.schema.json; `derived` has values that are no attribute, by the name of their class.

    A field has the attribute of its own name, or the one that "x-from" names: a path, with numbers for the parts of a
    tuple, and empty for the object itself. A value that the schema forbids, such as NaN or an empty text with a
    minLength, becomes null; a field that must not be null is left out then, or keeps its value if it is required.
    """

    def __init__(self, name: str, derived: Derived) -> None:
        self._name, self._derived = name, derived

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The schema, from its file."""
        file = Path(__file__).with_name(f"diag.{self._name}.schema.json")
        schema: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return schema

    def of(self, item: object, definition: str = "") -> dict[str, Any]:
        """Return the document of an object, or the part of one that this definition of the schema describes."""
        drawn: dict[str, Any] = self._maker(self.schema["$defs"][definition] if definition else self.schema)(item)
        return drawn

    def text(self, item: object, **more: object) -> str:
        """Return the document as text, with more fields at its end."""
        return json_text(self.of(item) | more)

    def _maker(self, shape: Shape) -> Callable[[Any], Any]:
        """Return the function that draws a value in this shape."""
        shape = self._resolved(shape)
        kinds = shape.get("type", ())
        if "properties" in shape:
            fields = []
            for name, part in shape["properties"].items():
                whole, is_required = self._resolved(part), name in shape.get("required", ())
                may_be_null = "null" in whole.get("type", ())
                if is_required and not may_be_null:  # an empty list is one, whatever the schema expects
                    whole = {key: value for key, value in whole.items() if key not in (*_LEAST, "$ref")}
                fields.append((name, self._field(name, whole), is_required or may_be_null))

            def make(value: Any) -> Any:
                drawn = ((name, draw(value), is_kept) for name, draw, is_kept in fields)
                return {name: part for name, part, is_kept in drawn if is_kept or part is not None}

        elif "array" in kinds:
            of_items = self._field("", shape["items"])

            def make(value: Any) -> Any:
                return _allowed(shape, [of_items(part) for part in value])

        elif "object" in kinds:
            of_values = self._maker(shape.get("additionalProperties", {}))

            def make(value: Any) -> Any:
                pairs = value.items() if isinstance(value, Mapping) else sorted(value)  # of a subject
                return {name: of_values(part) for name, part in pairs}

        else:
            is_whole = "integer" in kinds or {"number", "string"}.issubset(kinds)  # a setting: 64, as in a command

            def make(value: Any) -> Any:
                if is_whole and isinstance(value, float) and value.is_integer():
                    value = int(value)
                return _allowed(shape, joined(value) if isinstance(value, tuple) else value)

        return lambda value: None if value is None else make(value)

    def _field(self, name: str, shape: Shape) -> Callable[[Any], Any]:
        """Return the function that draws a field of an object, or an item of a list."""
        if "const" in shape or name == "diag":
            return lambda _: shape.get("const", __version__)
        path, make = shape.get("x-from", name), self._maker(shape)
        steps = [int(step) if step.isdecimal() else step for step in path.split(".") if step]

        def draw(item: Any) -> Any:
            for step in steps:
                if isinstance(step, int):
                    item = item[step]
                elif derive := self._derived.get(type(item).__name__, {}).get(step):
                    item = derive(item)
                elif item is not None:
                    is_record = isinstance(item, tuple) or not isinstance(item, Mapping)
                    item = getattr(item, step) if is_record else item.get(step)
            return make(item)

        return draw

    def _resolved(self, shape: Shape) -> Shape:
        reference = shape.get("$ref")
        return {**self.schema["$defs"][reference.rpartition("/")[2]], **shape} if reference else shape


def _allowed(shape: Shape, value: Any) -> Any:
    """Return the value, or None for one that the shape forbids."""
    if isinstance(value, str):
        forbidden = len(value) < shape.get("minLength", 0) or (not value and "" not in shape.get("enum", ("",)))
    elif isinstance(value, list):
        forbidden = len(value) < shape.get("minItems", 0)
    else:
        least, above = shape.get("minimum", -math.inf), shape.get("exclusiveMinimum", -math.inf)
        forbidden = isinstance(value, float | int) and not (least <= value < math.inf and above < value)
    return None if forbidden else value


def json_text(document: Mapping[str, Any]) -> str:
    """Return a document as indented JSON with one line break at its end; ValueError for NaN and Inf."""
    return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
