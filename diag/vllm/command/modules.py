"""Read what a Python source takes from the modules beside it: constants, and the attributes of its settings."""

import ast
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path

from diag.vllm.command.dockerfile import text_of

_MOST_IMPORTS, _MOST_NAMES = 64, 1000
_FIELDS = ("Field", "field")
_FOLDERS = 3
"""Folders above a source that may hold the package that it imports."""


def with_constants(text: str, file: Path) -> str:
    """Write the constants and settings that a Python source imports from modules beside, such as config.py, behind it.

    An object of settings becomes a call with all of its attributes.
    """
    lines = dict[str, None]()
    tree = _parsed(text) if file.suffix == ".py" and "import" in text else None
    nodes = (one for one in ast.walk(tree or ast.Module([], [])) if isinstance(one, ast.Import | ast.ImportFrom))
    for node in islice(nodes, _MOST_IMPORTS):
        is_from = isinstance(node, ast.ImportFrom)
        level, module = (node.level, node.module or "") if isinstance(node, ast.ImportFrom) else (0, "")
        constants = _beside(file, level, module) if module else {}
        for alias in node.names:
            name = alias.asname or alias.name
            if is_from and alias.name in constants:
                lines[f"{name} = {constants[alias.name]}"] = None
            elif not constants and (others := _beside(file, level, ".".join(filter(None, (module, alias.name))))):
                used = {*re.findall(rf"\b{re.escape(name)}\.(\w+)\b", text)} & others.keys()
                text = re.sub(rf"\b{re.escape(name)}\.(?=(?:{'|'.join(sorted(used))})\b)", "", text) if used else text
                lines |= dict.fromkeys(f"{one} = {others[one]}" for one in sorted(used))
    return "\n".join([text, *islice(lines, _MOST_NAMES)])


def _parsed(text: str) -> ast.Module | None:
    with (
        suppress(SyntaxError, ValueError, MemoryError, RecursionError),
        warnings.catch_warnings(action="ignore"),
    ):
        return ast.parse(text)
    return None


def _beside(file: Path, level: int, module: str) -> Mapping[str, str]:
    """Return the expressions of a module's names; {} if none is beside."""
    place, folders = Path(*module.split(".")), file.absolute().parents
    for folder in folders[level - 1 : level] if level else folders[:_FOLDERS]:
        if text := text_of(folder / place.with_suffix(".py")):
            return _constants(text)
    return {}


@lru_cache(maxsize=32)
def _constants(text: str) -> Mapping[str, str]:
    """Return the expressions of the names that a module sets once, settings with all of their attributes."""
    body = tree.body if (tree := _parsed(text)) else []
    classes = {node.name: class_values(node) for node in body if isinstance(node, ast.ClassDef)}
    made = {
        node.name: part.value.func.id
        for node in body
        if isinstance(node, ast.FunctionDef)
        for part in node.body
        if isinstance(part, ast.Return) and isinstance(part.value, ast.Call) and isinstance(part.value.func, ast.Name)
    }  # get_settings() returns Settings()
    values: dict[str, list[ast.expr]] = {name: [ast.Name(name)] for name in classes}
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            values.setdefault(getattr(target, "id", ""), []).append(node.value)
    found: dict[str, str] = {}
    for name, several in values.items():
        value = several[0]
        function = value.func if isinstance(value, ast.Call) else value
        kind = function.id if isinstance(function, ast.Name) else ""
        kind = made.get(kind, kind)
        if len(several) == 1 and name and kind in classes:
            own = value.keywords if isinstance(value, ast.Call) else []
            attributes = {**classes[kind], **{part.arg or "": part.value for part in own}}
            value = ast.Call(ast.Name(kind), [], [ast.keyword(key, part) for key, part in attributes.items()])
        if len(several) == 1 and name:
            found[name] = " ".join(ast.unparse(ast.fix_missing_locations(value)).split("\n"))
    return found


def class_values(node: ast.ClassDef) -> dict[str, ast.expr]:
    """Return the attributes that a class sets for all of its objects; those of settings are variables' defaults."""
    is_settings = any(ast.unparse(base).endswith("Settings") for base in node.bases)
    values: dict[str, ast.expr] = {}
    for part in node.body:
        if not isinstance(part, ast.Assign | ast.AnnAssign) or not part.value:
            continue
        target, value = part.targets[0] if isinstance(part, ast.Assign) else part.target, part.value
        if isinstance(value, ast.Call) and getattr(value.func, "id", getattr(value.func, "attr", "")) in _FIELDS:
            able = [*(one.value for one in value.keywords if one.arg == "default"), *value.args[:1]]
            value = able[0] if able else ast.Constant(...)
        if isinstance(target, ast.Name) and not (isinstance(value, ast.Constant) and value.value is ...):
            environ = ast.Attribute(ast.Attribute(ast.Name("os"), "environ"), "get")
            usual = ast.Call(environ, [ast.Constant(target.id.upper()), value], [])
            values[target.id] = usual if is_settings else value
    return values
