"""A ramp as it runs: load and scrapes side by side, step after step, until the ceiling is known or something ends it.

The load is made by `vllm bench serve` of the interpreter that has vLLM. Its module is run, since not every package of
vLLM has the command; it is loaded once, which takes long, by a host process that forks for each step. Secrets reach it
by the environment alone. Whatever ends a ramp, what was measured until then is kept and judged.
"""

import json
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from diag.core.errors import BadUsage
from diag.core.files import parse_json
from diag.core.formatting import plural, printable
from diag.ramp.plan import Limits, RequestLengths, next_offer, prompts, requests_for_repeat, why_unusable
from diag.ramp.results import ClientResult, GeneratorUse, Offer, ResultUnreadable, parse_vllm_bench
from diag.ramp.step import Step, generator_crowded, measure, step_from_client
from diag.sources.live.scrape import BackgroundScraper
from diag.sources.observation import Observation

HOST = """
import argparse, json, os, sys
import vllm
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
print(json.dumps({"status": 0, "version": getattr(vllm, "__version__", "")}), flush=True)
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
"""Seconds that a process has to exit after SIGTERM."""
POLL = 0.2
_OUTPUT = 4_000
"""Bytes at the end of the generator's output that are searched for a reason."""
_REASONS = {
    "No module named 'vllm": "this Python has no vLLM: name one that has with --vllm-python",
    "is not a local folder and is not a valid model identifier": "its tokenizer cannot be loaded: name a folder or a"
    " model that is on this host with --tokenizer",
    "outgoing traffic has been disabled": "its tokenizer is not on this host: name a folder with --tokenizer",
    "Can't load tokenizer": "its tokenizer cannot be loaded: name a folder with --tokenizer",
    "couldn't connect to 'https://huggingface.co'": "its tokenizer is not on this host, and the hub cannot be reached:"
    " name a folder with --tokenizer",
}
"""Texts in the generator's output, and the reasons that the user reads instead."""


class GeneratorFailed(Exception):
    """The load generator failed; the message is a sentence."""


