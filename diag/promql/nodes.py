"""The part of PromQL that is evaluated, as data. Times are milliseconds; parentheses and unary plus are gone.

A node is equal to itself only: the parser makes one node of parts that are written alike (`parse`), so that what was
computed for it is found without a look at the tree below it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from diag.promql.regex import fully_matches


class Matcher(NamedTuple):
    """A label matcher; a label that a series lacks has the value ""."""

    label: str
    op: str  # = != =~ !~
    value: str

    def accepts(self, value: str) -> bool:
        """Tell whether a label of this value passes."""
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

    text: how a selector without a metric's name is written; of any other its name.
    """

    matchers: tuple[Matcher, ...]
    offset: int
    text: str


@dataclass(eq=False)
class Range:
    """A range vector selector."""

    selector: Selector
    range: int


@dataclass(eq=False)
class Subquery:
    """A range vector made of evaluations at the multiples of `step`."""

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
    """An aggregation over series; `without` says how to read `labels`."""

    op: str
    expr: "Node"
    param: "Node | None"
    labels: tuple[str, ...]
    without: bool


class Matching(NamedTuple):
    """How the two sides of a vector operation are matched."""

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
    """Tell whether a node yields a scalar rather than a vector."""
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
