"""The generated rules as a person and a Prometheus read them: short, in layers, nothing evaluated twice."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
from support.alert_rules import RULES
from support.firing import NAME
from support.rule_files import groups_of

from diag import promql
from diag.artefacts.generate import files
from diag.artefacts.names import claim
from diag.artefacts.recording_rules import threshold_group
from diag.artefacts.reference import declared, signal_page
from diag.core.contract import Contract, Site
from diag.core.errors import BadUsage
from diag.core.incident import Part, Signal, judged
from diag.knowledge import signals
from diag.knowledge.catalog import load
from diag.knowledge.formulas import conjunction, formula, rule_set
from diag.knowledge.signals import DECLARED
from diag.promql import data as nodes
from diag.promql.facts import output_labels

ENGINE = ("instance", "engine")


@cache
def groups() -> list[dict[str, Any]]:
    return groups_of(RULES)


def rules(kind: str) -> list[dict[str, Any]]:
    return [rule for group in groups() for rule in group["rules"] if kind in rule]


def range_functions(node: nodes.Node) -> Iterator[tuple[object, ...]]:
    """Every function over raw samples, as often as it is written."""
    match node:
        case nodes.Call(function, args):
            ranges = [each for each in args if isinstance(each, nodes.Range)]
            if ranges:
                yield function, *(each for each in args if not isinstance(each, nodes.Range)), *ranges
            for each in args:
                yield from () if isinstance(each, nodes.Range) else range_functions(each)
        case nodes.Aggregate(_, expr, param):
            yield from range_functions(expr)
            yield from range_functions(param) if param else ()
        case nodes.Binary(_, left, right):
            yield from range_functions(left)
            yield from range_functions(right)
        case nodes.Negate(expr) | nodes.Subquery(expr):
            yield from range_functions(expr)


def test_causes_are_evaluated_before_their_effects() -> None:
    """An effect reads the alerts of its causes at the same instant: its message names them, or they mute it."""
    order = [[each["labels"].get("incident") for each in group["rules"] if "alert" in each] for group in groups()]
    swapped = [
        (cause.id, effect)
        for cause in load()
        for effect in cause.explains
        for names in order
        if {cause.id, effect} <= {*names} and names.index(cause.id) > names.index(effect)
    ]
    assert swapped == []


def test_every_expression_is_short_enough_to_be_read() -> None:
    incidents = [rule for rule in rules("alert") if "incident" in rule["labels"]]
    assert max(len(rule["expr"].splitlines()) for rule in incidents) <= 12
    assert max(len(promql.pretty(rule["expr"]).splitlines()) for rule in incidents) <= 18
    assert max(len(rule["expr"].splitlines()) for rule in rules("record")) <= 15
    ids = {rule["labels"]["incident"] for rule in incidents}
    judging = [group for group in groups() if group["name"] != "diag-thresholds"]
    assert sum(len(rule["expr"].splitlines()) for group in judging for rule in group["rules"]) < 45 * len(ids)


@pytest.mark.slow
def test_a_function_over_raw_samples_is_written_at_most_twice() -> None:
    parsed = (promql.parse(rule["expr"]) for group in groups() for rule in group["rules"])
    written = Counter(found for expression in parsed for found in range_functions(expression.node))
    recorded = {rule["record"] for rule in rules("record")}
    raw = {found: count for found, count in written.items() if not any(name in str(found) for name in recorded)}
    assert {found: count for found, count in raw.items() if count > 2} == {}


def test_rule_reads_only_series_recorded_before_it_or_in_the_slow_group() -> None:
    recorded = {rule["record"]: group["name"] for group in groups() for rule in group["rules"] if "record" in rule}
    for group in groups():
        before: set[str] = set()
        for rule in group["rules"]:
            read = {name for name in NAME.findall(rule["expr"]) if name in recorded}
            elsewhere = {recorded[name] for name in read - before - {rule.get("record")}}  # a rule may read its past
            assert elsewhere <= {"diag-slow"} or group["name"] in ("diag-slow", "diag-tickets", "diag-telemetry"), (
                rule,
                elsewhere,
            )
            before.add(rule.get("record", ""))


def test_the_level_in_a_name_is_the_labels_of_the_series() -> None:
    """Prometheus' convention: level:metric:operations."""
    for name, rule in rule_set(load(), Contract()).rules.items():
        labels = output_labels(promql.parse(rule.promql))
        level = name.partition(":")[0]
        for label in sorted(labels or (), key=len, reverse=True):
            assert label in level or labels is None or level == "series", name
            level = level.replace(label, "")
        assert labels is None or level.strip("_") in ("", "series"), name


def test_every_declared_name_means_one_expression() -> None:
    for signal in declared(load()).values():
        assert DECLARED.get(signal.id, signal).promql == signal.promql, signal.id
    for name, value in vars(signals).items():
        assert not isinstance(value, Signal) or DECLARED[value.id].promql == value.promql, name
    modules = [import_module(f"{signals.__name__}.{file.name}") for file in iter_modules(signals.__path__)]
    parts = Counter(part.name for module in modules for part in getattr(module, "PARTS", ()))
    assert {name for name, times in parts.items() if times > 1} == set()


def test_a_formula_has_at_most_five_lines_of_120_characters() -> None:
    assert {each.id: len(each.promql) for each in DECLARED.values() if len(each.promql) > 5 * 120} == {}


