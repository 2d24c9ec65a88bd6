"""PromQL over samples in memory: parse, evaluate at many instants at once, and facts about an expression.

The semantics are those of Prometheus 3. What is not fully implemented is refused by name, never answered wrongly.
"""

from diag.promql.add_matchers import add_matchers
from diag.promql.evaluate import Evaluator, evaluate
from diag.promql.facts import instant_selectors, metric_names, output_labels
from diag.promql.formula import Formula
from diag.promql.nodes import Expression
from diag.promql.parse import parse
from diag.promql.pretty import pretty
from diag.promql.samples import STALE, Block, Labels, Samples, distinct, is_stale
from diag.promql.vector import Vector

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
    "metric_names",
    "output_labels",
    "parse",
    "pretty",
]
