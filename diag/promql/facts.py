"""Expressions without samples: the metrics that they select, the labels that they yield, and edits of their text.

Text is edited, not printed anew: promql-parser prints durations without milliseconds and strings without escapes.
"""

import re
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from diag.promql.data import (
    NAME,
    Aggregate,
    Binary,
    Call,
    Expression,
    Negate,
    Node,
    Range,
    Selector,
    String,
    Subquery,
    is_scalar,
    pinned_labels,
)
from diag.promql.operators import ARITHMETIC, SET_OPERATIONS
from diag.promql.parser import parse

WIDTH = 100
"""Characters of a line of a pretty expression."""
_STRING = r'"(?:\\.|[^"\\])*"|' r"'(?:\\.|[^'\\])*'|`[^`]*`"
_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_TOKEN = re.compile(
    rf"{_STRING}|(?P<open>[({{\[])|(?P<close>[)}}\]])"
    r"|(?P<operator> (?=(?:and|or|unless|[-+*/%^]|[=!<>]=?) ))|(?P<comma>, )"
)
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
    """Return the labels that every result is limited to, or None if they depend on the samples."""
    return _labels(expression.node)


def may_have_value(node: Node, has_samples: Callable[[Selector], bool]) -> bool:
    """Return True if an expression may yield a value, by its selectors that have samples; values are not looked at."""
    match node:
        case Selector() | Range(Selector()):
            return has_samples(node if isinstance(node, Selector) else node.selector)
        case Subquery(expr) | Negate(expr) | Aggregate(_, expr):
            return may_have_value(expr, has_samples)
        case Call(function, args):
            return function.startswith("absent") or all(may_have_value(arg, has_samples) for arg in args)
        case Binary("or", left, right):
            return may_have_value(left, has_samples) or may_have_value(right, has_samples)
        case Binary("unless", left, _):
            return may_have_value(left, has_samples)
        case Binary(_, left, right):
            return may_have_value(left, has_samples) and may_have_value(right, has_samples)
    return True


def add_matchers(promql: str, matchers: str | Callable[[str], str], parts: Collection[str] = ()) -> str:
    """Return the expression with `matchers`, `job="vllm",cluster="eu"` for example, in each selector.

    A function returns those of a metric; a selector without a fixed name has the name "". The names in `parts` are left
    as they are: other expressions are going to replace them.
    """
    if not matchers:
        return promql
    selected = metric_names(parse(promql)).difference(parts)
    names = "|".join(name for name in selected if _METRIC.fullmatch(name)) or "(?!)"
    selector = rf"(?<![\w:])(?P<name>{names})(?![\w:])(?:\s*\{{)?|\{{"

    def put(found: re.Match[str]) -> str:
        if found["string"]:
            return found[0]
        added = matchers if isinstance(matchers, str) else matchers(found["name"] or "")
        return f"{found[0]}{added}, " if found[0][-1] == "{" else f"{found[0]}{{{added}}}"

    return re.sub(rf"(?P<string>{_STRING})|{selector}", put, promql)


class _Break(NamedTuple):
    """A place at which a line may end; `goes_on`: where the next line begins, `depth`: in parentheses."""

    at: int
    goes_on: int
    depth: int


def pretty(promql: str) -> str:
    """Return an expression with line breaks before its outermost operators, each line indented by its depth."""
    text = re.sub(r"\s*\n\s*", " ", promql)
    depth, breaks = 0, []
    for token in _TOKEN.finditer(text):
        match token.lastgroup:
            case "open":
                depth += 1
            case "close":
                depth -= 1
            case "operator":
                breaks.append(_Break(token.start(), token.end(), depth))
            case "comma":
                breaks.append(_Break(token.start() + 1, token.end(), depth))

    lines, start, indent = [], 0, ""
    while len(indent) + len(text) - start > WIDTH:
        ahead = [place for place in breaks if place.at > start]
        near = [place for place in ahead if len(indent) + place.at - start <= WIDTH]
        best = min(near or ahead[:1], key=lambda place: (place.depth, -place.at), default=None)
        if best is None:
            break
        lines.append(indent + text[start : best.at])
        start, indent = best.goes_on, "  " * best.depth
    return "\n".join([*lines, indent + text[start:]])


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
        case Aggregate(op, expr, param, names, without):
            labels = _labels(expr)
            if op not in ("topk", "bottomk"):
                added = {param.value} if isinstance(param, String) else set()
                if not without:
                    labels = frozenset(names) | added
                elif labels is not None:
                    labels = (labels | added) - {*names, NAME}
        case Call("vector") | Call(args=()):
            labels = frozenset()
        case Call("absent" | "absent_over_time", args):
            labels = frozenset(pinned_labels(args[0]))
        case Call(function, args):
            labels = _labels(next(arg for arg in args if not is_scalar(arg)))
            if function in ("label_replace", "label_join"):
                target = args[1]
                labels = None if labels is None or not isinstance(target, String) else labels | {target.value}
            elif function == "histogram_quantile":
                labels = _without(labels, NAME, "le")
            elif function not in ("sort", "sort_desc", "last_over_time"):
                labels = _without(labels, NAME)
        case Binary():
            labels = _labels_of_binary(node)
    return labels


def _without(labels: _Labels, *names: str) -> _Labels:
    return None if labels is None else labels - set(names)


def _labels_of_binary(node: Binary) -> _Labels:
    left, right = _labels(node.left), _labels(node.right)
    matching = node.matching
    if is_scalar(node.left) or is_scalar(node.right):
        labels = right if is_scalar(node.left) else left
    elif node.op == "or":
        return left if left == right else None
    elif node.op in SET_OPERATIONS:
        return left
    elif matching.many:
        many = right if matching.many == "right" else left
        labels = None if many is None else many | set(matching.include)
    elif matching.on:
        labels = frozenset(matching.labels) if left is None else left & set(matching.labels)
    else:
        labels = _without(left, *matching.labels)
    return _without(labels, NAME) if node.op in ARITHMETIC or node.return_bool else labels