def test_part_can_take_another_window_time_and_subject() -> None:
    asked = formula("$preemptions[2m] - $preemptions offset 1h + $preemptions by (instance)", ENGINE, "5m", Contract())
    assert asked.written_out() == (
        "(sum by (instance, engine) (increase(vllm:num_preemptions_total[2m])))"
        " - (sum by (instance, engine) (increase(vllm:num_preemptions_total[5m] offset 1h)))"
        " + (sum by (instance) (increase(vllm:num_preemptions_total[5m])))"
    )
    assert [*asked.parts] == [
        "instance_engine:preemptions:increase2m",
        "instance_engine:preemptions:increase5m_offset1h",
        "instance:preemptions:increase5m",
    ]


def test_undeclared_part_is_named() -> None:
    with pytest.raises(KeyError, match="preemptoins"):
        formula("$preemptoins > 1", ENGINE, "5m", Contract())


def test_a_users_signal_may_use_parts_and_is_recorded() -> None:
    own = Signal("preempted twice", "$preemptions >= bool 2", "preempted twice: {value}", "bool")
    incident = load()[0]._replace(
        id="mine",
        per=ENGINE,
        window="5m",
        symptoms=(own.at_least(1, judged("a test")),),
        looks_like=(),
        burns=(),
        escalates=None,
    )
    recorded = rule_set([incident], Contract()).rules
    assert [*recorded] == [
        "instance_engine:preempted_twice:5m",
        "instance_engine:preempted_twice:2m",
        "instance:samples_of_a_former_process:5m",
    ]
    rule = recorded["instance_engine:preempted_twice:5m"]
    assert rule.promql == "(sum by (instance, engine) (increase(vllm:num_preemptions_total[5m]))) >= bool 2"
    assert conjunction(incident, "5m", Contract()).text == "instance_engine:preempted_twice:5m >= 1"


def test_a_sites_own_labels_name_the_level() -> None:
    contract = Contract(site=Site(labels=("cluster", "pod")))
    own, usual = (rule_set(load(), each) for each in (contract, Contract()))
    moved = {name.replace("instance", "cluster_pod", 1) for name in usual.rules if name.startswith("instance")}
    assert moved == {name for name in own.rules if name.startswith("cluster_pod")}
    assert own.generation != usual.generation


@pytest.mark.parametrize("labels", [("cluster", "pod"), ("job", "instance"), ("namespace", "pod"), ("pod",)])
def test_every_rule_is_promql_whatever_labels_name_a_server(labels: tuple[str, ...]) -> None:
    for rule in rule_set(load(), Contract(site=Site(labels=labels))).rules.values():
        promql.parse(rule.promql)


def test_another_threshold_of_a_recorded_expression_is_another_generation() -> None:
    assert rule_set(load(), Contract(freeze_seconds=2.5)).generation != rule_set(load(), Contract()).generation


@pytest.mark.slow
def test_rules_for_selected_incidents_are_minimal() -> None:
    written = files(load(), Contract(), ["kv_eviction_cascade"])
    assert sorted(written) == [
        "alerts/diag.rules.yaml",
        "alerts/inhibit_rules.yaml",
        "alerts/prometheusrule.yaml",
        "runbooks/kv_eviction_cascade.md",
    ]
    with_board = files(load(), Contract(), ["kv_eviction_cascade"], per_incident=True)
    assert with_board.keys() - written.keys() == {"dashboards/kv_eviction_cascade.json"}
    recorded = rule_set([each for each in load() if each.id == "kv_eviction_cascade"], Contract())
    assert written["alerts/diag.rules.yaml"].count("record: ") == len(recorded.rules) + 4 + 4
    with pytest.raises(BadUsage, match="there is no such incident"):
        files(load(), Contract(), ["nothing"])


@pytest.mark.parametrize("asked", ["preemptions / finished request", "preemptions_per_finished_request"])
def test_a_signal_is_explained_by_its_formula_its_parts_and_its_users(asked: str) -> None:
    signal = next(each for each in DECLARED.values() if asked in (each.id, each.name))
    page = signal_page(signal, load(), Contract())
    assert "$preemptions * ($preemptions >= bool 3)" in page
    assert "- `$preemptions`: `sum by ($by) (increase(vllm:num_preemptions_total[$window]))`" in page
    assert "- incident `kv_eviction_cascade`: preemptions / finished request > 0.2" in page
    assert "Recorded as `instance_engine:preemptions_per_finished_request:5m`." in page


def test_the_threshold_is_drawn_that_makes_an_incident_serious() -> None:
    """Its alert reads that series, and not the weaker symptom's."""
    drawn = {
        (one["labels"]["incident"], one["labels"]["condition"]) for one in threshold_group(load(), Contract())["rules"]
    }
    graded = {(one.id, claim(one.serious, Contract())) for one in load() if one.serious}
    assert graded and graded <= drawn


def test_a_part_has_an_id_that_is_its_name() -> None:
    assert Part("a_name", "up").id == "a_name"


def test_mitigation_stands_alone() -> None:
    """A report without the fix, whose value needs finished requests, has the mitigation all the same."""
    refers = re.compile(r"until the threshold|as proposed|\bthe fix\b|the (?:flag|value) (?:below|above)")
    advice = [(one.id, [*one.mitigate, *(fix.change for fix in one.fixes if not fix.restart)]) for one in load()]
    assert [(name, text) for name, texts in advice for text in texts if refers.search(text)] == []
