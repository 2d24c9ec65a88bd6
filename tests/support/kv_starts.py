"""Logged starts of tests/data/kv_starts.csv, each with what diag estimates for the same launch.

A third of the rows was kept aside before anything was fitted: those whose SHA-256 is a multiple of three. Rows that
were found after the fit are a third set. The second set was gathered later, and half of it kept aside before the second
fit: those with an even SHA-256; so were the third and the fourth set before theirs. All of the fifth set
was kept aside.
"""

import csv
import json
import re
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from support.paths import MODELS

from diag.core.errors import BadUsage
from diag.core.formatting import GIB
from diag.vllm import gpus
from diag.vllm.command import parse as command
from diag.vllm.command.command import Command
from diag.vllm.flags.registry import release, versions
from diag.vllm.memory.ledger import DRAFT, KV_CACHE, WEIGHTS, Ledger, ledger, over_releases
from diag.vllm.memory.model import Model, load, read
from diag.vllm.memory.setup import GpuSpec, Setup, setup
from diag.vllm.memory.usage import ByteRange

_DATA = MODELS.parent
_FLAGS = {
    "tensor_parallel": "--tensor-parallel-size",
    "pipeline_parallel": "--pipeline-parallel-size",
    "data_parallel": "--data-parallel-size",
    "max_model_len": "--max-model-len",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "kv_cache_dtype": "--kv-cache-dtype",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
}
_SWITCHES = {"enforce_eager": "--enforce-eager", "enable_lora": "--enable-lora"}


_RELEASE = re.compile(r"\d+\.\d+(\.\d+){0,2}(\.post\d+|rc\d+)?")
"""A published release, not a build of a commit or of a vendor."""


_SEVERAL_SIZES = ("NVIDIA A100", "NVIDIA V100")
"""Names of GPUs that are made with memory of several sizes."""


@dataclass(frozen=True)
class Start:
    """One logged start; `row` has the columns of the file.

    A shape that ends in "?" is known without which of its layers are quantized: its layout alone is compared.
    """

    row: dict[str, str]
    model: Model
    setup: Setup
    command: Command

    @property
    def is_kept_aside(self) -> bool:
        return self.row["set"].endswith("kept aside")

    @property
    def is_quantized_somehow(self) -> bool:
        return self.row["shape"].endswith("?")

    @property
    def known(self) -> str:
        """Return what the log names of that on which the KV cache depends."""
        if not _RELEASE.fullmatch(self.row["vllm_version"]):
            return "release not named"
        is_size_known = self.row["gpu_memory_gib"] or self.row["gpu"] not in _SEVERAL_SIZES
        is_share_known = bool(self.row["gpu_memory_utilization"])
        return "release, GPU and share named" if is_size_known and is_share_known else "share or size not named"

    @property
    def kind(self) -> str:
        """Return the class of the model: dense, MoE or hybrid, with vision or without."""
        has_states = any(mixer.kind == "state" for layer in self.model.stack for mixer in layer.mixers)
        name = "hybrid" if has_states else "MoE" if self.model.experts else "dense"
        return f"{name}, vision" if self.model.encoders and not self.setup.text_only else name

    @property
    def label(self) -> str:
        """Return the model, the release and the GPUs as cells of a table."""
        row = self.row
        gpu = row["gpu"].removeprefix("NVIDIA ") or f"{row['gpu_memory_gib']} GiB"
        return f"{row['model'].rpartition('/')[2]} | {row['vllm_version']} | {row['num_gpus']} x {gpu}"

    @property
    def figures(self) -> str:
        """Return the logged and the estimated KV cache as cells of a table."""
        found, memory = self.estimate, self.number("available_kv_gib")
        if memory:
            return f"{memory:.2f} GiB | {found.kv_cache.central / GIB if found.kv_cache else 0:.2f} GiB"
        return f"{self.row['kv_tokens']} tokens | {found.tokens.central if found.tokens else 0} tokens"

    def number(self, column: str) -> float | None:
        return float(self.row[column]) if self.row[column] else None

    @cached_property
    def estimate(self) -> Ledger:
        """Return what diag estimates, with the range over all releases if the log names none."""
        found = ledger(self.model, self.setup)
        if self.known != "release not named":
            return found
        return over_releases(found, self.command, GpuSpec(self.setup.total, self.row["gpu"]))

    def layout_error(self) -> float | None:
        """Return the error of the KV cache's tokens if its bytes are those of the log."""
        memory, tokens = self.number("available_kv_gib"), self.number("kv_tokens")
        if not memory or not tokens or memory < 0:
            return None
        half = 0.005
        found = ledger(self.model, self.setup, {KV_CACHE: ByteRange.gib((memory - half, memory + half))})
        return found.tokens.central / tokens - 1 if found.tokens else None

    def weights_error(self) -> float | None:
        if self.is_quantized_somehow:
            return None
        logged = self.number("weights_gib")
        sizes = [row.computed for row in self.estimate.rows if row.name in (WEIGHTS, DRAFT) and row.computed]
        return sum(size.central for size in sizes) / GIB / logged - 1 if sizes and logged else None

    def has_weights_inside(self) -> bool:
        """Return True if the logged weights lie in the estimated range."""
        sizes = [row.computed for row in self.estimate.rows if row.name in (WEIGHTS, DRAFT) and row.computed]
        logged, half = (self.number("weights_gib") or 0) * GIB, 0.005 * GIB
        return sum(size.low for size in sizes) - half <= logged <= sum(size.high for size in sizes) + half

    def memory_error(self) -> float | None:
        """Return the error of the KV cache's bytes, from the launch and the GPU alone; of its tokens without bytes."""
        found, logged, tokens = self.estimate, self.number("available_kv_gib"), self.number("kv_tokens")
        if not self.setup.total or not found.kv_cache or self.is_quantized_somehow:
            return None
        if logged and logged > 0:
            return found.kv_cache.central / GIB / logged - 1
        return found.tokens.central / tokens - 1 if tokens and found.tokens and not logged else None

    def is_inside_range(self) -> bool | None:
        """Return True if the logged KV cache lies in the estimated range; None if `memory_error` is None."""
        if self.memory_error() is None:
            return None
        found, logged, tokens = self.estimate, self.number("available_kv_gib"), self.number("kv_tokens")
        size, value = (found.kv_cache, logged * GIB) if logged else (found.tokens, tokens)
        half = 0.005 * GIB if logged else 0
        return bool(size and value and size.low - half <= value <= size.high + half)


