"""Starts of a real vLLM that fail in the ways in which a CPU can: the log alone shows the kind, and what to do."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from support.live import model, outages, server
from support.reports import judged_logs
from support.sampling import some

pytestmark = [pytest.mark.live, server.needed]


class Failed(NamedTuple):
    """A start that fails: its flags, the kind that its log shows (or one of several), and a part of the advice."""

    flags: tuple[str, ...]
    kind: str
    advice: str
    breaks: Callable[[Path], None] | None = None
    """Damages the files of the model."""
    kills: bool = False
    """The engine is killed while it starts."""


def without_tokenizer(files: Path) -> None:
    for file in files.glob("tokenizer*"):
        file.unlink()


def of_an_unknown_kind(files: Path) -> None:
    file = files / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"architectures": ["NoSuchLM"], "model_type": "nosuch"}
    file.write_text(json.dumps(config), encoding="utf-8")


STARTS = {
    "flag": Failed(("--no-such-flag", "1"), "flag_unknown", "--no-such-flag"),
    "value": Failed(("--kv-cache-dtype", "fp9"), "flag_choice", "--kv-cache-dtype"),
    "length": Failed(("--max-model-len", "999999"), "model_len_above_derived", "--max-model-len 16384"),
    "context": Failed(outages.LARGE_CONTEXT, "kv_cache_below_model_len", "--max-model-len"),
    "template": Failed(("--chat-template", "/no/such.jinja"), "chat_template_not_found", "--chat-template"),
    "parser": Failed(
        ("--enable-auto-tool-choice", "--tool-call-parser", "nosuch"), "tool_parser_unknown", "--tool-call-parser"
    ),
    "rank": Failed(("--enable-lora", "--max-lora-rank", "7"), "flag_choice", "--max-lora-rank"),
    "heads": Failed(("--tensor-parallel-size", "3"), "heads_not_divisible", "--tensor-parallel-size 1 or 2"),
    "tokenizer": Failed((), "tokenizer_needs_package", "tokenizer.json", breaks=without_tokenizer),
    "architecture": Failed((), "model_type_unknown", "Upgrade vLLM", breaks=of_an_unknown_kind),
    "killed": Failed((), "process_killed engine_process_vanished engine_ended_before_its_worker", "dmesg", kills=True),
}


@contextmanager
def failing(folder: Path, start: Failed) -> Iterator[server.Server]:
    """Start it, and wait until it has ended."""
    model.write(folder / "tiny", "tiny")
    if start.breaks is not None:
        start.breaks(folder / "tiny")
    with server.starting(folder, "tiny", start.flags) as vllm:
        if start.kills:
            end = time.monotonic() + server.READY_SECONDS
            while time.monotonic() < end and "Initializing a V1 LLM engine" not in vllm.log.read_text(encoding="utf-8"):
                time.sleep(0.2)
            vllm.signal("VLLM::EngineCore", signal.SIGKILL)
        vllm.process.wait(server.READY_SECONDS)
        yield vllm


@pytest.mark.parametrize("name", ["killed", *some([name for name in STARTS if name != "killed"], 4)])
def test_the_log_of_a_failed_start_names_its_kind_and_the_action(name: str, tmp_path: Path) -> None:
    start = STARTS[name]
    with failing(tmp_path, start) as vllm:
        report = judged_logs(vllm.log)
    assert report.verdict == "critical"
    found = report.present[0].failure
    assert found is not None
    assert found.id in start.kind.split()
    assert start.advice in found.do


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with server.starting(tmp_path, "tiny", (), port=port) as vllm:
            vllm.process.wait(server.READY_SECONDS)
            found = judged_logs(vllm.log).present[0].failure
    assert found is not None
    assert found.id.startswith("port_in_use")
    assert str(port) in found.do or "--port" in found.do


@pytest.mark.nightly
def test_a_dev_shm_that_is_too_small(tmp_path: Path) -> None:
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "true"], check=False).returncode:
        pytest.skip("no mount namespace may be made here")
    model.write(tmp_path / "tiny", "tiny")
    log = tmp_path / "server.log"
    mounted = [*namespace, "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh"]
    serve = [server.PYTHON, "-m", "vllm.entrypoints.openai.api_server", *server.COMMON, "--model", f"{tmp_path}/tiny"]
    flags = ["--tensor-parallel-size", "2", "--port", str(server.free_port())]
    words, environment = [*mounted, *serve, *flags], {**os.environ, **server.ENVIRONMENT}
    with log.open("wb") as out:
        subprocess.run(words, stdout=out, stderr=out, env=environment, timeout=server.READY_SECONDS, check=False)
    found = judged_logs(log).present[0].failure
    assert found is not None
    assert found.id == "vllm_shared_memory_too_small"
    assert "--shm-size" in found.do
