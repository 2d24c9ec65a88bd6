"""The doctor's decision is that of the alert, over raw series and over those that the rules record, on any samples.

A graded incident that the doctor calls an info has no alert: the alert has `serious` in the place of `mild`.
"""

from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import THOROUGH

from diag import promql
from diag.artefacts.alerts import alerts
from diag.core.contract import Contract
from diag.core.incident import Incident, Signal, judged
from diag.diagnosis.diagnose import diagnose
from diag.diagnosis.query_cache import QueryCache
from diag.knowledge.catalog import load
from diag.knowledge.formulas import conjunction, rule_set
from diag.sources.observation import SampleSource

INCIDENTS = load()
STEP, SCRAPES = 2.0, 40
WHY, MISSING = judged("a test"), float("nan")
TIMES = np.arange(SCRAPES, dtype=np.int64) * round(STEP * 1000) + 1_700_000_000_000
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "up")
COUNTERS = (
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_generation_tokens_sum",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
)
HISTOGRAMS = ("vllm:inter_token_latency_seconds", "vllm:request_prefill_time_seconds", "vllm:request_prompt_tokens")
EDGES = ("0.01", "1.0", "40.0", "500.0", "+Inf")

holes = st.lists(st.integers(0, SCRAPES - 1), max_size=30)
pace = st.sampled_from([0.0, 0.05, 0.5, 3.0, 40.0])


def row(values: np.ndarray, missing: list[int]) -> np.ndarray:
    values = values.copy()
    values[missing] = promql.STALE
    return values


@st.composite
def telemetry(draw: st.DrawFn) -> promql.Samples:
    """A page's worth of series with load, resets and holes as drawn; any of them may be absent."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    series: dict[str, list[tuple[dict[str, str], np.ndarray]]] = {}

    def add(name: str, values: np.ndarray, **labels: str) -> None:
        full = {"__name__": name, "instance": "a:1", **({} if name == "up" else {"engine": "0"}), **labels}
        series.setdefault(name, []).append((full, row(values, draw(holes))))

    for name in GAUGES:
        if draw(st.integers(0, 9)):
            top = 1.0 if name in ("up", "vllm:kv_cache_usage_perc") else 30 * draw(pace)
            values = random.uniform(draw(st.sampled_from([0.0, 0.9])) * top, top, SCRAPES)
            add(name, np.round(values) if top != 1.0 or name == "up" else values)
    for name in COUNTERS:
        if draw(st.integers(0, 9)):
            add(name, counter(random, draw(pace), draw(st.booleans())))
    for name in HISTOGRAMS:
        rate = draw(pace)
        buckets = np.cumsum([counter(random, rate, False) for _ in EDGES], axis=0)
        for edge, values in zip(EDGES, buckets, strict=True):
            add(f"{name}_bucket", values, le=edge)
        add(f"{name}_count", buckets[-1])
        add(f"{name}_sum", buckets[-1] * draw(st.sampled_from([0.02, 0.5])))
    for flag, value in (("kv_cache_size_tokens", 4096.0), ("block_size", 32.0), ("max_num_seqs", 16.0)):
        add("diag_vllm_config", np.full(SCRAPES, value), flag=flag)
    return promql.Samples(
        promql.Block(tuple(labels for labels, _ in rows), TIMES, np.array([values for _, values in rows]))
        for rows in series.values()
    )


def counter(random: np.random.Generator, rate: float, resets: bool) -> np.ndarray:
    values = np.cumsum(random.poisson(rate, SCRAPES).astype(float))
    if resets:
        at = int(random.integers(1, SCRAPES))
        values[at:] -= values[at - 1]
    return values


def doctors(
    incident: Incident, samples: promql.Samples, instant: int, alarming: bool = False
) -> Iterator[Mapping[str, str]]:
    """Yield the subjects on which an incident is present; if `alarming`, without the infos of a graded one."""
    asked = QueryCache(SampleSource(samples, np.array([instant], np.int64), STEP), Contract())
    for found in diagnose([incident], asked):
        if found.state == "present" and not (alarming and incident.serious and found.severity == "info"):
            yield dict(found.subject)


@cache
def written_out(incident: Incident, window: str) -> promql.Formula:
    return conjunction(incident, window, Contract())


def as_its_alert(incident: Incident) -> Incident:
    """An incident that is present if its alert fires: nothing else for one that is not graded."""
    alerting = incident._replace(symptoms=incident.alerting[: len(incident.symptoms)], serious=None, mild=None)
    assert alerting.conditions == incident.alerting
    return alerting if incident.serious else incident


@cache
def recorded(incident: Incident, window: str) -> promql.Formula:
    """The alert's conjunction over what the rules for this window record, each over what those before it do."""
    alert = conjunction(as_its_alert(incident), window, Contract())
    rules = rule_set([incident._replace(window=window, burns=())], Contract())
    made: dict[str, promql.Formula] = {}
    for series, rule in rules.rules.items():
        made[series] = promql.Formula("", rule.promql, {name: made[name] for name in rule.reads})
    return promql.Formula("", alert.text, {name: made[rules.series[name]] for name in alert.parts})


