"""`diag preflight` before a real vLLM on the CPU: a good launch is a go and starts, a broken one fails as foretold."""

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from support.cli import diag
from support.live import model, server
from support.sampling import THOROUGH

from diag.preflight.machine import Machine

pytestmark = [pytest.mark.live, server.needed]

GIB = 2**30
KEPT = ("--served-model-name", "tiny", "--dtype", "bfloat16", "--host", "127.0.0.1", "--enforce-eager")
SITE = '[preflight.ignore]\nopen_files = "the limit of this host"\n'


class Broken(NamedTuple):
    """A launch that cannot start: its flags and variables, the check that names it, and the words of vLLM's own end."""

    check: str
    ends: str
    flags: tuple[str, ...] = ("--load-format", "dummy")
    environment: tuple[str, ...] = ("VLLM_CPU_KVCACHE_SPACE=1",)
    around: Callable[[int], Iterator[object]] | None = None
    """Holds what breaks the launch at this port while it lasts."""
    within: tuple[str, ...] = ()
    """A command in which diag and vLLM run."""


def listening(port: int) -> Iterator[object]:
    with socket.create_server(("127.0.0.1", port)) as taken:
        yield taken


def tenant(_: int) -> Iterator[object]:
    """A process that holds 4 GiB of host memory."""
    hold = f"held = b'x' * {4 * GIB}; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        yield process
        process.kill()


def most_share() -> str:
    """The share of the host's memory that fits now, and does not beside the tenant."""
    host = Machine()
    assert host.memory_free and host.memory_total
    return f"{(host.memory_free - 2 * GIB) / host.memory_total:.2f}"


SMALL = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', "sh")
"""A namespace whose /dev/shm holds 8 MiB."""
CONNECTOR = Path(__file__).resolve().parents[1] / "support/live"
LOCKING = {"kv_connector": "LockingConnector", "kv_connector_module_path": "locking_connector", "kv_role": "kv_both"}
UNLOCKED = (
    *("unshare", "--mount", "sh", "-c"),
    "set -e; mount -t tmpfs tmpfs /mnt; cp -a /sys/class/net /mnt; port=/mnt/infiniband/mlx5_0/ports/1; mkdir -p $port"
    '; echo "4: ACTIVE" > $port/state; mount --bind /mnt /sys/class; exec "$@"',
    *("sh", "setpriv", "--bounding-set", "-ipc_lock", "prlimit", "--memlock=65536:65536"),
)
"""A host with an InfiniBand port, on which 64 KiB may be locked in memory."""
BROKEN = {
    "memlock": Broken(
        "locked_memory",
        "Cannot allocate memory",
        ("--load-format", "dummy", "--kv-transfer-config", json.dumps(LOCKING)),
        ("VLLM_CPU_KVCACHE_SPACE=1", f"PYTHONPATH={CONNECTOR}"),
        within=UNLOCKED,
    ),
    "port": Broken("port_free", "Address already in use", around=listening),
    "memory": Broken(
        "cpu_memory_free", "is less than requested memory for kv", environment=("VLLM_CPU_KVCACHE_SPACE=900",)
    ),
    "flag": Broken("removed_flag", "unrecognized arguments", ("--load-format", "dummy", "--swap-space", "4")),
    "shm": Broken("shared_memory", "", ("--load-format", "dummy", "--tensor-parallel-size", "2"), within=SMALL),
    "weights": Broken("weight_files", "model", ()),
    "tenant": Broken(
        "cpu_memory_free",
        "is less than desired CPU memory utilization",
        ("--load-format", "dummy", "--gpu-memory-utilization", "SHARE"),
        environment=(),
        around=tenant,
    ),
}


for name in [name for name, start in BROKEN.items() if start.within]:
    if subprocess.run([*BROKEN[name].within, "true"], capture_output=True, check=False).returncode:
        del BROKEN[name]  # only root may make a namespace, and not in every container


def launch(folder: Path, port: int, flags: tuple[str, ...], environment: tuple[str, ...] = ()) -> str:
    """A launch of the tiny model as a user writes it; without VLLM_CPU_KVCACHE_SPACE the share decides."""
    files = folder / "tiny"
    if not files.exists():
        model.write(files, "tiny")
        (files / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"lm_head.weight": "model-1.safetensors"}})
        )
    words = [server.PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(files), *KEPT]
    return shlex.join([*environment, *words, "--port", str(port), *flags])


def judged(folder: Path, line: str, *more: str, within: tuple[str, ...] = ()) -> tuple[int, list[dict[str, str]]]:
    """The exit status and the results, the worst first."""
    site = folder / "diag.toml"
    site.write_text(SITE)
    words = ["preflight", line, "--vllm-python", server.PYTHON, "--contract", str(site), "--json", *more]
    if within:
        command = [*within, sys.executable, "-m", "diag", *words]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    else:
        answer = diag(*words)
    return answer.returncode, json.loads(answer.stdout)["results"]


@contextmanager
def broken(start: Broken, port: int) -> Iterator[None]:
    holding = start.around(port) if start.around else iter([None])
    next(holding)
    try:
        yield
    finally:
        next(holding, None)


def ended(folder: Path, line: str, within: tuple[str, ...]) -> str:
    """Start it as its user would, wait until it ends, and return what it wrote."""
    told = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = folder / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            [*within, "bash", "-c", f"exec env {line}"],
            stdout=written,
            stderr=written,
            env=told,
            start_new_session=True,
        )
        started = server.Server(0, process, line, log)
        try:
            assert process.wait(server.READY_SECONDS) != 0
        finally:
            started.stop()
    return log.read_text(encoding="utf-8", errors="replace")


@pytest.mark.parametrize("name", BROKEN if THOROUGH else ("port", "flag"))
def test_a_broken_launch_fails_for_its_reason_first_and_then_as_foretold(name: str, tmp_path: Path) -> None:
    start, port = BROKEN[name], server.free_port()
    flags = tuple(most_share() if flag == "SHARE" else flag for flag in start.flags)
    line = launch(tmp_path, port, flags, start.environment)
    with broken(start, port):
        status, results = judged(tmp_path, line, within=start.within)
        assert (status, results[0]["state"], results[0]["id"]) == (2, "fail", start.check)
        assert start.ends in ended(tmp_path, line, start.within)


def test_a_good_launch_is_a_go_and_starts(tmp_path: Path) -> None:
    port = server.free_port()
    line = launch(tmp_path, port, ("--load-format", "dummy"), ("VLLM_CPU_KVCACHE_SPACE=1",))
    status, results = judged(tmp_path, line)
    unlike = [each["id"] for each in results if each["state"] in ("fail", "warn")]
    assert (status, unlike) == (1, ["random_weights"])  # of --load-format dummy
    with server.relaunched(f"HF_HUB_OFFLINE=1 {line}", port, tmp_path / "log") as started:
        status, results = judged(tmp_path, started.url)
        assert status in (0, 1) and not [each for each in results if each["state"] == "fail"]


def test_the_all_reduce_of_two_ranks_is_measured(tmp_path: Path) -> None:
    ranks = ("--load-format", "dummy", "--tensor-parallel-size", "2")
    line = launch(tmp_path, server.free_port(), ranks, ("VLLM_CPU_KVCACHE_SPACE=1",))
    _, results = judged(tmp_path, line, "--bench")
    (found,) = (each for each in results if each["id"] == "all_reduce")
    assert found["state"] == "pass" and "iB/s bus bandwidth of 2 ranks (torch.distributed, gloo)" in found["message"]