def rows() -> list[dict[str, str]]:
    """Return all rows of the file."""
    with (_DATA / "kv_starts.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def starts() -> tuple[Start, ...]:
    """Return the rows whose model's config.json is known and whose flags diag reads."""
    read_starts = []
    for row in rows():
        with suppress(BadUsage):
            if not why_left_out(row):
                read_starts.append(_start(row))
    return tuple(read_starts)


def left_out() -> dict[str, int]:
    """Return the number of rows that cannot be computed, by the reason."""
    reasons = Counter(why for row in rows() if (why := why_left_out(row)))
    found = starts()
    reasons["which layers are quantized is unknown: the layout alone is compared"] = sum(
        start.is_quantized_somehow for start in found
    )
    reasons["the GPU is not named: layout and weights alone are compared"] = sum(
        not start.setup.total for start in found if not start.is_quantized_somehow
    )
    return dict(reasons)


def why_left_out(row: dict[str, str]) -> str:
    """Return the reason why a row cannot be computed, "" if it can."""
    if not row["shape"]:
        return "the checkpoint's config.json, or which of its layers are quantized, is unknown"
    if row["speculative"] == "yes":
        return "the draft model is unknown"
    return ""


def _start(row: dict[str, str]) -> Start:
    words = ["vllm", "serve", row["shape"].rstrip("?")]
    for column, flag in _FLAGS.items():
        words += [flag, row[column]] if row[column] not in ("", "auto") else []
    words += [flag for column, flag in _SWITCHES.items() if row[column] == "yes"] + row["extra"].split()
    if row["quantization"] in ("fp8", "bitsandbytes"):
        words += ["--quantization", row["quantization"]]
    version = _version(row["vllm_version"])
    model = shape(row["shape"].rstrip("?"), version)
    gpu, started = GpuSpec(_total(row), row["gpu"]), command.read(" ".join(words), version=version)
    return Start(row, model, setup(started, model, gpu, version), started)


def _version(text: str) -> str:
    parts = text.split("+", maxsplit=1)[0].split(".")
    numbers = [part for part in parts[:3] if part.isdigit()]
    found = ".".join((*numbers, "0", "0")[:3]) if numbers else ""
    return found if release(found) else versions()[-1]


def _total(row: dict[str, str]) -> int | None:
    if row["gpu_memory_gib"]:
        return round(float(row["gpu_memory_gib"]) * GIB)
    with suppress(BadUsage):
        return gpus.memory(row["gpu"]) if row["gpu"] else None
    return None


@cache
def shape(name: str, version: str) -> Model:
    """Return a shape of the tests' data, or of the package by its repository."""
    return (
        load(name, Command((), 0, {}, name, ()), version=version)
        if "/" in name
        else read(model_folder(name), name, version)
    )


@cache
def model_folder(shape: str) -> Path:
    """Return a folder with the config.json of a shape."""
    shape = shape.rstrip("?")
    models = json.loads((_DATA / "kv_models.json").read_text(encoding="utf-8"))
    if shape not in models:
        return MODELS / shape
    folder = Path(tempfile.mkdtemp()) / shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(models[shape]), encoding="utf-8")
    return folder
