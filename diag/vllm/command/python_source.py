"""Read `LLM(...)`, `EngineArgs(...)` and Ray's `LLMConfig(...)` in Python source; nothing is executed."""

import ast
import operator
import re
import shlex
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeGuard, cast

from diag.core.errors import BadUsage
from diag.vllm.command.command import (
    NOTATIONS,
    SAGEMAKER,
    command_line,
    from_variables,
    is_server,
    serve,
    split,
    unread,
)
from diag.vllm.command.container import accelerators
from diag.vllm.command.manifests import Writing, ray_arguments
from diag.vllm.command.modules import class_values
from diag.vllm.command.shell import is_default, usual, with_default
from diag.vllm.flags.registry import understood

_CALLS = ("LLM", "AsyncEngineArgs", "EngineArgs", "LLMConfig", "VLLMArgs")
_CALL = re.compile(rf"(?<![\w.])(?:\w+\.){{0,4}}(?:{'|'.join(_CALLS)})\s*\(")
_SERVER = re.compile(NOTATIONS["patterns"]["python_source_server"])
_COMMAND = re.compile(r"\s*(?:exec\s+|\w+=\S+\s+)*(?:vllm serve|python[\d.]* -m vllm\.entrypoints\.\S+)\s")
_LINE = re.compile(_COMMAND.pattern, re.MULTILINE)
_FLAGS = re.compile(NOTATIONS["patterns"]["python_source_flags"])
_LEAST_FLAGS = 3
_IMPORT = re.compile(r"^(?:from [\w.]+ )?import \w", re.MULTILINE)
_PRINTERS = frozenset[str](NOTATIONS["printers"])
_NOTEBOOK = re.compile(r"^([ \t]*)[!%](?:.*\\\n)*.*$", re.MULTILINE)
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt},
    **{ast.LtE: operator.le, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    **{ast.In: lambda first, second: first in second, ast.NotIn: lambda first, second: first not in second},
}
_TEXT_METHODS = frozenset[str](NOTATIONS["text_methods"])
_LONGEST = 1000
_ALTERING = ("insert", "remove", "pop", "reverse", "sort", "clear")
_LARGEST = 10**18
_DEEPEST = 20
"""Names and operators within each other that are followed."""
_MOST_ENGINES = 100
_SAGEMAKERS_MODEL = f"{SAGEMAKER}MODEL"
_MOST_OBJECTS = 8
"""Objects of one class whose arguments are told apart."""
_MOST_NAMES = 10_000
"""Names that are replaced by their values: a name may stand for two others, and so on."""


class _UnknownValue(Exception):
    """An expression that is no literal."""


def _variable(name: str) -> str:
    """Return a shell's variable for an expression that is not known until the program runs."""
    return f"${re.sub(r'[^A-Z0-9]+', '_', name.upper()).strip('_') or 'VALUE'}"


def is_python(text: str) -> bool:
    """Return True if a text may be Python source that creates an engine, or starts a server."""
    is_import = _IMPORT.search(text) and "vllm serve " in text
    return bool(_CALL.search(text) or _SERVER.search(text) or is_import or _FLAGS.search(text))


def engines(text: str, version: str) -> list[Writing]:
    """Return the engines that Python source creates, the first one first; BadUsage if it cannot be parsed."""
    try:
        with warnings.catch_warnings(action="ignore"):  # Python's about the source
            return list(_Source(_tree(textwrap.dedent(text)), version).engines())
    except SyntaxError as error:
        raise BadUsage(f"the Python source cannot be parsed: line {error.lineno or 1} is no Python") from None
    except (ValueError, MemoryError, RecursionError):
        raise BadUsage("the Python source cannot be parsed: it is nested too deep, or no text") from None


def _tree(text: str) -> ast.Module:
    """Parse a source, else without the lines that only a notebook runs."""
    with suppress(SyntaxError):
        return ast.parse(text)
    try:
        return ast.parse(_NOTEBOOK.sub(lambda line: f"{line[1]}pass" + "\n" * line[0].count("\n"), text))
    except SyntaxError as error:  # prose below the source
        source = "\n".join(text.split("\n")[: (error.lineno or 1) - 1])
        if not _CALL.search(source):
            raise
        return ast.parse(source)


def is_parsed(cell: str) -> bool:
    """Return True if a cell of a notebook is Python."""
    with suppress(SyntaxError, ValueError, MemoryError, RecursionError), warnings.catch_warnings(action="ignore"):
        return bool(_tree(cell))
    return False


def _attributes(scopes: Iterable[ast.AST]) -> dict[int, ast.expr]:
    """Return the value of each use of a class's attribute that is set once."""
    found: dict[int, ast.expr] = {}
    for scope in scopes:
        places: dict[str, list[ast.expr]] = {}
        parts = list(ast.walk(scope)) if isinstance(scope, ast.ClassDef) else []
        for part in parts:
            if isinstance(part, ast.Assign | ast.AnnAssign) and part.value:
                target = part.targets[0] if isinstance(part, ast.Assign) else part.target
                root, last = _names(target)
                if root in ("self", "cls") or (root == last and part in getattr(scope, "body", ())):
                    places.setdefault(last, []).append(part.value)
        used = (part for part in parts if isinstance(part, ast.Attribute) and _names(part)[0] in ("self", "cls"))
        found |= {id(part): places[part.attr][0] for part in used if len(places.get(part.attr, ())) == 1}
    return found


