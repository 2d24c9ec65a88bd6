"""The load of a step: `vllm bench serve`, by the interpreter that has vLLM, as one process for each step.

Its module is run, since not every package of vLLM has the command. It is loaded once, which takes long, by a host that
forks for each step. Secrets reach it by the environment alone.
"""

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diag.core.errors import BadUsage
from diag.core.formatting import printable
from diag.ramp.results import ResultUnreadable, of_vllm_bench
from diag.ramp.step import ClientResult, Offer
from diag.ramp.traffic import RequestLengths

HOST = """
import argparse, json, os, sys
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
print(json.dumps({"status": 0}), flush=True)
for line in sys.stdin:
    arguments = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(2, 1)
        main(parser.parse_args(arguments))
        sys.exit()
    print(json.dumps({"pid": child}), flush=True)
    print(json.dumps({"status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}), flush=True)
"""
LOADS = 600.0
"""Seconds for vLLM's modules to load, on a busy host."""
ENDS = 10.0
"""Seconds that a process has to end after SIGTERM."""
POLL = 0.2
_SAID = 4_000
_REASONS = {
    "No module named 'vllm": "this Python has no vLLM: name one that has with --vllm-python",
    "is not a local folder and is not a valid model identifier": "its tokenizer cannot be loaded: name a folder or a"
    " model that is on this host with --tokenizer",
    "outgoing traffic has been disabled": "its tokenizer is not on this host: name a folder with --tokenizer",
    "Can't load tokenizer": "its tokenizer cannot be loaded: name a folder with --tokenizer",
    "couldn't connect to 'https://huggingface.co'": "its tokenizer is not on this host, and the hub cannot be reached:"
    " name a folder with --tokenizer",
}
"""What its last lines may say, and what that means for who reads it."""


class GeneratorFailed(Exception):
    """The load generator could not make its load; the message is a sentence."""


@dataclass
class Generator:
    """How the load is made: the interpreter with vLLM, the server, the model's names, how long requests are.

    `folder` holds the result of a step, and what vLLM prints.
    """

    python: str
    url: str
    model: str
    tokenizer: str
    lengths: RequestLengths
    environment: Mapping[str, str]
    folder: Path = field(default_factory=Path)
    _host: "subprocess.Popen[bytes] | None" = None
    _unread: bytes = b""

    @contextmanager
    def running(self, tick: Callable[[], bool]) -> Iterator[None]:
        """Load vLLM's modules, and end all that was started with the block; GeneratorFailed where they do not load."""
        with tempfile.TemporaryDirectory(prefix="diag-ramp-") as folder:
            self.folder = Path(folder)
            with (self.folder / "said").open("wb") as said:
                self._host = self._start(said.fileno())
            try:
                self._done(time.monotonic() + LOADS, tick)
                yield
            finally:
                _end(self._host)

    def run(self, offer: Offer, prompts: int, most_seconds: float, tick: Callable[[], bool]) -> ClientResult:
        """Make the load of a step; GeneratorFailed where it cannot be made or does not end.

        `tick` is called all the while; the load ends once it says False, and its result is lost.
        """
        assert self._host
        assert self._host.stdin
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        arguments = json.dumps(self._arguments(offer, prompts, result))
        with suppress(BrokenPipeError):
            self._host.stdin.write(f"{arguments}\n".encode())
            self._host.stdin.flush()
        cores = self._done(time.monotonic() + most_seconds, tick)
        return _result(result)._replace(cores=cores)

    def _done(self, until: float, tick: Callable[[], bool]) -> float | None:
        """Wait for what was begun; the CPU cores that it used. GeneratorFailed where it went wrong."""
        status, cores = self._wait(until, tick)
        if status:
            raise GeneratorFailed(_why(status, _tail(self.folder / "said")))
        return cores

    def _start(self, said: int) -> "subprocess.Popen[bytes]":
        command, pipe = [self.python, "-c", HOST], subprocess.PIPE
        try:
            return subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=said, env=dict(self.environment), start_new_session=True
            )
        except OSError as error:
            raise BadUsage(f"--vllm-python {printable(self.python)} cannot be run: {error.strerror}") from error

    def _wait(self, until: float, tick: Callable[[], bool]) -> tuple[int, float | None]:
        """Until the step's process ends: its status, and the CPU cores that it used on average."""
        seen: list[tuple[float, float]] = []
        pid = 0
        while True:
            told = self._told()
            if "status" in told:
                return told["status"], _cores(seen)
            pid = told.get("pid", pid)
            if time.monotonic() > until:
                raise GeneratorFailed("the load generator did not end in time: requests hang, or the network does")
            if not tick():
                raise GeneratorFailed("the load was ended early")
            used = _cpu_seconds(pid) if pid else None
            seen += [(time.monotonic(), used)] if used is not None else []

    def _told(self) -> dict[str, Any]:
        """The next line of the host, nothing where it writes none for a moment; its status where it has ended."""
        assert self._host
        assert self._host.stdout
        if b"\n" not in self._unread and select.select([self._host.stdout], [], [], POLL)[0]:
            new = os.read(self._host.stdout.fileno(), 2**16)
            if not new:
                return {"status": self._host.wait() or 1}
            self._unread += new
        line, found, rest = self._unread.partition(b"\n")
        self._unread = rest if found else self._unread
        with suppress(ValueError):  # what loading vLLM prints
            told = json.loads(line) if found else {}
            return told if isinstance(told, dict) else {}
        return {}

    def _arguments(self, offer: Offer, prompts: int, result: Path) -> list[str]:
        load = {
            "--backend": "openai",
            "--base-url": self.url,
            "--model": self.model,
            "--tokenizer": self.tokenizer,
            "--dataset-name": "random",
            "--random-input-len": self.lengths.prompt - self.lengths.prefix,
            "--random-output-len": self.lengths.output,
            "--random-prefix-len": self.lengths.prefix,
            "--random-range-ratio": round(self.lengths.spread, 2),
            "--num-prompts": prompts,
            "--seed": prompts,
            "--percentile-metrics": "ttft,tpot,itl,e2el",
            "--metric-percentiles": "50,90,99",
            "--result-dir": result.parent,
            "--result-filename": result.name,
        }
        load |= {"--max-concurrency": offer.concurrency} if offer.concurrency else {"--request-rate": offer.rate}
        return [str(word) for pair in load.items() for word in pair] + ["--save-result", "--disable-tqdm"]


