"""The configuration that a server runs with, each value with its source or the release's default."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from diag import promql
from diag.core.formatting import gibibytes
from diag.sources.observation import Observation
from diag.vllm.flags.registry import UNSET, WORD_DEFAULTS, default, known, release, versions
from diag.vllm.server.config import RunningConfig, SourcedValue
from diag.vllm.server.launch import FLAGS, WORDS, Value

_GPUS = (
    "max by (instance, gpu, name) (last_over_time(diag_gpu_memory_total_bytes[{0}s])"
    " * on (instance, gpu) group_left (name) last_over_time(diag_gpu_info[{0}s]))"
    " unless on (instance, gpu) last_over_time(diag_gpu_serving[{0}s]) == 0"
)
_BY_GPU = ("max_num_seqs", "max_num_batched_tokens")
ASK = "needs the log (--log), the launch command (--launch) or /server_info (VLLM_SERVER_DEV_MODE=1)"


@dataclass(frozen=True)
class ServingGpu:
    """One GPU that the server runs on; memory in bytes as NVML counts it."""

    number: str
    name: str
    memory: float


@dataclass(frozen=True)
class ConfigEntry:
    """A flag (--max-num-seqs) or a size that vLLM derived (kv_cache_size_tokens), its value None where it is not set.

    `others` are the other sources, `conflicts` those with another value. `is_default` marks the release's own default.
    """

    name: str
    value: Value | None
    source: str
    others: tuple[SourcedValue, ...] = ()
    conflicts: tuple[SourcedValue, ...] = ()
    is_default: bool = False


@dataclass(frozen=True)
class Configuration:
    """All that is known of how one server runs.

    `unknown` are the names without a value, by the reason. `incomplete` says why a flag may be set that no source
    reports, "" where none can be.
    """

    instance: str
    version: str
    model: str
    gpus: tuple[ServingGpu, ...]
    entries: tuple[ConfigEntry, ...]
    unknown: Mapping[str, tuple[str, ...]]
    environment: Mapping[str, str]
    incomplete: str


@dataclass(frozen=True)
class _Server:
    """What a default may depend on."""

    version: str
    gpus: tuple[ServingGpu, ...]
    settled: RunningConfig

    def number(self, name: str) -> float | None:
        """A setting that some source has, as a number."""
        found = self.settled.settings.get(name)
        return None if found is None or isinstance(found.value, str) else found.value

    @property
    def gpu(self) -> ServingGpu | None:
        """What all its GPUs are; None where they differ, or none was found."""
        kinds = {(gpu.name, gpu.memory): gpu for gpu in self.gpus}
        return next(iter(kinds.values())) if len(kinds) == 1 else None


def configurations(seen: Observation) -> tuple[Configuration, ...]:
    """The configuration of every observed server."""
    gpus = _gpus(seen)
    servers = {
        name: _Server(seen.versions.get(name, ""), gpus.get(name, ()), settled)
        for name, settled in seen.settled.items()
    }
    return tuple(_configuration(name, server, seen.models.get(name, "")) for name, server in servers.items())


def notes(seen: Observation) -> tuple[str, ...]:
    """What else a reader has to know; conflicts between sources are shown with the setting."""
    shown = {
        note for name, settled in seen.settled.items() for note in set(settled.notes(name)) - set(settled.problems)
    }
    return tuple(note for note in seen.notes if note not in shown)


def _gpus(seen: Observation) -> dict[str, tuple[ServingGpu, ...]]:
    window = max(1, round((seen.instants[-1] - seen.instants[0]) / 1000 + seen.interval + 1))
    found = promql.evaluate(_GPUS.format(window), seen.samples, seen.instants[-1:])
    gpus: dict[str, list[ServingGpu]] = {}
    for labels, row, present in zip(found.labels, found.values, found.present, strict=True):
        if present[0]:
            gpu = ServingGpu(labels.get("gpu", ""), labels.get("name", ""), float(row[0]))
            gpus.setdefault(labels.get("instance", ""), []).append(gpu)
    return {name: tuple(sorted(of_server, key=lambda gpu: gpu.number)) for name, of_server in gpus.items()}


def _configuration(instance: str, server: _Server, model: str) -> Configuration:
    entries: list[ConfigEntry] = []
    unknown: dict[str, list[str]] = {}
    for name in (*FLAGS, *WORDS):
        found = _entry(name, server)
        if isinstance(found, ConfigEntry):
            entries.append(found)
        elif found:
            unknown.setdefault(found, []).append(_flag(name))
    settled = server.settled
    reasons = {reason: tuple(names) for reason, names in unknown.items()}
    return Configuration(
        instance, server.version, model, server.gpus, tuple(entries), reasons, settled.environment, settled.incomplete
    )


def _entry(name: str, server: _Server) -> ConfigEntry | str:
    """A setting; else why its value is unknown, "" for what is no flag of this release."""
    setting, flag = server.settled.settings.get(name), _flag(name)
    shown = flag if flag in known() else name
    if setting:
        return ConfigEntry(shown, setting.value, setting.source, setting.others, setting.conflicts)
    if flag not in known() or not known()[flag].in_release(server.version):
        return ""
    value = WORD_DEFAULTS.get(flag) if name in WORDS else _default(name, server)
    if value is not None:
        return ConfigEntry(shown, value, _source(name, server), is_default=True)
    if server.settled.incomplete:
        return ASK
    return ConfigEntry(shown, None, "") if flag in UNSET else _no_default(name, server)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _default(name: str, server: _Server) -> float | None:
    """The release's default, and what vLLM makes of it beside the other settings."""
    gpu = server.gpu
    value = default(_flag(name), server.version, gpu.memory if gpu else None, gpu.name if gpu else "")
    if value is None or name not in _BY_GPU:
        return value
    mode = server.settled.settings.get("performance_mode")
    value *= 2 if mode and mode.value == "throughput" else 1
    return min([value, *_bounds(name, server)])


def _bounds(name: str, server: _Server) -> Iterator[float]:
    """What a default for the batch is lowered to: requests to its tokens, tokens to what the requests can have."""
    tokens, requests, length = map(server.number, ("max_num_batched_tokens", "max_num_seqs", "max_model_len"))
    if name == "max_num_seqs" and tokens:
        yield tokens
    if name == "max_num_batched_tokens" and requests and length:
        yield requests * length


def _source(name: str, server: _Server) -> str:
    newest = versions()[-1]
    which = server.version or "every release"
    if release(server.version) > release(newest):
        which = f"{newest}, the newest known"
    gpu = server.gpu
    on = f" on {gibibytes(gpu.memory, 0)}" if gpu and name in _BY_GPU else ""
    return f"default of {which}{on}" + (", unless set" if server.settled.incomplete else "")


def _no_default(name: str, server: _Server) -> str:
    """Why a default is unknown although it is clear that the flag is not set."""
    if not server.version:
        return "the default depends on the vLLM version, which is unknown"
    if name in _BY_GPU:
        return "the default depends on the GPU, and none or several kinds were found; needs /server_info"
    return "the default depends on the model and the platform; needs the log or /server_info"
