"""The load of a step: `vllm bench serve`, as one process for each step, by the interpreter that has vLLM.

Its module is run, since not every package of vLLM has the command. Secrets reach it by the environment alone.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diag.core.errors import BadUsage
from diag.core.formatting import printable
from diag.ramp.results import ResultUnreadable, of_vllm_bench
from diag.ramp.step import ClientResult, Offer

RUN = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; parser = argparse.ArgumentParser();"
    " add_cli_args(parser); main(parser.parse_args())"
)
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


@dataclass(frozen=True)
class Generator:
    """How the load is made: the interpreter with vLLM, the server, the model's names and the lengths in tokens."""

    python: str
    url: str
    model: str
    tokenizer: str
    prompt_tokens: int
    output_tokens: int
    environment: Mapping[str, str]

    def run(self, offer: Offer, prompts: int, most_seconds: float, tick: Callable[[], bool]) -> ClientResult:
        """Make the load of a step; GeneratorFailed where it cannot be made or does not end.

        `tick` is called all the while; the load ends once it says False, and its result is lost.
        """
        with tempfile.TemporaryDirectory(prefix="diag-ramp-") as folder:
            begun, result = time.monotonic(), Path(folder) / "result.json"
            with (Path(folder) / "said").open("w+b") as said:
                process = self._start(self._arguments(offer, prompts, result), said.fileno())
                try:
                    cores = _wait(process, begun + most_seconds, tick)
                finally:
                    _end(process)
                if process.returncode or not result.exists():
                    raise GeneratorFailed(_why(process.returncode, _tail(said.fileno())))
            return _read(result)._replace(cores=cores)

    def _start(self, arguments: list[str], said: int) -> "subprocess.Popen[bytes]":
        try:
            return subprocess.Popen(
                [self.python, "-c", RUN, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=dict(self.environment),
                start_new_session=True,
            )
        except OSError as error:
            raise BadUsage(f"--vllm-python {printable(self.python)} cannot be run: {error.strerror}") from error

    def _arguments(self, offer: Offer, prompts: int, result: Path) -> list[str]:
        load = {
            "--backend": "openai",
            "--base-url": self.url,
            "--model": self.model,
            "--tokenizer": self.tokenizer,
            "--dataset-name": "random",
            "--random-input-len": self.prompt_tokens,
            "--random-output-len": self.output_tokens,
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


def _wait(process: "subprocess.Popen[bytes]", until: float, tick: Callable[[], bool]) -> float | None:
    """Until it ends; the CPU cores that it used on average while it did."""
    seen: list[tuple[float, float]] = []
    while process.poll() is None:
        if time.monotonic() > until:
            raise GeneratorFailed("the load generator did not end in time: requests hang, or the network does")
        if not tick():
            raise GeneratorFailed("the load was ended early")
        used = _cpu_seconds(process.pid)
        seen += [(time.monotonic(), used)] if used is not None else []
        time.sleep(POLL)
    half = seen[len(seen) // 2 :]  # the first half has the imports
    lasted = half[-1][0] - half[0][0] if half else 0.0
    return (half[-1][1] - half[0][1]) / lasted if lasted > 1 else None


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


def _tail(said: int) -> str:
    size = os.fstat(said).st_size
    return os.pread(said, _SAID, max(0, size - _SAID)).decode(errors="replace")


def _why(status: int | None, said: str) -> str:
    """The last line that it wrote, or what is known of it."""
    known = next((reason for text, reason in _REASONS.items() if text in said), "")
    if known:
        return f"vllm bench serve failed: {known}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f"vllm bench serve ended with status {status}: {printable(lines[-1]) if lines else 'it said nothing'}"


def _read(file: Path) -> ClientResult:
    try:
        return of_vllm_bench(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, ResultUnreadable) as error:
        raise GeneratorFailed(f"the result of vllm bench serve cannot be read: {printable(str(error))}") from error
