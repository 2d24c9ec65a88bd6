"""What can be said of an expression without samples, for those who declare expressions."""

from collections.abc import Iterator

from diag.promql.binary import ARITHMETIC, SET_OPERATIONS
from diag.promql.nodes import (
    Aggregate,
    Binary,
    Call,
    Expression,
    Matching,
    Negate,
    Node,
    Range,
    Selector,
    String,
    Subquery,
    is_scalar,
)
from diag.promql.samples import NAME
from diag.promql.selectors import pinned_labels

_Labels = frozenset[str] | None  # None: unknown


def instant_selectors(expression: Expression) -> tuple[str, ...]:
    """Return the metrics selected outside of any range selector or subquery, which a single missed scrape can blind.

    A selector without a fixed metric name is returned as it is written.
    """
    return tuple(_name(selector) for selector, in_range in _selectors(expression.node, False) if not in_range)


def metric_names(expression: Expression) -> frozenset[str]:
    """Return all metrics selected; a selector without a fixed metric name is returned as it is written."""
    return frozenset(map(_name, selectors(expression)))


def selectors(expression: Expression) -> tuple[Selector, ...]:
    """Return all selectors, as often as they are written."""
    return tuple(selector for selector, _ in _selectors(expression.node, False))


def output_labels(expression: Expression) -> frozenset[str] | None:
    """Return the labels that every result is limited to, or None where only the samples can tell."""
    return _labels(expression.node)


def _name(selector: Selector) -> str:
    names = [matcher.value for matcher in selector.matchers if matcher.label == NAME and matcher.op == "="]
    return names[0] if names else selector.text


def _selectors(node: Node, in_range: bool) -> Iterator[tuple[Selector, bool]]:
    match node:
        case Selector():
            yield node, in_range
        case Range(selector):
            yield selector, True
        case Subquery(expr):
            yield from _selectors(expr, True)
        case Negate(expr):
            yield from _selectors(expr, in_range)
        case Aggregate(_, expr, param):
            for part in (expr, param):
                if part is not None:
                    yield from _selectors(part, in_range)
        case Binary(_, left, right):
            yield from _selectors(left, in_range)
            yield from _selectors(right, in_range)
        case Call(_, args):
            for arg in args:
                yield from _selectors(arg, in_range)


def _labels(node: Node) -> _Labels:
    labels: _Labels = None
    match node:
        case _ if is_scalar(node):
            labels = frozenset()
        case Subquery(expr):
            labels = _labels(expr)
        case Negate(expr):
            labels = _without(_labels(expr), NAME)
        case Aggregate():
            labels = _labels_of_aggregate(node)
        case Call():
            labels = _labels_of_call(node)
        case Binary():
            labels = _labels_of_binary(node)
    return labels


def _without(labels: _Labels, *names: str) -> _Labels:
    return None if labels is None else labels - set(names)


def _labels_of_aggregate(node: Aggregate) -> _Labels:
    inner = _labels(node.expr)
    if node.op in ("topk", "bottomk"):
        return inner
    added = {node.param.value} if isinstance(node.param, String) else set()
    if not node.without:
        return frozenset(node.labels) | added
    return None if inner is None else (inner | added) - {*node.labels, NAME}


def _labels_of_call(node: Call) -> _Labels:
    if node.function == "vector" or not node.args:
        return frozenset()
    if node.function in ("absent", "absent_over_time"):
        return frozenset(pinned_labels(node.args[0]))
    inner = _labels(next(arg for arg in node.args if not is_scalar(arg)))
    match node.function:
        case "sort" | "sort_desc" | "last_over_time":
            return inner
        case "label_replace" | "label_join":
            target = node.args[1]
            return None if inner is None or not isinstance(target, String) else inner | {target.value}
        case "histogram_quantile":
            return _without(inner, NAME, "le")
    return _without(inner, NAME)


def _labels_of_binary(node: Binary) -> _Labels:
    left, right = _labels(node.left), _labels(node.right)
    if is_scalar(node.left) or is_scalar(node.right):
        labels = right if is_scalar(node.left) else left
    elif node.op == "or":
        return left if left == right else None
    elif node.op in SET_OPERATIONS:
        return left
    else:
        labels = _labels_of_match(left, right, node.matching)
    return _without(labels, NAME) if node.op in ARITHMETIC or node.return_bool else labels


def _labels_of_match(left: _Labels, right: _Labels, matching: Matching) -> _Labels:
    if matching.many:
        many = right if matching.many == "right" else left
        return None if many is None else many | set(matching.include)
    if matching.on:
        return frozenset(matching.labels) if left is None else left & set(matching.labels)
    return _without(left, *matching.labels)
