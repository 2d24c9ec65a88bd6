"""Our own signals: a real Prometheus gives the same numbers on every recording, at both kinds of window."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from support.expressions import ENGINE, INCIDENTS, expressions
from support.paths import OF_ONE_SERVER, RECORDINGS
from support.prometheus_server import PLACES, assert_same, program, serving
from support.sampling import some
from support.scenarios import everything

from diag import promql
from diag.core.contract import Contract
from diag.core.incident import Incident
from diag.knowledge import signals
from diag.knowledge.formulas import formula
from diag.sources.observation import Observation
from diag.sources.recording.reader import read

START = 1_700_000_000_000
BUSY = (
    "kv_cascade",
    "everything",
    "speculation_ineffective",
    "lora_thrash",
    "kv_offload_effective",
    "kv_offload_oversized",
    "prefix_hybrid_blocks",
    "output_corrupted",
    "host_cpu_busy",
)
LONG = {name: name for name in ("version_regression", "speculation_lost_at_length")}
"""Incidents that need more than minutes, and the recordings at whose end their signals have values."""
STRETCH = 7.5
"""Turns a scrape every 2 s into one every 15 s."""


@cache
def seen() -> dict[str, Observation]:
    """Return the values of every recording."""
    with TemporaryDirectory() as folder:
        return {path.name: read(path) for path in (*OF_ONE_SERVER, everything(Path(folder)))}


def blocks(stretch: float) -> Iterator[promql.Block]:
    """Every recording as an instance of its own; all begin at the same moment, with their seconds stretched."""
    for name, observation in seen().items():
        for block in observation.samples.select([]):
            times = START + np.round((block.times - block.times[0]) * stretch).astype(np.int64)
            labels = tuple({**each, "instance": name} for each in block.labels)
            yield block._replace(labels=labels, times=times)


@cache
def of_busy_servers(stretch: float) -> promql.Samples:
    return promql.Samples(each for each in blocks(stretch) if each.labels[0]["instance"] in BUSY)


def instants(stretch: float) -> range:
    """While all of them run, when the short ones have ended, and after some died; off the grid of the scrapes.

    No window begins before the samples do, or in a hole of them: there, Prometheus 2 extrapolates a counter to its zero
    point in another way.
    """
    first, last, step = (round(seconds * 1000 * stretch) for seconds in (53.3, 104.6, 17.1))
    return range(START + first, START + last + 1, step)


@pytest.mark.prometheus
@pytest.mark.parametrize(
    ("place", "window", "stretch"),
    # releases differ in the rules of windows, not in their size
    some([(PLACES[1], "5m", STRETCH), (PLACES[0], "30s", 1.0)], 1),
    ids=some(["3_at_5m_by_15s", "2_at_30s_by_2s"], 1),
)
def test_a_real_prometheus_agrees_on_every_signal(place: str, window: str, stretch: float) -> None:
    ends = ("shutdown_drained", "shutdown_drops_requests")  # in a window, and another process begins there
    held = [each for each in blocks(stretch) if each.labels[0]["instance"] not in ends]
    with serving(program(place), held) as server:
        assert_same(promql.Samples(held), some(expressions(window), 120), instants(stretch), server)


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda each: each.id)
def test_every_threshold_has_a_rationale(incident: Incident) -> None:
    for condition in incident.every_condition:
        if condition.why.kind == "measured":
            assert (RECORDINGS / condition.why.reference).is_dir()
        elif condition.why.kind != "judged":
            assert condition.why.reference.startswith("https://")


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda each: each.id)
def test_every_fix_has_a_rationale(incident: Incident) -> None:
    for fix in incident.fixes:
        assert fix.why.kind != "measured" or (Path(RECORDINGS) / fix.why.reference).is_dir()


@pytest.mark.parametrize(("window", "stretch"), [("30s", 1.0), ("5m", STRETCH)], ids=["30s_by_2s", "5m_by_15s"])
@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda each: each.id)
def test_a_signal_yields_one_number_per_subject(incident: Incident, window: str, stretch: float) -> None:
    """And all signals that limit something have a value on a server that is busy."""
    if incident.id in LONG:
        samples, at = seen()[LONG[incident.id]].samples, seen()[LONG[incident.id]].instants[-2:]
    else:
        samples, at = of_busy_servers(stretch), instants(stretch)[0] + np.array([0, round(5000 * stretch)])
    for condition in incident.conditions:
        over = incident.window if incident.id in LONG else window
        text = formula(condition.signal, incident.per, over, Contract()).written_out()
        vector = promql.evaluate(text, samples, at)
        assert {frozenset(each) for each in vector.labels} == {frozenset(incident.per)}
        assert vector.present.any(axis=0).all(), condition.signal.name


@pytest.mark.parametrize(
    ("late", "edges", "burn"),
    [
        (20, ("40", "2.5", "1920"), 100),
        (9, ("40", "2.5", "1920"), None),
        (20, ("40", "2.5"), None),
        (0, ("40", "2.5", "1920"), 0),
    ],
    ids=["late", "too few to say", "an edge is missing", "none late"],
)
def test_error_budget_burns_by_late_requests(late: int, edges: tuple[str, ...], burn: float | None) -> None:
    """First tokens are all late or all in time; inter-token latency and whole answers are in time."""
    names = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
    times = START + np.arange(31) * 10_000
    series, rows = [], []
    for name, edge in zip(names, ("40", "2.5", "1920"), strict=True):
        of = {"instance": "h:1", "engine": "0"}
        grown = np.linspace(0, max(late, 1), 31)
        series += [{**of, "__name__": f"vllm:{name}_count"}]
        rows += [grown]
        if edge in edges:
            series += [{**of, "__name__": f"vllm:{name}_bucket", "le": edge}]
            rows += [grown * (late == 0 or name != names[0])]
    text = formula(signals.error_budget_burn_rate, ENGINE, "5m", Contract()).written_out()
    held = promql.Samples([promql.Block(tuple(series), times, np.array(rows))])
    answer = promql.evaluate(text, held, times[-1:])
    assert [round(float(each), 6) for each in answer.values[:, 0]] == ([] if burn is None else [burn])


@pytest.mark.parametrize(
    ("preempted", "finished", "rate"),
    [(0, 3, 0), (2, 3, None), (2, 20, 0), (3, 3, 1)],
    ids=["none", "few of few", "few of many", "three"],
)
def test_a_few_preemptions_among_a_few_requests_are_no_rate(preempted: int, finished: int, rate: float | None) -> None:
    times = START + np.arange(31) * 10_000
    counters = {"vllm:num_preemptions_total": preempted, "vllm:request_success_total": finished}
    series = tuple({"__name__": name, "instance": "h:1", "engine": "0"} for name in counters)
    rows = np.array([np.linspace(0, most, 31) for most in counters.values()])
    text = formula(signals.preemptions_per_request, ENGINE, "5m", Contract()).written_out()
    answer = promql.evaluate(text, promql.Samples([promql.Block(series, times, rows)]), times[-1:])
    assert [round(float(each), 6) for each in answer.values[:, 0]] == ([] if rate is None else [rate])


def test_a_server_under_two_jobs_makes_no_query_fail(tmp_path: Path) -> None:
    """A Prometheus would answer nothing about any server then."""
    seen = read(everything(tmp_path))
    every = seen.samples.select([])
    jobs = [each._replace(labels=tuple({**one, "job": job} for one in each.labels)) for job in "ab" for each in every]
    samples = promql.Samples(jobs)
    for text in expressions("30s"):
        promql.evaluate(text, samples, seen.instants[-3:])
