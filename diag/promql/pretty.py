"""PromQL over as many lines as it takes to be read: each breaks before an operator, and is indented by its depth."""

import re
from collections.abc import Iterator
from typing import NamedTuple

WIDTH = 100
"""Characters of a line."""
_TOKEN = re.compile(
    r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`|(?P<open>[({\[])|(?P<close>[)}\]])"""
    r"|(?P<operator> (?=(?:and|or|unless|[-+*/%^]|[=!<>]=?) ))|(?P<comma>, )"
)


class _Break(NamedTuple):
    """A place at which a line may end: where it is, where the next line goes on, and how deep in parentheses."""

    at: int
    goes_on: int
    depth: int


def pretty(promql: str) -> str:
    """Return an expression with line breaks at its outermost operators."""
    text = re.sub(r"\s*\n\s*", " ", promql)
    breaks, lines, start, indent = list(_breaks(text)), [], 0, ""
    while len(indent) + len(text) - start > WIDTH:
        ahead = [each for each in breaks if each.at > start]
        near = [each for each in ahead if len(indent) + each.at - start <= WIDTH]
        best = min(near or ahead[:1], key=lambda each: (each.depth, -each.at), default=None)
        if best is None:
            break
        lines.append(indent + text[start : best.at])
        start, indent = best.goes_on, "  " * best.depth
    return "\n".join([*lines, indent + text[start:]])


def _breaks(text: str) -> Iterator[_Break]:
    depth = 0
    for token in _TOKEN.finditer(text):
        match token.lastgroup:
            case "open":
                depth += 1
            case "close":
                depth -= 1
            case "operator":
                yield _Break(token.start(), token.end(), depth)
            case "comma":
                yield _Break(token.start() + 1, token.end(), depth)
