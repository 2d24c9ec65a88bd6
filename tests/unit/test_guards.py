"""A guard of an alert (`unless`) holds when the series that it needs is gone: no series that ends makes an alert."""

import re
from typing import Any

import numpy as np
import pytest
from support.alert_rules import RULES, rules
from support.dropping import family
from support.firing import episodes
from support.sampling import some
from support.timelines import HOSTS, LEAD, RECORDED, STEP, TIMES, recovered

from diag import promql
from diag.core.incident import seconds
from diag.promql.data import without_holes

COMPARED = re.compile(r"(?:last_over_time\()?([a-z_]+:[\w:]+)(?:\[\w+\]\))? (>=?|<=?) ([\d.e+-]+)")
REMEMBERED = re.compile(r"unless last_over_time\(([\w:]+)\[(\w+)\]\)")
FORMER = re.compile(r"[\w:]+samples_of_a_former_process:5m")
GUARDED = [rule for rule in rules() if "alert" in rule and REMEMBERED.search(rule["expr"])]
ENDS = 80
"""The scrape after which the series of the guards end."""


def satisfied(op: str, limit: float) -> float:
    return {">": 2 * limit + 1, ">=": limit, "<": limit / 2 - 1, "<=": limit}[op]


def test_most_alerts_over_minutes_have_a_guard_that_remembers() -> None:
    assert len(GUARDED) > 10
    assert not [rule["alert"] for rule in rules() if "alert" in rule and re.search(r"unless [a-z_]+:", rule["expr"])]


@pytest.mark.parametrize("rule", GUARDED, ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_refutation_outlasts_its_series_until_the_window_is_clear(rule: dict[str, Any]) -> None:
    ((guard, remembers),) = REMEMBERED.findall(rule["expr"])
    steps = ENDS + round(seconds(remembers)) // STEP - 1
    values = {}
    for name, op, limit in COMPARED.findall(rule["expr"].partition("unless")[0]):
        values[name] = np.full(steps, satisfied(op, float(limit)))
    (op, limit), *_ = [
        found[1:] for found in COMPARED.findall(rule["expr"].partition("unless")[2]) if found[0] == guard
    ]
    values[guard] = np.where(np.arange(steps) < ENDS, satisfied(op, float(limit)), np.nan)
    labels = tuple({"__name__": name, "instance": "h:1", "engine": "0", "gpu": "0"} for name in values)
    instants, block = STEP * 1000 * np.arange(steps, dtype=np.int64), np.array([*values.values()])

    def holds(over: np.ndarray) -> bool:
        samples = promql.Samples(without_holes(labels, instants, over, ~np.isnan(over)))
        return bool(promql.Evaluator(samples).evaluate(promql.parse(rule["expr"]), instants).present.any())

    assert not holds(block)
    assert holds(block[:, ENDS:])


ENDED = [
    (incident, name)
    for incident in sorted({*RECORDED, *HOSTS})
    for name in ("vllm:request_success_total", "vllm:inter_token_latency_seconds", "vllm:num_preemptions_total", "up")
]


@pytest.mark.parametrize(("incident", "name"), some(ENDED, 3))
def test_a_family_that_ends_after_recovery_makes_no_alert(incident: str, name: str) -> None:
    """The server answers on, without that family: a relabelling that was deployed just then."""
    series = recovered(incident)
    ends = TIMES.size + 6
    cut = {key: np.where(np.arange(values.size) < ends, values, np.nan) for key, values in series.items()}
    ended = {key: cut[key] if family(dict(key)) == name else values for key, values in series.items()}
    before, after = episodes(RULES, series), episodes(RULES, ended)
    gone = ends * STEP - LEAD
    new = {
        key: (begin, end)
        for key, found in after.items()
        for begin, end in found
        if end > gone and not any(first <= end and begin <= last for first, last in before.get(key, []))
    }
    assert new == {}
