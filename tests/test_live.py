"""A real vLLM on the CPU: healthy is called healthy, and what makes it ill is named while it lasts."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live import cure, load, server

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        not server.PYTHON, reason="no vLLM: .ci/components makes one, DIAG_VLLM_PYTHON names its Python"
    ),
]
DIAG = str(Path(sys.executable).parent / "diag")
TIMES_HEALTHY = int(os.environ.get("DIAG_TIMES_HEALTHY", "10"))


def doctor(url: str, seconds: float = 30) -> dict[str, object]:
    command = [DIAG, "doctor", url, "--for", str(seconds), "--every", "1", "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)


def primary(report: dict[str, object]) -> list[str]:
    return [each["incident"] for each in report["diagnoses"] if each["primary"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[server.Server]:
    """A server that prefills slowly, with a step large enough for two long prompts."""
    with server.running(folder, "small", cure.SMALL) as running:
        yield running


def test_a_healthy_server_is_healthy_time_after_time(small: server.Server) -> None:
    with load.running(small.port, *load.HEALTHY):
        time.sleep(15)
        with ThreadPoolExecutor(2) as pairs:  # two at a time
            reports = list(pairs.map(lambda _: doctor(small.url, 12), range(TIMES_HEALTHY)))
    assert [each["verdict"] for each in reports] == ["healthy"] * TIMES_HEALTHY
    assert {each["progress"][0]["state"] for each in reports} == {"busy"}


def test_a_stopped_engine_is_a_stall_while_it_lasts(small: server.Server) -> None:
    with load.running(small.port, *load.STEADY):
        time.sleep(10)
        small.signal("VLLM::EngineCore", signal.SIGSTOP)
        try:
            report = doctor(small.url, 40)
        finally:
            small.signal("VLLM::EngineCore", signal.SIGCONT)
    assert (primary(report), report["progress"][0]["state"]) == (["engine_stalled"], "stalled")
