"""Metrics that a Prometheus 2 stores as `vllm_...`: where every rule on `vllm:` is silent, one alert still fires."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import yaml
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from support import victoria_metrics as victoria
from support.paths import ROOT
from support.prometheus_server import PLACES, Server, answer, program, serving
from support.timelines import LEAD, SICK, blocks, timeline
from support.waiting import until

from diag.artefacts.telemetry_alerts import TELEMETRY_ALERTS, expression_of
from diag.core.contract import Contract

RULES = ROOT / "alerts" / "diag.rules.yaml"
END = 1_790_000_000_000
(RENAMED,) = (alert for alert in TELEMETRY_ALERTS if alert.name == "VllmMetricsRenamed")
STORED = '{__name__=~"vllm.num_requests_running"}'


@contextmanager
def scraped(place: str, fallback: str) -> Iterator[Server]:
    """A Prometheus that scrapes a page of the client library that vLLM answers with."""
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Requests.", ["engine"], registry=registry).labels("0").set(3)
    page, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    job = {"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{page.server_port}"]}]}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{**job, **yaml.safe_load(fallback)}],
    }
    try:
        with serving(program(place), [], yaml.safe_dump(config)) as server:
            yield server
    finally:
        page.shutdown()
        page.server_close()
        thread.join()


def names(server: Server) -> set[str]:
    held = until(lambda: answer(server, STORED))
    return {dict(key)["__name__"] for key in held}


@pytest.mark.prometheus
def test_a_prometheus_2_stores_other_names_and_the_guard_sees_them() -> None:
    with scraped(PLACES[0], "{}") as server:
        assert names(server) == {"vllm_num_requests_running"}
        found = server.query(expression_of(RENAMED, Contract()), round(time.time() * 1000))
        assert [set(dict(key)) for key in found] == [{"instance"}]


@pytest.mark.prometheus
def test_a_prometheus_3_keeps_the_names_and_the_guard_is_silent() -> None:
    with scraped(PLACES[1], "{}") as server:
        assert names(server) == {"vllm:num_requests_running"}
        assert server.query(expression_of(RENAMED, Contract()), round(time.time() * 1000)) == {}


@pytest.mark.prometheus
def test_a_prometheus_2_with_the_relabelling_keeps_them_too() -> None:
    with scraped(PLACES[0], (ROOT / "alerts" / "relabel.yaml").read_text(encoding="utf-8")) as server:
        assert names(server) == {"vllm:num_requests_running"}


def test_vmalert_fires_for_renamed_metrics_and_for_nothing_else_of_a_sick_server() -> None:
    """A cascade under the names that no rule asks for: only its telemetry can be told to be wrong."""
    (block,) = blocks(timeline("kv_cascade"), END / 1000 - LEAD - SICK)
    labels = tuple({**each, "__name__": each["__name__"].replace("vllm:", "vllm_")} for each in block.labels)
    with victoria.serving([replace(block, labels=labels)]) as server:
        alerts = victoria.replay(RULES, END - 1_500_000, END, server)
    assert "VllmMetricsRenamed firing" in alerts
    assert not [each for each in alerts if "KvEvictionCascade" in each]
