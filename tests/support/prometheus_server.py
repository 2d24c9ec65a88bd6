"""A real Prometheus that holds given samples, to compare diag.promql with.

The samples are sent to its remote-write receiver, not backfilled by promtool: OpenMetrics text has no stale markers.
"""

import json
import math
import os
import re
import shutil
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from support.sampling import THOROUGH

from diag.core.errors import QueryFailed
from diag.promql import Block, Evaluator, Samples, Vector

TOLERANCE = 1e-9  # relative
PLACES = ("PATH", "DIAG_PROMETHEUS3")  # where the programs are looked for: Prometheus 2, and the folder of Prometheus 3
EACH = PLACES if THOROUGH else PLACES[1:]  # where both releases read the same
ANY = PLACES[0 if THOROUGH else 1]  # where the release is not the subject: what costs less, nightly the other one

Answer = dict[frozenset[tuple[str, str]], float]


@dataclass(frozen=True)
class Server:
    """A running Prometheus."""

    url: str
    version: tuple[int, ...]

    def query(self, promql: str, instant: int) -> Answer | None:
        """Ask at an instant (ms); None: valid, but without an answer."""
        data = self._asked("query", promql, time=instant)
        if data is None:
            return None
        if data["resultType"] == "scalar":
            return {frozenset(): float(data["result"][1])}
        return {frozenset(series["metric"].items()): float(series["value"][1]) for series in data["result"]}

    def query_range(self, promql: str, instants: range) -> list[Answer | None]:
        """Ask at instants (ms) in one query, which costs little more than at one of them."""
        data = self._asked("query_range", promql, start=instants[0], end=instants[-1], step=instants.step)
        if data is None:
            return [None] * len(instants)
        answers: list[Answer] = [{} for _ in instants]
        for series in data["result"]:
            for when, value in series["values"]:
                answers[instants.index(round(when * 1000))][frozenset(series["metric"].items())] = float(value)
        return [*answers]

    def _asked(self, api: str, promql: str, **millis: int) -> Any:
        """The data of an answer; None where the query is valid and cannot be answered."""
        times = {name: f"{each / 1000:.3f}" for name, each in millis.items()}
        form = urllib.parse.urlencode({"query": promql, **times}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{api}", form, timeout=600) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            reply = json.load(error)
            assert reply["errorType"] == "execution", f"{promql}: {reply}"
            return None


def program(place: str) -> Path:
    """Return the prometheus of one of the PLACES; skip the test when it is not installed."""
    if place == "PATH":
        found = shutil.which("prometheus")
    else:
        cache = os.environ.get("DIAG_CACHE", str(Path.home() / ".cache" / "diag"))
        found = shutil.which("prometheus", path=os.environ.get(place, f"{cache}/prometheus3"))
    if found is None:
        pytest.skip(f"no prometheus at {place}: .ci/components installs it")
    return Path(found)


@contextmanager
def serving(prometheus: Path, blocks: Sequence[Block], config_text: str = "{}") -> Iterator[Server]:
    """Start a Prometheus that holds these samples, holes as stale markers, and scrapes what the configuration says."""
    version = subprocess.run([prometheus, "--version"], capture_output=True, text=True, check=True)
    numbers = (version.stdout + version.stderr).split("version ")[1].split("+")[0]
    with TemporaryDirectory(prefix="prometheus-") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*free.getsockname())
        free.close()
        config = Path(folder, "prometheus.yml")
        config.write_text(config_text)
        options = (f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}")
        with Path(folder, "log").open("w") as log:
            process = subprocess.Popen(
                [prometheus, *options, f"--web.external-url=http://{address}", "--web.enable-remote-write-receiver"],
                stdout=log,
                stderr=log,
            )
        try:
            server = Server(f"http://{address}", tuple(int(number) for number in numbers.split(".")[:3]))
            if blocks:
                _send(server, blocks, process, Path(folder, "log"))
            yield server
        finally:
            process.terminate()
            process.wait(30)


def assert_same(samples: Samples, expressions: Iterable[str], instants: Sequence[int], server: Server) -> None:
    """Compare every expression at every instant (ms).

    Windows of Prometheus 2 are closed on the left: compare it at instants where no window begins at a sample.
    """
    ours = Evaluator(samples)
    wrong = [f"{promql}\n{why}" for promql in expressions if (why := _difference(ours, promql, instants, server))]
    assert not wrong, "\n\n".join(wrong)


