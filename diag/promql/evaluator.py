"""Evaluation of an expression at many instants at once."""

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from diag.core.errors import QueryFailed
from diag.promql import functions
from diag.promql.data import (
    Aggregate,
    Binary,
    Block,
    Call,
    Expression,
    FormulaPart,
    Millis,
    Negate,
    Node,
    Number,
    Range,
    Samples,
    Selector,
    String,
    Subquery,
    Vector,
    distinct,
    instant_vector,
    nameless,
    pinned_labels,
    scalar,
    stack,
    without_holes,
)
from diag.promql.functions import RANGE_FUNCTIONS, Spans, over_windows
from diag.promql.operators import aggregate, binary, count_values
from diag.promql.parser import Formula, parse

MOST_CELLS = 10_000_000
"""Cells that an evaluator keeps, of vectors and of the instants that are their keys: 90 MB, more than a catalogue takes
over thousands of scrapes."""
MOST_INSTANTS = 64
"""Series of instants at which an evaluator keeps vectors; judging one window takes five."""

_NAMES = re.compile(r"[a-zA-Z_:][\w:]*|(?<![\w:])\{", re.ASCII)
"""Every name in an expression, and the brace of a selector without a name."""
_YIELDS_WITHOUT_SAMPLES = frozenset({"{", "absent", "absent_over_time", "vector", "scalar", *functions.DATES})
_words = lru_cache(maxsize=8192)(lambda text: frozenset(_NAMES.findall(text)))  # the same for all servers
_YIELDS_WITHOUT_A_PART = _YIELDS_WITHOUT_SAMPLES | {"or", "unless"}


def evaluate(expression: Expression | Formula | str, samples: Samples, instants: Millis) -> Vector:
    """Evaluate at instants (ms since 1970, ascending, any spacing), each as a Prometheus 3 asked at that instant would.

    Series that have no value at any instant are left out.
    """
    return Evaluator(samples).evaluate(expression, instants)


class Evaluator:
    """Evaluates expressions over one set of samples; a part that several expressions share is computed once."""

    def __init__(self, samples: Samples, most_cells: int = MOST_CELLS) -> None:
        self.samples = samples
        self._kept: dict[bytes, dict[Node, Vector]] = {}
        self._room = most_cells
        self._may_hold: dict[Formula | str, bool] = {}

    def evaluate(self, expression: Expression | Formula | str, instants: Millis) -> Vector:
        if not isinstance(expression, Expression):
            expression = parse(expression, with_parts=False)
        try:
            with np.errstate(all="ignore"):
                vector = self.at(np.asarray(instants, dtype=np.int64)).vector(expression.node)
        except RecursionError:
            raise QueryFailed(f"`{expression.text[:60]}...` is nested too deeply.") from None
        rows = np.flatnonzero(vector.present.any(axis=1))
        if vector.scalar or rows.size == len(vector.labels):
            return vector
        return Vector(tuple(vector.labels[row] for row in rows), vector.values[rows], vector.present[rows])

    def may_hold(self, asked: Formula | str) -> bool:
        """Return False if metrics that a query needs have no sample; it is not parsed: most metrics are missing."""
        memory = self._may_hold
        if asked not in memory:
            text, parts = (asked, {}) if isinstance(asked, str) else (asked.text, asked.parts)
            words = _words(text)
            named = not (self.samples.names.isdisjoint(words) and _YIELDS_WITHOUT_SAMPLES.isdisjoint(words))
            instant = "[" not in text and not parts
            if parts and _YIELDS_WITHOUT_A_PART.isdisjoint(map(str.lower, words)):
                memory[asked] = all(map(self.may_hold, parts.values()))
            else:
                memory[asked] = named or instant or any(map(self.may_hold, parts.values()))
        return memory[asked]

    def at(self, instants: Millis) -> "_Evaluation":
        """Return the evaluation at these instants, with what was computed at them before."""
        key = instants.tobytes()
        kept = self._kept.pop(key, None)
        if kept is None:
            if len(self._kept) >= MOST_INSTANTS:
                oldest = next(iter(self._kept))
                self._room += len(oldest) // instants.itemsize + sum(map(_cells, self._kept.pop(oldest).values()))
            kept = {}
            self._room -= instants.size
        self._kept[key] = kept  # the last one used is the last one dropped
        return _Evaluation(self, instants, kept)

    def take_room(self, vector: Vector) -> bool:
        has_room = (cells := _cells(vector)) <= self._room
        self._room -= cells * has_room
        return has_room


