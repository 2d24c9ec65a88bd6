"""Samples become a page: a real Prometheus with the generated rules, a real Alertmanager with the inhibition rules.

The samples end minutes from now, so that both servers see them as the present.
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest
from support import alertmanager
from support.alertmanager import snippet
from support.paths import RECORDINGS
from support.prometheus_server import ANY, Server, hasty, program, serving
from support.timelines import blocks, timeline
from support.waiting import PATIENCE, until

from diag.artefacts.alerts import filled_alerts
from diag.artefacts.generate import files
from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract, Site, apply_overrides, read
from diag.knowledge.catalog import load
from diag.promql import Block

ENGINE = "0' $(id) `touch x` <a http://e @here> \x1b\u202e"
SITE = Site(runbook_base_url="https://wiki.example/vllm", grafana_url="https://grafana.example")
CONTRACT = Contract(ttft_seconds=1.0, site=SITE)  # a promise that the recorded cascade breaks
generated = cache(lambda: files(load(), CONTRACT))


def routes(webhook: str) -> str:
    """The documented ones, to this pager."""
    return alertmanager.hasty(snippet(generated(), "alertmanager.yml").replace("http://pager.example/", webhook))


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


@pytest.mark.prometheus
def test_cause_pages_with_all_annotations_and_its_consequences_do_not(tmp_path: Path) -> None:
    (tmp_path / "diag.rules.yaml").write_text(hasty(generated()["alerts/diag.rules.yaml"]))
    with (
        alertmanager.pager() as (webhook, arrived),
        alertmanager.running(tmp_path, generated(), routes(webhook)) as address,
    ):
        documented = snippet(generated(), "prometheus.yml").replace("/etc/prometheus/diag", str(tmp_path))
        config = documented.replace("alertmanager:9093", address)
        with serving(program(ANY), hostile(blocks(timeline("kv_cascade"))), config) as server:
            page = until(lambda: [alert for alert in arrived if alert["labels"]["incident"] == "kv_eviction_cascade"])
            fires = firing(server)
            says = pasted(page[0]["annotations"]["doctor"])
    assert "contract_breached" not in fires, "its cause is told"
    assert "contract_breached" not in {alert["labels"]["incident"] for alert in arrived}
    annotations = page[0]["annotations"]
    shown = "0? ??id? ?touch x? ?a http:?e ?here? ??"
    assert re.match(rf"KV-cache preemption cascade on .*h:1 engine {re.escape(shown)}: ", annotations["summary"])
    assert not {"<", "`", "$", "\x1b"} & set("".join(annotations.values()))
    assert annotations["runbook_url"] == "https://wiki.example/vllm/kv_eviction_cascade.md"
    assert says[0]["subject"] == {"instance": "h:1", "engine": ENGINE}
    assert [found["incident"] for found in says if found["primary"]] == ["kv_eviction_cascade"]
    begin, end = (int(part.split("=")[1]) for part in annotations["dashboard_url"].split("?")[1].split("&")[-2:])
    assert end - begin == 3_600_000 and abs(end / 1000 - time.time()) < PATIENCE
    assert filled() == {name: re.sub(r"\d{9,}", "N", annotations[name]) for name in filled()}
    assert f"&var-instance=h%3A1&var-engine={quote_plus(ENGINE)}&from=" in annotations["dashboard_url"]


def filled() -> dict[str, str]:
    """Return the post of a watch without a Prometheus for the same engine, without its times."""
    first = doctor.run(ObserveOptions([str(RECORDINGS / "kv_cascade")])).present[0].diagnosis
    diagnosis = first._replace(subject=(("engine", ENGINE), ("instance", "h:1")))
    (alert,) = filled_alerts(diagnosis, CONTRACT, time.time())
    texts = {name: re.sub(r"\d{9,}", "N", text) for name, text in alert.annotations.items()}
    return {name: texts[name] for name in ("title", "impact", "runbook_url", "dashboard_url")}


def hostile(series: list[Block]) -> list[Block]:
    """Return the alert of an engine with a hostile name, which the server of the page may choose."""
    named = (
        tuple({**labels, "engine": ENGINE} if labels.get("engine") == "0" else labels for labels in block.labels)
        for block in series
    )
    return [block._replace(labels=labels) for block, labels in zip(series, named, strict=True)]


def pasted(command: str) -> list[dict[str, Any]]:
    """Return the findings of an alert's command, run unchanged by a shell."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shell = ["bash", "-c", f"{command} --json"]
    done = subprocess.run(shell, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    return [found for found in json.loads(done.stdout)["diagnoses"] if found["state"] == "present"]


def firing(server: Server) -> set[str]:
    alerts = ask(f"{server.url}/api/v1/alerts")["data"]["alerts"]
    return {alert["labels"].get("incident") for alert in alerts if alert["state"] == "firing"}


def test_documented_alertmanager_configuration_is_valid(tmp_path: Path) -> None:
    (tmp_path / "diag.toml").write_text(snippet(generated(), "diag.toml"))
    contract = read(tmp_path / "diag.toml")
    assert contract.site == Site(runbook_base_url="https://wiki.example/vllm", grafana_url="https://grafana.example")
    assert apply_overrides(load(), contract) != load()
