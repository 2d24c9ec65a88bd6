"""Fleets in a real Prometheus whose ill servers share a label: one finding for one cause, and none without a label."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from support import fleet_in_prometheus as fleet
from support import prometheus_server
from support.prometheus_server import program
from support.sampling import some
from support.scenarios import gpu
from support.timelines import recording

from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract
from diag.core.errors import NotAnswered
from diag.core.metric_families import families
from diag.diagnosis.fleet import judge
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Report
from diag.knowledge.catalog import load
from diag.promql import Block
from diag.report import html, markdown, terminal
from diag.report import json as as_json
from diag.report import sentences as words
from diag.sources.prometheus.scope import Scope, TimeSpan
from diag.sources.prometheus.servers import PrometheusSource
from diag.sources.source import open_prometheus

pytestmark = pytest.mark.prometheus
SCHEMA = Path(as_json.__file__).with_name("diag.doctor.schema.json")
END, MIDNIGHT, DAY = 1_790_000_000.5, 1_790_035_200, 86_400
HOT = "gpu_thermal_throttling"
CASCADE = "kv_eviction_cascade"


def number(name: str) -> int:
    return int(name.partition(":")[0].rpartition("-")[2])


def pools(name: str) -> Mapping[str, str]:
    """Hot servers are in pool b, the others in two pools of the same region; each server has a node of its own."""
    pool = "b" if name.startswith(HOT) else "ac"[number(name) % 2]
    return {"pool": pool, "node": f"node-{name}", "zone": f"z{number(name) % 3}", "region": "eu"}


@contextmanager
def source(url: str, since: str = "") -> Iterator[PrometheusSource]:
    span = TimeSpan(since=since, until=f"{MIDNIGHT}") if since else TimeSpan(at=f"{END}")
    yield open_prometheus(ObserveOptions([], prometheus=url, scope=Scope(span)), Contract())


@contextmanager
def holding(
    folder: Path, members: Mapping[str, int], labels: Callable[[str], Mapping[str, str]]
) -> Iterator[prometheus_server.Server]:
    fleet.write(folder, members, END, scrapes=45, labels=labels)
    with fleet.serving(program("DIAG_PROMETHEUS3"), folder) as server:
        yield server


@pytest.fixture(scope="module")
def of_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[prometheus_server.Server]:
    with holding(tmp_path_factory.mktemp("pools"), {"healthy": 14, HOT: 6}, pools) as server:
        yield server


def judged(server: prometheus_server.Server) -> Report:
    with source(server.url) as remote:
        return judge(remote, load(), QueryCache(remote, Contract()))


def test_six_ill_servers_of_one_pool_are_one_finding_with_their_pool(of_pools: prometheus_server.Server) -> None:
    report = judged(of_pools)
    sentence = f'GPU thermal throttling ({HOT}) on 6 servers: all 6 have pool="b"; 0 of the 14 healthy servers do.'
    assert words.shared(report) == [sentence]

    short = terminal.render(report).splitlines()
    assert " ".join(map(str.strip, short[1:3])) == sentence
    (row,) = (line for line in short if line.startswith("  warning"))
    assert f"({HOT})" in row and 'pool="b":' in row
    assert terminal.render(report, verbose=True).count(f"  warning  {HOT}-") == 6

    assert markdown.escape(sentence) in markdown.render(report)
    assert markdown.render(report).count("| warning |") == 1
    assert markdown.render(report, verbose=True).count("| warning |") == 6
    assert "<p>" + sentence.replace('"', "&#34;") + "</p>" in html.render(report)

    document = json.loads(as_json.render(report))
    Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(document)
    (shared,) = document["shared"]
    counts = {"ill_with": 6, "ill": 6, "healthy_with": 0, "healthy": 14}
    assert shared == shared | counts | {"incident": HOT, "kind": "label", "property": "pool", "value": "b", "also": []}
    assert shared["servers"] == fleet.instances(HOT, 6)


@pytest.mark.nightly
def test_a_flag_that_only_the_ill_servers_run_with_is_named(tmp_path: Path) -> None:
    with holding(tmp_path, {"healthy": 14, CASCADE: 6}, lambda _: {"region": "eu"}) as server:
        report = judged(server)
    (shared,) = report.shared
    flags = {item.name: value for item, value in ((shared.property, shared.value), *shared.also)}
    assert shared.property.kind == "flag" and flags["num_gpu_blocks_override"] == "128"
    assert (shared.ill_with, shared.ill, shared.healthy_with, shared.healthy) == (6, 6, 0, 14)


@pytest.mark.nightly
def test_a_healthy_fleet_and_one_whose_labels_do_not_separate_share_nothing(tmp_path: Path) -> None:
    with holding(tmp_path, {"healthy": 14, HOT: 6}, lambda name: {"zone": f"{number(name) % 3}"}) as server:
        report = judged(server)
        assert report.verdict == "warning" and report.shared == ()
        assert "shared" not in json.loads(as_json.render(report))

        only = ObserveOptions([], prometheus=server.url, scope=Scope(TimeSpan(at=f"{END}"), instances=["healthy.*"]))
        remote = open_prometheus(only, Contract())
        asked = counting(remote)
        assert judge(remote, load(), QueryCache(remote, Contract())).verdict == "healthy"
        assert asked == []


def counting(remote: PrometheusSource) -> list[str]:
    """Note every query for properties of servers."""
    asked: list[str] = []
    answered = remote.at_end
    remote.at_end = lambda promql: asked.append(promql) or answered(promql)  # type: ignore[func-returns-value, method-assign]
    return asked


@pytest.mark.parametrize(
    ("refused", "told"),
    some([("up{", False), ("diag_gpu_info", True), ("count_values", True)], 1),
)
def test_refused_query_leaves_out_only_its_labels(of_pools: prometheus_server.Server, refused: str, told: bool) -> None:
    with source(of_pools.url) as remote:
        answered = remote.at_end

        def at_end(promql: str) -> list[tuple[str, Mapping[str, str], float]]:
            if refused in promql:
                raise NotAnswered
            return answered(promql)

        remote.at_end = at_end  # type: ignore[method-assign]
        report = judge(remote, load(), QueryCache(remote, Contract()))
    assert report.verdict == "warning"
    assert [shared.property.name for shared in report.shared] == (["pool"] if told else [])


# -- a day of a hundred sites -----------------------------------------------------------------------------------------

TIMES = np.arange(0, DAY + 1, 60)
NOON = (11.5 * 3600, 13.5 * 3600)
PAGE = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total"),
    "vllm:iteration_tokens_total_count",
)


def site(begin: float, end: float) -> Block:
    """A day of one vLLM with one GPU, which throttles between these seconds of the day."""

    def throttled(second: float) -> float:
        return 0.4 * float(np.clip(second - begin, 0, end - begin))

    def is_hot(second: float) -> bool:
        return begin <= second < end

    one = gpu(
        throttle_seconds_total__sw_thermal=throttled,
        clock_hertz__sm=lambda second: 1800e6 if is_hot(second) else 1980e6,
        temperature_margin_celsius=lambda second: 1 if is_hot(second) else 27,
    )
    series: dict[frozenset[tuple[str, str]], list[float]] = {}
    for second in TIMES:
        for name, values, value in one(float(second)):
            labels = zip(families()[name].labels, values, strict=True)
            series.setdefault(frozenset({("__name__", name), *labels}), []).append(value)
    healthy = recording("healthy")
    page = healthy.looped(TIMES.astype(float), healthy.whole)
    rows = {key: values for key, values in page.items() if dict(key)["__name__"] in PAGE}
    ups = {frozenset({("__name__", name)}): np.ones(TIMES.size) for name in ("up", "diag_vllm_up")}
    whole = {**rows, **ups, **{key: np.array(values) for key, values in series.items()}}
    labels = tuple({"instance": fleet.PLACEHOLDER, "job": "vllm", **dict(key)} for key in whole)
    times = (MIDNIGHT - DAY + TIMES) * 1000
    return Block(labels, times, np.array([*whole.values()]))


@pytest.mark.nightly
def test_sites_that_throttle_at_noon_are_one_finding_with_their_cooling_and_the_hours(tmp_path: Path) -> None:
    held = {"hot": [site(*NOON)], "cool": [site(0, 0)]}

    def labels(name: str) -> Mapping[str, str]:
        cooling = "air" if name.startswith("hot") else "water"
        return {"cooling": cooling, "site": name.partition(":")[0], "region": f"r{number(name) % 4}"}

    fleet.write_blocks(tmp_path, held, {"hot": 40, "cool": 60}, np.arange(TIMES.size), labels)
    served = fleet.serving(program("DIAG_PROMETHEUS3"), tmp_path)
    with served as server, source(server.url, f"{MIDNIGHT - DAY}") as remote:
        asked = counting(remote)
        report = judge(remote, load(), QueryCache(remote, Contract()))
    assert len(asked) <= 4
    present = [finding.diagnosis for finding in report.present]
    assert {(each.incident.id, each.severity, each.ongoing) for each in present} == {(HOT, "info", False)}
    sentence = (
        f"GPU thermal throttling ({HOT}) on 40 servers (ended): "
        'all 40 have cooling="air"; 0 of the 60 healthy servers do. '
        "It began between 11:00 and 13:00 UTC on all 40 servers."
    )
    assert words.shared(report) == [sentence]
    short = terminal.render(report).splitlines()
    assert short[0].startswith("NO INCIDENT FOUND  (not seen: latency)  100 servers"), "at midnight all sites are cool"
    assert f"{short[1]} {short[2].strip()}" == sentence
