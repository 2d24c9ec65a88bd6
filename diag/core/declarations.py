"""Declarations checked as they are read: a mistake is one sentence with file, line, key, allowed values, nearest name.

A declaration is data with a declared type, a NamedTuple or a dataclass: a table of a TOML file, or Python that is
executed (incidents, signals, lint rules). `typed` checks both by their annotations.
"""

import ast
import builtins
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from traceback import walk_tb
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from diag.core.errors import BadDeclaration, DiagError
from diag.core.files import read_toml
from diag.core.formatting import in_python, printable

PACKAGE = Path(__file__).parents[1]
T = TypeVar("T")
Place = tuple[str | int, ...]
"""The way to a value: keys, and positions in lists."""
_SIMPLE: Mapping[object, tuple[str, tuple[type, ...]]] = {
    str: ("a text", (str,)),
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    NoneType: ("nothing", (NoneType,)),
    object: ("anything", (object,)),
    Any: ("anything", (object,)),
}
"""Simple types in words, and the types of values that they take."""
_MANY_LINES = re.compile(r'"""(?:[^"\\]|\\.|"(?!""))*"""' + r"|'''.*?'''", re.DOTALL)
_HEADER = re.compile(r"\s*\[\[?([^]]*)\]")
_KEY = re.compile(r"\s*((?:\"[^\"]*\"|'[^']*'|[\w.-])+)\s*=")
_WORD = re.compile(r'"[^"]*"|[^.\s"]+')
_AT_LINE = re.compile(r" \(at line (\d+), column \d+\)")
_NO_NAME = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")
_NO_KEY = re.compile(r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r"([\w.]+)\(\) missing \d+ required [\w-]+ arguments?: (.+)")
_CONSTRUCTOR = re.compile(r"\.__(?:new|init)__$")


class Mistake(ValueError):
    """A value that its declared type or another rule does not allow; `word` is what to look for in the file."""

    def __init__(self, reason: str, place: Place = (), word: object = "") -> None:
        names = [part for part in place if isinstance(part, str)]
        super().__init__(f"{'.'.join(names)} {reason}".strip())
        self.place = place
        self.word = word or (names[-1] if names else "")


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Return " (did you mean x?)" with the nearest of the allowed words, "" if none is near."""
    near = get_close_matches(word, [name for name in allowed if not name.startswith("_")], n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def no_key(key: str, allowed: Iterable[str]) -> str:
    return f"has no key '{key}'; its keys are {', '.join(allowed)}{did_you_mean(key, allowed)}"


# -- values and their declared types


def typed(value: Any, kind: Any, place: Place = ()) -> Any:
    """Return a value of a declaration as its declared type, or raise Mistake.

    A table of TOML becomes a NamedTuple whose first field may be the table's name, a list a tuple, a text a regular
    expression, and a number of the type Annotated[float, 1e9] is multiplied. Values of Python are only checked.
    """
    origin, inside = get_origin(kind), get_args(kind)
    if kind in _SIMPLE:
        if isinstance(value, _SIMPLE[kind][1]) and (kind not in (int, float) or not isinstance(value, bool)):
            return value
    elif origin is Literal:
        if value in inside:
            return value
        near = did_you_mean(value, inside) if isinstance(value, str) else ""
        raise Mistake(f"must be {described(kind)}, not {in_python(value)}{near}", place, value)
    elif origin is Annotated:
        scaled = typed(value, float, place) * inside[1]
        return round(scaled) if inside[0] is int else scaled
    elif origin in (Union, UnionType):
        for one in inside:
            try:
                return typed(value, one, place)
            except Mistake as mistake:
                if len(mistake.place) > len(place):  # the value is of this type, and the mistake inside of it
                    raise
    elif origin is tuple:
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            kinds = inside[:1] * len(value) if inside[-1] is ... else inside
            if len(kinds) == len(value):
                pairs = enumerate(zip(value, kinds, strict=True))
                return tuple(typed(item, one, (*place, at)) for at, (item, one) in pairs)
    elif inspect.isclass(origin) and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            rows = {}
            for key, row in value.items():
                is_named = hasattr(inside[1], "_fields") and isinstance(row, dict)
                rows[typed(key, inside[0], (*place, key))] = {inside[1]._fields[0]: key, **row} if is_named else row
            return {key: typed(row, inside[1], (*place, key)) for key, row in rows.items()}
    elif origin is re.Pattern:
        try:
            return re.compile(value)
        except (re.error, TypeError) as error:
            raise Mistake(f"must be a regular expression, not {in_python(value)}: {error}", place) from error
    elif origin is not None:
        if callable(value) or (inspect.isclass(origin) and isinstance(value, origin)):
            return value
    elif isinstance(value, kind):
        for name, declared in _declared(kind)[0].items():
            typed(getattr(value, name), declared, (*place, name))
        return value
    elif isinstance(value, dict):
        return _row(value, kind, place)
    raise Mistake(f"must be {described(kind)}, not {in_python(value)}", place)


def _row(table: dict[str, Any], kind: Any, place: Place) -> Any:
    declared, required = _declared(kind)
    for key in table:
        if key not in declared:
            raise Mistake(no_key(key, declared), place, key)
    for key in required:
        if key not in table:
            raise Mistake(f"lacks the key '{key}'", place)
    row = kind(**{key: typed(value, declared[key], (*place, key)) for key, value in table.items()})
    for reason, key in row.mistakes() if hasattr(row, "mistakes") else ():
        raise Mistake(reason, (*place, key))
    return row


@cache
def _declared(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the types of a declaration's keys, and the keys without a default."""
    hints = get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        optional = {
            entry.name for entry in fields(kind) if (entry.default, entry.default_factory) != (MISSING, MISSING)
        }
    else:
        optional = set(getattr(kind, "_field_defaults", ()))
        hints = {name: hints[name] for name in getattr(kind, "_fields", ())}
    return hints, [name for name in hints if name not in optional]


