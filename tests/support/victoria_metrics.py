"""A real VictoriaMetrics that holds given samples, and its vmalert that replays alert rules over them.

They are Debian's: of a day that is over, vmalert tells in seconds which alerts would have fired.
"""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from support.firing import alerts_alone
from support.prometheus_server import Answer

from diag.promql import Block

OPTIONS = (
    "-search.disableCache",
    "-search.latencyOffset=0s",
    "-search.maxQueryLen=1MB",
    "-retentionPeriod=100y",
    "-maxLabelsPerTimeseries=100",  # vllm:cache_config_info has more than the 30 that it keeps
)
REPLAY = (
    "-datasource.queryStep=15s",
    "-remoteWrite.flushInterval=100ms",
    "-replay.rulesDelay=0s",  # no rule builds upon another: what is recorded is put in its place
    "-replay.maxDatapointsPerQuery=30000",  # an alert's `for` begins anew with every query: a day in one
    "-replay.disableProgressBar",
)
PATIENCE = 60
"""Seconds until imported samples can be queried: a new series is found about a second later."""


@dataclass(frozen=True)
class Server:
    """A running VictoriaMetrics."""

    url: str

    def query(self, promql: str, instant: int) -> Answer:
        """Ask at an instant (ms)."""
        form = urllib.parse.urlencode({"query": promql, "time": f"{instant / 1000:.3f}"}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query", form, timeout=120) as response:
                result = json.load(response)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{promql}: {json.load(error)['error']}") from error
        return {frozenset(series["metric"].items()): float(series["value"][1]) for series in result}

    def flush(self) -> None:
        """Make what has been written visible to the next query."""
        urllib.request.urlopen(f"{self.url}/internal/force_flush", timeout=60).close()


def program(name: str) -> Path:
    """Return one of the package's programs; skip the test when it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: .ci/components installs it")
    return Path(found)


@contextmanager
def serving(blocks: Sequence[Block]) -> Iterator[Server]:
    """Start a VictoriaMetrics that holds these samples; holes are left out."""
    victoria = program("victoria-metrics")
    with TemporaryDirectory(prefix="victoria-") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*free.getsockname())
        free.close()
        options = (f"-storageDataPath={folder}/data", f"-httpListenAddr={address}", *OPTIONS)
        with Path(folder, "log").open("w") as log:
            process = subprocess.Popen([victoria, *options], stdout=log, stderr=log)
        try:
            server = Server(f"http://{address}")
            _wait_until_ready(server, process, Path(folder, "log"))
            _import(server, blocks, Path(folder, "log"))
            yield server
        finally:
            process.terminate()
            process.wait(30)


def replay(rules: Path, start: int, end: int, server: Server) -> dict[str, int]:
    """Replay alert rules from one instant to another (ms).

    Returns how many samples of ALERTS the server holds of that time, by "<alertname> <alertstate>": a server that was
    replayed before has those as well.
    """
    vmalert = program("vmalert")
    span = (f"-replay.timeFrom={_rfc3339(start)}", f"-replay.timeTo={_rfc3339(end)}")
    urls = (f"-datasource.url={server.url}", f"-remoteWrite.url={server.url}")
    with TemporaryDirectory(prefix="vmalert-") as folder:
        file = _without_what_vmalert_refuses(rules, Path(folder))
        command = [vmalert, f"-rule={file}", *span, *urls, *REPLAY]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return _alerts(server, start, end, done.stderr)


def _without_what_vmalert_refuses(rules: Path, folder: Path) -> Path:
    """Copy the alerts without `keep_firing_for`, labels and annotations that `query`: 1.79 has none in a replay."""
    groups = alerts_alone(rules)
    for rule in (rule for group in groups for rule in group["rules"]):
        rule.pop("keep_firing_for", None)
        for texts in ("labels", "annotations"):
            rule[texts] = {name: text for name, text in rule.get(texts, {}).items() if "query" not in text}
    copy = folder / rules.name
    copy.write_text(json.dumps({"groups": groups}), encoding="utf-8")
    return copy


def _alerts(server: Server, start: int, end: int, log: str) -> dict[str, int]:
    """Count the samples of ALERTS once all that vmalert's last line tells of can be queried."""
    written = int(log.rpartition("Imported ")[2].split(" ")[0])
    span, deadline = f"[{end - start + 1}ms]", time.monotonic() + PATIENCE
    every = f'sum(count_over_time({{__name__=~"ALERTS|ALERTS_FOR_STATE"}}{span}))'
    server.flush()
    while sum(server.query(every, end).values()) < written:
        assert time.monotonic() < deadline, log
        time.sleep(0.1)
    counts = server.query(f"sum by (alertname, alertstate) (count_over_time(ALERTS{span}))", end)
    named = {(dict(key)["alertname"], dict(key)["alertstate"]): count for key, count in counts.items()}
    return {f"{name} {state}": int(count) for (name, state), count in sorted(named.items())}


def _rfc3339(instant: int) -> str:
    return datetime.fromtimestamp(instant / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=60).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)


def _import(server: Server, blocks: Sequence[Block], log: Path) -> None:
    """Write all samples and wait until every series can be queried; a line that VM refuses is only in its log."""
    lines = [line for block in blocks for row in range(len(block.labels)) if (line := _line(block, row))]
    if not lines:
        return
    urllib.request.urlopen(f"{server.url}/api/v1/import", b"".join(lines), timeout=120).close()
    server.flush()
    first, last = (edge(int(block.times[at]) for block in blocks) for edge, at in ((min, 0), (max, -1)))
    deadline = time.monotonic() + PATIENCE
    for attempt in count():  # another question each time: what was found too early is remembered
        time.sleep(1)
        server.flush()
        asked = f'count(last_over_time({{__name__=~".+|{attempt}"}}[{last - first + 1}ms]))'
        found = server.query(asked, last)
        if found == {frozenset(): len(lines)}:
            return
        assert time.monotonic() < deadline, (found, len(lines), log.read_text())
        time.sleep(0.1)


def _line(block: Block, row: int) -> bytes:
    """One series; without its holes, NaN and infinities: this JSON cannot hold them. Empty where nothing is left."""
    kept = np.isfinite(block.values[row])
    values, times = block.values[row][kept].tolist(), block.times[kept].tolist()
    told = {"metric": block.labels[row], "values": values, "timestamps": times}
    return json.dumps(told).encode() + b"\n" if values else b""
