"""The data of PromQL: the tree of an expression, the RE2 patterns of its matchers, and samples and vectors in memory.

Times of a tree are milliseconds; parentheses and unary plus are removed. A node is equal to itself only: the parser
makes one node of parts that are written alike, so that a result kept for a node is found without comparing the trees
below it. Samples are indexed by metric name.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from diag.core.errors import QueryFailed

if TYPE_CHECKING:
    from diag.promql.parser import Formula

Labels = dict[str, str]
Floats = npt.NDArray[np.float64]
Millis = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NAME = "__name__"
LOOKBACK = 5 * 60 * 1000  # ms; a sample exactly this old is too old
_METADATA = frozenset({NAME, "__type__", "__unit__"})
_STALE_BITS = np.uint64(0x7FF0000000000002)
STALE: np.float64 = _STALE_BITS.view(np.float64)


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


@dataclass(eq=False)
class FormulaPart:
    """A part of a formula that is parsed once its values are asked for: most are of metrics that the samples lack."""

    formula: "Formula"


Node = Number | String | Selector | Range | Subquery | Call | Aggregate | Binary | Negate | FormulaPart


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


# -- samples and vectors


def is_stale(values: Floats) -> Bools:
    """Tell stale markers from other NaNs, which are real values."""
    stale: Bools = np.ascontiguousarray(values).view(np.uint64) == _STALE_BITS
    return stale


def distinct(times: Millis) -> Millis:
    """Sort times and keep one of equal ones; np.unique would load numpy.ma for it, a hundredth of a second."""
    ordered = np.sort(times)
    first: Bools = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: ordered.size]
    return ordered[first]


class Block(NamedTuple):
    """Series that share their sample times, as one scrape target's do.

    times: ms since 1970, ascending, shape (N,). values: shape (S, N); a hole is the stale marker.
    """

    labels: tuple[Labels, ...]
    times: Millis
    values: Floats


class Samples:
    """Blocks indexed by metric name; a series may be in one block only."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks: dict[str, list[Block]] = {}
        self._dense: dict[str, list[Block]] = {}
        self._selected: dict[tuple[Matcher, ...], list[Block]] = {}
        for block in blocks:
            labels = [{name: value for name, value in series.items() if value} for series in block.labels]
            values = np.asarray(block.values, dtype=np.float64)
            times = np.asarray(block.times, dtype=np.int64)
            if values.shape != (len(labels), times.size) or not (np.diff(times) > 0).all():
                raise ValueError("a block needs one row per series, one column per time, and times that ascend")
            rows: dict[str, list[int]] = {}
            for row, series in enumerate(labels):  # an empty label is no label
                rows.setdefault(series.get(NAME, ""), []).append(row)
            for name, chosen in rows.items():
                part = Block(tuple(labels[row] for row in chosen), times, values[chosen])
                self._blocks.setdefault(name, []).append(part)
        for name, parts in self._blocks.items():
            distinct_labels = {frozenset(series.items()) for part in parts for series in part.labels}
            if len(distinct_labels) != sum(len(part.labels) for part in parts):
                raise ValueError(f"two series of {name} have the same labels")

    @property
    def names(self) -> AbstractSet[str]:
        return self._blocks.keys()

    def select(self, matchers: Sequence[Matcher]) -> list[Block]:
        """Return the series that all matchers accept, holes included."""
        return [part for name in self._names(matchers) for part in _matching(self._blocks[name], matchers)]

    def select_dense(self, matchers: tuple[Matcher, ...]) -> Sequence[Block]:
        """Return the series that all matchers accept, in blocks that have no holes."""
        found = self._selected.get(matchers)
        if found is None:
            names = self._names(matchers)
            for name in names:
                if name not in self._dense:
                    self._dense[name] = [
                        dense
                        for block in self._blocks[name]
                        for dense in without_holes(block.labels, block.times, block.values, ~is_stale(block.values))
                    ]
            found = [part for name in names for part in _matching(self._dense[name], matchers)]
            self._selected[matchers] = found  # several windows select the same series
        return found

    def _names(self, matchers: Sequence[Matcher]) -> list[str]:
        on_name = [matcher for matcher in matchers if matcher.label == NAME]
        for matcher in on_name:
            if matcher.op == "=":
                return [name for name in (matcher.value,) if name in self._blocks and _accept(on_name, {NAME: name})]
        return [name for name in self._blocks if _accept(on_name, {NAME: name} if name else {})]


def without_holes(labels: Sequence[Labels], times: Millis, values: Floats, present: Bools) -> Iterator[Block]:
    """Split series into blocks without holes: the series of each block returned have samples at all of its times."""
    if present.all():
        yield Block(tuple(labels), times, values)
        return
    patterns: dict[bytes, list[int]] = {}
    for row, pattern in enumerate(np.packbits(present, axis=1)):
        patterns.setdefault(pattern.tobytes(), []).append(row)
    for rows in patterns.values():
        kept = np.flatnonzero(present[rows[0]])
        if kept.size:
            yield Block(tuple(labels[row] for row in rows), times[kept], values[rows][:, kept])


