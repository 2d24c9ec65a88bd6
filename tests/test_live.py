"""A real vLLM on the CPU: healthy is called healthy, and what makes it ill is named while it lasts."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import load, server

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        not server.PYTHON, reason="no vLLM: .ci/components makes one, DIAG_VLLM_PYTHON names its Python"
    ),
]
DIAG = str(Path(sys.executable).parent / "diag")
TIMES_HEALTHY = int(os.environ.get("DIAG_TIMES_HEALTHY", "10"))
POOL = ("--max-model-len", "2048", "--block-size", "32", "--num-gpu-blocks-override")


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
    flags = ("--max-model-len", "8192", "--num-gpu-blocks-override", "512", "--max-num-batched-tokens", "16384")
    with server.running(folder, "small", flags) as running:
        yield running


def test_a_healthy_server_is_healthy_time_after_time(small: server.Server) -> None:
    with load.running(small.port, *load.HEALTHY):
        time.sleep(15)
        reports = [doctor(small.url, 12) for _ in range(TIMES_HEALTHY)]
    assert [each["verdict"] for each in reports] == ["healthy"] * TIMES_HEALTHY
    assert {each["progress"][0]["state"] for each in reports} == {"busy"}


def test_long_prompts_among_streams_are_named_with_a_threshold(small: server.Server) -> None:
    with load.running(small.port, *load.CONTENTION):
        time.sleep(15)
        report = doctor(small.url, 40)
    assert primary(report) == ["prefill_decode_contention"]
    fix = report["diagnoses"][0]["fixes"][0]
    assert (fix["name"], fix["restart"]) == ("--long-prefill-token-threshold", True)
    assert fix["to"] >= 256


def test_a_stopped_engine_is_a_stall_while_it_lasts(small: server.Server) -> None:
    with load.running(small.port, *load.STEADY):
        time.sleep(10)
        small.signal("VLLM::EngineCore", signal.SIGSTOP)
        try:
            report = doctor(small.url, 40)
        finally:
            small.signal("VLLM::EngineCore", signal.SIGCONT)
    assert (primary(report), report["progress"][0]["state"]) == (["engine_stalled"], "stalled")


def test_a_cascade_is_named_within_a_minute_of_its_load(folder: Path) -> None:
    with server.running(folder, "tiny", (*POOL, "128", "--max-num-seqs", "64")) as tiny:
        begun = time.time()
        with load.running(tiny.port, *load.CASCADE):
            time.sleep(4)
            report = doctor(tiny.url, 25)
        assert primary(report) == ["kv_eviction_cascade"]
        since = report["diagnoses"][0]["since"] or report["observed"]["from"]
        assert since - begun < 60  # by the scrapes: two busy cores start our process late, and have it watch on
        fixes = {each["name"]: each["to"] for each in report["diagnoses"][0]["fixes"]}
        assert 4 <= fixes["--max-num-seqs"] <= 9
