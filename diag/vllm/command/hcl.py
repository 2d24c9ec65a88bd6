"""Read HCL: Terraform's resources as the documents of Kubernetes and Helm that they make, and the tasks of Nomad."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from diag.core.errors import BadUsage
from diag.core.files import parse_json, parse_yaml
from diag.vllm.command.command import NOTATIONS
from diag.vllm.command.container import listed
from diag.vllm.command.shell import variable_name, with_default

_TOKEN = re.compile(NOTATIONS["patterns"]["hcl_token"])
_EXPRESSION = re.compile(r"(?P<escaped>\$)?\$\{\s*(?P<name>[^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|%\{[^{}]*\}")
_ESCAPES = {r"\"": '"', r"\n": "\n", r"\t": "\t", r"\\": "\\"}
_DEEPEST = 60
_MOST_DOCUMENTS = 200
_MOST_ATTRIBUTES = 3
_FLAT = ("tostring", "tolist", "toset", "trimspace", "chomp", "nonsensitive")
"""Functions that return their argument, as far as a launch is concerned."""
_LISTS: Mapping[str, str] = NOTATIONS["terraform_lists"]
_KINDS: Mapping[str, str] = NOTATIONS["terraform_kinds"]
_JOB = re.compile(r"^[ \t]*(?:task|resource|locals|module|job)\b[^\n={]*\{", re.MULTILINE)
_PATH = re.compile(r"\[(\d{1,2})\]|((?:\\.|[^.\[\]\\])+)")


class _Block(dict[str, Any]):
    """A block: `labels` stand behind its name, `line` is its place in the text."""

    labels: tuple[str, ...] = ()
    line = 0


def is_hcl(text: str) -> bool:
    """Return True if a text has a block of Terraform or Nomad."""
    return bool(_JOB.search(text))


def documents(text: str) -> list[Any]:
    """Return what a text of Terraform or Nomad describes, as documents of YAML; BadUsage if it cannot be read."""
    first = _Parser(text, {}).body(0)
    local = {f"local.{key}": value for block in _blocks(first, "locals") for key, value in block.items()}
    for block in _blocks(first, "variable"):
        local |= _defaults(f"var.{''.join(block.labels)}", block.get("default"))
    whole = _Parser(text, local).body(0) if local else first
    tasks, rest = list[Any](), list[Any]()
    for task in (one for one in _blocks(whole, "task") if one.labels):  # as a service of Compose
        config, environment = _first(task, "config"), _first(task, "env")
        counts = [one.get("count", 1) for one in _blocks(task, "device") if "gpu" in " ".join(one.labels)]
        words = [*filter(None, [config.get("command")]), *listed(config.get("args"))]
        service = {"image": config.get("image"), "entrypoint": config.get("entrypoint"), "command": words}
        service |= {"environment": dict(environment)}
        service |= {"job": {"kind": "Nomad task", "gpus": (*counts, None)[0], "line": task.line}}
        tasks.append({"services": {task.labels[0]: service}})
    for block in _blocks(whole, "resource"):
        kind, name = (*block.labels, "", "")[:2]
        made = _resource(re.sub(r"_v\d$", "", kind), name, block)
        tasks += made
        rest += [] if made else [_plain(block)]
    return [*tasks, *rest, *map(_plain, _blocks(whole, "module"))]


def _defaults(name: str, value: Any, depth: int = 0) -> dict[str, str]:
    """Return what a variable is by default, and each of its attributes."""
    if isinstance(value, dict) and depth < _MOST_ATTRIBUTES:
        return {
            key: text for part in value for key, text in _defaults(f"{name}.{part}", value[part], depth + 1).items()
        }
    text = "" if isinstance(value, bool) else str(value) if isinstance(value, str | int | float) else ""
    return {name: with_default(variable_name(name), text)} if text and "\n" not in text else {}


def _blocks(node: Any, name: str) -> Iterator[_Block]:
    """Yield the blocks of that name at any depth."""
    for key, value in node.items() if isinstance(node, dict) else ():
        for child in value if isinstance(value, list) else ():
            if isinstance(child, _Block):
                yield from ((child,) if key == name else _blocks(child, name))


def _first(block: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = block.get(name)
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, dict) else {}


def _resource(kind: str, name: str, block: _Block) -> list[Any]:
    """Return the documents that a resource of Terraform stands for; [] for one of another kind."""
    if kind in ("kubernetes_manifest", "kubectl_manifest"):
        made = block.get("manifest", block.get("yaml_body"))
        return _texts([made]) if isinstance(made, str) else [made]
    if kind == "helm_release":
        values: dict[str, Any] = {}  # its texts over each other, and the values of `set`
        for document in _texts(listed(block.get("values"))):
            values |= document if isinstance(document, dict) else {}
        for one in (entry for key in ("set", "set_list") for entry in listed(block.get(key))):
            place: Any = values
            parts = [number or text.replace("\\", "") for number, text in _PATH.findall(str(one.get("name")))]
            for part, following in zip(parts, [*parts[1:], ""], strict=True):
                after: Any = one.get("value") if not following else [] if following.isdigit() else {}
                if isinstance(place, list) and part.isdigit():
                    place += [{} for _ in range(len(place), int(part) + 1)]
                    place[int(part)] = after if not following else place[int(part)]
                    place = place[int(part)]
                elif isinstance(place, dict):
                    place[part] = after if not following else place.get(part) or after
                    place = place[part]
        return [{"name": "".join(block.labels[1:]), **values}] if values else []
    if kind in _KINDS:
        return [{**_plain(block), "kind": _KINDS[kind]}]
    if "cloud_run" in kind or kind == "azurerm_container_app":
        return [{"kind": "service of containers", "metadata": {"name": name}, "spec": _plain(block)}]
    if kind == "aws_ecs_task_definition":
        defined = block.get("container_definitions")
        with suppress(ValueError):
            defined = parse_json(defined) if isinstance(defined, str) else defined
        return [{"containerDefinitions": defined}] if isinstance(defined, list) else []
    return []


def _texts(values: Sequence[Any]) -> list[Any]:
    made: list[Any] = []
    for value in values:
        with suppress(BadUsage):
            made += parse_yaml(value, "a value") if isinstance(value, str) else [value]
    return made


def _plain(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block with the keys of Kubernetes' objects; maps and lists that are no blocks stay as they are."""
    made: dict[str, Any] = {}
    for key, value in block.items():
        name = re.sub(r"_([a-z])", lambda letter: letter[1].upper(), key)
        if isinstance(value, list) and value and isinstance(value[0], _Block):
            children = [_plain(child) for child in value]
            made[_LISTS.get(key, name)] = children if key in _LISTS else children[0]
        else:
            made[name] = value
    return made