def _difference(evaluator: Evaluator, promql: str, instants: Sequence[int], server: Server) -> str | None:
    if isinstance(instants, range):
        theirs = server.query_range(promql, instants)
    else:
        theirs = [server.query(promql, instant) for instant in instants]
    try:
        ours = evaluator.evaluate(promql, np.array(instants))
    except QueryFailed as failure:
        return None if None in theirs else f"we fail: {failure}"
    for place, (instant, answer) in enumerate(zip(instants, theirs, strict=True)):
        mine = _at(ours, place)
        if answer is None or mine.keys() != answer.keys():
            return f"at {instant}: {_show(mine)}\ninstead of {_show(answer)}"
        apart = {key: (mine[key], value) for key, value in answer.items() if not _close(mine[key], value)}
        if apart:
            return f"at {instant}: {[(dict(key), *pair) for key, pair in apart.items()]}"
    return None


def _at(vector: Vector, place: int) -> Answer:
    rows = np.flatnonzero(vector.present[:, place])
    return {frozenset(vector.labels[row].items()): float(vector.values[row, place]) for row in rows}


def _show(answer: Answer | None) -> str:
    return "failure" if answer is None else str([(dict(key), value) for key, value in answer.items()][:5])


def _close(ours: float, theirs: float) -> bool:
    if math.isnan(ours) or math.isnan(theirs):
        return math.isnan(ours) and math.isnan(theirs)
    return math.isclose(ours, theirs, rel_tol=TOLERANCE, abs_tol=1e-12)


def _send(server: Server, blocks: Sequence[Block], process: subprocess.Popen[bytes], log: Path) -> None:
    """Write all samples, once the server is ready, and wait until the last one can be queried."""
    # The oldest first: an empty Prometheus takes nothing that is much older than the first sample it got.
    filled = sorted((block for block in blocks if block.times.size), key=lambda block: int(block.times[0]))
    for message in _messages(filled):
        headers = {"Content-Encoding": "snappy", "Content-Type": "application/x-protobuf"}
        request = urllib.request.Request(f"{server.url}/api/v1/write", _snappy(message), headers)
        while not _accepted(request):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
    last = max(int(block.times[-1]) for block in filled)
    assert server.query('count({__name__!=""})', last), log.read_text()


def _messages(blocks: Sequence[Block], most: int = 1_000_000) -> Iterator[bytes]:
    """Cut the samples by time into messages of about so many, as a Prometheus takes 32 MiB at once."""
    times = np.sort(np.concatenate([np.repeat(block.times, len(block.labels)) for block in blocks]))
    begins = [*np.unique(times[::most]), times[-1] + 1]
    for begin, end in pairwise(begins):
        cuts = [(block, slice(*np.searchsorted(block.times, (begin, end)))) for block in blocks]
        parts = [Block(block.labels, block.times[cut], block.values[:, cut]) for block, cut in cuts]
        yield b"".join(_field(1, series) for part in parts if part.times.size for series in _series(part))


def _accepted(request: urllib.request.Request) -> bool:
    """Tell whether the server took the samples; it does not listen, or says 503, until it is ready."""
    try:
        urllib.request.urlopen(request, timeout=600).close()
    except urllib.error.HTTPError as error:
        assert error.code == 503, error.read()
        return False
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


def _series(block: Block) -> Iterator[bytes]:
    """Encode each prometheus.TimeSeries of the remote-write protocol; what surrounds a value is the same for all."""
    ends = [b"\x10" + _varint(int(when)) for when in block.times]
    begins = [_varint(2 << 3 | 2) + _varint(9 + len(end)) + b"\x09" for end in ends]
    for labels, values in zip(block.labels, block.values.tolist(), strict=True):
        pairs = sorted(labels.items())
        names = [_field(1, _field(1, name.encode()) + _field(2, value.encode())) for name, value in pairs]
        points = [begins[at] + struct.pack("<d", value) + ends[at] for at, value in enumerate(values)]
        yield b"".join(names + points)


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _snappy(content: bytes) -> bytes:
    """Wrap bytes as a snappy block of one literal."""
    return _varint(len(content)) + b"\xfc" + struct.pack("<I", len(content) - 1) + content


def hasty(rules: str) -> str:
    """The rules with a minute of 5 s: causes still fire before what follows. The real times are tested elsewhere."""
    often = re.sub(r"interval: (15s|\d+m)", "interval: 3s", rules)
    return re.sub(r"for: (\d+)m", lambda found: f"for: {5 * int(found[1])}s", often)


def answer(server: Server, promql: str) -> Answer | None:
    """Return the current response; None while the server does not listen or is not ready."""
    try:
        return server.query(promql, round(time.time() * 1000))
    except (urllib.error.URLError, ConnectionError, json.JSONDecodeError):
        return None