def described(kind: Any) -> str:
    """Name a declared type: "a number", "info, warning or critical", "a list of texts"."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind in _SIMPLE:
        return _SIMPLE[kind][0]
    if origin in (Literal, Union, UnionType):
        words = [str(one) or "''" for one in inside] if origin is Literal else [described(one) for one in inside]
        return f"{', '.join(words[:-1])} or {words[-1]}" if words[1:] else words[0]
    if origin is tuple:
        return f"a list of {described(inside[0]).removeprefix('a ')}s"
    if origin is not None:
        is_table = inspect.isclass(origin) and issubclass(origin, Mapping)
        return "a table" if is_table else f"a {str(kind).rpartition('.')[2]}"
    return f"a {kind.__name__}"


# -- TOML


def read(file: Path, kind: type[T], name: str = "") -> T:
    """Return a TOML file as its declared type, or what it has under its one `name`; BadDeclaration with the line."""
    text, tables = document(file)
    try:
        if name and tables.keys() != {name}:
            others = [key for key in tables if key != name]
            raise Mistake(no_key(others[0], (name,)), (), others[0]) if others else Mistake(f"lacks [[{name}]]")
        content: T = typed(tables[name] if name else tables, kind, (name,) if name else ())
        rows = content if isinstance(content, tuple) else ()
        ids = [getattr(row, "id", "") for row in rows]
        for at, id in enumerate(ids):
            if id and id in ids[:at]:
                raise Mistake(f"'{id}' exists twice", (name, at))
    except Mistake as mistake:
        place = (*mistake.place, str(mistake.word))
        raise BadDeclaration(f"{shown_path(file)}{toml_line(text, place)}: {mistake}") from mistake
    return content


def document(file: Path, refusal: type[DiagError] = BadDeclaration) -> tuple[str, dict[str, Any]]:
    """Return the text of a TOML file and its tables; `refusal` in words if it cannot be read or is no TOML."""
    try:
        return read_toml(file)
    except OSError as error:
        raise refusal(f"{printable(str(file))} cannot be read: {error.strerror}") from error
    except ValueError as error:
        line = _AT_LINE.search(str(error))
        place = f"{shown_path(file)}{f':{line[1]}:' if line else ''}"
        raise refusal(f"{place} is not valid TOML: {_AT_LINE.sub('', str(error))}") from error


def toml_line(text: str, place: Place) -> str:
    """Return the line of a key, ":3", or that of the table around it; "" if only a parser would find it."""
    names = [part for part in place if isinstance(part, str)]
    index = place[1] if len(place) > 1 and isinstance(place[1], int) else 0
    tables: list[list[str]] = [[]]
    line_of_deepest, deepest = "", 0
    for number, line in enumerate(_MANY_LINES.sub(lambda text: "\n" * text[0].count("\n"), text).splitlines(), 1):
        header, key = _HEADER.match(line), _KEY.match(line)
        if header:
            tables.append(_WORD.findall(header[1].replace("'", '"')))
        if not header and not key:
            continue
        path = [*tables[-1], *(_WORD.findall(key[1].replace("'", '"')) if key and not header else ())]
        path = [word.strip('"') for word in path]
        if path == names[: len(path)] and len(path) > deepest and tables.count(tables[-1]) > index:
            line_of_deepest, deepest = f":{number}", len(path)
    return line_of_deepest


def shown_path(file: Path) -> Path:
    """Return the path of a file of diag as in its repository, any other one unchanged."""
    return file.relative_to(PACKAGE.parent) if file.is_relative_to(PACKAGE) else file


# -- Python


def python_line(file: Path, word: object, after: int = 0) -> int:
    """Return the first line at or after one that has a name or a constant; that line itself if none has."""
    lines = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        names = [getattr(node, name, None) for name in ("arg", "attr", "id", "name", "value")]
        line = (node.end_lineno or 0) if isinstance(node, ast.Attribute) else getattr(node, "lineno", 0)
        if word in names and line >= after:
            lines.append(line)
    return min(lines, default=after)


def executed(error: BaseException, *roots: Path) -> str:
    """Return the sentence about an error that a declaration under these folders raised as its file was executed.

    "" for any other error: no `<module>` of these is the last one in its traceback.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        file, line, reason = Path(error.filename), error.lineno, f"{error.msg} (Python's syntax)"
    else:
        modules = [
            (frame, line)
            for frame, line in walk_tb(error.__traceback__)
            if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__"
        ]
        if not modules or (isinstance(error, ImportError) and not str(error.name).startswith("diag")):
            return ""
        frame, line = modules[-1]
        file = Path(frame.f_code.co_filename)
        reason, word = _reason(error, frame.f_globals)
        line = python_line(file, word, line) if word and file.is_file() else line
    return f"{shown_path(file)}:{line}: {reason}" if any(map(file.is_relative_to, roots)) else ""


