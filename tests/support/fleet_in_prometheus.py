"""A fleet of vLLM servers in a real Prometheus, for queries over many instances at once.

promtool back-fills it: of a thousand instances that takes half a minute, and the blocks serve any number of tests.
"""

import json
import re
import socket
import subprocess
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from support.expressions import expressions
from support.prometheus_server import PLACES, Server, program
from support.recorded_series import recorded
from support.scenarios import gpu
from support.timelines import CALM, HOSTS, RECORDED, TIMES, Series, blocks, timeline

from diag.core.metric_families import Sample
from diag.promql import STALE, Block, Samples, is_stale, metric_names, parse

LAST = 3
"""Scrapes whose recorded series a fleet holds."""
THINNED = "thinned_healthy"
"""A kind: healthy, the page without histogram buckets, log, start-up phases and limits of the hardware.

What rules record of it is recorded of the whole page. Tens of thousands of whole pages do not fit into promtool.
"""
_LEFT_OUT = re.compile(r".*_bucket|diag_vllm_(log|startup)_.*|diag_gpu_(flops|pcie|nvlink|xid|memory_bandwidth)_.*")
PLACEHOLDER, BORN = "<instance>", "<born>"
CREATED = "vllm:generation_tokens_created"
BESIDES = {CREATED, "diag_vllm_info", "process_start_time_seconds"}
"""What no expression of the catalogue selects and every page has nevertheless."""


def instances(kind: str, count: int) -> list[str]:
    """The instances of a kind: "kv_eviction_cascade-0:8000" to "kv_eviction_cascade-2:8000"."""
    return [f"{kind}-{number:0{len(str(count - 1))}}:8000" for number in range(count)]


def write(
    folder: Path,
    members: Mapping[str, int],
    end: float,
    scrapes: int = TIMES.size,
    labels: Callable[[str], Mapping[str, str]] = lambda _: {},
    *,
    rules: bool = False,
) -> None:
    """Write the blocks of a fleet: so many instances of each kind, scraped every 15 s so often up to `end`.

    `labels` are those that the target of an instance has besides. With `rules`, also what the generated rules record of
    each: with its peers like itself, and but for the series that tell the generation only at the last scrapes, which
    are those that are judged in a fleet. A kind is "healthy" or the id of an incident of timelines.py; its fault sets
    in after the lead-in. Instances of one kind differ only in their name and `labels`.
    """
    pages = {kind: _block(kind, end - float(TIMES[-1])) for kind in members}
    held = {
        kind: [_thinned(page) if kind == THINNED else page, *(_recorded(page) if rules else ())]
        for kind, page in pages.items()
    }
    write_blocks(folder, held, members, np.arange(TIMES.size)[-scrapes:], labels)


def write_blocks(
    folder: Path,
    held: Mapping[str, Sequence[Block]],
    members: Mapping[str, int],
    scrapes: npt.NDArray[np.intp],
    labels: Callable[[str], Mapping[str, str]],
) -> None:
    """Write these scrapes of the blocks of each kind for so many instances; their label `instance` is PLACEHOLDER."""
    running = []
    # a block for each core that promtool may use; blocks that do not overlap are left as they are
    for number, half in enumerate(np.array_split(scrapes, 2)):  # the second is written while promtool reads the first
        with (folder / f"{number}.om").open("wb") as file:
            file.writelines(_lines(held, members, half, labels))
        running.append(_promtool(Path(file.name), folder / "data"))
    for process in running:
        said, _ = process.communicate()
        assert process.returncode == 0, said
    for text in folder.glob("*.om"):
        text.unlink()


def _lines(
    held: Mapping[str, Sequence[Block]],
    members: Mapping[str, int],
    part: npt.NDArray[np.intp],
    labels: Callable[[str], Mapping[str, str]],
) -> Iterator[bytes]:
    """Each kind is formatted once."""
    for kind, count in members.items():
        page = b"".join(_text(block, part) for block in held[kind])
        for name in instances(kind, count):
            born = f"{zlib.crc32(name.encode())}".encode()  # a time of its own, or all would be one server
            target = ",".join(f"{key}={json.dumps(value)}" for key, value in {"instance": name, **labels(name)}.items())
            yield page.replace(f'instance="{PLACEHOLDER}"'.encode(), target.encode()).replace(BORN.encode(), born)
    yield b"# EOF\n"


