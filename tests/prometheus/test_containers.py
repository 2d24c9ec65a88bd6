"""cAdvisor and kube-state-metrics as evidence: what they say of a server's container, through a real Prometheus."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.alert_rules import only
from support.bad_servers import serving
from support.expressions import expressions
from support.firing import all_fired
from support.node import Node, Pod, scrape_config, timeline_of
from support.paths import ROOT
from support.prometheus_server import PLACES, program
from support.prometheus_server import serving as prometheus
from support.rule_files import groups_of
from support.timelines import LEAD

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.diagnose import Diagnosis
from diag.knowledge import containers
from diag.promql import Block, parse
from diag.sources.prometheus.missing_metrics import Containers, mentioned
from diag.sources.prometheus.scope import Scope, TimeSpan

pytestmark = pytest.mark.prometheus
STARTS = 15.0
"""Seconds in which both Prometheus have started, however busy the machine is."""
PODS = [
    Pod("starved", throttled=0.95, tokens_late=True),
    Pod("throttled-in-time", throttled=0.95),
    Pod("late-with-cpu", throttled=0.05, tokens_late=True),
    Pod("growing", used=29.8, growth=0.02, cached=1.0),
    Pod("reading-files", used=20.0, cached=9.8, cache_growth=0.02),
    Pod("large-and-steady", used=30.4, cached=1.0),
    Pod("killed", used=31.0, dies=STARTS + 8.0, killed=True),
    Pod("killed-long-ago", killed_before=True),
    Pod("looping", dies=STARTS + 8.0, restarts_every=4.0),
    Pod("restarted-once", dies=STARTS + 10.0, restarts_every=12.0),
]
CAUSES = {"host_cpu_starved", "host_memory_exhausted", "crash_loop"}
SCENE = 27.0
"""Seconds: a death is judged 15 s after it."""
FEWEST = 24
"""Scrapes of a scene, one each second: with fewer, the machine was too busy to play it."""


ILL = {
    ("starved", "host_cpu_starved"),
    ("growing", "host_memory_exhausted"),
    ("killed", "host_memory_exhausted"),
    ("looping", "crash_loop"),
}
NAMED_BY_POD = """
[site]
labels = ["namespace", "pod"]
"""


def judged(url: str, end: float, contract: Path | None = None, **scope: tuple[str, ...]) -> list[Diagnosis]:
    """Return the incidents present in the scene that ended then."""
    span = TimeSpan(at=f"{end}", window="22s")
    options = ObserveOptions([], prometheus=url, scope=Scope(span, **scope), contract=contract)
    return [each.diagnosis for each in doctor.run(options).present]


def causes(present: list[Diagnosis]) -> set[tuple[str, str]]:
    """The pods and their incidents; a server is called POD:8000, or llm/POD where the site names it by its pod."""
    pods = ((dict(each.subject)["instance"].removeprefix("llm/").partition(":")[0], each) for each in present)
    return {(pod, each.incident.id) for pod, each in pods if each.incident.id in CAUSES}


@contextmanager
def scraped() -> Iterator[tuple[list[str], float]]:
    """The URLs of both Prometheus and the end of a scene; it is played anew where scrapes of it were missed."""
    for _ in range(10):
        node = Node(PODS)
        with ExitStack() as scene:
            target = scene.enter_context(serving(node)).instance
            both = [
                scene.enter_context(prometheus(program(place), (), scrape_config(target, PODS, honor)))
                for place, honor in zip(PLACES, ("true", "false"), strict=True)
            ]
            end = node.begin + STARTS + SCENE
            time.sleep(max(0.0, end - time.time()))
            counts = [each.query(f"min(count_over_time(up[{SCENE:.0f}s]))", round(end * 1000)) for each in both]
            if all(min((count or {frozenset(): 0.0}).values(), default=0) >= FEWEST for count in counts):
                yield [each.url for each in both], end
                return
    pytest.fail(f"no scene of ten was scraped every second: {counts}")


@pytest.mark.nightly
@pytest.mark.slow
def test_doctor_reads_the_same_from_cadvisor_as_from_an_exporter(tmp_path: Path) -> None:
    (tmp_path / "diag.toml").write_text(NAMED_BY_POD)
    with scraped() as ((one, other), end):
        present = judged(one, end)
        by_pod = judged(other, end, tmp_path / "diag.toml", matchers=('namespace="llm"',))
    assert causes(present) == causes(by_pod) == ILL
    dead = {dict(each.subject)["instance"]: each.explained_by for each in present if each.incident.id == "engine_dead"}
    assert dead == {"killed:8000": "host_memory_exhausted"}


def test_every_query_is_valid_for_a_server_without_an_exporter() -> None:
    """Other exporters count fewer events than ours does: an event that only ours counts has no series."""
    asked = [text for text in expressions("5m") if mentioned(text)]
    completed = [Containers(frozenset({"h:1"}), ("p",)).completed(text, "", 15.0) for text in asked]
    assert all(map(parse, completed)) and any('event="max"' in text for text in completed)


LASTING = {  # of each alert: pods with which it fires, and those with which it must not
    "host_cpu_starved": (PODS[0], PODS[1], PODS[2]),
    "host_memory_exhausted": (
        Pod("killed", used=31.0, dies=LEAD, killed=True),
        Pod("killed-long-ago", killed_before=True),
        Pod("large-and-steady", used=30.4, cached=1.0),
    ),
}


@pytest.mark.parametrize("incident", LASTING)
def test_container_rules_make_exactly_the_expected_alerts_fire(incident: str, tmp_path: Path) -> None:
    groups = [*groups_of(ROOT / "alerts" / "kubernetes.yaml"), *groups_of(only(incident, tmp_path))]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": groups}))
    pods = {pod.name: timeline_of(pod) for pod in LASTING[incident]}
    names = {dict(key)["__name__"] for series in pods.values() for key in series}
    found = all_fired(tmp_path / "rules.yaml", pods, names, tmp_path)
    ill, *healthy = (found[pod.name].incidents for pod in LASTING[incident])
    assert (ill, *healthy) == ({incident}, *(set() for _ in healthy))


NOW = 1_795_000_000_000
LIMIT = "kube_pod_container_resource_limits"
KEY = ("namespace", "pod", "container")
FOUND = "last_over_time(vllm:num_requests_running{$named}[1h])"


def server(pod: str, container: str = "vllm", **labels: str) -> dict[str, str]:
    own = {"__name__": "vllm:num_requests_running", "instance": f"{pod}:8000", "namespace": "llm", "pod": pod}
    return {**own, **({"container": container} if container else {}), **labels}


def limit(pod: str, container: str = "vllm", aside: str = "", **labels: str) -> dict[str, str]:
    """Return a kube-state-metrics series of a container; its own labels come before the exported ones."""
    of_target = dict(zip(KEY, ("monitoring", "kube-state-metrics-0", "kube-state-metrics"), strict=True))
    workload = {f"{aside}{label}": value for label, value in zip(KEY, ("llm", pod, container), strict=True)}
    return {"__name__": LIMIT, "resource": "memory", **(of_target if aside else {}), **workload, **labels}


SCENES = {  # the series and their values, and the limit that the server has by them
    "labels of the workload": ([(server("a"), 1), (limit("a"), 32)], 32),
    "labels set aside": ([(server("b"), 1), (limit("b", aside="exported_"), 33)], 33),
    "two containers": ([(server("c"), 1), (limit("c"), 34), (limit("c", "sidecar"), 1)], 34),
    "an engine each": ([(server("d", engine="0"), 1), (server("d", engine="1"), 1), (limit("d"), 35)], 35),
    "no container named": ([(server("e", ""), 1), (limit("e"), 36), (limit("e", "istio-proxy"), 1)], 36),
    "no container named, and two": ([(server("f", ""), 1), (limit("f"), 37), (limit("f", "other"), 1)], None),
    "scraped through a proxy": ([(server("g", "queue-proxy"), 1), (limit("g", "queue-proxy"), 1)], None),
    "another pod": ([(server("h"), 1), (limit("hh"), 38)], None),
    "another container": ([(server("i"), 1), (limit("i", "sidecar"), 39)], None),
    "one cluster": ([(server("j", cluster="eu"), 1), (limit("j", cluster="eu"), 40)], 40),
    "another cluster": ([(server("k", cluster="eu"), 1), (limit("k", cluster="us"), 41)], None),
    "a pod that was made anew": ([(server("l"), 1), (limit("l", uid="1"), 42), (limit("l", uid="2"), 42)], 42),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_server_gets_the_metrics_of_its_own_container_and_of_no_other(place: str) -> None:
    """One query covers all servers, as in a rule."""
    series = [each for given, _ in SCENES.values() for each in given]
    info = [{**labels, "__name__": "kube_pod_container_info"} for labels, _ in series if labels["__name__"] == LIMIT]
    values = np.array([[float(value)] for _, value in series] + [[1.0]] * len(info))
    block = Block((*(labels for labels, _ in series), *info), np.array([NOW]), values)
    (record,) = (each for each in containers.RECORDING_RULES if each.metric == "diag_host_memory_limit_bytes")
    asked = containers.of_pods(containers.joined(record, ["instance"], containers.servers(FOUND, ["instance"])))
    with prometheus(program(place), [block]) as held:
        answer = held.query(asked, NOW)
    assert answer is not None
    limits = {dict(labels)["instance"]: value for labels, value in answer.items()}
    expected = {given[0][0]["instance"]: value for given, value in SCENES.values() if value is not None}
    assert limits == expected
