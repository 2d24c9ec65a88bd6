"""Evaluation of an expression at many instants at once."""

from collections.abc import Sequence

import numpy as np

from diag.core.errors import QueryFailed
from diag.promql import functions
from diag.promql.aggregate import aggregate, count_values
from diag.promql.binary import binary
from diag.promql.formula import Formula
from diag.promql.nodes import (
    Aggregate,
    Binary,
    Call,
    Expression,
    Negate,
    Node,
    Number,
    Range,
    Selector,
    String,
    Subquery,
)
from diag.promql.parse import parse
from diag.promql.range_functions import RANGE_FUNCTIONS, over_windows
from diag.promql.samples import Block, Millis, Samples, distinct, without_holes
from diag.promql.selectors import instant_vector, pinned_labels, timestamps
from diag.promql.vector import Vector, nameless, scalar, stack
from diag.promql.windows import Spans

MOST_CELLS = 10_000_000
"""Of the vectors that an evaluator keeps: 90 MB, more than a catalogue takes over thousands of scrapes."""


def evaluate(expression: Expression | Formula | str, samples: Samples, instants: Millis) -> Vector:
    """Evaluate at instants (ms since 1970, ascending, any spacing), each as a Prometheus 3 asked at that instant would.

    Series that have no value at any instant are left out.
    """
    return Evaluator(samples).evaluate(expression, instants)


class Evaluator:
    """Evaluates expressions over the same samples; a part that several of them have is computed once."""

    def __init__(self, samples: Samples, most_cells: int = MOST_CELLS) -> None:
        self.samples = samples
        self._kept: dict[bytes, dict[Node, Vector]] = {}
        self._room = most_cells

    def evaluate(self, expression: Expression | Formula | str, instants: Millis) -> Vector:
        """As the function of that name."""
        if not isinstance(expression, Expression):
            expression = parse(expression)
        try:
            with np.errstate(all="ignore"):
                vector = self.at(np.asarray(instants, dtype=np.int64)).vector(expression.node)
        except RecursionError:
            raise QueryFailed(f"`{expression.text[:60]}...` is nested too deeply.") from None
        rows = np.flatnonzero(vector.present.any(axis=1))
        if vector.scalar or rows.size == len(vector.labels):
            return vector
        return Vector(tuple(vector.labels[row] for row in rows), vector.values[rows], vector.present[rows])

    def at(self, instants: Millis) -> "_Evaluation":
        """The evaluation at these instants, with what was computed at them before."""
        return _Evaluation(self, instants, self._kept.setdefault(instants.tobytes(), {}))

    def has_room(self, vector: Vector) -> bool:
        """Whether a vector may be kept."""
        self._room -= vector.values.size
        return self._room >= 0


class _Evaluation:
    """Nodes at some instants; `kept` are the vectors of those that were computed before."""

    def __init__(self, evaluator: Evaluator, instants: Millis, kept: dict[Node, Vector]) -> None:
        self.evaluator = evaluator
        self.samples = evaluator.samples
        self.instants = instants
        self.kept = kept

    def vector(self, node: Node) -> Vector:
        vector = self.kept.get(node)
        if vector is None:
            vector = self._computed(node)
            if self.evaluator.has_room(vector):
                self.kept[node] = vector
        return vector

    def _computed(self, node: Node) -> Vector:
        match node:
            case Number(value):
                return scalar(np.full(self.instants.size, value))
            case Selector():
                return instant_vector(node, self.samples, self.instants)
            case Negate(expr):
                return _negated(self.vector(expr))
            case Binary():
                return self._binary(node)
            case Aggregate():
                return self._aggregate(node)
            case Call():
                return self._call(node)
        raise TypeError(f"{node} is not a vector")

    def _binary(self, node: Binary) -> Vector:
        left = self.vector(node.left)
        if node.op != "or" and not left.scalar and not left.labels:
            return left  # whatever the other side is, nothing matches it
        return binary(node.op, left, self.vector(node.right), node.matching, node.return_bool)

    def _aggregate(self, node: Aggregate) -> Vector:
        vector = self.vector(node.expr)
        if isinstance(node.param, String):
            return count_values(vector, node.param.value, node.labels, node.without)
        param = np.empty(0) if node.param is None else self.vector(node.param).values[0]
        return aggregate(node.op, vector, node.labels, node.without, param)

    def _call(self, node: Call) -> Vector:
        if node.function in RANGE_FUNCTIONS:
            return self._over_range(node)
        if node.function == "time":
            return functions.seconds(self.instants)
        if node.function == "timestamp":
            return self._timestamp(node.args[0])
        if node.function == "absent":
            return functions.absent(self.vector(node.args[0]), pinned_labels(node.args[0]))
        args = [arg.value if isinstance(arg, String) else self.vector(arg) for arg in node.args]
        # Only the calendar functions may go without an argument: they are asked about now.
        return functions.CALLS[node.function](*args or [functions.to_vector(functions.seconds(self.instants))])

    def _timestamp(self, node: Node) -> Vector:
        """Return when each sample was taken; what is computed is taken at the instant of evaluation."""
        if isinstance(node, Selector):
            return timestamps(node, self.samples, self.instants)
        vector = self.vector(node)
        return nameless(
            Vector(vector.labels, np.broadcast_to(self.instants / 1000, vector.values.shape), vector.present)
        )

    def _over_range(self, node: Call) -> Vector:
        over = next(arg for arg in node.args if isinstance(arg, Range | Subquery))
        blocks, offset = self._blocks(over)
        scalars = [self.vector(arg).values[0] for arg in node.args if arg is not over]
        argument = scalars[0] if scalars else np.empty(self.instants.size)
        function = RANGE_FUNCTIONS[node.function]
        spans = Spans(self.instants, over.range, offset)
        parts = [over_windows(function, block, spans, argument) for block in blocks]
        vector = stack(parts, self.instants.size)
        if node.function == "absent_over_time":
            return functions.absent(vector, pinned_labels(over))
        return vector if node.function == "last_over_time" else nameless(vector)

    def _blocks(self, over: Range | Subquery) -> tuple[Sequence[Block], int]:
        """Return what a range vector is made of, without holes, and its offset."""
        if isinstance(over, Range):
            return self.samples.select_dense(over.selector.matchers), over.selector.offset
        steps = _steps(self.instants - over.offset, over.range, over.step)
        inner = self.evaluator.at(steps).vector(over.expr)
        return list(without_holes(inner.labels, steps, inner.values, inner.present)), over.offset


def _steps(ends: Millis, span: int, step: int) -> Millis:
    """Return the multiples of `step` in the windows (end - span, end]."""
    first, last = (ends - span) // step + 1, ends // step
    counts = np.maximum(last - first + 1, 0)
    steps = [np.arange(start, start + count) for start, count in zip(first, counts, strict=True)]
    return distinct(np.concatenate(steps or [first])) * step


def _negated(vector: Vector) -> Vector:
    return nameless(Vector(vector.labels, -vector.values, vector.present, vector.scalar))
