"""The part of PromQL that is evaluated, as data, and the RE2 patterns of its matchers.

Times are milliseconds; parentheses and unary plus are removed. A node is equal to itself only: the parser makes one
node of parts that are written alike, so that a result kept for a node is found without comparing the trees below it.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Matcher(NamedTuple):
    """A label matcher; a label that a series lacks has the value ""."""

    label: str
    op: str  # = != =~ !~
    value: str

    def accepts(self, value: str) -> bool:
        same = value == self.value if self.op in ("=", "!=") else fully_matches(self.value, value)
        return same == (self.op in ("=", "=~"))


@dataclass(eq=False)
class Number:
    """A number literal."""

    value: float


@dataclass(eq=False)
class String:
    """A string literal; only ever an argument."""

    value: str


@dataclass(eq=False)
class Selector:
    """An instant vector selector; the metric's name is the matcher of __name__.

    text: the metric's name, or the selector as it is written if it has none. offset: ms.
    """

    matchers: tuple[Matcher, ...]
    offset: int
    text: str


@dataclass(eq=False)
class Range:
    """A range vector selector; range: ms."""

    selector: Selector
    range: int


@dataclass(eq=False)
class Subquery:
    """A range vector made of evaluations at the multiples of `step`; all times in ms."""

    expr: "Node"
    range: int
    step: int
    offset: int


@dataclass(eq=False)
class Call:
    """A function call."""

    function: str
    args: tuple["Node", ...]


@dataclass(eq=False)
class Aggregate:
    """An aggregation over series: by `labels`, or without them."""

    op: str
    expr: "Node"
    param: "Node | None"
    labels: tuple[str, ...]
    without: bool


class Matching(NamedTuple):
    """Vector matching: on(...) or ignoring(...), group_left(...) or group_right(...)."""

    on: bool
    labels: tuple[str, ...]
    many: str  # the side that may have many series for one of the other: "", "left" or "right"
    include: tuple[str, ...]  # copied from the side that has one


@dataclass(eq=False)
class Binary:
    """A binary operation."""

    op: str
    left: "Node"
    right: "Node"
    matching: Matching
    return_bool: bool


@dataclass(eq=False)
class Negate:
    """Unary minus."""

    expr: "Node"


Node = Number | String | Selector | Range | Subquery | Call | Aggregate | Binary | Negate


class Expression(NamedTuple):
    """A parsed and supported PromQL expression."""

    text: str
    node: Node


def is_scalar(node: Node) -> bool:
    match node:
        case Number():
            return True
        case Call(function):
            return function in ("time", "scalar")
        case Binary(_, left, right):
            return is_scalar(left) and is_scalar(right)
        case Negate(expr):
            return is_scalar(expr)
    return False


_WORDS = re.compile(r"[\w|]*", re.ASCII)
"""Alternatives without any metacharacter, as most patterns are: they need not be compiled."""
_READ_DIFFERENTLY = (
    (r"\[[\[:]", "a bracket or a named class inside a character class"),
    (r"\{,", "a repetition without a lower bound"),
    (r"[*+?}]\+", "a doubled repetition"),
    (r"(?s)\(\?[a-z]*i(?=.*[^\x00-\x7f])", "case folding outside of ASCII"),
)
"""Patterns that RE2, which Prometheus uses, and Python's `re` understand differently."""


def fully_matches(pattern: str, text: str) -> bool:
    """Match as Prometheus does: anchored at both ends, the dot matching a newline too."""
    words = _words(pattern)
    return text in words if words is not None else compiled(pattern).fullmatch(text) is not None


@lru_cache(maxsize=1024)
def _words(pattern: str) -> frozenset[str] | None:
    return frozenset(pattern.split("|")) if _WORDS.fullmatch(pattern) else None


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL | re.ASCII)


@lru_cache(maxsize=1024)
def refusal(pattern: str) -> str | None:
    """Return the reason why a valid RE2 pattern is not supported; None if all of it is."""
    if _words(pattern) is not None:
        return None
    for unlike, what in _READ_DIFFERENTLY:
        if re.search(unlike, pattern):
            return f"{what} in the pattern {pattern!r}"
    try:
        compiled(pattern)
    except re.error as error:
        return f"the pattern {pattern!r} ({error})"
    return None


def expand(template: str, match: re.Match[str]) -> str:
    """Replace $1, ${1}, $name and ${name} as Go's Regexp.Expand does; an unknown group is empty."""

    def value(reference: re.Match[str]) -> str:
        if reference.group() == "$$":
            return "$"
        name = reference.group(1) or reference.group(2)
        groups: dict[str, str | None] = {str(i): group for i, group in enumerate((match.group(), *match.groups()))}
        return (groups | match.groupdict()).get(name) or ""

    return re.sub(r"\$\$|\$\{(\w+)\}|\$(\w+)", value, template, flags=re.ASCII)
