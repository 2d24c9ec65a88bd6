"""The demo of deploy/compose: every mounted file exists, every address is some service's, and its parts page together.

There is no container engine here: the same commands and configurations are started as processes.
"""

import re
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import ComposeSpecification
from support import alertmanager, prometheus_server
from support.cli import DIAG
from support.live.server import free_port
from support.paths import ROOT
from support.waiting import until

DEMO = ROOT / "deploy" / "compose"
TEXT = (DEMO / "compose.yaml").read_text()
COMPOSE = yaml.safe_load(TEXT)
SERVICES: Mapping[str, Any] = COMPOSE["services"]
PORTS = {"vllm": 8000, "exporter": 9400, "prometheus": 9090, "alertmanager": 9093, "grafana": 3000}
"""Where each listens: ours by their options, the others by default."""


def mounts(service: str) -> dict[str, Path]:
    """The files and folders of the repository that a service sees, by their place in its container."""
    pairs = (volume.split(":")[:2] for volume in SERVICES[service].get("volumes", ()))
    return {place: (DEMO / source).resolve() for source, place in pairs if source not in COMPOSE["volumes"]}


def test_compose_file_has_only_known_keys() -> None:
    read = ComposeSpecification.model_validate(COMPOSE).model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert {name: set(service) for name, service in read["services"].items()} == {
        name: set(service) for name, service in SERVICES.items()
    }


def test_mounted_files_exist() -> None:
    assert [place for service in SERVICES for place in mounts(service).values() if not place.exists()] == []


def test_every_address_is_a_listening_service() -> None:
    texts = [TEXT, *(file.read_text() for file in DEMO.iterdir())]
    named = {found for text in texts for found in re.findall(r"\b([a-z]+):(\d{4,5})\b", text)}
    assert {(name, int(port)) for name, port in named} == {(name, PORTS[name]) for name in PORTS if name != "grafana"}
    published = {service: spec["ports"] for service, spec in SERVICES.items() if "ports" in spec}
    assert published == {name: [f"127.0.0.1:{PORTS[name]}:{PORTS[name]}"] for name in published}


@contextmanager
def started(service: str, addresses: Mapping[str, str], folder: Path, *more: str) -> Iterator[None]:
    """One of our services by its own command, at an address of this host."""
    command = [*(here(word, addresses, folder) for word in SERVICES[service]["command"]), *more]
    command[command.index("--listen") + 1] = addresses[service]
    with subprocess.Popen([DIAG, *command], stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: answers(addresses[service]))
            yield
        finally:
            process.terminate()


def here(text: str, addresses: Mapping[str, str], folder: Path) -> str:
    """A text of the demo with the addresses and folders of this host."""
    for service, address in addresses.items():
        text = text.replace(f"{service}:{PORTS[service]}", address)
    return text.replace("/recordings/", f"{ROOT}/tests/recordings/").replace("/log/", f"{folder}/")


def answers(address: str, path: str = "/metrics") -> bytes:
    """Return the response; empty while nothing listens, and on an error."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.read()
    except OSError:
        return b""


@pytest.fixture
def hang(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The demo's server and exporter once more: its pages stay as they are after seconds, with requests in flight."""
    folder = tmp_path / "hang"
    folder.mkdir()
    addresses = {service: f"127.0.0.1:{free_port()}" for service in ("vllm", "exporter")}
    with (
        started("vllm", addresses, folder, "--speed", "30", "--at-end", "hold"),
        started("exporter", addresses, folder),
    ):
        assert answers(addresses["exporter"], "/livez")  # it judges from the first question on
        yield addresses


@pytest.mark.prometheus
@pytest.mark.slow
def test_a_replayed_cascade_pages_and_a_replayed_hang_fails_its_probe(tmp_path: Path, hang: dict[str, str]) -> None:
    """Both last: the hang begins two minutes before it is proven, as docs/exporter.md has it."""
    (rules,) = (file for place, file in mounts("prometheus").items() if place.endswith("rules.yaml"))
    (tmp_path / "diag.rules.yaml").write_text(prometheus_server.hasty(rules.read_text()))
    addresses = {service: f"127.0.0.1:{free_port()}" for service in ("vllm", "exporter")}
    shipped = {"alerts/inhibit_rules.yaml": mounts("alertmanager")["/config/inhibit_rules.yaml"].read_text()}
    routes = mounts("alertmanager")["/config/routes.yml"].read_text()
    with ExitStack() as demo:
        for service in list(addresses):
            demo.enter_context(started(service, addresses, tmp_path))
        addresses["alertmanager"] = demo.enter_context(alertmanager.running(tmp_path, shipped, routes))
        config = here((DEMO / "prometheus.yml").read_text(), addresses, tmp_path)
        config = config.replace("/etc/prometheus/diag", str(tmp_path)).replace("interval: 15s", "interval: 5s")
        program = prometheus_server.program(prometheus_server.PLACES[0])
        demo.enter_context(prometheus_server.serving(program, (), config))
        until(lambda: b'"kv_eviction_cascade"' in answers(addresses["alertmanager"], "/api/v2/alerts"))
    until(lambda: not answers(hang["exporter"], "/livez"))
    assert not answers(hang["exporter"], "/readyz")
    assert answers(hang["exporter"])
    assert answers(hang["vllm"])
