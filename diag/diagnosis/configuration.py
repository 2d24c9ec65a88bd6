"""The configuration that a server runs with: each value with its source, or the release's default."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from diag import promql
from diag.core.subjects import label_value
from diag.sources.observation import Observation
from diag.vllm.flags.registry import UNSET, WORD_DEFAULTS, default, known, release, versions
from diag.vllm.running_config import FLAGS, WORDS, RunningConfig, SourcedValue, Value

_GPUS = (
    "max by (instance, gpu, name) (last_over_time(diag_gpu_memory_total_bytes[{0}s])"
    " * on (instance, gpu) group_left (name) last_over_time(diag_gpu_info[{0}s]))"
    " unless on (instance, gpu) last_over_time(diag_gpu_serving[{0}s]) == 0"
)
_BY_GPU = ("max_num_seqs", "max_num_batched_tokens")
Unknown = Literal["incomplete", "version", "gpu", "model"]
"""Reasons why a value is unknown: the sources lack flags, or its default needs an unknown version, GPU or model."""


@dataclass(frozen=True)
class ServingGpu:
    """One GPU that the server runs on; memory in bytes as NVML counts it."""

    number: str
    name: str
    memory: float


@dataclass(frozen=True)
class ReleaseDefault:
    """The release whose default a value is, "" for every release; `is_newest_known` if the server's own is newer.

    `memory` are the bytes of the GPU that the default depends on, None if it depends on no GPU. `unless_set` is true if
    a flag may be set that no source reports.
    """

    release: str
    is_newest_known: bool
    memory: float | None
    unless_set: bool


@dataclass(frozen=True)
class ConfigEntry:
    """A flag (--max-num-seqs) or a size that vLLM derived (kv_cache_size_tokens), its value None if it is not set.

    `source` is "" for a default. `others` are the other sources, `conflicts` the sources with another value.
    """

    name: str
    value: Value | None
    source: str
    others: tuple[SourcedValue, ...] = ()
    conflicts: tuple[SourcedValue, ...] = ()
    default: ReleaseDefault | None = None


@dataclass(frozen=True)
class Configuration:
    """The configuration of one server.

    `unknown` are the names without a value, by the reason. `incomplete` is why a flag may be set that no source
    reports, "" if there can be none.
    """

    instance: str
    version: str
    model: str
    gpus: tuple[ServingGpu, ...]
    entries: tuple[ConfigEntry, ...]
    unknown: Mapping[Unknown, tuple[str, ...]]
    environment: Mapping[str, str]
    incomplete: str


def configurations(seen: Observation) -> tuple[Configuration, ...]:
    """Return the configuration of every observed server."""
    window = max(1, round((seen.instants[-1] - seen.instants[0]) / 1000 + seen.interval + 1))
    memories = promql.evaluate(_GPUS.format(window), seen.samples, seen.instants[-1:])
    gpus: dict[str, list[ServingGpu]] = defaultdict(list)
    for labels, row, present in zip(memories.labels, memories.values, memories.present, strict=True):
        if present[0]:
            gpu = ServingGpu(label_value(labels, "gpu"), label_value(labels, "name"), float(row[0]))
            gpus[label_value(labels, "instance")].append(gpu)
    configured = []
    for instance, settled in seen.settled.items():
        version, serving = seen.versions.get(instance, ""), sorted(gpus[instance], key=lambda gpu: gpu.number)
        kinds = {(gpu.name, gpu.memory): gpu for gpu in serving}
        one_kind = next(iter(kinds.values())) if len(kinds) == 1 else None
        entries: list[ConfigEntry] = []
        unknown: dict[Unknown, tuple[str, ...]] = {}
        for name in (*FLAGS, *WORDS):
            entry = _entry(name, version, one_kind, settled)
            if isinstance(entry, ConfigEntry):
                entries.append(entry)
            elif entry:
                unknown[entry] = (*unknown.get(entry, ()), _flag(name))
        configured.append(
            Configuration(
                instance=instance,
                version=version,
                model=seen.models.get(instance, ""),
                gpus=tuple(serving),
                entries=tuple(entries),
                unknown=unknown,
                environment=settled.environment,
                incomplete=settled.incomplete,
            )
        )
    return tuple(configured)


def notes(seen: Observation) -> tuple[str, ...]:
    """Return the notes of the observation, without conflicts between sources: a setting shows its own."""
    shown = {
        note for name, settled in seen.settled.items() for note in set(settled.notes(name)) - set(settled.problems)
    }
    return tuple(note for note in seen.notes if note not in shown)


def _entry(name: str, version: str, gpu: ServingGpu | None, settled: RunningConfig) -> ConfigEntry | Unknown | None:
    """Return a setting; else the reason why its value is unknown, None if the release has no such flag.

    `gpu` stands for all of the server; None if they differ, or there is none. vLLM changes the default of a batch by
    other settings: its requests are bounded by its tokens, its tokens by the longest that all requests can have.
    """
    settings, flag = settled.settings, _flag(name)
    shown = flag if flag in known() else name
    if setting := settings.get(name):
        return ConfigEntry(shown, setting.value, setting.source, setting.others, setting.conflicts)
    if flag not in known() or not known()[flag].in_release(version):
        return None

    if name in WORDS:
        value: Value | None = WORD_DEFAULTS.get(flag)
    else:
        value = number = default(flag, version, gpu.memory if gpu else None, gpu.name if gpu else "")
        if number is not None and name in _BY_GPU:
            mode = settings.get("performance_mode")
            value = number * 2 if mode and mode.value == "throughput" else number
            bounds = map(settings.get, ("max_num_batched_tokens", "max_num_seqs", "max_model_len"))
            tokens, requests, length = (one.value if one and not isinstance(one.value, str) else None for one in bounds)
            if name == "max_num_seqs" and tokens:
                value = min(value, tokens)
            elif name == "max_num_batched_tokens" and requests and length:
                value = min(value, requests * length)

    incomplete = bool(settled.incomplete)
    if value is not None:
        newest = versions()[-1]
        is_newer = release(version) > release(newest)
        memory = gpu.memory if gpu and name in _BY_GPU else None
        by_release = ReleaseDefault(newest if is_newer else version, is_newer, memory, incomplete)
        return ConfigEntry(shown, value, "", default=by_release)
    if incomplete:
        return "incomplete"
    if flag in UNSET:
        return ConfigEntry(shown, None, "")
    return "version" if not version else "gpu" if name in _BY_GPU else "model"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
