"""From samples to a page: a real Prometheus with the generated rules, a real Alertmanager with the inhibition rules.

The samples end minutes from now, so that both servers see them as the present.
"""

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.prometheus_server import PLACES, Server, hasty, program, serving
from support.timelines import blocks, timeline
from support.waiting import PATIENCE, until

from diag.artefacts.generate import files
from diag.core.contract import Contract, Site
from diag.core.contract_file import read
from diag.core.site_overrides import apply_overrides
from diag.knowledge.catalog import load

SITE = Site(runbook_base_url="https://wiki.example/vllm", grafana_url="https://grafana.example")
CONTRACT = Contract(ttft_seconds=1.0, site=SITE)  # a promise that the recorded cascade breaks


@contextmanager
def pager() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A webhook: its URL and every alert that arrived."""
    arrived: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            arrived.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield "http://{}:{}".format(*server.server_address), arrived
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def alertmanager(folder: Path, webhook: str) -> Iterator[str]:
    """A real one with the generated inhibition rules; yields host:port."""
    found = shutil.which("prometheus-alertmanager")
    if found is None:
        pytest.skip("no prometheus-alertmanager: .ci/components installs it")
    documented = snippet("alertmanager.yml").replace("http://pager.example/", webhook)
    quick = documented.replace("  receiver: tickets\n", "  receiver: tickets\n  group_wait: 5s\n", 1)
    text = quick + files(load(), CONTRACT)["alerts/inhibit_rules.yaml"]
    (folder / "alertmanager.yml").write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*free.getsockname())
    options = (f"--storage.path={folder}/am", f"--web.listen-address={address}", "--cluster.listen-address=")
    with (folder / "alertmanager.log").open("w") as log:
        command = [found, f"--config.file={folder}/alertmanager.yml", *options]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield address
    finally:
        process.terminate()
        process.wait(30)


def snippet(name: str) -> str:
    """A file as alerts/README.md shows it."""
    steps = files(load(), CONTRACT)["alerts/README.md"]
    return re.search(rf"```\w+ {re.escape(name)}\n(.*?)```", steps, re.DOTALL)[1]


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


@pytest.mark.prometheus
def test_the_cause_pages_with_all_that_is_needed_and_what_follows_from_it_does_not(tmp_path: Path) -> None:
    text = files(load(), CONTRACT)["alerts/diag.rules.yaml"]
    (tmp_path / "diag.rules.yaml").write_text(hasty(text))
    with pager() as (webhook, arrived), alertmanager(tmp_path, webhook) as address:
        documented = snippet("prometheus.yml").replace("/etc/prometheus/diag", str(tmp_path))
        config = documented.replace("alertmanager:9093", address)
        with serving(program(PLACES[0]), blocks(timeline("kv_cascade")), config) as server:
            until(lambda: firing(server) >= {"kv_eviction_cascade", "contract_breached"})
            page = until(lambda: [alert for alert in arrived if alert["labels"]["incident"] == "kv_eviction_cascade"])
            held_back = until(lambda: inhibited(address) & {"contract_breached"})
    assert held_back
    assert "contract_breached" not in {alert["labels"]["incident"] for alert in arrived}
    annotations = page[0]["annotations"]
    assert annotations["summary"] == "KV-cache preemption cascade on h:1 engine 0"
    assert annotations["runbook_url"] == "https://wiki.example/vllm/kv_eviction_cascade.md"
    assert annotations["doctor"] == "diag doctor http://h:1"
    begin, end = (int(part.split("=")[1]) for part in annotations["dashboard_url"].split("?")[1].split("&")[:2])
    assert end - begin == 3_600_000 and abs(end / 1000 - time.time()) < PATIENCE
    assert annotations["dashboard_url"].endswith("&var-instance=h%3A1&var-engine=0")


def firing(server: Server) -> set[str]:
    alerts = ask(f"{server.url}/api/v1/alerts")["data"]["alerts"]
    return {alert["labels"].get("incident") for alert in alerts if alert["state"] == "firing"}


def inhibited(address: str) -> set[str]:
    alerts = ask(f"http://{address}/api/v2/alerts")
    return {alert["labels"].get("incident") for alert in alerts if alert["status"]["inhibitedBy"]}


def test_the_documented_contract_is_one(tmp_path: Path) -> None:
    (tmp_path / "diag.toml").write_text(snippet("diag.toml"))
    contract = read(tmp_path / "diag.toml")
    assert contract.site == Site(runbook_base_url="https://wiki.example/vllm", grafana_url="https://grafana.example")
    assert apply_overrides(load(), contract) != load()
