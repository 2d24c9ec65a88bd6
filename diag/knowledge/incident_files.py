"""Incidents, and the fixes and look-alikes that several share, read from *.incident files: data in the form of signals.

A file has statements as a *.promql file has: `key: value`, an indented line continues the one above, # begins a
comment, and `{NAME}` and `{function NAME}` stand for what diag.signals exports. First come `NAME = value` lines, a
link, a rationale, a condition or a text that the file uses by its name; then the fields of Incident; then a section
for each look-alike `[looks_like]`, fix `[fixes]`, and incident that it may explain `[may_explain]`. In detail:

condition    `signal >= 0.9 (measured: text; recording)`, `function(word) > limit (NAME)`, or the name of a condition
rationale    `documented: text; link`, `reported: text; link`, `measured: text; recording`, `judged: text`
list         one line for each member, or `none`; `per`, `explains`, `operations`, `burns` have them in one, `a, b`
value        a number, a text, or `$signal`, which computes it; a number in quotes is a text
[fixes NAME] names what the section declares; `like: NAME` copies it, and the lines below replace its fields
[signals x]  a signal of the file, written as in a *.promql file
"""

import re
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from diag.core.declarations import PACKAGE, Mistake, did_you_mean, no_key, shown_path, typed
from diag.core.errors import BadDeclaration
from diag.core.incident import Condition, Effect, Fix, Incident, LookAlike, Signal, Source
from diag.knowledge import signals
from diag.knowledge.signals.expressions import add_to_signal, filled, statements

FOLDER, SHARED = PACKAGE / "knowledge" / "incidents", PACKAGE / "knowledge" / "shared.incident"
SECTIONS: Mapping[str, Any] = {"looks_like": LookAlike, "fixes": Fix, "may_explain": Effect, "signals": Signal}
_COMPARED: Mapping[str, Callable[[Signal, float | str, Source], Condition]] = {
    ">": Signal.above,
    ">=": Signal.at_least,
    "<": Signal.below,
    "<=": Signal.at_most,
}
_CONDITION = re.compile(r"([a-z][\w()]*) ([<>]=?) (\S+) \((.+)\)")
_CALL = re.compile(r"(\w+)\((\w+)\)")
_SOURCE = re.compile(r"(documented|measured|reported): (.+); (\S+)|(judged): (.+)")
_NAMED = re.compile(r"([A-Z][A-Z0-9_]*) = (.+)")
_SECTION = re.compile(r"\[(\w+)(?: (\w+))?\]")
_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,15})?(e\d{1,2})?")
_IN_ONE_LINE = ("per", "explains", "operations", "burns")


class _Names(dict[str, Any]):
    """The names that a file may use, and those of them that it declares itself: one that is declared twice is both."""

    def __init__(self, outer: Mapping[str, Any]) -> None:
        super().__init__(outer)
        self.own: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        if name in self.own:
            before = self.own[name]
            value = (*(before if type(before) is tuple else (before,)), value)
        self[name] = self.own[name] = value


class _Section(NamedTuple):
    """The statements of a section with their lines; kind and name are empty for those before the first section."""

    kind: str
    name: str
    line: int
    statements: list[tuple[int, str]]


def read(file: Path) -> Incident:
    """Return the incident that a file declares; its id is the file's name."""
    fields, lists = _declared(file, _Names({**_exported(), **shared()}))
    incident: Incident = _made(Incident, {"id": file.stem, "looks_like": (), "fixes": (), **fields, **lists}, file, 1)
    return incident


@lru_cache(maxsize=1)
def shared() -> Mapping[str, Any]:
    """Return what several incidents use, by its name: a condition, a link, or all fixes with that name."""
    names = _Names(_exported())
    _declared(SHARED, names)
    return names.own


@lru_cache(maxsize=1)
def _exported() -> Mapping[str, Any]:
    """Return the signals, conditions, constants and functions of diag.signals; nothing else can be called by a file."""
    return {
        name: value
        for name, value in vars(signals).items()
        if not name.startswith("_") and (not callable(value) or str(value.__module__).startswith("diag."))
    }