def _reason(error: BaseException, scope: Mapping[str, Any]) -> tuple[str, object]:
    """Return the reason of an error in words, and the word in the file that caused it."""
    text = str(error)
    if isinstance(error, Mistake):
        return text, error.word
    if isinstance(error, ImportError):
        if (no_name := _NO_NAME.match(text)) and no_name[2] in sys.modules:
            name, module = no_name.groups()
            return f"{module} has no '{name}'{did_you_mean(name, dir(sys.modules[module]))}", name
        name = str(error.name)
        return f"there is no module {name}{did_you_mean(name, sys.modules)}", name
    if isinstance(error, NameError):
        return f"'{error.name}' is not defined{did_you_mean(str(error.name), [*scope, *vars(builtins)])}", error.name
    if isinstance(error, AttributeError) and error.name:
        owner = getattr(error.obj, "__name__", type(error.obj).__name__)
        return f"{owner} has no '{error.name}'{did_you_mean(error.name, dir(error.obj))}", error.name
    if wrong := _NO_KEY.match(text):
        called = _CONSTRUCTOR.sub("", wrong[1])
        first, *rest = called.split(".")
        modules = [vars(module) for name, module in sys.modules.items() if name.startswith("diag.")]
        function = next((names[first] for names in (scope, *modules) if first in names), None)
        for name in rest:
            function = getattr(function, name, None)
        keys = inspect.signature(function).parameters if callable(function) else ()
        return f"{called} {no_key(wrong[2], [key for key in keys if key != 'self'])}", wrong[2]
    if missing := _MISSING.match(text):
        return f"{_CONSTRUCTOR.sub('', missing[1])} lacks the key {missing[2]}", ""
    return f"{type(error).__name__}: {text}", ""