@dataclass
class Generator:
    """Makes the load: the interpreter with vLLM, the server, the model's names, the lengths of requests.

    `folder` holds the result of a step, and vLLM's output. `version` is that of the interpreter's vLLM, once loaded.
    """

    python: str
    url: str
    model: str
    tokenizer: str
    lengths: RequestLengths
    environment: Mapping[str, str]
    folder: Path = field(default_factory=Path)
    version: str = ""
    _host: "subprocess.Popen[bytes] | None" = None
    _unread: bytes = b""

    @contextmanager
    def running(self, tick: Callable[[], bool]) -> Iterator[None]:
        """Load vLLM's modules, and end all processes after the block; GeneratorFailed if the modules do not load."""
        with tempfile.TemporaryDirectory(prefix="diag-ramp-") as folder:
            self.folder = Path(folder)
            command, pipe, environment = [self.python, "-c", HOST], subprocess.PIPE, dict(self.environment)
            with (self.folder / "output").open("wb") as output:
                try:
                    self._host = subprocess.Popen(
                        command, stdin=pipe, stdout=pipe, stderr=output, env=environment, start_new_session=True
                    )
                except OSError as error:
                    raise BadUsage(f"--vllm-python {printable(self.python)} cannot be run: {error.strerror}") from error
            try:
                self._wait(time.monotonic() + LOADS, tick)
                yield
            finally:
                for number in (signal.SIGTERM, signal.SIGKILL):
                    if self._host.poll() is None:
                        with suppress(ProcessLookupError):
                            os.killpg(self._host.pid, number)
                        with suppress(subprocess.TimeoutExpired):
                            self._host.wait(ENDS)

    @property
    def name(self) -> str:
        return f"vllm bench serve {printable(self.version, 40)}".rstrip()

    def run(self, offer: Offer, prompts: int, most_seconds: float, tick: Callable[[], bool]) -> ClientResult:
        """Make the load of a step; GeneratorFailed if it fails or does not end.

        `tick` is called all the while; the load ends once it returns False, and its result is lost.
        """
        assert self._host
        assert self._host.stdin
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
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
        arguments = json.dumps(
            [*(str(word) for pair in load.items() for word in pair), "--save-result", "--disable-tqdm"]
        )

        with suppress(BrokenPipeError):
            self._host.stdin.write(f"{arguments}\n".encode())
            self._host.stdin.flush()
        uses = self._wait(time.monotonic() + most_seconds, tick)
        lasted = uses[-1].at - uses[0].at if uses else 0.0
        cores = (uses[-1].cpu - uses[0].cpu) / lasted if lasted > 1 else None
        try:
            found = parse_vllm_bench(parse_json(result.read_text(encoding="utf-8")))
            return found._replace(cores=cores, uses=tuple(uses))
        except (OSError, ValueError, RecursionError, ResultUnreadable) as error:
            raise GeneratorFailed(f"the result of vllm bench serve cannot be read: {printable(str(error))}") from error

    def _wait(self, until: float, tick: Callable[[], bool]) -> list[GeneratorUse]:
        """Wait for the step's process; return the CPU time that it used meanwhile. GeneratorFailed if it fails."""
        uses: list[GeneratorUse] = []
        pid = 0
        while True:
            message = self._message()
            self.version = str(message.get("version", self.version))
            if status := message.get("status"):
                output = ""
                with suppress(OSError):
                    output = (self.folder / "output").read_bytes()[-_OUTPUT:].decode(errors="replace")
                known = next((reason for text, reason in _REASONS.items() if text in output), "")
                if known:
                    raise GeneratorFailed(f"vllm bench serve failed: {known}")
                lines = [line.strip() for line in output.splitlines() if line.strip()]
                last = printable(lines[-1]) if lines else "no output"
                raise GeneratorFailed(f"vllm bench serve ended with status {status}: {last}")
            if status is not None:
                return uses
            pid = message.get("pid", pid)
            if time.monotonic() > until:
                why = generator_crowded(uses) or "requests hang, or the network does"
                raise GeneratorFailed(f"the load generator did not end in time: {why}")
            if not tick():
                raise GeneratorFailed("the load was ended early")
            if use := _use(pid):
                uses.append(use)

    def _message(self) -> dict[str, Any]:
        """Read the next line of the host; {} if it writes none for a moment, its exit status if it has ended."""
        assert self._host
        assert self._host.stdout
        if b"\n" not in self._unread and select.select([self._host.stdout], [], [], POLL)[0]:
            new = os.read(self._host.stdout.fileno(), 2**16)
            if not new:
                return {"status": self._host.wait() or 1}
            self._unread += new
        line, newline, rest = self._unread.partition(b"\n")
        self._unread = rest if newline else self._unread
        with suppress(ValueError):  # loading vLLM prints other lines
            message = parse_json(line) if newline else {}
            return message if isinstance(message, dict) else {}
        return {}


