"""Declared metrics, start-up phases and log events are the ones in every expression that diag queries."""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import get_args

import pytest
from support.dashboards import plain
from support.paths import ROOT
from support.rows import each_row

from diag import signals
from diag.core.contract import Contract
from diag.core.incident import Signal
from diag.core.log_events import LOG_EVENTS, STARTUP_PHASES
from diag.core.metric_families import THROTTLE_REASONS, families, label_meanings
from diag.diagnosis import telemetry_checks
from diag.diagnosis.query_cache import ENGINES, GPUS, INSTANCES
from diag.exporter.process.kernel import EVENTS
from diag.knowledge.catalog import load
from diag.knowledge.formulas import formula
from diag.promql import Expression, parse
from diag.promql.data import NAME, Matcher, Selector
from diag.promql.facts import selectors
from diag.report.coverage import sentences
from diag.verify import changes, compare
from diag.vllm.running_config import FLAGS

DECLARED = {
    "event": {event.name for event in LOG_EVENTS} | {*EVENTS},
    "phase": {phase.name for phase in STARTUP_PHASES},
}
OF_OTHERS = {"exported_instance", "instance", "job"}
"""Labels that Prometheus adds."""


def every_signal() -> Iterator[Signal]:
    """Yield the signals that incident files may import, and the signals of our conditions and fixes."""
    yield from (value for value in vars(signals).values() if isinstance(value, Signal))
    for incident in load():
        yield from (condition.signal for condition in incident.every_condition)
        for fix in incident.fixes:
            yield from fix.signals
            yield from (condition.signal for condition in (*fix.only_if, *fix.expects))


def of_signals() -> Iterator[str]:
    for signal in every_signal():
        yield signal.promql
        if signal.culprit_promql:
            yield signal.culprit_promql


def of_dashboards() -> Iterator[str]:
    for file in (ROOT / "dashboards").glob("*.json"):
        yield from re.findall(r'"expr": ("(?:[^"\\]|\\.)*")', file.read_text(encoding="utf-8"))


def of_diagnosis() -> Iterator[str]:
    """Yield the other queries: the constants of these modules that are PromQL."""
    yield from (ENGINES, GPUS, INSTANCES)
    for module in (telemetry_checks, compare, changes):
        constants = (value for name, value in vars(module).items() if name.isupper())
        for text in (each for value in constants for each in (value if isinstance(value, tuple) else (value,))):
            if isinstance(text, str) and "diag_" in text:
                yield text


@cache
def selected() -> tuple[Selector, ...]:
    """Every selector of every expression, with the placeholders filled in."""
    ours = [filled(promql) for promql in {*of_signals(), *of_diagnosis()}]
    panels = [parse(plain(json.loads(text))) for text in set(of_dashboards())]
    return tuple(selector for expression in [*ours, *panels] for selector in selectors(expression))


def filled(promql: str) -> Expression:
    return parse(formula(promql, ("instance",), "5m", Contract()))


def matches(selector: Selector, label: str, value: str) -> bool:
    """Return True if a selector matches this value and leaves out others."""
    named = [matcher for matcher in selector.matchers if matcher.label == label]
    return bool(named) and all(matcher.accepts(value) for matcher in named)


def metrics(selector: Selector) -> set[str]:
    """The families of the exporter that a selector can read."""
    return _families_of(tuple(matcher for matcher in selector.matchers if matcher.label == NAME))


@cache
def _families_of(named: tuple[Matcher, ...]) -> set[str]:
    return {family for family in families() if named and all(matcher.accepts(family) for matcher in named)}


def values_of(label: str) -> set[str]:
    """The words that stand in any matcher of a label."""
    texts = [matcher.value for selector in selected() for matcher in selector.matchers if matcher.label == label]
    return {word for text in texts for word in text.split("|") if not word.startswith("$")}


def test_every_metric_of_ours_in_an_expression_is_a_family() -> None:
    named = {m.value for s in selected() for m in s.matchers if m.label == NAME and m.op == "="}
    assert {name for name in named if name.startswith("diag_")} <= families().keys()


def test_every_label_that_an_expression_matches_is_one_of_its_family() -> None:
    for selector in selected():
        for family in metrics(selector):
            labels = {matcher.label for matcher in selector.matchers} - OF_OTHERS - {NAME}
            assert labels <= set(families()[family].labels), selector


@pytest.mark.parametrize("label", DECLARED)
def test_every_phase_and_event_in_an_expression_is_declared(label: str) -> None:
    assert values_of(label) <= DECLARED[label]


def test_a_flag_that_a_condition_reads_is_published() -> None:
    """A condition on any other flag would be unknown everywhere; a fix can read one from the launch command."""
    conditions = [condition for incident in load() for condition in incident.every_condition]
    read = [
        matcher
        for condition in conditions
        for s in selectors(filled(condition.signal.promql))
        for matcher in s.matchers
    ]
    assert {matcher.value for matcher in read if matcher.label == "flag" and matcher.op == "="} <= FLAGS.keys()


def test_metric_family_is_read_or_states_its_purpose() -> None:
    read = {family for selector in selected() for family in metrics(selector)}
    unread = "what no signal reads says in `unread` what it is for"
    assert {name for name, family in families().items() if not family.unread} == read, unread


def test_log_event_is_read_or_has_a_reason_to_be_counted() -> None:
    signalled = [selector for promql in of_signals() for selector in selectors(filled(promql))]
    read = {event.name for selector in signalled for event in LOG_EVENTS if matches(selector, "event", event.name)}
    unread = "what no signal reads says in `unread` why it is counted"
    assert {event.name for event in LOG_EVENTS if not event.unread} == read, unread


def test_every_phase_is_read() -> None:
    read = {phase for selector in selected() for phase in DECLARED["phase"] if matches(selector, "phase", phase)}
    assert read | {"ready"} == DECLARED["phase"]  # who is ready is not starting


def test_every_label_is_explained() -> None:
    assert {label for family in families().values() for label in family.labels} == label_meanings().keys()
    assert label_meanings()["reason"] == ", ".join(THROTTLE_REASONS)


def test_every_defect_of_telemetry_has_a_sentence() -> None:
    kinds = {kind for group in get_args(telemetry_checks.DefectKind) for kind in get_args(group)}
    assert sentences().keys() == kinds | {"port"}


@each_row(("name", "family"), families().items())
def test_a_help_text_is_a_sentence_that_names_the_unit(name: str, family: object) -> None:
    text = families()[name].help
    assert re.fullmatch(r"[A-Z0-9].*\.", text)
    units = {"seconds": "seconds", "bytes": "bytes", "celsius": "Celsius", "watts": "watts", "hertz": "hertz"}
    units |= {"joules": "joules", "ratio": "0 to 1"}
    stem = name.removesuffix("_total")
    unit = next((word for suffix, word in units.items() if stem.endswith("_" + suffix)), "")
    assert unit.lower() in text.lower().replace("unix time", "seconds")
