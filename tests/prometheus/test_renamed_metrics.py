"""Metrics stored under other names: one alert says so, the doctor judges them, and a site's rules ask for them."""

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from support import victoria_metrics as victoria
from support.alert_rules import metrics_read, only
from support.firing import evaluated, fired
from support.paths import ROOT
from support.prometheus_server import PLACES, Server, answer, program, serving
from support.timelines import LEAD, SICK, blocks, timeline
from support.waiting import until

from diag.artefacts.generate import files
from diag.artefacts.names import expression
from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract, Site
from diag.diagnosis.report import Report
from diag.knowledge.catalog import load
from diag.promql import Block
from diag.report import coverage
from diag.sources.prometheus.scope import Scope, TimeSpan

RULES = ROOT / "alerts" / "diag.rules.yaml"
END = 1_790_000_000_000
(RENAMED,) = (incident for incident in load() if incident.id == "scrape_renames_metrics")
ASKED = expression(RENAMED.symptoms[0].signal, RENAMED, "5m", Contract())
PREFIXES = ("vllm_", "kserve_vllm:", "ray_vllm:", "ray_vllm_")
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
        found = server.query(ASKED, round(time.time() * 1000))
        assert [(set(dict(key)), value) for key, value in found.items()] == [({"instance"}, 1.0)]


@pytest.mark.prometheus
def test_a_prometheus_3_keeps_the_names_and_the_guard_is_silent() -> None:
    with scraped(PLACES[1], "{}") as server:
        assert names(server) == {"vllm:num_requests_running"}
        assert list(server.query(ASKED, round(time.time() * 1000)).values()) == [0.0]


@pytest.mark.prometheus
def test_a_prometheus_2_with_the_relabelling_keeps_them_too() -> None:
    with scraped(PLACES[0], (ROOT / "alerts" / "relabel.yaml").read_text(encoding="utf-8")) as server:
        assert names(server) == {"vllm:num_requests_running"}


def stored(prefix: str, recording: str = "kv_cascade", instance: str = "h:1") -> Block:
    """A recording as a Prometheus stores it that gets these names; of Ray without counters that never counted."""
    (block,) = blocks(timeline(recording), END / 1000 - LEAD - SICK)
    absent = {"vllm:num_preemptions_total"} if prefix.startswith("ray_") and recording != "kv_cascade" else set()
    rows = [
        at
        for at, labels in enumerate(block.labels)
        if labels["__name__"] in metrics_read() - absent or labels["__name__"].startswith(("up", "process_"))
    ]
    labels = [{**block.labels[at], "instance": instance} for at in rows]
    named = tuple({**each, "__name__": each["__name__"].replace("vllm:", prefix)} for each in labels)
    return Block(named, block.times, block.values[rows])


def judged(server: Server, contract: Path | None = None) -> Report:
    scope = Scope(TimeSpan(at=f"{END / 1000}", window="10m"))
    return doctor.run(ObserveOptions([], prometheus=server.url, scope=scope, contract=contract))


@pytest.fixture(scope="module")
def fleet() -> Iterator[Server]:
    """One server under each prefix, in a cascade, beside one that keeps vLLM's names and one of Ray's with a queue."""
    cascades = [stored(prefix, instance=prefix) for prefix in ("vllm:", *PREFIXES)]
    with serving(program(PLACES[1]), [*cascades, stored("ray_vllm_", "queue_saturation", "queue")]) as server:
        yield server


@pytest.fixture(scope="module")
def report(fleet: Server) -> Report:
    return judged(fleet)


@pytest.mark.prometheus
def test_every_server_of_a_fleet_is_judged_under_its_own_names(report: Report) -> None:
    present = {(found.diagnosis.incident.id, found.diagnosis.subject[-1][1]) for found in report.present}
    assert {name for incident, name in present if incident == "kv_eviction_cascade"} == {"vllm:", *PREFIXES}
    assert {name for incident, name in present if incident == "scrape_renames_metrics"} == {*PREFIXES, "queue"}
    assert ("queue_saturation", "queue") in present


@pytest.mark.prometheus
def test_each_prefix_is_reported_in_one_line_with_its_relabelling(report: Report) -> None:
    notes = [note for note in coverage.notes(report) if note.startswith("metrics stored as")]
    assert len(notes) == len(PREFIXES)
    for prefix in PREFIXES:
        assert any(f"stored as {prefix}..." in note and f"regex: '{prefix}(.+)'" in note for note in notes)


@pytest.mark.prometheus
def test_stated_site_prefix_is_no_incident(fleet: Server, tmp_path: Path) -> None:
    stated = tmp_path / "diag.toml"
    stated.write_text('[site]\nprefix = "kserve_vllm:"\n')
    found = {f.diagnosis.subject[-1][1] for f in judged(fleet, stated).present if f.diagnosis.incident == RENAMED}
    assert found == {"vllm:", *PREFIXES, "queue"} - {"kserve_vllm:"}


@pytest.mark.prometheus
@pytest.mark.parametrize("prefix", ["kserve_vllm:", pytest.param("ray_vllm_", marks=pytest.mark.nightly)])
def test_the_alerts_of_a_site_fire_for_its_names(tmp_path: Path, prefix: str) -> None:
    texts = files(load(), Contract(site=Site(prefix=prefix)))
    file = tmp_path / "rules.yaml"
    file.write_text(texts["alerts/diag.rules.yaml"])
    assert subprocess.run(["promtool", "check", "rules", file], capture_output=True, check=False).returncode == 0
    read = metrics_read() - ({"vllm:num_preemptions_total"} if prefix.startswith("ray_") else set())
    held = {
        frozenset({**dict(key), "__name__": dict(key)["__name__"].replace("vllm:", prefix)}.items()): values
        for key, values in timeline("queue_saturation").items()
        if dict(key)["__name__"] in read
    }
    assert evaluated(file, held).incidents == {"queue_saturation"}
    chosen = only("queue_saturation", tmp_path, file)
    assert fired(chosen, held, {dict(key)["__name__"] for key in held}, tmp_path).incidents == {"queue_saturation"}
    assert "vllm:" not in re.sub(r"[a-z]+_vllm:", "", texts["dashboards/server.json"])


@pytest.mark.nightly
def test_vmalert_fires_for_renamed_metrics_and_for_nothing_else_of_a_sick_server() -> None:
    """A cascade under the names that no rule asks for: only its telemetry can be told to be wrong."""
    with victoria.serving([stored("vllm_")]) as server:
        alerts = victoria.replay(RULES, END - 1_500_000, END, server)
    assert "VllmScrapeRenamesMetrics firing" in alerts
    assert not [each for each in alerts if "KvEvictionCascade" in each]