def _use(pid: int) -> GeneratorUse | None:
    """Return the CPU time that a process has used and waited for so far; None if it is gone."""
    texts = {}
    for name, file in (("stat", f"{pid}/stat"), ("schedstat", f"{pid}/schedstat"), ("pressure", "pressure/cpu")):
        with suppress(OSError):
            texts[name] = Path(f"/proc/{file}").read_text(encoding="utf-8")
    try:
        fields = texts["stat"].rpartition(")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system time
        waited = int(texts["schedstat"].split()[1]) / 1e9 if "schedstat" in texts else None
        some = re.search(r"^some avg10=([\d.]+)", texts.get("pressure", ""))
        return GeneratorUse(time.time(), cpu, waited, float(some[1]) / 100 if some else None)
    except (KeyError, ValueError, IndexError):
        return None


def environment(given: Mapping[str, str], authorization: str, ca_file: str) -> dict[str, str]:
    """Return the generator's environment; BadUsage for credentials that it cannot send."""
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


WARM_UP = 3
"""Requests, one at a time, before anything counts: they show that the load can be made, and how fast one is."""
MOST_SECONDS = 60.0
"""Time-out of a step beyond four times its length: to load a tokenizer and make the prompts on a busy host."""
STOPPED_BY_USER = "interrupted"
Tick = Callable[[str, float], None]
"""Receives the current activity and the share of it that is over."""


def between(observed: Observation | None, start: float, end: float) -> Observation | None:
    """Return the scrapes from one moment to another, in unix seconds."""
    if observed is None:
        return None
    within = (observed.instants >= start * 1000) & (observed.instants <= end * 1000)
    return replace(observed, instants=observed.instants[within]) if np.count_nonzero(within) > 1 else None


@dataclass
class RampRun:
    """The steps of one ramp so far; `stopped` is why it was cut short."""

    generator: Generator
    watched: BackgroundScraper
    limits: Limits
    tick: Tick
    first: int = 1
    steps: list[Step] = field(default_factory=list)
    stopped: str = ""
    warm: float = 1.0

    def run(self) -> None:
        """Run steps until the ceiling is known or something ends the ramp; raises nothing for that."""
        try:
            with self.generator.running(self._ticker("loading vLLM's modules", 20.0)):
                client = self._load(Offer(concurrency=1), WARM_UP, "warming up", self.limits.seconds)
                if client and client.failed >= WARM_UP:
                    self.stopped = "every request of the warm-up failed: look at the server's log"
                elif client:
                    self.warm = max(client.requests_per_second, 0.01)
                while not self.stopped and (offer := next_offer(self.steps, self.limits, self.first)):
                    count = prompts(offer, self.steps, self.warm, self.limits)
                    step = self._measured(offer, count)
                    if step is None and not self.stopped:
                        why = self.watched.scraper.last_failures(1) or "they were over between two scrapes"
                        self.stopped = f"none of {plural(count, 'request')} was seen in the server: {why}"
                    more = requests_for_repeat(step, count, self.limits) if step and not self.stopped else 0
                    # a longer step, or one on a calmer host, replaces the step that does not count
                    if more and (again := self._measured(offer, more, ", once more")):
                        self.steps = [kept for kept in self.steps if kept is not step]
                        step = again
                    if step and not self.stopped:  # the next steps would be worth no more
                        self.stopped = why_unusable(step, self.limits)
        except KeyboardInterrupt:
            self.stopped = STOPPED_BY_USER
        except GeneratorFailed as error:
            self.stopped = self.stopped or str(error)

    def _measured(self, offer: Offer, count: int, remark: str = "") -> Step | None:
        """Run and measure a step with so many requests, also if it was cut short after its steady part had begun."""
        start, client = time.time(), None
        try:
            client = self._load(offer, count, f"{offer.shown} requests{remark}", self.limits.seconds)
        finally:
            step = measure(offer, between(self.watched.seen(), start, time.time()), self.limits.contract, client)
            step = step or (step_from_client(offer, client, self.limits.contract) if client else None)
            self.steps += [step] if step and (client or not step.is_short) else []
        return step

    def _load(self, offer: Offer, count: int, what: str, seconds: float) -> ClientResult | None:
        try:
            return self.generator.run(offer, count, MOST_SECONDS + 4 * seconds, self._ticker(what, seconds))
        except GeneratorFailed as error:
            self.stopped = self.stopped or str(error)
            return None

    def _ticker(self, what: str, seconds: float) -> Callable[[], bool]:
        """Return a function that shows progress and returns False once the server is gone."""
        begun = time.monotonic()

        def tick() -> bool:
            self.tick(what, (time.monotonic() - begun) / seconds)
            self.stopped = self.stopped or self.watched.gone()
            return not self.stopped

        return tick
