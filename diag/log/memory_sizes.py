"""Read the GPU memory sizes that a vLLM server's log states, for the latest start in it.

Sizes are rounded in the log, so each is a range. Of several workers the fullest one counts: most weights, least room.
"""

import re
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.core.errors import BadUsage
from diag.core.formatting import GIB
from diag.core.log_events import CUDA_OUT_OF_MEMORY, NO_KV_CACHE_MEMORY
from diag.log.interpreter import LogInterpreter
from diag.log.meanings import PlacedLine
from diag.log.origin import LineOrigin
from diag.log.parse_line import FIRST, LAST, LONGEST, read_lines, skipped_note, split_redrawn
from diag.log.patterns import parse_amount, read_values
from diag.log.server_log import ServerLog
from diag.log.trackers import parse_settings

Size = tuple[int, int]
"""Least and most bytes."""


class SizeText(NamedTuple):
    """A text that states sizes, and their names."""

    begins: str
    names: tuple[str, ...]


class SizeTable(NamedTuple):
    """The file memory_sizes.toml."""

    text: tuple[SizeText, ...]
    sizes: Mapping[str, str]
    numbers: Mapping[str, str]


_TABLE = read(PACKAGE / "log" / "memory_sizes.toml", SizeTable)
_LOOKED_FOR = tuple(
    (re.compile(text.begins.replace("{n}", r"(-?[\d.]+)").replace("{g}", " ?Gi?B")), text.names) for text in _TABLE.text
)
_LEAST = frozenset({"kv_cache", "free", "total", "budget"})
"""Sizes of which the smallest of several workers counts; of all others the largest."""
_WITHOUT_LEVEL = ("model weights take", "the current vLLM")
"""Beginnings of the further lines of a record."""
_AOT = re.compile(r"(?:\[\w+\] )?(?:(saved AOT compiled function)|Directly load AOT compilation) ")
_KEPT = 0.97
"""Share of the KV cache that two equal starts both have; 4 to 5 % are lost with a small model (vllm#54383)."""
SETTINGS = ("gpu_memory_utilization", "tensor_parallel_size", "pipeline_parallel_size")
"""Settings that the sizes depend on."""


@dataclass
class LoggedMemory:
    """Memory of one start: `sizes` by name in bytes, `numbers` without a unit, `settings`, and the vLLM version.

    Sizes: weights, kv_cache, graphs, "estimated graphs", activations, other, free, total, budget, needed. Numbers:
    tokens, length and concurrency of the KV cache, and the longest context that vLLM itself estimated. Settings: those
    of SETTINGS. `skipped` is the sentence about the part of a large log that was not read. `compiled` is whether the
    start compiled the model (True) or loaded it from the compile cache (False); `earlier` is the start before.
    """

    skipped: str = ""
    version: str = ""
    sizes: dict[str, Size] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    compiled: bool | None = None
    earlier: "LoggedMemory | None" = None

    def lost_to_compiling(self) -> tuple[int, int] | None:
        """Return the KV cache of a start that compiled, and of another one with equal settings that did not, in bytes.

        None unless it was smaller with the same weights and GPU memory: compiling counts as activations (vllm#54122).
        """
        other = self.earlier
        while other and {self.compiled, other.compiled} != {True, False}:
            other = other.earlier
        if other is None or other.settings != self.settings or other.sizes.get("weights") != self.sizes.get("weights"):
            return None
        own, others = (sum(start.sizes.get("kv_cache", (0, 0))) // 2 for start in (self, other))
        cold, warm = (own, others) if self.compiled else (others, own)
        return (cold, warm) if 0 < cold < _KEPT * warm else None

    def note(self, name: str, text: str) -> None:
        """Note a size in GiB, as exact as it was printed; ValueError or OverflowError if it is no number."""
        half = 0.5 * 10.0 ** -max(len(text.partition(".")[2]), 2)  # "1.0" is round(x, 2)
        size = round((float(text) - half) * GIB), round((float(text) + half) * GIB)
        self.sizes[name] = (min if name in _LEAST else max)(self.sizes.get(name, size), size)


def read_memory_log(path: str) -> LoggedMemory:
    """Read the memory sizes of a log file, "-" for standard input; BadUsage if it cannot be read."""
    try:
        if path != "-":
            memory = parse_memory_log(line for _, line in read_lines(Path(path)))
            memory.skipped = skipped_note(Path(path))
            return memory
        content = sys.stdin.buffer.read(FIRST + LAST + 1)
    except OSError as error:
        raise BadUsage(f"the log {path[:120]!r} cannot be read: {error.strerror}") from error
    if len(content) > FIRST + LAST:
        raise BadUsage(f"standard input has more than {(FIRST + LAST) >> 20} MiB: give the log as a file")
    return parse_memory_log(content.decode("utf-8", "replace").split("\n"))


def parse_memory_log(lines: Iterable[str]) -> LoggedMemory:
    """Parse the memory sizes in the lines of a log, of the latest start."""
    interpreter, now = _MemoryInterpreter(), time.time()
    log = ServerLog(interpreter=interpreter)
    for raw in lines:
        for line in split_redrawn(raw[:LONGEST]):
            log.feed(line, now, live=False)
    interpreter.memory.version = log.config.version
    return interpreter.memory


class _MemoryInterpreter(LogInterpreter):
    """Reads memory sizes as well; while the server serves, only from events that vLLM itself logs."""

    def __init__(self) -> None:
        super().__init__("")
        self.memory = LoggedMemory()

    def interpret(self, placed: PlacedLine) -> None:
        line, pattern, origin = placed[:3]
        startup, serves = self.states.run.startup, self.phase == "serving"
        super().interpret(placed)
        if startup is not self.states.run.startup and self.memory.sizes:
            self.memory = LoggedMemory(earlier=self.memory)
        if aot := None if serves else _AOT.match(line.text):
            self.memory.compiled = bool(aot[1])
        if serves and (origin is not LineOrigin.VLLM or (pattern and pattern.kind != "event")):
            return
        if pattern:
            settings = parse_settings(line.text) if pattern.name in ("args", "config") else {}
            values = read_values(pattern, line.text)
            if "utilization" in values:
                settings["gpu_memory_utilization"] = values["utilization"]
            for name in settings.keys() & set(SETTINGS):
                with suppress(ValueError, OverflowError):
                    self.memory.settings[name] = float(settings[name])
            if pattern.name == NO_KV_CACHE_MEMORY:
                self.memory.sizes.setdefault("kv_cache", (0, 0))
            for name, value in values.items():
                with suppress(ValueError, OverflowError):
                    if name in _TABLE.numbers:
                        self.memory.numbers[_TABLE.numbers[name]] = parse_amount(value)
                    elif name in _TABLE.sizes and (name == "total_gibibytes" or pattern.name != CUDA_OUT_OF_MEMORY):
                        # when memory runs out, the free memory is not that of the start
                        self.memory.note(_TABLE.sizes[name], f"{parse_amount(value):.2f}")
        if serves or not (line.level in ("INFO", "DEBUG") or line.text.startswith(_WITHOUT_LEVEL)):
            return
        for regex, names in _LOOKED_FOR:
            match = regex.match(line.text)
            for name, value in zip(names, match.groups(), strict=True) if match else ():
                with suppress(ValueError, OverflowError):  # a line that only looks like one of vLLM's
                    self.memory.note(name, value)
