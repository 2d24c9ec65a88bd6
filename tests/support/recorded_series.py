"""The series that the generated recording rules make of samples, as a Prometheus that evaluates them holds them."""

from functools import cache

import numpy as np

from diag.artefacts.alerts import groups
from diag.core.contract import Contract
from diag.core.incident import seconds
from diag.core.subjects import Instants
from diag.knowledge.catalog import load
from diag.knowledge.formulas import SUBJECTS, RuleSet, generation_series, rule_set
from diag.promql import STALE, Block, Evaluator, Formula, Samples


@cache
def generated() -> RuleSet:
    """The rules of the built-in incidents."""
    return rule_set(load(), Contract())


@cache
def _formulas() -> dict[str, Formula]:
    """Each recorded series by its name, over the series that the rule reads."""
    found: dict[str, Formula] = {}
    for name, rule in generated().rules.items():
        found[name] = Formula("", rule.promql, {other: found[other] for other in rule.reads})
    return found


@cache
def _intervals() -> dict[str, float]:
    """Seconds between two evaluations of each recorded series."""
    return {
        rule["record"]: seconds(group["interval"])
        for group in groups(load(), Contract())
        for rule in group["rules"]
        if "record" in rule
    }


def recorded(samples: Samples, instants: Instants) -> list[Block]:
    """Return the series that the rules record, a block for each rule with a result.

    Each is evaluated at those of the instants (unix ms) that are due by the interval of its group.
    """
    evaluator, every = Evaluator(samples), _intervals()
    subjects = {generation_series(per, ("instance",)): promql for per, promql in SUBJECTS.items()}
    blocks = []
    for name, asked in {**subjects, **_formulas()}.items():
        seldom = instants[:: max(1, round(every[name] * 1000 / (instants[1] - instants[0])))]
        vector = evaluator.evaluate(asked, seldom)
        more = {"generation": generated().generation} if name in subjects else {}
        labels = tuple({**series, **more, "__name__": name} for series in vector.labels)
        if labels:
            blocks.append(Block(labels, seldom, np.where(vector.present, vector.values, STALE)))
    return blocks