def prometheus(incident: Incident, samples: promql.Samples, instant: int, rules: bool) -> Iterator[Mapping[str, str]]:
    asked = QueryCache(SampleSource(samples, TIMES, STEP), Contract())
    window = asked.window(incident).text
    alert = recorded(incident, window) if rules else written_out(incident, window)
    vector = promql.evaluate(alert, samples, np.array([instant], np.int64))
    for labels, present in zip(vector.labels, vector.present, strict=True):
        if present[0]:
            yield labels


@pytest.mark.slow
@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda each: each.id)
@settings(max_examples=25 if THOROUGH else 4)
@given(samples=telemetry(), at=st.integers(16, SCRAPES - 1), late=st.integers(0, 1999))
def test_the_doctor_and_the_query_agree(incident: Incident, samples: promql.Samples, at: int, late: int) -> None:
    instant = int(TIMES[at]) + late
    agree(incident, samples, instant)


def agree(incident: Incident, samples: promql.Samples, instant: int) -> tuple[bool, bool]:
    """Return whether the incident is present, and whether its alert fires, where doctor and queries agree."""
    present = list(doctors(incident, samples, instant))
    assert present == list(prometheus(incident, samples, instant, rules=False))
    alarming = list(doctors(incident, samples, instant, alarming=True))
    assert alarming == list(prometheus(as_its_alert(incident), samples, instant, rules=False))
    assert alarming == list(prometheus(incident, samples, instant, rules=True))
    return bool(present), bool(alarming)


def gauge(name: str) -> Signal:
    return Signal(name, f"max by ($by) (last_over_time({name}[$window]))", "{value}", "")


@pytest.mark.parametrize(
    ("heat", "smoke", "decided"),
    [(0, 0, (False, False)), (2, 0, (True, False)), (2, MISSING, (True, False)), (2, 2, (True, True))],
    ids=["absent", "mild", "unknown whether serious", "serious"],
)
def test_the_alert_of_a_graded_incident_fires_where_the_doctor_calls_it_no_info(
    heat: float, smoke: float, decided: tuple[bool, bool]
) -> None:
    mild, serious, other = (gauge(name).above(1, WHY) for name in ("heat", "smoke", "noise"))
    graded = Incident(
        "graded", "", "warning", ("instance", "engine"), "", "", (mild, other), (), (), supports=(serious,)
    )._replace(serious=serious, mild=mild)
    assert {condition for alert in alerts(graded) for _, condition in alert.conditions()} == {serious, other}
    rows = {"up": 1.0, "vllm:num_requests_running": 0.0, "noise": 2.0, "heat": heat, "smoke": smoke}
    samples = promql.Samples(
        promql.Block(
            ({"__name__": name, "instance": "a:1", "engine": "0"},),
            TIMES,
            np.full((1, SCRAPES), promql.STALE if np.isnan(value) else value),
        )
        for name, value in rows.items()
    )
    assert agree(graded, samples, int(TIMES[-1])) == decided
