"""The errors that vLLM's own code raises, for diag/knowledge/failures/raised.json.

`PYTHONPATH=tests python -m support.raised_errors 0.8.5=FOLDER 0.33.0=FOLDER ...` reads the folders `vllm` of wheels or
installations, oldest release first. A message is kept as its fixed parts. Of the options count those that the message
names or fills in and, if it has none, those that the condition above the `raise` reads.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from diag.core.declarations import PACKAGE
from diag.vllm.flags.registry import known, release

FILE = PACKAGE / "knowledge" / "failures" / "raised.json"
ANY = "\0"
FEWEST_LETTERS, FEWEST_WORDS, MOST_OPTIONS = 12, 2, 4
"""Of a message's fixed parts; and the options that are kept of an error."""
MOST_TEXT = 90
"""Characters of a message that tell it from the others; it is kept to the end of the word."""
OLDEST = "0.8.5"
"""The oldest release that the project judges: what went before it is not kept."""
NO_REASON = re.compile("has no attribute|object is not|[Ss]ee (?:root cause|.{0,20}stack ?trace)|check the stack trace")
"""What Python itself says, too, and what only names another exception."""
SKIPPED = re.compile(r"vllm/(?:benchmarks|third_party|vllm_flash_attn|transformers_utils/configs|assets)/|/tests?/")
_VAGUE = {"model", "dtype", "device", "seed", "tokenizer", "quantization", "port", "host", "revision", "task", "config"}
"""Options that are the names of much else; they count if a message names them with dashes."""


class Site(NamedTuple):
    """A place that raises an error: its class, its message with ANY for what is filled in, and its options."""

    kind: str
    template: str
    options: tuple[str, ...]


def template_of(node: ast.expr, texts: dict[str, ast.expr]) -> tuple[str, list[ast.expr]]:
    """Return the message of an expression, and the expressions that are filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text, []
        case ast.JoinedStr(values=parts):
            read = [template_of(part, {}) for part in parts]
            return "".join(text for text, _ in read), [each for _, filled in read for each in filled]
        case ast.FormattedValue(value=value):
            return ANY, [value]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, other = template_of(left, texts), template_of(right, texts)
            return one[0] + other[0], one[1] + other[1]
        case ast.BinOp(left=left, op=ast.Mod(), right=right):
            text, _ = template_of(left, texts)
            return re.sub(r"%[-\d.]*[sdrfg]", ANY, text), [right]
        case ast.Call(func=ast.Attribute(value=value, attr="format"), args=args):
            text, _ = template_of(value, texts)
            return re.sub(r"\{[^{}]*\}", ANY, text), list(args)
        case ast.Call(func=ast.Attribute(value=value, attr="strip" | "rstrip"), args=[]):
            return template_of(value, texts)
        case ast.Name(id=name) if name in texts:
            return template_of(texts[name], {})
    return ANY, [node]


def options_in(nodes: list[ast.expr]) -> list[str]:
    """Return vLLM's options that expressions read as variables or fields."""
    names = [
        each.attr if isinstance(each, ast.Attribute) else each.id
        for node in nodes
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute | ast.Name)
    ]
    return [f"--{name.replace('_', '-')}" for name in names if name not in _VAGUE and _is_option(name)]


def _is_option(name: str) -> bool:
    return f"--{name.replace('_', '-')}" in known()


def options_named(text: str) -> list[str]:
    """Return vLLM's options that a message names, with dashes or as fields."""
    dashed = [name for name in re.findall(r"--[a-z][\w-]+", text) if name.replace("_", "-") in known()]
    fields = [f"--{name.replace('_', '-')}" for name in re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", text)]
    return [*dashed, *(name for name in fields if name in known())]


class _Sites(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[Site] = []
        self._conditions: list[ast.expr] = []
        self._texts: dict[str, ast.expr] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        conditions, self._conditions, texts, self._texts = self._conditions, [], self._texts, {}
        self.generic_visit(node)
        self._conditions, self._texts = conditions, texts

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._texts[target.id] = node.value
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._conditions.append(node.test)
        for each in (*node.body, *node.orelse):
            self.visit(each)
        self._conditions.pop()

    def visit_Assert(self, node: ast.Assert) -> None:
        if node.msg is not None:
            self._add("AssertionError", node.msg, [*self._conditions[-1:], node.test])

    def visit_Raise(self, node: ast.Raise) -> None:
        call = node.exc
        if isinstance(call, ast.Call) and call.args:
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name[:1].isupper() or name.endswith("Error"):
                self._add(name, call.args[0], self._conditions[-2:])

    def _add(self, kind: str, message: ast.expr, conditions: list[ast.expr]) -> None:
        text, filled = template_of(message, self._texts)
        text = re.sub(rf"(?:\s|{ANY})*{ANY}(?:\s|{ANY})*", lambda gap: f" {ANY} " if " " in gap[0] else ANY, text)
        text = re.sub(r" +", " ", text.replace("\n", " ")).strip(f" {ANY}")
        if NO_REASON.search(text):
            return
        letters = re.sub(rf"[^A-Za-z{ANY} ]", "", text)
        if sum(map(str.isalpha, letters)) < FEWEST_LETTERS or len(re.findall("[A-Za-z]{2,}", text)) < FEWEST_WORDS:
            return
        options = [*options_named(text), *options_in(filled)] or options_in(conditions[::-1])
        self.found.append(Site(kind, text, tuple(dict.fromkeys(options))[:MOST_OPTIONS]))


def sites(package: Path) -> Iterator[tuple[str, Site]]:
    """Yield what the code of a release raises, with the module: "vllm/config/model.py"."""
    for file in sorted(package.rglob("*.py")):
        module = str(Path("vllm") / file.relative_to(package))
        if not SKIPPED.search(module):
            visitor = _Sites()
            visitor.visit(ast.parse(file.read_text(encoding="utf-8")))
            yield from ((module, site) for site in visitor.found)


def content(packages: dict[str, Path]) -> dict[str, object]:
    """Return the file's content; a message that moved is listed in its newest module."""
    found: dict[tuple[str, str], tuple[str, int, int, tuple[str, ...]]] = {}
    for number, package in enumerate(packages.values()):
        for module, site in sites(package):
            first = found.get((site.kind, site.template), ("", number, 0, ()))[1]
            found[site.kind, site.template] = module, first, number, site.options
    found = {key: at for key, at in found.items() if release([*packages][at[2]]) >= release(OLDEST)}
    kinds = sorted({kind for kind, _ in found})
    modules: dict[str, list[list[object]]] = {}
    for (kind, template), (module, first, last, options) in sorted(
        found.items(), key=lambda each: (each[1][0], each[0])
    ):
        parts = template[: template.find(" ", MOST_TEXT) if " " in template[MOST_TEXT:] else None].split(ANY)
        modules.setdefault(module, []).append([kinds.index(kind), first, last, " ".join(options), *parts])
    return {"releases": list(packages), "kinds": kinds, "modules": modules}


if __name__ == "__main__":
    pairs = (argument.split("=", 1) for argument in sys.argv[1:])
    written = json.dumps(
        content({release: Path(folder) for release, folder in pairs}), ensure_ascii=False, separators=(",", ":")
    )
    FILE.write_text(written.replace('],"vllm/', '],\n"vllm/') + "\n", encoding="utf-8")
