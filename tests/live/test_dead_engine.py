"""An engine that is dead behind a page that its API server still serves, on a real vLLM, wherever one looks.

With VLLM_KEEP_ALIVE_ON_ENGINE_DEATH the API server outlives its engine. The tests stand in the order in which they use
the one server: it is alive in the first ones.
"""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support import prometheus_server
from support.bad_servers import Reply, Request, serving
from support.live import server
from support.paths import ROOT
from support.sampling import THOROUGH
from support.waiting import until

pytestmark = [pytest.mark.live, server.needed]
DIAG = str(Path(sys.executable).parent / "diag")
ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Runs a command that sees no process of this host, as a sidecar without a shared PID namespace."""
CAN_BE_ALONE = subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0
sidecar = pytest.mark.skipif(not CAN_BE_ALONE, reason="no PID namespace can be made here: run as root")
LATE = 5.0
T = TypeVar("T")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Server]:
    folder, flags = tmp_path_factory.mktemp("vllm"), ("--max-model-len", "2048", "--max-num-seqs", "32")
    with server.running(folder, "tiny", flags, VLLM_KEEP_ALIVE_ON_ENGINE_DEATH="1") as running:
        yield running


@pytest.fixture(scope="module")
def watched(vllm: server.Server) -> Iterator[tuple[str, prometheus_server.Server]]:
    """An exporter that sees no process, from before the death on, and a Prometheus with the shipped rules behind it."""
    port = server.free_port()
    words = (*(ALONE if CAN_BE_ALONE else ()), DIAG, "exporter", "--vllm", vllm.url, "--listen", f"127.0.0.1:{port}")
    config = f"""
    global: {{scrape_interval: 5s}}
    rule_files: [{ROOT}/alerts/diag.rules.yaml]
    scrape_configs: [{{job_name: vllm, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
    """
    program = prometheus_server.program("PATH")
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as exporter:
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: status(f"{url}/metrics") == 200)
            with prometheus_server.serving(program, (), config) as prometheus:
                yield url, prometheus
        finally:
            exporter.kill()  # unshare ignores SIGTERM, and its end kills the exporter


@pytest.fixture(scope="module")
def dead(vllm: server.Server, watched: object) -> server.Server:
    vllm.signal("VLLM::EngineCore", signal.SIGKILL)
    until(lambda: status(f"{vllm.url}/health") == 503)
    return vllm


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def doctor(*words: str, before: tuple[str, ...] = ()) -> tuple[str, set[str]]:
    """Return the verdict and the incidents of thirty seconds."""
    done = subprocess.run([*before, DIAG, "doctor", *words, "--json"], capture_output=True, text=True, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    present = {found["incident"] for found in report["diagnoses"] if found["state"] == "present"}
    return report["verdict"], present


def at_once(looks: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Each look takes thirty seconds, mostly waiting."""
    with ThreadPoolExecutor(len(looks)) as together:
        return dict(zip(looks, together.map(lambda look: look(), looks.values()), strict=True))


def front(vllm: server.Server, health: Callable[[], Reply]) -> Callable[[Request], Reply]:
    """The pages of the server, with other answers of /health."""

    def answer(request: Request) -> Reply:
        if request.path == "/health":
            return health()
        with urllib.request.urlopen(vllm.url + request.path, timeout=30) as page:
            return Reply(page.read())

    return answer


def late() -> Reply:
    time.sleep(LATE)
    return Reply(b"", 200)


def test_idle_engine_is_healthy_and_not_dead_where_its_health_is_not_measured(vllm: server.Server) -> None:
    """A busy server answers /health late, and a gateway may not pass it on."""
    log = ("--log", str(vllm.log))
    with serving(front(vllm, late)) as slow, serving(front(vllm, lambda: Reply(b"", 404))) as without:
        urls = {"measured": vllm.url, "late": slow.url, "missing": without.url}
        found = at_once({name: partial(doctor, url, *log) for name, url in urls.items()})
    assert found.pop("measured") == ("healthy", set())
    assert [
        name for name, (verdict, present) in found.items() if verdict == "critical" or "engine_dead" in present
    ] == []


def recorded(url: str, folder: Path) -> tuple[str, set[str]]:
    words = (DIAG, "record", url, str(folder), "--for", "20", "--every", "2")
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    return doctor(str(folder))


def test_dead_engine_is_named_live_and_from_a_recording(dead: server.Server, tmp_path: Path) -> None:
    log = ("--log", str(dead.log))
    looks = {
        "processes, no log": partial(doctor, dead.url),
        "recording": partial(recorded, dead.url, tmp_path / "recording"),
        **({"no processes, log": partial(doctor, dead.url, *log, before=ALONE)} if CAN_BE_ALONE else {}),
    }
    if THOROUGH:
        looks["processes, log"] = partial(doctor, dead.url, *log)
        looks["no processes, no log"] = partial(doctor, dead.url, before=ALONE)
    found = at_once(looks)
    assert [
        name for name, (verdict, present) in found.items() if verdict != "critical" or "engine_dead" not in present
    ] == []


@sidecar
def test_exporter_that_sees_no_process_publishes_the_death(
    watched: tuple[str, prometheus_server.Server], dead: server.Server
) -> None:
    url, prometheus = watched
    shown = b"\ndiag_vllm_health_status 503.0\n"  # of the next page, if the server is busy
    until(lambda: shown in urllib.request.urlopen(f"{url}/metrics", timeout=30).read())
    until(lambda: (status(f"{url}/livez"), status(f"{url}/readyz")) == (503, 503))
    until(lambda: prometheus_server.answer(prometheus, 'ALERTS{alertname="VllmEngineDead"}'))  # pending, or firing
