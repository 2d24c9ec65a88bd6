"""vLLM's process tree, played by small processes with its titles."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from support.live import server as live

FAKE = Path(__file__).parent / "fake_vllm.py"


Node = dict[str, Any]


def engine(*workers: str, title: str = "VLLM::EngineCore", **how: Any) -> Node:
    return {"title": title, "children": [{"title": each, **how} for each in workers]}


TP2 = engine("VLLM::Worker_TP0", "VLLM::Worker_TP1")


@dataclass
class Fake:
    """A server that is played; `wait` is the file that lets it open its port and set its titles."""

    process: subprocess.Popen[bytes]
    port: int
    wait: Path

    def pids(self) -> list[int]:
        return [self.process.pid, *(each.pid for each in psutil.Process(self.process.pid).children(recursive=True))]


@contextmanager
def serving(
    folder: Path,
    *children: Node,
    flags: Sequence[str] | None = None,
    environment: dict[str, str] | None = None,
    ready: bool = True,
    method: str = "spawn",
    before: Sequence[str] = (),
    log: Path | None = None,
    **root: Any,
) -> Iterator[Fake]:
    """Run it, and end all of it, orphans too."""
    port = live.free_port()
    program, wait = folder / "bin" / "vllm", folder / f"ready-{port}"
    program.parent.mkdir(exist_ok=True)
    program.unlink(missing_ok=True)
    program.symlink_to(FAKE)
    if ready:
        wait.touch()
    play = {"port": port, "children": children, "method": method, "wait": str(wait), **root}
    flags = ["--port", str(port)] if flags is None else flags
    running = subprocess.Popen(
        [*before, sys.executable, str(program), "serve", "model", *flags],
        env={**os.environ, **(environment or {}), "FAKE_VLLM": json.dumps(play)},
        start_new_session=True,
        stdout=log.open("ab") if log else None,
    )
    try:
        yield Fake(running, port, wait)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
