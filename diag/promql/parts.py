"""Long expressions in parts, so that a part that many of them have is parsed once.

The parser takes time with the square of an expression's depth, and expressions that are made of others repeat them many
times. Between the parentheses of a text a part is replaced by a name, and the name by its node when nodes are made.
"""

import re
from collections.abc import Callable
from itertools import count

from diag.core.lazy_regex import lazy
from diag.promql.nodes import Node

LEAST = 120
"""Characters from which on a part is parsed on its own."""
_TOKEN = re.compile(r"""(\()|(\))|(,)|"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*'|`[^`]*`""")
_OPENS, _CLOSES, _COMMA = 1, 2, 3
MOST_DEEP = 500
"""Operators and parentheses around or before one term: the parser takes time and memory with the square of them."""
_DEEPER = lazy(
    r"""[({})\],\[]|[-+*/%^]|[=!<>]=?|\b(?i:and|or|unless|atan2)\b|"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|`[^`]*+`"""
)
_NAME = "diag::part::"
_named: dict[str, Node] = {}
_names: dict[str, str] = {}
_numbers = count()


def named(name: str | None) -> Node | None:
    """The part with this name."""
    return _named.get(name or "")


def depth(text: str) -> int:
    """How deep the tree of an expression can be at most: a row of operators is as deep as it is long."""
    if len(text) <= MOST_DEEP:
        return len(text)
    many = sum(map(text.count, "([{+-*/%^=!<>")) + sum(map(text.lower().count, ("and", "or", "unless", "atan2")))
    if many <= MOST_DEEP:
        return many
    groups, deep, most = [0], 0, 0
    for token in _DEEPER.finditer(text):
        mark = token.group()
        if mark in "([{":
            groups.append(0)
        elif mark in ")]}" and len(groups) > 1:
            deep -= groups.pop()
        elif mark == ",":
            deep, groups[-1] = deep - groups[-1], 0
        elif mark[0] not in "\"'`":
            deep, groups[-1] = deep + 1, groups[-1] + 1
        most = max(most, deep + len(groups))
    return most


class _Group:
    """The text after an opening parenthesis, or from the start: what was read of it, its parts already replaced."""

    def __init__(self, begin: int) -> None:
        self.begin = self.copied = begin
        self.pieces: list[str] = []
        self.has_comma = False

    def until(self, end: int, text: str) -> str:
        """The group as it is written up to `end`, with its parts replaced."""
        return "".join([*self.pieces, text[self.copied : end]])

    def take(self, inner: "_Group", name: str, end: int, text: str) -> None:
        """Take up a group that ends here: by its name, else what was replaced in it."""
        if name or inner.pieces:
            self.pieces += (text[self.copied : inner.begin], *([name] if name else inner.pieces))
            self.copied = end if name else inner.copied


def shortened(text: str, parse_vector: Callable[[str], Node | None]) -> str:
    """The text with the parts between its parentheses replaced; `parse_vector` gives no node for what is no vector.

    RecursionError where there are more than MOST_DEEP parentheses around something.
    """
    if len(text) < LEAST or _NAME in text or "#" in text:
        return text
    groups = [_Group(0)]
    for token in _TOKEN.finditer(text):
        mark = token.lastindex  # None for a string
        if mark == _OPENS:
            groups.append(_Group(token.end()))
            if len(groups) > MOST_DEEP:
                raise RecursionError
        elif mark == _COMMA:
            groups[-1].has_comma = True
        elif mark == _CLOSES and len(groups) > 1:
            group, at = groups.pop(), token.start()
            name = "" if group.has_comma or at - group.begin < LEAST else _name_of(group, at, text, parse_vector)
            groups[-1].take(group, name, at, text)
    return groups[0].until(len(text), text)


def _name_of(group: _Group, end: int, text: str, parse_vector: Callable[[str], Node | None]) -> str:
    """The name of a part, "" where it is no vector."""
    inside = text[group.begin : end]
    if inside not in _names:
        node = parse_vector(group.until(end, text))
        name = f"{_NAME}{next(_numbers)}" if node else ""  # one of its own, also where another thread names a part now
        if node:
            _named[name] = node
        _names[inside] = name
    return _names[inside]