def _promtool(file: Path, data: Path) -> subprocess.Popen[str]:
    task = ("tsdb", "create-blocks-from", "openmetrics", "--max-block-duration=24h")
    command = (program(PLACES[0]).with_name("promtool"), *task, file, data)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@contextmanager
def serving(prometheus: Path, folder: Path) -> Iterator[Server]:
    """Start a Prometheus on these blocks; the last scrape of the fleet can be queried then."""
    version = subprocess.run([prometheus, "--version"], capture_output=True, text=True, check=True)
    numbers = (version.stdout + version.stderr).split("version ")[1].split("+")[0]
    last = max(json.loads(meta.read_text())["maxTime"] for meta in folder.glob("data/*/meta.json")) - 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*free.getsockname())
    options = (f"--storage.tsdb.path={folder}/data", "--storage.tsdb.retention.time=100y", "--config.file=/dev/null")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([prometheus, *options, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        server = Server(f"http://{address}", tuple(int(number) for number in numbers.split(".")[:3]))
        while not _holds(server, last):
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def _holds(server: Server, instant: int) -> bool:
    try:
        return bool(server.query("count(up)", instant))
    except (OSError, ValueError):  # it does not listen, or says 503 in words of its own, until it is ready
        return False


@cache
def _asked() -> set[str]:
    """Every metric that the catalogue selects."""
    return BESIDES.union(*(metric_names(parse(text)) for text in expressions("5m")))


def _exporter(_: float) -> Iterable[Sample]:
    """Return the samples of an exporter's page that the scenarios do not set."""
    for index in (0, 1):
        card = ("NVIDIA H100 80GB HBM3", f"00000000:{index + 1}A:00.0", "570.86", "9.0")
        yield "diag_gpu_info", (f"{index}", f"GPU-{index}", *card), 1.0
    for part in ("log", "nvml", "process", "vllm"):
        yield "diag_scrape_success", (part,), 1.0


def _series(kind: str) -> Series:
    """A whole page of the exporter: what shows the incident, and all that is well beside it."""
    kind = "healthy" if kind == THINNED else kind
    name, own, _ = HOSTS.get(kind, (RECORDED.get(kind, kind), (), ()))
    before = (*CALM, _exporter) if name else ()
    beside = before or (gpu(0), gpu(1), _exporter)  # a server that is being started was not there before
    series = timeline(name, *beside, *own, before=before)
    answers = series[frozenset({("__name__", "diag_vllm_up")})]
    scraped = {("__name__", "diag_scrape_success"), ("collector", "vllm")}
    pages = {frozenset(scraped): answers, frozenset({("__name__", "up")}): np.where(np.isnan(answers), np.nan, 1.0)}
    return {key: values for key, values in {**series, **pages}.items() if dict(key)["__name__"] in _asked()}


def _block(kind: str, begin: float) -> Block:
    """The samples of one instance under no name yet."""
    (block,) = blocks(_series(kind), begin)
    for labels in block.labels:
        labels["instance"] = PLACEHOLDER
    return block


def _thinned(page: Block) -> Block:
    kept = [at for at, labels in enumerate(page.labels) if not _LEFT_OUT.fullmatch(labels["__name__"])]
    return Block(tuple(page.labels[at] for at in kept), page.times, page.values[kept])


def _recorded(page: Block) -> Iterator[Block]:
    """Return the series that the rules record for a page at its scrapes, except series of several servers."""
    for block in recorded(Samples([page]), page.times):
        if "instance" not in block.labels[0]:
            continue
        if "generation" not in block.labels[0]:
            block.values[:, :-LAST] = STALE
        yield block


def _text(block: Block, part: npt.NDArray[np.intp]) -> bytes:
    """Some of the scrapes as OpenMetrics, series by series, each in the order of time; holes are left out."""
    lines = []
    for labels, values in zip(block.labels, block.values, strict=True):
        told = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items() if name != "__name__")
        there = part[~is_stale(values[part])]
        samples = zip(values[there].tolist(), (block.times[there] / 1000).tolist(), strict=True)
        name = labels["__name__"]
        lines += [
            f"{name}{{{told}}} {BORN if name == CREATED else repr(value)} {when:.3f}\n" for value, when in samples
        ]
    return "".join(lines).encode()
