"""Results of a load on a server before and after a fix: the recording, and the clients' own numbers."""

import gzip
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from support.live import load

DIAG = str(Path(sys.executable).parent / "diag")
WARM_UP = 20.0
"""Seconds of load before anything counts: a fresh server's first ones are not its usual ones."""

TINY = (*("--max-model-len", "2048", "--block-size", "32", "--num-gpu-blocks-override", "128"), "--max-num-seqs", "64")
SMALL = (
    "--max-model-len",
    "8192",
    "--num-gpu-blocks-override",
    "512",
    "--max-num-batched-tokens",
    "16384",
    "--max-num-seqs",
    "32",
)


@dataclass(frozen=True)
class Case:
    """An incident, the server and the load that bring it about; `steady` are the clients whose streams it harms.

    `changed` is what its relaunch line changes; `flag` a fix whose number is within `bounds`, by what fixed it before.
    """

    incident: str
    size: str
    flags: tuple[str, ...]
    clients: tuple[load.Clients, ...]
    steady: tuple[int, ...]
    changed: str
    flag: str
    bounds: tuple[float, float]

    @property
    def streams(self) -> tuple[load.Clients, ...]:
        """The clients, with every token timed."""
        return tuple(replace(each, stream=True) for each in self.clients)


CASCADE = Case(
    *("kv_eviction_cascade", "tiny", TINY, load.CASCADE, (0, 1)),
    *("--num-gpu-blocks-override", "--max-num-active-seqs", (4, 9)),
)
CONTENTION = Case(
    *("prefill_decode_contention", "small", SMALL, load.CONTENTION, (0,)),
    *("--long-prefill-token-threshold", "--long-prefill-token-threshold", (256, 1024)),
)


@dataclass(frozen=True)
class Met:
    """Seconds and rates; `first` and `gaps` are sorted, of the clients that are harmed."""

    first: list[float]
    gaps: list[float]
    tokens_per_second: float
    preemptions_per_request: float


def met(url: str, port: int, case: Case, folder: Path, seconds: float, *, gateway: int = load.UNLIMITED) -> Met:
    """Put the load on a server, record it for so long, and say what the clients met meanwhile, behind their gateway."""
    with load.running(port, *case.streams, gateway=gateway) as clients:
        time.sleep(WARM_UP)
        before = {group: len(each) for group, each in clients.first.items()}
        gaps, begun = len(clients.gaps), time.monotonic()
        recorded(url, folder, seconds)
        lasted, between = time.monotonic() - begun, sorted(clients.gaps[gaps:])
        every = {group: each[before.get(group, 0) :] for group, each in clients.first.items()}
    assert not clients.errors, clients.errors[:3]
    harmed = sorted(each for at in case.steady for each in every.get(case.streams[at], []))
    tokens = len(between) + sum(map(len, every.values()))
    return Met(harmed, between, tokens / lasted, grown(folder, PREEMPTED) / max(1.0, grown(folder, FINISHED)))


def recorded(url: str, folder: Path, seconds: float) -> None:
    """Return a recording of so many seconds by `diag record`."""
    command = [DIAG, "record", url, str(folder), "--for", str(seconds), "--every", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


PREEMPTED, FINISHED = "vllm:num_preemptions_total", "vllm:request_success_total"


def grown(folder: Path, counter: str) -> float:
    """Return the growth of a counter from the first page of a recording to its last."""
    pages = gzip.decompress((folder / "metrics.prom.gz").read_bytes()).decode().split("# scrape ")
    sums = [
        sum(map(float, re.findall(rf"^{counter}{{[^}}]*}} (\S+)$", page, re.MULTILINE)))
        for page in pages
        if counter in page
    ]
    return sums[-1] - sums[0]


def quantile(ordered: list[float], share: float) -> float:
    """Return a quantile of sorted numbers; 0 without numbers."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0