def _matching(blocks: Iterable[Block], matchers: Sequence[Matcher]) -> Iterator[Block]:
    others = [matcher for matcher in matchers if matcher.label != NAME]
    if not others:
        yield from blocks
        return
    for block in blocks:
        rows = [row for row, series in enumerate(block.labels) if _accept(others, series)]
        if rows:
            labels = tuple(block.labels[row] for row in rows)
            yield block if len(rows) == len(block.labels) else Block(labels, block.times, block.values[rows])


def _accept(matchers: Sequence[Matcher], series: Labels) -> bool:
    return all(matcher.accepts(series.get(matcher.label, "")) for matcher in matchers)


class Vector(NamedTuple):
    """The result of a node: series x instants.

    values: shape (S, T). present: shape (S, T), because NaN can be a real value. A scalar is one series without labels,
    present everywhere, with `scalar` set.
    """

    labels: tuple[Labels, ...]
    values: Floats
    present: Bools
    scalar: bool = False


def scalar(values: Floats) -> Vector:
    return Vector(({},), values[np.newaxis, :], np.ones((1, values.size), dtype=bool), scalar=True)


def stack(parts: Sequence[Vector], instants: int) -> Vector:
    """Put vectors over the same instants below each other; their label sets must differ."""
    if len(parts) == 1:
        return parts[0]
    labels = tuple(series for part in parts for series in part.labels)
    if not labels:
        return Vector((), np.empty((0, instants)), np.empty((0, instants), dtype=bool))
    return Vector(labels, np.concatenate([p.values for p in parts]), np.concatenate([p.present for p in parts]))


def merged(labels: Iterable[Labels], values: Floats, present: Bools) -> Vector:
    """Make a vector of rows that may have equal label sets.

    Rows with equal labels become one. QueryFailed if two of them are present at one instant, as in Prometheus.
    """
    labels = tuple(labels)
    if len(labels) < 2:
        return Vector(labels, values, present)
    places: dict[frozenset[tuple[str, str]], int] = {}
    index = [places.setdefault(frozenset(series.items()), len(places)) for series in labels]
    if len(places) == len(labels):
        return Vector(labels, values, present)
    shape = (len(places), present.shape[1])
    out, seen = np.zeros(shape), np.zeros(shape, dtype=bool)
    for row, place in enumerate(index):
        if (seen[place] & present[row]).any():
            raise QueryFailed(f"Two series of a result have the same labels {show(labels[row])} at one instant.")
        seen[place] |= present[row]
        out[place] = np.where(present[row], values[row], out[place])
    first = {place: row for row, place in reversed(list(enumerate(index)))}
    return Vector(tuple(labels[first[place]] for place in range(len(places))), out, seen)


def nameless(vector: Vector) -> Vector:
    """Drop the metric's name, which a computed quantity does not have."""
    if vector.scalar:
        return vector
    return merged((drop_name(series) for series in vector.labels), vector.values, vector.present)


def drop_name(labels: Labels) -> Labels:
    """Return the labels without the metric's name, type and unit."""
    return {name: value for name, value in labels.items() if name not in _METADATA}


def show(labels: Labels) -> str:
    """Write a label set as PromQL does."""
    return "{" + ", ".join(f'{name}="{value}"' for name, value in sorted(labels.items())) + "}"


def instant_vector(selector: Selector, samples: Samples, instants: Millis, of_time: bool = False) -> Vector:
    """Take the last sample of each series, its time in unix seconds if `of_time`; a stale marker ends the series."""
    parts = []
    at = instants - selector.offset
    for block in samples.select(selector.matchers):
        place = np.searchsorted(block.times, at, side="right") - 1
        times = block.times[np.maximum(place, 0)]
        recent = (place >= 0) & (times > at - LOOKBACK)
        values = block.values[:, np.maximum(place, 0)]
        present = recent & ~is_stale(values)
        parts.append(Vector(block.labels, np.broadcast_to(times / 1000, values.shape) if of_time else values, present))
    return stack(parts, instants.size)


def pinned_labels(node: Node) -> Labels:
    """Return the labels that absent() gives its result: each label that a selector pins to one value.

    If a label has several matchers, the last one decides (Prometheus' createLabelsForAbsentFunction). Matchers that an
    absent label passes count as last, because the storage has reordered them by then.
    """
    selector = node.selector if isinstance(node, Range) else node
    matchers = selector.matchers if isinstance(selector, Selector) else ()
    labels: Labels = {}
    pinned: set[str] = set()
    for matcher in sorted(matchers, key=lambda matcher: matcher.op in ("!=", "!~") and matcher.accepts("")):
        if matcher.op == "=" and matcher.label not in {NAME, *pinned}:
            labels[matcher.label] = matcher.value
            pinned.add(matcher.label)
        else:
            labels.pop(matcher.label, None)
    return {name: value for name, value in labels.items() if value}