def _cells(vector: Vector) -> int:
    """Return the cells that a vector takes; an empty one takes memory too."""
    return max(vector.values.size, 1)


class _Evaluation:
    """The values of nodes at some instants; `kept` are the vectors of nodes that were computed before."""

    def __init__(self, evaluator: Evaluator, instants: Millis, kept: dict[Node, Vector]) -> None:
        self.evaluator = evaluator
        self.samples = evaluator.samples
        self.instants = instants
        self.kept = kept

    def vector(self, node: Node) -> Vector:
        while isinstance(node, FormulaPart):
            if not self.evaluator.may_hold(node.formula):
                return stack((), self.instants.size)
            node = parse(node.formula, with_parts=False).node
        vector = self.kept.get(node)
        if vector is None:
            vector = self._computed(node)
            if self.evaluator.take_room(vector):
                self.kept[node] = vector
        return vector

    def _computed(self, node: Node) -> Vector:
        match node:
            case Binary():
                left = self.vector(node.left)
                if node.op != "or" and not left.scalar and not np.count_nonzero(left.present):
                    return stack((), self.instants.size)  # nothing matches it: the right side need not be computed
                return binary(node.op, left, self.vector(node.right), node.matching, node.return_bool)
            case Aggregate():
                vector = self.vector(node.expr)
                if isinstance(node.param, String):
                    return count_values(vector, node.param.value, node.labels, node.without)
                param = np.empty(0) if node.param is None else self.vector(node.param).values[0]
                return aggregate(node.op, vector, node.labels, node.without, param)
            case Call(function) if function in RANGE_FUNCTIONS:
                return self._over_range(node)
            case Number(value):
                return scalar(np.full(self.instants.size, value))
            case Selector():
                return instant_vector(node, self.samples, self.instants)
            case Negate(expr):
                vector = self.vector(expr)
                return nameless(Vector(vector.labels, -vector.values, vector.present, vector.scalar))
            case Call("time"):
                return scalar(self.instants / 1000)
            case Call("timestamp", (Selector() as selector,)):
                return nameless(instant_vector(selector, self.samples, self.instants, of_time=True))
            case Call("timestamp", (computed,)):  # a computed value has the time of evaluation
                vector = self.vector(computed)
                times = np.broadcast_to(self.instants / 1000, vector.values.shape)
                return nameless(Vector(vector.labels, times, vector.present))
            case Call("absent", (argument,)):
                return functions.absent(self.vector(argument), pinned_labels(argument))
            case Call(function, arguments):
                args = [arg.value if isinstance(arg, String) else self.vector(arg) for arg in arguments]
                # only the calendar functions may have no argument: it is the time of evaluation then
                return functions.CALLS[function](*args or [scalar(self.instants / 1000)._replace(scalar=False)])
        raise TypeError(f"{node} is not a vector")

    def _over_range(self, node: Call) -> Vector:
        over = next(arg for arg in node.args if isinstance(arg, Range | Subquery))
        blocks: Sequence[Block]
        if isinstance(over, Range):
            blocks, offset = self.samples.select_dense(over.selector.matchers), over.selector.offset
        else:
            ends, offset = self.instants - over.offset, over.offset
            first, last = (ends - over.range) // over.step + 1, ends // over.step  # in the windows (end - range, end]
            multiples = [np.arange(low, high + 1) for low, high in zip(first, last, strict=True)]
            steps = distinct(np.concatenate(multiples or [first])) * over.step
            inner = self.evaluator.at(steps).vector(over.expr)
            blocks = list(without_holes(inner.labels, steps, inner.values, inner.present))

        scalars = [self.vector(arg).values[0] for arg in node.args if arg is not over]
        argument = scalars[0] if scalars else np.empty(self.instants.size)
        function = RANGE_FUNCTIONS[node.function]
        spans = Spans(self.instants, over.range, offset)
        vector = stack([over_windows(function, block, spans, argument) for block in blocks], self.instants.size)
        if node.function == "absent_over_time":
            return functions.absent(vector, pinned_labels(over))
        return vector if node.function == "last_over_time" else nameless(vector)