def _defaults(calls: Iterable[ast.Call]) -> dict[str, ast.expr]:
    """Return the defaults of a program's options."""
    found: dict[str, ast.expr] = {}
    for call in calls:
        names = [part.value for part in call.args if isinstance(part, ast.Constant)] if call.args else []
        name = next((str(text) for text in names if str(text)[:2] == "--"), "")
        if _names(call.func)[1] == "add_argument" and name:
            keywords = {part.arg: part.value for part in call.keywords}
            action = getattr(keywords.get("action"), "value", None)
            usual = {"store_true": False, "store_false": True}.get(str(action))
            place = str(getattr(keywords.get("dest"), "value", name[2:].replace("-", "_")))
            if "default" in keywords or "required" not in keywords:
                found[place] = keywords.get("default", ast.Constant(usual))
    return found


def _parameters(nodes: Iterable[ast.AST], calls: Iterable[ast.Call], stored: Mapping[str, int]) -> dict[str, ast.expr]:
    """Return the values of functions' parameters, if all of a name have the same: of the only call, or the defaults."""
    everywhere: dict[str, list[ast.expr]] = {}
    made: dict[str, list[ast.Call]] = {}
    for call in calls:
        made.setdefault(_names(call.func)[1], []).append(call)
    given = {part.arg for some in made.values() for call in some for part in call.keywords}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = made.get(node.name, [])
            names = [part.arg for part in node.args.args if part.arg != "self"]
            is_open = any(isinstance(part, ast.Starred) for call in own for part in call.args)
            most = len(names) if is_open else max((len(call.args) for call in own), default=0)
            found = {name: value for name, value in _preset(node.args) if name not in {*given, *names[:most]}}
            if len(own) == 1 and not is_open:
                found |= _passed(node.args, own[0])
            for name, value in found.items():
                everywhere.setdefault(name, []).append(value)
    return {f"{name}=": values[0] for name, values in everywhere.items() if _is_one(values, stored[name])}


def _preset(taken: ast.arguments) -> list[tuple[str, ast.expr]]:
    """Return the parameters of a function with their defaults."""
    pairs = [(one.arg, value) for one, value in zip(reversed(taken.args), reversed(taken.defaults), strict=False)]
    return pairs + [(key.arg, it) for key, it in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if it]


def _passed(taken: ast.arguments, call: ast.Call) -> dict[str, ast.expr]:
    """Return the arguments of a call by the names of its function's parameters; what `**` takes is a dict."""
    names = [part.arg for part in (*taken.posonlyargs, *taken.args) if part.arg != "self"]
    passed = dict(zip(names, call.args, strict=False)) | {part.arg: part.value for part in call.keywords if part.arg}
    more = [part for part in call.keywords if part.arg not in (*names, *(key.arg for key in taken.kwonlyargs))]
    if taken.kwarg:
        keys = [part.arg and ast.Constant(part.arg) for part in more]
        passed[taken.kwarg.arg] = ast.Dict(keys, [part.value for part in more])  # type: ignore[arg-type]
    return passed


def _keyed(nodes: Sequence[ast.AST]) -> dict[str, list[ast.Assign]]:
    """Return the statements that set single keys of a dict, by its name, if nothing else changes it."""
    keyed: dict[str, list[ast.Assign]] = {}
    taken = set[int]()
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str())) as place]):
                keyed.setdefault(name, []).append(node)
                taken.add(id(place))
    held = (one for one in nodes if isinstance(one, ast.Subscript | ast.Attribute) and isinstance(one.value, ast.Name))
    others = (one for one in held if isinstance(one, ast.Attribute) or not isinstance(one.ctx, ast.Load))
    changed = {_names(one.value)[0] for one in others if id(one) not in taken}
    return {name: statements for name, statements in keyed.items() if name not in changed}


def _is_sagemakers(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and str(key.value).startswith(SAGEMAKER)


def _objects(classes: Iterable[ast.AST], calls: Iterable[ast.Call]) -> dict[int, list[tuple[int, dict[str, ast.expr]]]]:
    """Return the arguments of each object of a class, with its line, by the function that takes them.

    A deployment of Ray Serve is bound: Server.options(num_replicas=2).bind(...); an actor is remote.
    """
    made: dict[str, list[ast.Call]] = {}
    for call in calls:
        match call.func:
            case (
                ast.Name(id=name)
                | ast.Attribute(value=ast.Name(id=name), attr="bind" | "remote")
                | ast.Attribute(
                    value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="options")), attr="bind" | "remote"
                )
            ):
                made.setdefault(name, []).append(call)
    made_by = dict[int, list[tuple[int, dict[str, ast.expr]]]]()
    for one in classes:
        body = one.body if isinstance(one, ast.ClassDef) else ()
        for function in (part for part in body if isinstance(part, ast.FunctionDef) and part.name == "__init__"):
            names = [part for part in ast.walk(function) if isinstance(part, ast.Name)]
            stored = {part.id for part in names if isinstance(part.ctx, ast.Store)}
            for call in made.get(getattr(one, "name", ""), [])[:_MOST_OBJECTS]:
                is_open = any(isinstance(part, ast.Starred) for part in call.args)
                is_open = is_open or (not function.args.kwarg and any(part.arg is None for part in call.keywords))
                values = {} if is_open else {**dict(_preset(function.args)), **_passed(function.args, call)}
                values = {name: value for name, value in values.items() if name not in stored}
                made_by.setdefault(id(function), []).append((call.lineno, values))
    return made_by