def _declared(file: Path, names: _Names) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Return the fields before the first section and the rows of the others; all names of the file are added."""
    if not file.is_file():
        raise BadDeclaration(f"{shown_path(file)}: is not a regular file")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadDeclaration(f"{shown_path(file)} cannot be read: {error}") from error
    sections = [_Section("", "", 1, [])]
    for number, line in statements(text):
        if line[0] == "[" and (header := _SECTION.fullmatch(line)):
            if header[1] not in SECTIONS:
                reason = f"there is no section [{header[1]}], only {', '.join(SECTIONS)}"
                raise BadDeclaration(f"{shown_path(file)}:{number}: {reason}{did_you_mean(header[1], SECTIONS)}")
            sections.append(_Section(header[1], header[2] or "", number, []))
        else:
            sections[-1].statements.append((number, line))
    for section in sections:
        if section.kind == "signals":  # first, since all others may use them
            names.add(section.name, _made(Signal, _fields(section, names, file), file, section.line))
    own = _fields(sections[0], names, file)
    lists: dict[str, tuple[Any, ...]] = {}
    for section in sections[1:]:
        if section.kind != "signals":
            fields, kind = _fields(section, names, file), SECTIONS[section.kind]
            copied = fields.pop("like", None)
            if kind is LookAlike and fields.get("incident"):
                fields["name"] = fields["incident"]
            if copied is None:
                rows: tuple[Any, ...] = (_made(kind, fields, file, section.line),)
            else:
                rows = (copied,) if isinstance(copied, kind) else copied
                if type(rows) is not tuple or not all(isinstance(row, kind) for row in rows):
                    reason = f"[{section.kind}] is like something else than {kind.__name__}"
                    raise BadDeclaration(f"{shown_path(file)}:{section.line}: {reason}")
                rows = tuple(row._replace(**fields) for row in rows)
            for row in rows if section.name else ():  # which its name stands for from then on
                names.add(section.name, row)
            lists[section.kind] = (*lists.get(section.kind, ()), *rows)
    return own, lists


def _fields(section: _Section, names: _Names, file: Path) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for number, line in section.statements:
        try:
            if section.kind == "signals":
                add_to_signal(line, fields, names)
            elif line[0].isupper() and (named := _NAMED.fullmatch(line)):
                text = named[2]  # a rationale, a condition, or a text
                if _SOURCE.fullmatch(text):
                    names.add(named[1], _source(text, names))
                elif _CONDITION.fullmatch(text) or _CALL.fullmatch(text) or isinstance(names.get(text), Condition):
                    names.add(named[1], _conditions(text, names)[0])
                else:
                    names.add(named[1], filled(text, names, is_text=True))
            else:
                key, colon, text = line.partition(": ")
                if not colon:
                    raise Mistake(f"'{line}' must be `key: value`")
                if key == "like" and section.kind:
                    fields[key] = _named(text, names)
                    continue
                readers = _readers(SECTIONS.get(section.kind, Incident))
                if key not in readers:
                    raise Mistake(no_key(key, readers))
                is_list, reader = readers[key]
                if key in fields and not is_list:
                    raise Mistake(f"{key} stands twice")
                value = () if is_list and text == "none" else reader(text, names)
                fields[key] = (*fields.get(key, ()), *value) if is_list else value
        except (ValueError, TypeError, LookupError, AttributeError) as error:  # Mistake, or of a function that it names
            raise BadDeclaration(f"{shown_path(file)}:{number}: {error}") from error
    return fields


def _made(kind: Any, fields: dict[str, Any], file: Path, line: int) -> Any:
    for name in kind._fields:
        if name not in fields and name not in kind._field_defaults:
            raise BadDeclaration(f"{shown_path(file)}:{line}: {kind.__name__} lacks the key '{name}'")
    return kind(**fields)


# -- values


def _named(name: str, names: Mapping[str, Any]) -> Any:
    """Return what a name stands for, or what `function(word)` returns; the word may be a name, too."""
    call = _CALL.fullmatch(name)
    for word in call.groups()[:1] if call else (name,):
        if word not in names:
            raise Mistake(f"there is no signal, condition or constant '{word}'{did_you_mean(word, names)}", word=word)
    return names[call[1]](names.get(call[2], call[2])) if call else names[name]


def _source(text: str, names: Mapping[str, Any]) -> Source:
    if match := _SOURCE.fullmatch(text):
        reference = names.get(match[3] or "", match[3]) or ""
        kind: Any = match[1] or match[4]
        return Source(kind, filled(match[2] or match[5], names, is_text=True), reference)
    named = _named(text, names) if text in names else None
    source = named.why if isinstance(named, Condition) else named
    if not isinstance(source, Source):
        raise Mistake(f"'{text}' must be `judged: text`, or `documented: text; link` (reported, measured), or a name")
    return source


def _signal(text: str, names: Mapping[str, Any]) -> Signal:
    signal = _named(text.removeprefix("$"), names)
    if not isinstance(signal, Signal):
        raise Mistake(f"'{text}' must be a signal")
    return signal


def _conditions(text: str, names: Mapping[str, Any]) -> tuple[Condition, ...]:
    if match := _CONDITION.fullmatch(text):
        limit = filled(match[3], names)
        number = _number(limit) if _NUMBER.fullmatch(limit) else limit
        return (_COMPARED[match[2]](_signal(match[1], names), number, _source(match[4], names)),)
    found = _named(text, names) if _CALL.fullmatch(text) or text in names else None
    conditions = found if type(found) is tuple else (found,)
    if not all(isinstance(condition, Condition) for condition in conditions):
        near = did_you_mean(text, names)
        raise Mistake(f"'{text}' must be `signal >= number (judged: text)` or the name of a condition{near}")
    return conditions


def _number(text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise Mistake(f"'{text}' must be a number or $signal")
    return float(text) if "." in text or "e" in text else int(text)


def _value(text: str, names: Mapping[str, Any], is_text: bool = False) -> Any:
    """Return a number, a signal or, if that is allowed, a text."""
    if text.startswith("$"):
        return _signal(text, names)
    written = filled(text, names, is_text=is_text)
    if is_text and not _NUMBER.fullmatch(written):
        return written[1:-1] if re.fullmatch(r'"[\d.]*"', written) else written
    return _number(written)


def _also(text: str, names: Mapping[str, Any]) -> tuple[tuple[str, Signal], ...]:
    flag, _, signal = text.partition(" ")
    return ((flag, _signal(signal, names)),)


@cache
def _readers(kind: Any) -> dict[str, tuple[bool, Callable[[str, Mapping[str, Any]], Any]]]:
    """Return how the text of each field is read, by its declared type, and whether several lines are one list."""
    return {
        key: (get_origin(declared) is tuple and key != "versions", _reader(key, declared))
        for key, declared in get_type_hints(kind).items()
        if key not in SECTIONS and (kind, key) != (Incident, "id")
    }


def _reader(key: str, declared: Any) -> Callable[[str, Mapping[str, Any]], Any]:
    inside = get_args(declared)
    if key == "also":
        return _also
    if key == "versions":
        return lambda text, names: tuple(text.partition("..")[::2])
    if key == "burns":
        return lambda text, names: tuple(_named(name, names) for name in text.split(", "))
    if key in _IN_ONE_LINE:
        return lambda text, names: typed(tuple(text.split(", ")), declared, (key,))
    if declared is Source:
        return _source
    if float in inside:
        return partial(_value, is_text=str in inside)
    if Signal in inside:
        return _signal
    if get_origin(declared) is tuple:
        return _conditions if inside[0] is Condition else lambda text, names: (filled(text, names, is_text=True),)
    if Condition in inside:
        return lambda text, names: _conditions(text, names)[0]
    if declared is str:
        return lambda text, names: filled(text, names, is_text=True)
    return lambda text, names: typed({"true": True, "false": False}.get(text, text), declared, (key,))
