"""Long expressions in parts, so that a part that many of them have is parsed once.

The parser takes time with the square of an expression's depth, and expressions that are made of others repeat them many
times. Between the parentheses of a text a part is replaced by a name, and the name by its node when nodes are made.
"""

import re
from collections.abc import Callable, Iterator

from diag.promql.nodes import Node

LEAST = 120
"""Characters from which on a part is parsed on its own."""
_TOKEN = re.compile(r"""[(),]|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|`[^`]*`""")
_NAME = "diag::part::"
_named: dict[str, Node] = {}
_names: dict[str, str] = {}


def named(name: str | None) -> Node | None:
    """The part with this name."""
    return _named.get(name or "")


def shortened(text: str, parse_vector: Callable[[str], Node | None]) -> str:
    """The text with the parts between its parentheses replaced; `parse_vector` gives no node for what is no vector."""
    if len(text) < LEAST or _NAME in text or "#" in text:
        return text
    pieces, end = [], 0
    for begin, close, has_comma in _groups(text):
        inside = text[begin:close]
        name = "" if has_comma or len(inside) < LEAST else _name_of(inside, parse_vector)
        pieces += [text[end:begin], name or shortened(inside, parse_vector)]
        end = close
    return "".join([*pieces, text[end:]])


def _name_of(inside: str, parse_vector: Callable[[str], Node | None]) -> str:
    """The name of a part, "" where it is no vector."""
    if inside not in _names:
        node = parse_vector(inside)
        name = f"{_NAME}{len(_names)}" if node else ""
        if node:
            _named[name] = node
        _names[inside] = name
    return _names[inside]


def _groups(text: str) -> Iterator[tuple[int, int, bool]]:
    """Where the outermost parentheses begin and end inside, and whether a comma stands directly in them."""
    depth, begin, has_comma = 0, 0, False
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark == "(":
            depth += 1
            if depth == 1:
                begin, has_comma = token.end(), False
        elif mark == ")":
            depth -= 1
            if depth == 0:
                yield begin, token.start(), has_comma
        elif mark == "," and depth == 1:
            has_comma = True
