"""`diag replay` as a program: the doctor, an exporter and a log see a live server."""

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.cli import CASCADE, DIAG, diag
from support.live.server import free_port
from support.paths import ROOT
from support.waiting import until


@contextmanager
def replaying(*words: str) -> Iterator[str]:
    """The URL of the first server that is replayed."""
    port = free_port()
    command = [DIAG, "replay", *words, "--listen", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ) as process:
        assert process.stderr is not None
        assert "is replayed at" in process.stderr.readline()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def test_the_doctor_judges_a_replay_as_the_live_server_that_it_was(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    with replaying(CASCADE, "--speed", "8", "--log", str(log)) as url:
        with urllib.request.urlopen(f"{url}/version") as answer:
            assert json.load(answer) == {"version": "0.32.0"}
        report = json.loads(diag("doctor", url, "--for", "6", "--every", "0.5", "--log", str(log), "--json").stdout)
        until(lambda: "non-default args" in log.read_text())
    (primary,) = (found["incident"] for found in report["diagnoses"] if found["primary"])
    assert primary == "kv_eviction_cascade"


def test_replay_ends_with_its_recording_on_request() -> None:
    done = diag(
        "replay", "tests/recordings/engine_dead", "--listen", f":{free_port()}", "--speed", "100", "--at-end", "exit"
    )
    assert done.returncode == 0


def test_unusable_recording_is_one_sentence(tmp_path: Path) -> None:
    for words, reason in (
        (("nowhere",), "there is no recording at nowhere"),
        (("tests/recordings/idle", "--log", str(tmp_path)), "cannot be written: Is a directory"),
        (("tests/recordings/idle", "--listen", "8000"), "--listen takes host:port"),
    ):
        done = diag("replay", *words)
        assert (done.returncode, done.stderr.count("\n")) == (64, 1)
        assert reason in done.stderr