def environment(given: Mapping[str, str], authorization: str, ca_file: str) -> dict[str, str]:
    """What the generator runs with; BadUsage for credentials that it cannot send."""
    scheme, _, token = authorization.partition(" ")
    if authorization and scheme != "Bearer":
        raise BadUsage("vllm bench serve sends a bearer token only: set DIAG_BEARER_TOKEN, not DIAG_BASIC_AUTH")
    own = {name: value for name, value in given.items() if not name.startswith("DIAG_")}
    return {
        "VLLM_NO_USAGE_STATS": "1",
        **own,
        **({"OPENAI_API_KEY": token} if token else {}),
        **({"SSL_CERT_FILE": ca_file} if ca_file else {}),
        "PYTHONUNBUFFERED": "1",
    }


def _cores(seen: list[tuple[float, float]]) -> float | None:
    """CPU seconds per second, of what it used at these times."""
    lasted = seen[-1][0] - seen[0][0] if seen else 0.0
    return (seen[-1][1] - seen[0][1]) / lasted if lasted > 1 else None


def _cpu_seconds(pid: int) -> float | None:
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End it with all of its processes, at once after a while."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDS)


def _tail(said: Path) -> str:
    with suppress(OSError):
        return said.read_bytes()[-_SAID:].decode(errors="replace")
    return ""


def _why(status: int | None, said: str) -> str:
    """The last line that it wrote, or what is known of it."""
    known = next((reason for text, reason in _REASONS.items() if text in said), "")
    if known:
        return f"vllm bench serve failed: {known}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f"vllm bench serve ended with status {status}: {printable(lines[-1]) if lines else 'it said nothing'}"


def _result(file: Path) -> ClientResult:
    try:
        return of_vllm_bench(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, ResultUnreadable) as error:
        raise GeneratorFailed(f"the result of vllm bench serve cannot be read: {printable(str(error))}") from error
