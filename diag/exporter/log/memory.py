"""What a vLLM server's log says of its memory: the parts as it measured them, of the latest start that is in it.

Sizes are rounded in the log, so each is a range. Of several workers the fullest one counts: most weights, least room.
"""

import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from diag.core.errors import BadUsage
from diag.core.formatting import GIB
from diag.core.log_events import CUDA_OUT_OF_MEMORY, NO_KV_CACHE_MEMORY
from diag.exporter.log.facts import settings
from diag.exporter.log.line import FIRST, LAST, LONGEST, Line, cut, ends, skipped
from diag.exporter.log.pattern import Pattern
from diag.exporter.log.reading import LogReading
from diag.exporter.log.recognise import amount, values
from diag.exporter.log.records import Belief
from diag.exporter.log.state import ServerLog

Size = tuple[int, int]
"""Bytes, at least and at most."""

_G = r" ?Gi?B"
_N = r"(-?[\d.]+)"
_TEXTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (rf"(?:Model loading|Loading model weights) took {_N}{_G}", ("weights",)),
    (rf"Available KV cache memory: {_N} GiB", ("kv_cache",)),
    (rf"Graph capturing finished in [\d.]+ secs?, took {_N} GiB", ("graphs",)),
    (rf"Estimated CUDA graph memory: {_N} GiB total", ("estimated graphs",)),
    (rf"(?:Explicitly|Auto) set \({_N}/[\d.]+\) GiB for KV cache", ("kv_cache",)),
    (
        rf"Free memory on device (?:\S+ )?\({_N}/{_N} GiB\) on startup\. Desired GPU memory utilization is "
        rf"\([\d.]+, {_N} GiB\)\.",
        ("free", "total", "budget"),
    ),
    (rf"Free memory on device .*? {_N} GiB for peak activation", ("activations",)),
    (rf"Free memory on device .*? {_N} GiB for non-torch memory", ("other",)),
    (rf"the current vLLM instance can use total_gpu_memory \({_N}{_G}\)", ("total",)),
    (rf"the current vLLM instance .*= {_N}{_G}", ("budget",)),
    (
        rf"(?:the current .*?)?model weights take {_N}{_G}; non_torch_memory takes {_N}{_G}; PyTorch activation peak"
        rf" memory takes {_N}{_G}; the rest of the memory reserved for KV Cache is {_N}{_G}",
        ("weights", "other", "activations", "kv_cache"),
    ),
)
_LOOKED_FOR = tuple((re.compile(regex), names) for regex, names in _TEXTS)
_LEAST = frozenset({"kv_cache", "free", "total", "budget"})
"""Of several workers the smallest one; of everything else the largest."""
_WITHOUT_LEVEL = ("model weights take", "the current vLLM")
"""What the further lines of a record begin with."""


@dataclass
class Memory:
    """What one start said: `sizes` by name in bytes, `numbers` without a unit, and the version.

    Sizes: weights, kv_cache, graphs, "estimated graphs", activations, other, free, total, budget, needed. Numbers:
    tokens, length and concurrency of the KV cache, and the longest context that vLLM itself estimated. Settings: those
    of SETTINGS. `skipped` is the sentence about what was not read of a large log.
    """

    skipped: str = ""
    version: str = ""
    sizes: dict[str, Size] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, text: str) -> None:
        """A size in GiB, as exact as it was printed."""
        half = 0.5 * 10.0 ** -max(len(text.partition(".")[2]), 2)  # "1.0" is round(x, 2)
        size = round((float(text) - half) * GIB), round((float(text) + half) * GIB)
        known = self.sizes.get(name, size)
        self.sizes[name] = min(known, size) if name in _LEAST else max(known, size)


def read(path: str) -> Memory:
    """What a log says of memory; BadUsage where it cannot be read."""
    try:
        if path == "-":
            return memory(_standard_input())
        found = memory(line for _, line in ends(Path(path)))
        found.skipped = skipped(Path(path))
        return found
    except OSError as error:
        raise BadUsage(f"the log {path[:120]!r} cannot be read: {error.strerror}") from error


def _standard_input() -> Iterator[str]:
    content = sys.stdin.buffer.read(FIRST + LAST + 1)
    if len(content) > FIRST + LAST:
        raise BadUsage(f"standard input has more than {(FIRST + LAST) >> 20} MiB: give the log as a file")
    return iter(content.decode("utf-8", "replace").split("\n"))


def memory(lines: Iterable[str]) -> Memory:
    """What the lines of a log say, of the latest start."""
    reading, now = _MemoryReading(), time.time()
    log = ServerLog(reading=reading)
    for raw in lines:
        for line in cut(raw[:LONGEST]):
            log.feed(line, now, live=False)
    reading.memory.version = log.version
    return reading.memory


class _MemoryReading(LogReading):
    """Of a server at work, only what is vLLM's own counts."""

    def __init__(self) -> None:
        super().__init__("")
        self.memory = Memory()

    def _take(self, line: Line, pattern: Pattern | None, belief: Belief, at: float) -> None:
        begun, serves = self._startup, self._phase == "serving"
        super()._take(line, pattern, belief, at)
        if begun is not self._startup and self.memory.sizes:
            self.memory = Memory()
        if serves and (belief is not Belief.OWN or (pattern and pattern.kind != "event")):
            return
        if pattern:
            _known(self.memory, pattern, line.text)
        if not serves and (line.level in ("INFO", "DEBUG") or line.text.startswith(_WITHOUT_LEVEL)):
            _sizes(self.memory, line.text)


def _sizes(found: Memory, text: str) -> None:
    for regex, names in _LOOKED_FOR:
        match = regex.match(text)
        for name, value in zip(names, match.groups(), strict=True) if match else ():
            with _no_number():
                found.note(name, value)


_NUMBERS = {
    "max_model_len": "length",
    "kv_cache_max_concurrency": "concurrency",
    "kv_cache_size_tokens": "tokens",
    "estimated_max_model_len": "longest",
}
SETTINGS = ("gpu_memory_utilization", "tensor_parallel_size", "pipeline_parallel_size")
"""What the sizes hold for."""
_SIZES = {
    "free_gibibytes": "free",
    "total_gibibytes": "total",
    "requested_gibibytes": "budget",
    "needed_gibibytes": "needed",
    "available_gibibytes": "kv_cache",
}


def _known(found: Memory, pattern: Pattern, text: str) -> None:
    """What the table of lines reads out of a text; what is free when memory runs out is another matter."""
    told = values(pattern, text)
    said = settings(text) if pattern.name in ("args", "config") else {}
    if "utilization" in told:
        said["gpu_memory_utilization"] = told["utilization"]
    for name in said.keys() & set(SETTINGS):
        with _no_number():
            found.settings[name] = float(said[name])
    if pattern.name == NO_KV_CACHE_MEMORY:
        found.sizes.setdefault("kv_cache", (0, 0))
    ran_out = pattern.name == CUDA_OUT_OF_MEMORY
    for name, value in told.items():
        with _no_number():
            if name in _NUMBERS:
                found.numbers[_NUMBERS[name]] = amount(value)
            elif name in _SIZES and (name == "total_gibibytes" or not ran_out):
                found.note(_SIZES[name], f"{amount(value):.2f}")


@contextmanager
def _no_number() -> Iterator[None]:
    """A line that only looks like one of vLLM's says nothing."""
    try:
        yield
    except (ValueError, OverflowError):
        return
