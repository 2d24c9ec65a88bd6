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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.bad_servers import Reply, Request, serving
from support.live import server
from support.waiting import until

pytestmark = [pytest.mark.live, server.needed]
DIAG = str(Path(sys.executable).parent / "diag")
ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Runs a command that sees no process of this host, as a sidecar without a shared PID namespace."""
sidecar = pytest.mark.skipif(
    subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode != 0,
    reason="no PID namespace can be made here: run as root",
)
LATE = 5.0


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Server]:
    folder, flags = tmp_path_factory.mktemp("vllm"), ("--max-model-len", "2048", "--max-num-seqs", "32")
    with server.running(folder, "tiny", flags, VLLM_KEEP_ALIVE_ON_ENGINE_DEATH="1") as running:
        yield running


@pytest.fixture(scope="module")
def dead(vllm: server.Server) -> server.Server:
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


@pytest.mark.parametrize("reply", ["late", "missing"])
def test_idle_engine_whose_health_is_not_measured_is_not_dead(vllm: server.Server, reply: str) -> None:
    """A busy server answers /health late, and a gateway may not pass it on."""

    def answer(request: Request) -> Reply:
        if request.path == "/health":
            time.sleep(LATE if reply == "late" else 0)
            return Reply(b"", 200 if reply == "late" else 404)
        with urllib.request.urlopen(vllm.url + request.path, timeout=30) as page:
            return Reply(page.read())

    with serving(answer) as front:
        verdict, present = doctor(front.url, "--log", str(vllm.log))
    assert verdict != "critical"
    assert "engine_dead" not in present


def test_idle_engine_is_healthy(vllm: server.Server) -> None:
    assert doctor(vllm.url, "--log", str(vllm.log)) == ("healthy", set())


@pytest.mark.parametrize(
    ("before", "log"),
    [
        pytest.param((), False, id="processes, no log"),
        pytest.param(ALONE, True, id="no processes, log", marks=sidecar),
        pytest.param((), True, id="processes, log", marks=pytest.mark.nightly),
        pytest.param(ALONE, False, id="no processes, no log", marks=[sidecar, pytest.mark.nightly]),
    ],
)
def test_dead_engine_is_named_live(dead: server.Server, before: tuple[str, ...], log: bool) -> None:
    words = (dead.url, "--log", str(dead.log)) if log else (dead.url,)
    verdict, present = doctor(*words, before=before)
    assert (verdict, "engine_dead" in present) == ("critical", True)


def test_dead_engine_is_named_from_a_recording(dead: server.Server, tmp_path: Path) -> None:
    words = (DIAG, "record", dead.url, str(tmp_path / "recording"), "--for", "20", "--every", "2")
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    verdict, present = doctor(str(tmp_path / "recording"))
    assert (verdict, "engine_dead" in present) == ("critical", True)


@sidecar
def test_exporter_that_sees_no_process_publishes_the_death(dead: server.Server) -> None:
    port = server.free_port()
    words = (*ALONE, DIAG, "exporter", "--vllm", dead.url, "--listen", f"127.0.0.1:{port}")
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as exporter:
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: status(f"{url}/metrics") == 200)
            shown = b"\ndiag_vllm_health_status 503.0\n"  # of the next page, if the server is busy
            until(lambda: shown in urllib.request.urlopen(f"{url}/metrics", timeout=30).read())
            until(lambda: (status(f"{url}/livez"), status(f"{url}/readyz")) == (503, 503))
        finally:
            exporter.kill()  # unshare ignores SIGTERM, and its end kills the exporter
