"""Parsing of PromQL, and formulas: expressions in which other expressions stand by name.

An expression of which any part is not fully implemented is refused by name.
"""

import re
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import promql_parser as ast

from diag.core.errors import Unsupported
from diag.promql import data
from diag.promql.data import NAME
from diag.promql.functions import CALLS, RANGE_FUNCTIONS
from diag.promql.operators import AGGREGATIONS, ARITHMETIC, COMPARISONS, SET_OPERATIONS

FUNCTIONS = frozenset(RANGE_FUNCTIONS) | frozenset(CALLS) | {"absent", "time", "timestamp"}
OPERATORS = frozenset(ARITHMETIC) | frozenset(COMPARISONS) | SET_OPERATIONS

_DEFAULT_STEP = 60_000  # ms, of a subquery: Prometheus' evaluation interval unless configured
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_BYTE_ESCAPE = re.compile(r"\\(?:x[89a-fA-F]|[23][0-7]{2})")  # the parser reads it as a character
# Keyed by name: the parser's enumerations are not hashable.
_OPS = {"MatchOp.Equal": "=", "MatchOp.NotEqual": "!=", "MatchOp.Re": "=~", "MatchOp.NotRe": "!~"}
_MANY = {"VectorMatchCardinality.ManyToOne": "left", "VectorMatchCardinality.OneToMany": "right"}
_N = TypeVar("_N")
_MILLISECOND = timedelta(milliseconds=1)
_NO_RESULT = (data.Range, data.Subquery, data.String)
_BARE = data.Matching(on=False, labels=(), many="", include=())
_Parts = Mapping[str, data.Node]
"""The nodes of a formula's parts, by the names of their series."""
MOST_DEEP = 500
"""Operators and parentheses around or before one term: the parser takes time and memory with the square of them."""
_DEEPER = (
    r"""[({})\],\[]|[-+*/%^]|[=!<>]=?|\b(?i:and|or|unless|atan2)\b|"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|`[^`]*`"""
)
"""A pattern of the tokens that make a tree deeper; hardly any expression is long enough to need it."""