def _is_one(values: list[ast.expr], stored: int) -> bool:
    """Return True if a name, which is stored so often, has one value wherever it is set."""
    return stored == len(values) and len({ast.dump(value) for value in values}) == 1


class _Values:
    """The expressions of a source: those of its names, and of its dicts with what is set in them."""

    def __init__(self, nodes: list[ast.AST], version: str) -> None:
        self._values, self._left = dict[str, ast.expr](), _MOST_NAMES
        self._version = version
        self._attributes, self._bound = dict[int, ast.expr](), dict[str, ast.expr]()
        self._options: dict[str, ast.expr] = {}
        self._after: dict[int, tuple[list[ast.stmt], ast.AST]] = {}
        self._is_certain = True
        scopes = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        self._scopes = [node for node in nodes if isinstance(node, scopes)]
        self._classes = {scope.name: class_values(scope) for scope in self._scopes if isinstance(scope, ast.ClassDef)}
        held = [node for node in nodes if isinstance(node, ast.Subscript | ast.Attribute)]
        held = [node for node in held if isinstance(node.value, ast.Name)]
        self._set = {_names(node.value)[0] for node in held if not isinstance(node.ctx, ast.Load)}
        self._changed = self._set | {_names(node.value)[0] for node in held if isinstance(node, ast.Attribute)}
        self._dicts = [node for node in nodes if isinstance(node, ast.Dict)]
        self._names_of = {  # a dict that is assigned to a name, and what is set in it
            id(node.value): node.targets[0].id
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        self._keyed = _keyed(nodes)
        self._items: dict[str, list[tuple[ast.expr | None, ast.expr]]] = {}
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(place := node.targets[0], ast.Subscript):
                self._items.setdefault(_names(place.value)[1] or "=", []).append((place.slice, node.value))
        named = {name: [key for key, _ in items] for name, items in self._items.items()}
        self._keys = {name: keys for name, keys in named.items() if any(map(_is_sagemakers, keys))}

    def _assumed(self, name: str, value: object) -> str:
        """Return a variable of the program with its default."""
        self._is_certain = False
        return with_default(name, value)

    def _nested(self, node: ast.expr | None) -> tuple[dict[str, Any], list[str]]:
        if node is None:
            return {}, []
        return self._arguments([ast.keyword(None, node)])

    def _arguments(self, keywords: Iterable[ast.keyword], depth: int = 0) -> tuple[dict[str, Any], list[str]]:
        """Return arguments by name, and a variable for each `**` whose names are not known."""
        arguments: dict[str, Any] = {}
        unseen: list[str] = []
        for keyword in keywords:
            if keyword.arg:
                arguments[keyword.arg] = self._known(keyword.value, keyword.arg)
                continue
            named = keyword.value.id if isinstance(keyword.value, ast.Name) else ""
            keyed = self._keyed.get(named, ()) if named in self._values and named not in self._bound else ()
            keyed = keyed if self._left > 0 else ()
            self._left -= bool(keyed)
            inner = self._inner(self._values[named] if keyed else keyword.value)
            if inner is None or depth > _DEEPEST:
                unseen.append(_variable(_named(keyword.value)))
            else:
                names, more = self._arguments(inner, depth + 1)
                arguments |= names
                unseen += more
                for statement in keyed[:_MOST_ENGINES]:
                    name, is_taken = statement.targets[0].slice.value, self._is_taken(statement)  # type: ignore[attr-defined]
                    if is_taken:
                        arguments[name] = self._known(statement.value, name)
                    elif is_taken is None and name in arguments:
                        arguments[name] = _variable(name)
                    elif is_taken is None:
                        unseen.append(_variable(name))
        return arguments, unseen

    def _inner(self, node: ast.expr) -> list[ast.keyword] | None:
        """Return the entries of a dict that the source writes out; None for another expression."""
        if isinstance(node, ast.Name):
            self._left -= 1
            value = self._bound.get(node.id, self._values.get(node.id, self._options.get(f"{node.id}=")))
            value = None if node.id in self._changed or self._left < 0 else value
            return self._inner(value) if value is not None and not isinstance(value, ast.Name) else None
        if isinstance(node, ast.Call) and _names(node.func) == ("dict", "dict") and not node.args:
            return node.keywords
        if not isinstance(node, ast.Dict):
            return None
        entries = []
        for key, value in zip(node.keys, node.values, strict=True):
            name = key.value if isinstance(key, ast.Constant) else key
            if not (name is None or isinstance(name, str)):
                return None
            entries.append(ast.keyword(name, value))
        return entries

    def _is_taken(self, statement: ast.AST) -> bool | None:
        """Return True if a statement runs, in the branches by default too, False if it never does, None for unknown."""
        for _ in range(_DEEPEST):
            if id(statement) not in self._after:
                return True
            parent = self._after[id(statement)][1]
            if isinstance(parent, ast.If) and "__name__" not in _names(getattr(parent.test, "left", parent.test)):
                self._is_certain = True
                try:
                    value = bool(usual(self._literal(parent.test, 0)))
                except (_UnknownValue, RecursionError, ArithmeticError, LookupError, TypeError, ValueError):
                    return None
                if value is (statement in parent.orelse):
                    return False if self._is_certain else None
            statement = parent
        return None

    def _known(self, node: ast.expr, name: str) -> Any:
        """Return the value of an expression, a variable of that name if the source does not show it."""
        try:
            return self._literal(node, 0)
        except (_UnknownValue, RecursionError, ArithmeticError, LookupError, TypeError, ValueError):
            return _variable(name)

    def _literal(self, node: ast.expr, depth: int) -> Any:
        if depth > _DEEPEST:
            raise _UnknownValue
        match node:
            case ast.Constant(value=str() | int() | float() | None as value):
                return value
            case ast.Name(id=name) if (
                name in self._bound or (name in self._values and name not in self._changed)
            ) and self._left > 0:
                self._left -= 1
                return self._literal(self._bound.get(name, self._values.get(name, node)), depth + 1)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return name
            case ast.Attribute(value=ast.Name(id="sys"), attr="executable"):
                return "python3"
            case ast.Attribute() if id(node) in self._attributes:
                value = self._literal(self._attributes[id(node)], depth + 1)
                if value is None:  # set from elsewhere
                    raise _UnknownValue
                return value
            case ast.Attribute(value=holder, attr=name) if name in (made := self._made(holder)):
                return self._literal(made[name], depth + 1)
            case ast.Name(id=name) if f"{name}=" in self._options:
                value = self._literal(self._options[f"{name}="], depth + 1)
                return value if is_default(value) else self._assumed(name.upper(), value)
            case ast.Attribute(value=ast.Name(id=holder), attr=name) if name in self._options and "arg" in holder:
                return self._assumed(name.upper(), self._literal(self._options[name], depth + 1))
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self._literal(part, depth + 1) for part in parts]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._literal(operand, depth + 1)
            case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _ARITHMETIC:
                numbers = self._literal(left, depth + 1), self._literal(right, depth + 1)
                is_text = isinstance(kind, ast.Add) and all(isinstance(n, str) and len(n) < _LONGEST for n in numbers)
                if is_text or all(isinstance(one, int | float) and abs(one) < _LARGEST for one in numbers):
                    return _ARITHMETIC[type(kind)](*numbers)
            case ast.Call(func=ast.Name(id="str" | "int" | "float" as kind), args=[inner]):
                value = self._literal(inner, depth + 1)
                return value if is_default(value) else {"str": str, "int": int, "float": float}[kind](value)
            case ast.Call(func=ast.Attribute(attr="get" | "getenv"), args=[ast.Constant(value=str() as name), *rest]):
                value = self._literal(rest[0], depth + 1) if rest else None
                if "environ" in ast.unparse(node.func) or ast.unparse(node.func) == "os.getenv":
                    return self._assumed(name, value)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str() as name), other]):
                return self._assumed(name.upper(), self._literal(other, depth + 1))
            case ast.JoinedStr(values=parts):
                inner_parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in parts]
                return "".join(str(self._literal(part, depth + 1)) for part in inner_parts)
            case ast.Call(func=ast.Attribute(attr="from_cli"), args=[ast.Constant(value=str() as text)]):
                return text
            case ast.Dict() | ast.Call():
                entries = self._inner(node)
                if isinstance(node, ast.Call) and _names(node.func)[1].endswith("Config") and not node.args:
                    entries = node.keywords  # PoolerConfig(...)
                if entries is not None and not any(entry.arg is None for entry in entries):
                    return {str(entry.arg): self._literal(entry.value, depth + 1) for entry in entries}
        return self._computed(node, depth)

    def _made(self, holder: ast.expr) -> Mapping[str, ast.expr]:
        """Return the attributes of a class, or of an object that a call of it makes."""
        name = holder.id if isinstance(holder, ast.Name) else ""
        value = None if name in self._set else self._values.get(name, holder)
        if isinstance(value, ast.Name):
            return self._classes.get(value.id, {})
        kind = _names(value.func)[1] if isinstance(value, ast.Call) and not value.args else ""
        own = {part.arg: part.value for part in value.keywords if part.arg} if isinstance(value, ast.Call) else {}
        return {**self._classes.get(kind, {}), **own} if kind[:1].isupper() else {}

    def _gpus(self, made: ast.Call, depth: int) -> Any:
        """Return the number of GPUs of modal.gpu.H100(count=2)."""
        if any(part.arg is None for part in made.keywords):
            raise _UnknownValue
        given = [*made.args, *(part.value for part in made.keywords if part.arg == "count")]
        return self._literal(given[0], depth) if given else 1

    def _computed(self, node: ast.expr, depth: int) -> Any:
        """Return the result of a test, a choice or a method of a text."""
        match node:
            case ast.Call(func=ast.Attribute(value=holder, attr=kind), args=given) if kind in _TEXT_METHODS:
                values = [usual(self._literal(part, depth + 1)) for part in (holder, *given)]
                if all(isinstance(value, str) and len(value) < _LONGEST for value in values):
                    return getattr(values[0], kind)(*values[1:])
            case ast.Attribute(value=ast.Name(id=name), attr="count") if name not in self._changed and _is_gpu(
                made := self._values.get(name)
            ):
                return self._gpus(made, depth + 1)
            case ast.Call(func=ast.Attribute(attr=kind), keywords=given) if _is_gpu(node):
                size = next((f"-{self._literal(part.value, depth + 1)}" for part in given if part.arg == "size"), "")
                return f"{kind.replace('_', '-')}{size}:{self._gpus(node, depth + 1)}"
            case ast.Subscript(value=holder, slice=place):
                return self._literal(holder, depth + 1)[self._literal(place, depth + 1)]
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._literal(body if usual(self._literal(test, depth + 1)) else orelse, depth + 1)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not usual(self._literal(operand, depth + 1))
            case ast.BoolOp(op=kind, values=parts):
                value = None
                for part in parts:
                    value = self._literal(part, depth + 1)
                    if bool(usual(value)) is isinstance(kind, ast.Or):
                        break
                return value
            case ast.Compare(left=left, ops=[kind], comparators=[right]) if type(kind) in _COMPARED:
                first, second = (usual(self._literal(part, depth + 1)) for part in (left, right))
                first = int(first) if isinstance(second, int) and str(first).isdecimal() else first
                first = None if second is None and first == "" else first  # a variable without a default
                return _COMPARED[type(kind)](first, second)
        raise _UnknownValue

    def _text(self, node: ast.JoinedStr | ast.Constant) -> str:
        """Return a text; a part that is not known is a variable."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        parts = (part.value if isinstance(part, ast.FormattedValue) else part for part in node.values)
        return "".join(str(self._known(part, _named(part))) for part in parts)

    def _writing(self, name: str, command: str, node: ast.expr) -> Writing:
        """Return a launch with its function and the GPUs that a decorator of Modal, or a call of Beam, gives it."""
        within, place = self._around(node), self._place(node)
        calls = [call for scope in within for call in scope.decorator_list if isinstance(call, ast.Call)]
        gpus = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "gpu"]
        around = accelerators(self._known(gpus[-1], "gpu"), "function") if gpus else None
        around = around and around._replace(gpus_by=f'gpu="{around.gpus_by}"')
        return Writing(name, command, around, is_here=not around, place=place, line=node.lineno)

    def _around(self, node: Any) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
        line = getattr(node, "lineno", 0) or getattr(getattr(node, "value", None), "lineno", 0)
        return [scope for scope in self._scopes if scope.lineno <= line <= (scope.end_lineno or scope.lineno)]

    def _place(self, node: Any) -> str:
        """Return the function of a node, "" for none."""
        return next((one.name for one in reversed(self._around(node)) if not isinstance(one, ast.ClassDef)), "")

    def _by_variables(self) -> Iterator[tuple[int, Writing]]:
        """Yield the servers that SageMaker's image starts with the variables of a dict."""
        able = list[tuple[ast.Dict, dict[str, str]]]()
        nodes = (
            node
            for node in self._dicts
            if any(map(_is_sagemakers, (*node.keys, *self._keys.get(self._names_of.get(id(node), ""), ()))))
        )
        places: dict[tuple[str, str], list[tuple[ast.expr | None, ast.expr]]] = {}
        for node in islice(nodes, _MOST_ENGINES):
            name, place = self._names_of.get(id(node), ""), self._place(node)
            for item in self._items.pop(name, [])[:_MOST_ENGINES]:
                places.setdefault((name, self._place(item[1])), []).append(item)
            items = [*zip(node.keys, node.values, strict=True), *places.get((name, place), ())]
            whole = ast.Dict([key for key, _ in items], [value for _, value in items])
            able.append((node, {key: str(value) for key, value in self._nested(whole)[0].items()}))
        is_named = any(_SAGEMAKERS_MODEL in variables for _, variables in able)
        for node, variables in able:
            if _SAGEMAKERS_MODEL in variables or not is_named:  # else a part of another one
                words = from_variables({_SAGEMAKERS_MODEL: "$MODEL", **variables}, self._version) or []
                command = serve(words, unread(variables))
                yield node.lineno, self._writing("Python: the variables of SageMaker's image", command, node)