class _Parser:
    """A reader of blocks and expressions; an expression that is no literal is a variable of a shell."""

    def __init__(self, text: str, local: Mapping[str, Any]) -> None:
        if text.count("<<") > _MOST_DOCUMENTS:
            raise BadUsage("the text has too many here-documents")
        self._local, self._at = local, 0
        self._tokens = [token for token in _TOKEN.finditer(text) if token.lastgroup != "gap"]
        self._text = text

    def _sign(self) -> str:
        """Return the next token as it is written, "" at the end."""
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _skip(self) -> None:
        while self._sign() in ("\n", ","):
            self._at += 1

    def body(self, depth: int) -> _Block:
        """Read the blocks and attributes up to a closing brace."""
        block, labels, name = _Block(), list[str](), ""
        if depth > _DEEPEST:
            raise BadUsage("the text is nested too deep")
        while sign := self._sign():
            token = self._tokens[self._at]
            self._at += 1
            if sign == "}" and not name:
                break
            if sign in ("\n", ","):
                name, labels = "", []
            elif sign in ("=", ":") and name:
                block[name] = self._expression(depth + 1)
                name = ""
            elif sign == "{" and name:
                child = self.body(depth + 1)
                child.labels, child.line = tuple(labels), self._text.count("\n", 0, token.start()) + 1
                if name == "dynamic" and labels:  # for each of some list: one of them
                    inner, name = child.get("content"), labels[0]
                    child = inner[0] if isinstance(inner, list) and inner else child
                entries = block.setdefault(name, [])
                if isinstance(entries, list):  # else an attribute of this name stands before it
                    entries.append(child)
                name, labels = "", []
            elif token["name"] or token["text"] is not None:
                word = token["name"] or self._filled(token["text"])
                name, labels = (name, [*labels, word]) if name else (word, [])
        return block

    def _expression(self, depth: int) -> Any:
        """Read an expression up to the end of its line, a comma or a bracket."""
        if depth > _DEEPEST:
            raise BadUsage("the text is nested too deep")
        start = self._at
        value = self._primary(depth)
        opened = 0
        if self._sign() not in ("\n", ",", "}", "]", ")", ""):  # an operator, a condition
            first = self._at
            while (sign := self._sign()) and (opened or sign not in ("\n", ",", "}", "]", ")")):
                opened += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(sign, 0)
                self._at += 1
                is_split = sign in ("?", ":") or self._sign() in ("?", ":")
                while is_split and self._sign() == "\n":
                    self._at += 1
            names = [token["name"] for token in self._tokens[start : first + 1] if token["name"]]
            return f"${variable_name((names or ['value'])[0])}"
        return value

    def _primary(self, depth: int) -> Any:
        while self._sign() == "\n":
            self._at += 1
        if self._at >= len(self._tokens):
            return None
        token = self._tokens[self._at]
        self._at += 1
        if token["mark"]:
            lines = token["document"].split("\n")
            indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
            return self._filled("\n".join(line[indent:] for line in lines) + "\n", is_raw=True)
        if token["text"] is not None:
            return self._filled(token["text"])
        if token["number"]:
            return float(token[0]) if "." in token[0] else int(token[0])
        if token[0] in ("{", "["):
            is_loop = self._tokens[self._at : self._at + 1] and self._sign() == "for"
            if is_loop:
                opened = 1
                while opened and (sign := self._sign()):
                    opened += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(sign, 0)
                    self._at += 1
                return "$VALUE"
            return dict(self.body(depth + 1)) if token[0] == "{" else self._list("]", depth)
        if token["name"] and self._sign() == "(":
            self._at += 1
            parts = self._list(")", depth)
            if token[0] in ("jsonencode", "yamlencode") and len(parts) == 1:
                return json.dumps(parts[0])
            if token[0] in _FLAT and len(parts) == 1:
                return parts[0]
            if token[0] in ("concat", "compact", "flatten"):
                return [word for part in parts for word in (part if isinstance(part, list) else [part])]
            if token[0] == "merge" and parts and all(isinstance(part, dict) for part in parts):
                return {key: value for part in parts for key, value in part.items()}
            if token[0] == "join" and len(parts) == 2 and isinstance(parts[1], list):
                return str(parts[0]).join(map(str, parts[1]))
            return f"${variable_name(token[0])}"
        return self._named(token[0])

    def _list(self, end: str, depth: int) -> list[Any]:
        found: list[Any] = []
        self._skip()
        while self._sign() not in (end, ""):
            before = self._at
            found.append(self._expression(depth + 1))
            self._at += self._at == before
            self._skip()
        self._at += 1
        return found

    def _named(self, name: str) -> Any:
        if name in ("true", "false", "null"):
            return {"true": True, "false": False, "null": None}[name]
        return self._local.get(name, f"${variable_name(name)}")

    def _filled(self, text: str, is_raw: bool = False) -> str:
        """Replace the expressions in a text: $${X} is a shell's own."""

        def value(found: re.Match[str]) -> str:
            if found["escaped"]:
                return found[0][1:]
            return str(self._named(found["name"].strip().strip('"'))) if found["name"] else ""

        text = text if is_raw else re.sub(r"\\.", lambda pair: _ESCAPES.get(pair[0], pair[0]), text)
        return _EXPRESSION.sub(value, text)