_METRIC = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|`[^`]*`|[a-zA-Z_:][a-zA-Z0-9_:]*')
"""A string, in which no word is a metric, or a word that may be the name of a series."""
_NONE: Mapping[str, str] = {}
Change = Callable[[str, Collection[str]], str]
"""Edits an expression; the names in the second argument are those of parts, not of series."""


@dataclass(eq=False, repr=False)
class Formula:
    """PromQL over raw series and over other formulas.

    `name` is the series under which a rule records the formula, "" if none does. `parts` holds the formula of each
    recorded series that `text` selects. A formula is equal to itself only, so that a cache finds it without reading it.
    """

    name: str
    text: str
    parts: Mapping[str, "Formula"]

    def written_out(self, series: Mapping[str, str] = _NONE) -> str:
        """Return PromQL over raw series and over the recorded `series`, which are named by the names of formulas."""
        return series.get(self.name) or self.text_over(series)

    def text_over(self, series: Mapping[str, str], change: Change | None = None) -> str:
        """Return the expression of the formula itself, also where the formula is recorded.

        `change` edits the text of the formula and of each part, before the parts are put into it.
        """
        return self._text_over(series, change, {})

    def _text_over(self, series: Mapping[str, str], change: Change | None, done: dict[str, str]) -> str:
        parts = {name: part for name, part in self.parts.items() if name not in series}
        text = _replaced(self.text, series) if self.parts else self.text
        if change:
            text = change(text, parts.keys())
        for name, part in parts.items():
            if name not in done:
                done[name] = f"({part._text_over(series, change, done)})"
        return _replaced(text, {name: done[name] for name in parts})

    def references(self) -> list[str]:
        """Return the names of the parts in the order and as often as the text selects them."""
        return [word[0] for word in _METRIC.finditer(self.text) if word[0] in self.parts]


def _replaced(text: str, words: Mapping[str, str]) -> str:
    return _METRIC.sub(lambda word: words.get(word[0], word[0]), text) if words else text


class _Refused(Exception):
    """Names what is not supported; `parse` adds the expression."""


@lru_cache(maxsize=2048)
def parse(promql: str | Formula, with_parts: bool = True) -> data.Expression:
    """Parse an expression and check that all of it is supported; Unsupported names the part that is not.

    The node of a formula's part stands where its text selects the part, or, without parts, a place for it.
    """
    text, parts = (promql, {}) if isinstance(promql, str) else (promql.text, promql.parts)
    try:
        if depth(text) > MOST_DEEP:
            raise RecursionError
        try:
            tree = ast.parse(text)
        except BaseException as error:
            if type(error).__name__ not in ("PanicException", "OverflowError"):  # the latter: a duration too long
                raise
            raise ValueError(str(error)) from None
        if "\\" in text and _BYTE_ESCAPE.search(text):
            raise _Refused("an escaped byte")
        nodes = {
            name: parse(part).node if with_parts else _only(data.FormulaPart, part) for name, part in parts.items()
        }
        node = _node(tree, nodes)
        if isinstance(node, _NO_RESULT):
            raise _Refused("a range vector or a string as the result")
    except ValueError as error:
        raise Unsupported(f"`{text}` is not PromQL: {error}") from error
    except RecursionError:
        raise Unsupported(f"`{text[:60]}...` is nested too deeply.") from None
    except _Refused as refused:
        raise Unsupported(f"`{text}` uses {refused}, which is not supported.") from None
    return data.Expression(text, node)


def depth(text: str) -> int:
    """Return how deep the tree of an expression can be at most: a row of operators is as deep as it is long."""
    if len(text) <= MOST_DEEP:
        return len(text)
    many = sum(map(text.count, "([{+-*/%^=!<>")) + sum(map(text.lower().count, ("and", "or", "unless", "atan2")))
    if many <= MOST_DEEP:
        return many
    groups, deep, most = [0], 0, 0
    for token in re.finditer(_DEEPER, text):
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


def _node(tree: ast.Expr, parts: _Parts) -> data.Node:
    while type(tree) is ast.ParenExpr:
        tree = tree.expr
    make = _MAKERS.get(type(tree))
    if make is None:
        raise _Refused(type(tree).__name__)
    try:
        return make(tree, parts)
    except OverflowError as error:  # the parser hands a duration over when it is asked for
        raise ValueError(str(error)) from None


def _only(kind: Callable[..., _N], *fields: Hashable) -> _N:
    """Return the one node with these fields, which all expressions share."""
    node: _N = _make(kind, *fields)
    return node


@lru_cache(maxsize=16_384)
def _make(kind: Callable[..., Any], *fields: Hashable) -> Any:
    return kind(*fields)


def _millis(duration: timedelta | None) -> int:
    return 0 if duration is None else duration // _MILLISECOND


def _number(text: str) -> data.Number:
    """Return the number of a text: with the text as the key, -0 and 0 are two numbers."""
    return data.Number(float(text))


def _without_at(tree: Any) -> Any:
    if tree.at is not None:
        raise _Refused("the @ modifier")
    return tree


def _selector(tree: ast.VectorSelector) -> data.Selector:
    if _without_at(tree).matchers.or_matchers:
        raise _Refused("`or` between matchers")
    matchers = [data.Matcher(m.name, _OPS[str(m.op)], m.value) for m in tree.matchers.matchers]
    if tree.name is not None:
        matchers.insert(0, data.Matcher(NAME, "=", tree.name))
    for matcher in matchers:
        if matcher.op in ("=~", "!~"):
            _check_pattern(matcher.value)
    return _only(data.Selector, tuple(matchers), _millis(tree.offset), str(tree) if tree.name is None else tree.name)


def _call(tree: ast.Call, parts: _Parts) -> data.Call:
    name = tree.func.name
    if name not in FUNCTIONS:
        raise _Refused(f"{name}()")
    args = tuple(_node(arg, parts) for arg in tree.args)
    if name in ("absent", "timestamp"):  # a selector has another result than what is computed
        args = tuple(parse(arg.formula).node if isinstance(arg, data.FormulaPart) else arg for arg in args)
    call = _only(data.Call, name, args)
    strings = [arg.value for arg in call.args if isinstance(arg, data.String)]
    if name == "label_replace":
        target, _, _, pattern = strings
        _check_label(target)
        _check_text(pattern)
    if name == "label_join":
        target, _, *sources = strings
        for label in (target, *sources):
            _check_label(label)
    return call


def _aggregate(tree: ast.AggregateExpr, parts: _Parts) -> data.Aggregate:
    op = str(tree.op)
    if op not in AGGREGATIONS:
        raise _Refused(f"{op}()")
    modifier = tree.modifier
    labels = () if modifier is None else tuple(modifier.labels)
    without = modifier is not None and modifier.type == ast.AggModifierType.Without
    param = None if tree.param is None else _node(tree.param, parts)
    if isinstance(param, data.String):
        _check_label(param.value)
    return _only(data.Aggregate, op, _node(tree.expr, parts), param, labels, without)


def _binary(tree: ast.BinaryExpr, parts: _Parts) -> data.Binary:
    op, modifier = str(tree.op), tree.modifier
    if op not in OPERATORS:
        raise _Refused(f"the operator {op}")
    matching = _BARE
    if modifier is not None:
        if modifier.fill_values.lhs is not None or modifier.fill_values.rhs is not None:
            raise _Refused("fill()")
        labels = modifier.matching
        on = labels is not None and labels.type == ast.LabelModifierType.Include
        names = () if labels is None else tuple(labels.labels)
        many, include = _MANY.get(str(modifier.card), ""), tuple(modifier.group_labels or ())
        matching = data.Matching(on, names, many, include)
    return _only(
        data.Binary,
        op,
        _node(tree.lhs, parts),
        _node(tree.rhs, parts),
        matching,
        modifier is not None and modifier.return_bool,
    )


_MAKERS: Mapping[type, Callable[[Any, _Parts], data.Node]] = {
    ast.VectorSelector: lambda tree, parts: parts.get(tree.name or "") or _selector(tree),
    ast.BinaryExpr: _binary,
    ast.AggregateExpr: _aggregate,
    ast.Call: _call,
    ast.MatrixSelector: lambda tree, _: _only(data.Range, _selector(tree.vector_selector), _millis(tree.range)),
    ast.NumberLiteral: lambda tree, _: _only(_number, repr(tree.val)),
    ast.StringLiteral: lambda tree, _: _only(data.String, tree.val),
    ast.SubqueryExpr: lambda tree, parts: _only(
        data.Subquery,
        _node(_without_at(tree).expr, parts),
        _millis(tree.range),
        _millis(tree.step) or _DEFAULT_STEP,
        _millis(tree.offset),
    ),
    ast.UnaryExpr: lambda tree, parts: _only(data.Negate, _node(tree.expr, parts)),
}
"""The functions that make a node of each kind of expression."""


def _check_label(name: str) -> None:
    if not _LABEL_NAME.fullmatch(name):
        raise _Refused(f"the label name {name!r}")


@lru_cache(maxsize=1024)
def _check_text(pattern: str) -> None:
    """Check a pattern that stands in a string: the parser has not seen it as a pattern."""
    quoted = pattern.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    try:
        ast.parse(f'x{{x=~"{quoted}"}}')
    except ValueError as error:
        raise _Refused(f"the pattern {pattern!r} ({error})") from None
    _check_pattern(pattern)


def _check_pattern(pattern: str) -> None:
    refusal = data.refusal(pattern)
    if refusal:
        raise _Refused(refusal)