class _Source(_Values):
    def __init__(self, tree: ast.Module, version: str) -> None:
        nodes = list(ast.walk(tree))
        super().__init__(nodes, version)
        self._calls = [node for node in nodes if isinstance(node, ast.Call)]
        self._lists = [node for node in nodes if isinstance(node, ast.List)]
        printed = {id(part) for call in self._calls if _names(call.func)[1] in _PRINTERS for part in call.args}
        printed |= {id(part.value) for call in self._calls for part in call.keywords if part.arg in _PRINTERS}
        printed |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        printed |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        self._texts = [
            node
            for node in nodes
            if id(node) not in printed
            and (isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)))
        ]
        stored = Counter(node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
        stored.update(node.arg for node in nodes if isinstance(node, ast.arg))
        assigned: dict[str, list[ast.expr]] = {}
        for node in nodes:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not node.value:
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                same = assigned.setdefault(getattr(name, "id", ""), [])
                same.append(value)
                if isinstance(name, ast.Name) and _is_one(same, stored[name.id]):
                    self._values[name.id] = value
                    is_fixed = isinstance(value, ast.Constant | ast.JoinedStr) or _is_gpu(value)
                    self._changed -= {name.id} if is_fixed else set()
        self._attributes, self._options = _attributes(self._scopes), _defaults(self._calls)
        self._options |= _parameters(nodes, self._calls, stored)
        self._objects = _objects(self._scopes, self._calls)
        self._read_additions(nodes)
        self._environment = self._read_environment(nodes)
        self._foreign = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        self._foreign |= {  # imported from elsewhere than vLLM
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom | ast.Import)
            for alias in node.names
            if not re.match(r"\w*vllm|ray\b|beam\b", getattr(node, "module", alias.name) or "") and alias.name != "vllm"
        }

    def _read_environment(self, nodes: list[ast.AST]) -> dict[str, str]:
        """Return the variables that the source sets: of os.environ, of a copy of it, and of Modal's image."""
        copies, found = {"environ"}, dict[str, str]()
        images = {
            id(part): node.targets[0].id
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            for part in ast.walk(node.value)
        }
        self._by_image: list[tuple[str, str, str]] = []
        self._own: list[tuple[str, str, str]] = []
        for node in nodes:
            entries: list[ast.keyword] = []
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                if "os.environ" in ast.unparse(node.value):
                    copies.add(node.targets[0].id)
                    entries = (isinstance(node.value, ast.Dict) and self._inner(node.value)) or []
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                place = node.targets[0]
                if _names(place.value)[1] in copies and isinstance(place.slice, ast.Constant):
                    entries = [ast.keyword(str(place.slice.value), node.value)]
            elif isinstance(node, ast.Call) and len(node.args) == 1 and _last(node.func) in ("env", "update"):
                is_set = _last(node.func) == "env" or "environ" in ast.unparse(node.func)
                entries = (is_set and self._inner(node.args[0])) or []
            elif isinstance(node, ast.keyword) and node.arg == "env" and "os.environ" in ast.unparse(node.value):
                entries = (isinstance(node.value, ast.Dict) and self._inner(node.value)) or []
            is_taken = self._is_taken(node) if entries and isinstance(node, ast.Assign) else True
            pairs = {
                one.arg: str(self._known(one.value, "value")) if is_taken else _variable(one.arg)
                for one in entries
                if one.arg and is_taken is not False
            }
            is_shared = isinstance(node, ast.Call) or (
                isinstance(node, ast.Assign) and "environ" in ast.unparse(node.targets[0])
            )
            found |= pairs if is_shared else {}
            self._own += [] if is_shared else [(self._place(node), *pair) for pair in pairs.items()]
            self._by_image += [(images[id(node)], *pair) for pair in pairs.items() if id(node) in images and is_shared]
        return found

    def _environment_of(self, node: ast.expr) -> dict[str, str]:
        """Return the variables of a server: those that only another function's image sets are not its own."""
        decorators = [
            call for scope in self._around(node) for call in scope.decorator_list if isinstance(call, ast.Call)
        ]
        image = next((part.value for call in decorators for part in call.keywords if part.arg == "image"), None)
        named = image.id if isinstance(image, ast.Name) else ""
        others = {key for other, key, _ in self._by_image if named and other != named}
        own = {key: value for other, key, value in self._by_image if other == named}
        return {**{key: value for key, value in self._environment.items() if key not in others}, **own}

    def _read_additions(self, nodes: list[ast.AST]) -> None:
        """Find the lists that are assigned to a name, each with the statements behind it, and what else changes one."""
        names = ("body", "orelse", "finalbody", "handlers")
        self._after = {
            id(statement): (body[at + 1 :], node)
            for node in nodes
            for name in names
            if isinstance(body := getattr(node, name, None), list)
            for at, statement in enumerate(body)
        }
        self._assigned = dict[int, tuple[str, list[ast.stmt]]]()
        for node in nodes:
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.List)) or _addition(node):
                continue
            if isinstance(node.targets[0], ast.Name):
                behind, around = list[ast.stmt](), cast(ast.AST, node)
                while id(around) in self._after:  # also behind the branches around it
                    below, around = self._after[id(around)]
                    behind += below
                    if not isinstance(around, ast.If | ast.With | ast.Try):
                        break
                self._assigned[id(node.value)] = (node.targets[0].id, behind)
        self._lists_by_name = {name: node for node in self._lists if (name := self._assigned.get(id(node), ("",))[0])}
        self._altered = {
            node.value.id
            for node in nodes
            if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.value, ast.Name)
            if (node.attr in _ALTERING if isinstance(node, ast.Attribute) else not isinstance(node.ctx, ast.Load))
        }
        additions = {id(node): added for node in nodes if (added := _addition(node))}
        later = {(name, id(part)) for name, rest in self._assigned.values() for one in rest for part in ast.walk(one)}
        self._altered |= {name for at, (name, _) in additions.items() if (name, at) not in later}
        self._parts = {id(part) for _, value in additions.values() for part in ast.walk(value)}
        together = [{part.arg or "": part.value for part in call.keywords} for call in self._calls]
        together.append({**self._lists_by_name})
        self._rest = {  # a container's command, and its args beside it
            id(value): rest
            for group in together
            for name, value in group.items()
            if name.endswith("command")
            if isinstance(rest := group.get(name.removesuffix("command") + "args"), ast.List)
        }
        self._joined = {
            id(node)
            for call in self._calls
            if isinstance(call.func, ast.Attribute)
            and call.func.attr == "join"
            and call.args
            and isinstance(call.args[0], ast.Name)
            for node in self._lists
            if self._assigned.get(id(node), ("",))[0] == call.args[0].id
        }

    def engines(self) -> Iterator[Writing]:
        writings: list[tuple[int, Writing]] = []
        has_arguments = any(_names(call.func)[1] == "EngineArgs" for call in self._calls)  # LLM(**vars(arguments))
        for call in self._calls:
            root, last = _names(call.func)
            keywords = {keyword.arg for keyword in call.keywords if keyword.arg}
            is_vllm = keywords.isdisjoint(NOTATIONS["other_llm"])  # other libraries have an LLM, too
            is_vllm = is_vllm and not (last == "LLM" and has_arguments and not call.args and not keywords)
            if last in _CALLS and is_vllm and root not in self._foreign and len(writings) < _MOST_ENGINES:
                variables, _ = self._nested(
                    next((part.value for part in call.keywords if part.arg == "runtime_env"), None)
                )
                own = variables.get("env_vars")
                own = {key: str(value) for key, value in own.items()} if isinstance(own, dict) else {}
                around = (self._objects[id(scope)] for scope in self._around(call) if id(scope) in self._objects)
                objects = next(around, [])  # of the class that makes the engine when it begins: one engine for each
                alone: list[tuple[int, dict[str, ast.expr]]] = [(call.lineno, values) for _, values in objects]
                for line, self._bound in objects if len(objects) > 1 else alone or [(call.lineno, {})]:
                    command = serve(self._words(call, last), {**self._environment_of(call), **own})
                    writing = self._writing(f"Python: {last}(...)", command, call)
                    writings.append((line, writing._replace(line=line)))
                self._bound = {}
        writings += islice(self._by_variables(), _MOST_ENGINES)
        taken = {*map(id, self._rest.values())}
        for node in (each for each in self._lists if id(each) not in taken):
            rest = self._rest.get(id(node))
            words = [*self._list(node), *(self._list(rest) if rest else ())]
            if words[1:2] == ["serve"] and node.elts and _is_program(node.elts[0], self._values):
                words[0] = words[0] if isinstance(node.elts[0], ast.Constant) else "vllm"
            flags = [word.partition("=")[0] for word in words if word.startswith("--")]
            is_run = words[:1] and words[0] in ("docker", "podman") and "run" in words and "vllm" in " ".join(words)
            is_served = words[1:2] == ["serve"] and words[0].rpartition("/")[2] == "vllm"
            if is_run or is_served or any(map(is_server, words[:3])):
                command = self._command(words, node)
            elif (  # flags of vLLM's alone, one of which names the model
                ("--model" in flags or "--served-model-name" in flags)
                and words[0].startswith("--")
                and len(flags) >= _LEAST_FLAGS
                and all(map(understood, flags))
            ):
                command = self._command(["python3", "-m", "vllm.entrypoints.openai.api_server", *words], node)
            else:
                continue
            if len(writings) < _MOST_ENGINES:
                writings.append((node.lineno, self._writing("Python: a command as a list", command, node)))
        for text_node in self._texts:
            text = self._text(text_node)
            is_script = "\n" in text and _LINE.search(text)
            if (is_script or _COMMAND.match(text)) and len(writings) < _MOST_ENGINES:
                writings.append((text_node.lineno, self._writing("Python: a command as a text", text, text_node)))
        yield from (writing for _, writing in sorted(writings, key=lambda entry: entry[0]))

    def _list(self, node: ast.List) -> list[str]:
        """Return the words of a list; ["--x 1"] is two words if the source joins the list to a line for a shell."""
        words = [
            self._text(item) if isinstance(item, ast.JoinedStr) else str(self._known(item, _named(item)))
            for item in node.elts
        ]
        return [part for word in words for part in (split(word) if id(node) in self._joined else [word])]

    def _command(self, words: list[str], node: ast.List) -> str:
        """Return a list as a command of a shell, with what later statements add to it, each in its branch."""
        name, behind = self._assigned.get(id(node), ("", []))
        lines = self._script(behind, name, id(node) in self._joined) if name else []
        is_rest = name in self._altered or id(node) in self._parts  # of another list
        unknown = [_variable(name or "words")] * is_rest
        place = self._place(node)
        own = {key: value for where, key, value in self._own if where == place}
        exports = [f"export {key}={shlex.quote(value)}" for key, value in {**self._environment_of(node), **own}.items()]
        exports = [] if words[0] in ("docker", "podman") else exports
        if any(line == "fi" for line in lines):
            array = [f"command=({shlex.join([*words, *unknown])})", *lines, '"${command[@]}"']
            return "\n".join([*exports, *array])
        return "\n".join([*exports, " ".join([shlex.join(words), *(line[10:-1] for line in lines), *unknown])])

    def _script(self, statements: list[ast.stmt], name: str, is_joined: bool) -> list[str]:
        """Return the commands of a shell that add to the array `command` what statements add to a list."""
        lines: list[str] = []
        for statement in statements:
            if id(getattr(statement, "value", None)) in self._assigned and _names(statement.targets[0])[1] == name:  # type: ignore[attr-defined]
                break  # another list
            if isinstance(statement, ast.If):
                is_missing = _is_missing(statement.test)  # "if x:" and "if not x:" exclude each other
                test, self._is_certain = "$CONDITION", True
                with suppress(_UnknownValue, RecursionError, ArithmeticError, LookupError, TypeError, ValueError):
                    value = self._literal(statement.test, 0)
                    if self._is_certain:
                        lines += self._script(statement.body if value else statement.orelse, name, is_joined)
                        continue
                    test = "true" if bool(usual(value)) is not is_missing else "false"
                ways = [self._script(body, name, is_joined) for body in (statement.body, statement.orelse)]
                ways = ways[::-1] if is_missing else ways
                lines += [f"if {test}; then", *(ways[0] or [":"]), "else", *(ways[1] or [":"]), "fi"] * any(ways)
                continue
            parts = list(ast.walk(statement))
            found = [added for part in parts if (added := _addition(part)) and added[0] == name]
            if not found:
                continue
            inner = [body for key in ("body", "orelse", "finalbody") if (body := getattr(statement, key, None))]
            if isinstance(statement, ast.With | ast.Try):
                lines += [line for body in inner for line in self._script(body, name, is_joined)]
            elif inner or len(found) > 1:  # a loop
                lines.append(f"command+=({_variable(name)})")
            else:
                lines += self._lines(found[0][1], name, is_joined)
        return lines

    def _lines(self, added: ast.expr, name: str, is_joined: bool) -> list[str]:
        if isinstance(added, ast.IfExp):
            ways = [self._lines(way, name, is_joined) for way in (added.body, added.orelse)]
            return ["if $CONDITION; then", *(ways[0] or [":"]), "else", *(ways[1] or [":"]), "fi"]
        with suppress(_UnknownValue, RecursionError, ArithmeticError, LookupError, TypeError, ValueError):
            if usual(self._literal(added, 0)) in ("", []):
                return []
        if not isinstance(added, ast.List | ast.Tuple):
            return [f"command+=({_variable(_named(added))})"]
        listed = ast.List(added.elts)
        self._joined |= {id(listed)} if is_joined else set()
        words = self._list(listed)
        return [f"command+=({shlex.join(words)})"] if words else []

    def _words(self, call: ast.Call, name: str) -> list[str]:
        arguments, unseen = self._arguments(call.keywords)
        for value in call.args[: name != "LLMConfig"]:
            if isinstance(value, ast.Starred):
                unseen.append(_variable(_named(value)))
            else:
                arguments = {"model": self._known(value, "model"), **arguments}
        if name == "LLMConfig":
            spread = [(part.value, self._inner(part.value)) for part in call.keywords if not part.arg]
            entries = [*call.keywords, *(entry for _, inside in spread for entry in inside or ())]
            keywords = {keyword.arg: keyword.value for keyword in entries if keyword.arg}
            loaded, more = self._nested(keywords.get("model_loading_config"))
            settings, unseen = self._nested(keywords.get("engine_kwargs"))
            unseen += [_variable(_named(value)) for value, inside in spread if inside is None]
            arguments = ray_arguments(loaded, settings)
            arguments["model"] = arguments["model"] or _variable("model")
            unseen += more if not loaded else []
        if unseen and not arguments.get("model"):
            arguments["model"] = _variable("model")
        return [*command_line(arguments, self._version), *dict.fromkeys(unseen)]


