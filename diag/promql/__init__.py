"""PromQL over samples in memory: parse, evaluate at many instants at once, and facts about an expression.

The semantics are those of Prometheus 3. An expression that is not fully implemented is refused by name, never answered
wrongly.
"""

from diag.promql.data import STALE, Block, Expression, Labels, Samples, Vector, distinct, is_stale
from diag.promql.evaluator import Evaluator, evaluate
from diag.promql.facts import add_matchers, instant_selectors, may_have_value, metric_names, output_labels, pretty
from diag.promql.parser import Formula, parse

__all__ = [
    "STALE",
    "Block",
    "Evaluator",
    "Expression",
    "Formula",
    "Labels",
    "Samples",
    "Vector",
    "add_matchers",
    "distinct",
    "evaluate",
    "instant_selectors",
    "is_stale",
    "may_have_value",
    "metric_names",
    "output_labels",
    "parse",
    "pretty",
]
