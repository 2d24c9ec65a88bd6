"""A Prometheus that scrapes a fleet and evaluates the generated rules: its CPU, its memory and missed evaluations."""

import asyncio
import json
import math
import multiprocessing
import os
import re
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rule_costs import RULES, Numbers, Told, members, numbers, whole_page
from support import fleet_in_prometheus as fleet
from support import prometheus_server, timelines
from support.rule_files import groups_of

from diag.core.incident import seconds
from diag.promql import is_stale

INTERVAL = 15
WARM = 60
"""Seconds before the CPU is measured: every target has been scraped and its series exist."""
CORES = 2
PLACE = "DIAG_PROMETHEUS3"
Pages = Mapping[str, Sequence[bytes]]


@dataclass(frozen=True)
class Measured:
    """What Prometheus tells of itself after a run; `cpu` is in seconds a second."""

    version: str
    cpu: float
    resident: float
    series: float
    missed: float
    failed: float
    groups: Mapping[str, float]


def evaluate_live(servers: int, lasting: float, tell: Told) -> None:
    """Tell a row with the rules and one without them, and then one for each group of rules."""
    pages = {kind: list(_pages(kind)) for kind in members(servers)}
    with _page_server(pages) as port:
        with_rules = _run(port, servers, lasting, RULES)
        tell(_row(with_rules, "yes", servers))
        without = _run(port, servers, WARM + (lasting - WARM) / 2, None)
        tell(_row(without, "no", servers))
    extra = (with_rules.cpu - without.cpu) * INTERVAL
    intervals = {group["name"]: group["interval"] for group in groups_of(RULES)}
    tell(
        f"\nThe rules take {extra:.2f} s of CPU every {INTERVAL} s for {servers:,} servers, "
        f"{1000 * extra / servers:.2f} s per 1,000 servers and evaluation.\n\n"
        "| group | every | the longest evaluation (s) | share of its interval |\n|---|---|---|---|"
    )
    for group, took in sorted(with_rules.groups.items()):
        share = took / seconds(intervals[group])
        tell(f"| {group} | {intervals[group]} | {took:.2f} | {100 * share:.0f} % |")


def _row(run: Measured, rules: str, servers: int) -> str:
    told = f"{run.cpu:.2f} | {run.resident / 2**30:.1f} | {run.series:,.0f} | {run.missed:.0f} | {run.failed:.0f}"
    return f"| {run.version} | {servers:,} | {rules} | {told} |"


def _run(port: int, servers: int, lasting: float, rules: Path | None) -> Measured:
    """Let a Prometheus scrape the fleet for so many seconds."""
    with tempfile.TemporaryDirectory(prefix="live-") as name:
        config = {
            "global": {"scrape_interval": f"{INTERVAL}s", "evaluation_interval": f"{INTERVAL}s"},
            "scrape_configs": [{"job_name": "vllm", "static_configs": list(_targets(port, servers))}],
            "rule_files": [str(rules)] if rules else [],
        }
        with _prometheus(Path(name), config) as url:
            began = time.monotonic()
            time.sleep(min(WARM, lasting / 2))
            before, since = numbers(url), time.monotonic()
            longest: dict[str, float] = {}
            while time.monotonic() < began + lasting:
                time.sleep(INTERVAL / 3)
                for group, took in _by_group(numbers(url), "prometheus_rule_group_last_duration_seconds").items():
                    longest[group] = max(took, longest.get(group, 0))
            after, until = numbers(url), time.monotonic()
            version = json.loads(_get(f"{url}/api/v1/status/buildinfo"))["data"]["version"].partition("+")[0]
    return Measured(
        version,
        (after["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]) / (until - since),
        after["process_resident_memory_bytes"],
        after["prometheus_tsdb_head_series"],
        sum(_by_group(after, "prometheus_rule_group_iterations_missed_total").values()),
        sum(_by_group(after, "prometheus_rule_evaluation_failures_total").values()),
        longest,
    )


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as response:
        return bytes(response.read())


def _by_group(found: Numbers, metric: str) -> dict[str, float]:
    """The samples of a metric by the name of the rule group."""
    named = ((re.fullmatch(rf'{metric}{{rule_group=".*;([\w-]+)"}}', key), value) for key, value in found.items())
    return {match[1]: value for match, value in named if match}


def _targets(port: int, servers: int) -> Iterator[dict[str, object]]:
    """One target per server: the path chooses the page."""
    for kind, count in members(servers).items():
        for name in fleet.instances(kind, count):
            labels = {"instance": name, "__metrics_path__": f"/{kind}"}
            yield {"targets": [f"127.0.0.1:{port}"], "labels": labels}


@contextmanager
def _prometheus(folder: Path, config: Mapping[str, object]) -> Iterator[str]:
    """A Prometheus on CORES cores."""
    (folder / "prometheus.yml").write_text(json.dumps(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*free.getsockname())
    command = [
        prometheus_server.program(PLACE),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "GOMAXPROCS": f"{CORES}"})
    try:
        deadline = time.monotonic() + 60
        while not _ready(f"http://{address}"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ValueError((folder / "log").read_text())
            time.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(60)


def _ready(url: str) -> bool:
    try:
        return bool(_get(f"{url}/-/ready"))
    except OSError:
        return False


def _pages(kind: str) -> Iterator[bytes]:
    """The scrapes of a server from the onset of its fault on, as text."""
    for block in timelines.blocks(whole_page(kind), time.time() - timelines.LEAD):
        names = [_name(labels) for labels in block.labels]
        onset = timelines.LEAD // timelines.STEP
        for values in block.values.T[onset:]:
            there = zip(names, values.tolist(), is_stale(values).tolist(), strict=True)
            yield "".join(f"{name} {_text(value)}\n" for name, value, stale in there if not stale).encode()


def _name(labels: Mapping[str, str]) -> str:
    own = {name: value for name, value in labels.items() if name not in ("__name__", "instance", "job")}
    return labels["__name__"] + "{" + ",".join(f"{name}={json.dumps(value)}" for name, value in own.items()) + "}"


def _text(value: float) -> str:
    return repr(value) if math.isfinite(value) else f"{value:+}".replace("inf", "Inf").replace("+nan", "NaN")


@contextmanager
def _page_server(pages: Pages) -> Iterator[int]:
    """A process that answers scrapes; the port."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        serving = multiprocessing.get_context("fork").Process(target=_serve, args=(pages, listening), daemon=True)
        serving.start()
        try:
            yield listening.getsockname()[1]
        finally:
            serving.terminate()
            serving.join()


def _serve(pages: Pages, listening: socket.socket) -> None:
    began = time.monotonic()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                asked = await reader.readuntil(b"\r\n\r\n")
                scrapes = pages[asked.split(b" ", 2)[1].decode().strip("/")]
                page = scrapes[min(int((time.monotonic() - began) / INTERVAL), len(scrapes) - 1)]
                head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(page)}"
                writer.write(f"{head}\r\n\r\n".encode() + page)
                await writer.drain()

    async def serve() -> None:
        server = await asyncio.start_server(answer, sock=listening)
        await server.serve_forever()

    asyncio.run(serve())