def _is_program(node: ast.expr, values: Mapping[str, ast.expr]) -> bool:
    """Return True for an expression that ends in vllm: a path's last part, or the last argument of a call."""
    for _ in range(_DEEPEST):
        match node:
            case ast.Constant(value=str() as text):
                return text.rpartition("/")[2] == "vllm"
            case ast.JoinedStr(values=[*_, last]) | ast.BoolOp(values=[*_, last]) | ast.Call(args=[*_, last]):
                node = last
            case ast.BinOp(op=ast.Add() | ast.Div(), right=last):
                node = last
            case ast.Name(id=name) if name in values:
                node = values[name]
            case _:
                return False
    return False


def _addition(node: ast.AST) -> tuple[str, ast.expr] | None:
    """Return the name of a list and what a node adds to it: +=, append, extend, or x = [*x, ...] and x = x + [...]."""
    match node:
        case ast.AugAssign(target=ast.Name(id=name), value=value):
            return name, value
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value]):
            return name, ast.List([value])
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="extend"), args=[value]):
            return name, value
        case ast.Assign(
            targets=[ast.Name(id=name)], value=ast.BinOp(left=ast.Name(id=left), op=ast.Add(), right=value)
        ) if name == left:
            return name, value
        case ast.Assign(
            targets=[ast.Name(id=name)], value=ast.List(elts=[ast.Starred(value=ast.Name(id=left)), *rest])
        ) if name == left:
            return name, ast.List(rest)
    return None


def _is_missing(test: ast.expr) -> bool:
    """Return True for `x is None` and `not x`."""
    match test:
        case ast.Compare(ops=[ast.Is()], comparators=[ast.Constant(value=None)]) | ast.UnaryOp(op=ast.Not()):
            return True
    return False


def _is_gpu(node: ast.expr | None) -> TypeGuard[ast.Call]:
    """Return True for modal.gpu.H100(count=2)."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith("modal.gpu.")


def _names(node: ast.expr) -> tuple[str, str]:
    """Return the first and the last name of vllm.engine.LLM; two empty names for another expression."""
    last = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    while isinstance(node, ast.Attribute):
        node = node.value
    return (node.id, last) if isinstance(node, ast.Name) else ("", "")


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""


def _named(node: ast.expr) -> str:
    """Return a name for an unknown expression."""
    if isinstance(node, ast.Starred):
        return _named(node.value)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else "value"
