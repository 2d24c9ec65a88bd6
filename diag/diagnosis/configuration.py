"""What a server runs with, each value with where it is known from; what nobody said has the default of its release."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from diag import promql
from diag.core.formatting import gibibytes
from diag.sources.observation import Observation
from diag.vllm.flags.defaults import UNSET, WORD_DEFAULTS, default
from diag.vllm.flags.registry import known, release, versions
from diag.vllm.server.config import RunningConfig, SourcedValue
from diag.vllm.server.launch import FLAGS, WORDS, Value

_GPUS = (
    "max by (instance, gpu, name) (last_over_time(diag_gpu_memory_total_bytes[{0}s])"
    " * on (instance, gpu) group_left (name) last_over_time(diag_gpu_info[{0}s]))"
    " unless on (instance, gpu) last_over_time(diag_gpu_serving[{0}s]) == 0"
)
_BY_GPU = ("max_num_seqs", "max_num_batched_tokens")
ASK = "its log (--log), its command (--launch), or /server_info (VLLM_SERVER_DEV_MODE=1) would tell"


@dataclass(frozen=True)
class ServingGpu:
    """One GPU that the server runs on; memory in bytes as NVML counts it."""

    number: str
    name: str
    memory: float


@dataclass(frozen=True)
class ConfigEntry:
    """A flag (--max-num-seqs) or a size that vLLM found (kv_cache_size_tokens), its value None where it is not set.

    `others` are the other sources; those that `differ` say something else. `assumed` marks a release's own default.
    """

    name: str
    value: Value | None
    source: str
    others: tuple[SourcedValue, ...] = ()
    differ: tuple[SourcedValue, ...] = ()
    assumed: bool = False


@dataclass(frozen=True)
class Configuration:
    """All that is known of how one server runs.

    `unknown` are the names without a value, by what would tell. `unread` says why a flag may be set that nobody spoke
    of, "" where none can be.
    """

    instance: str
    version: str
    model: str
    gpus: tuple[ServingGpu, ...]
    entries: tuple[ConfigEntry, ...]
    unknown: Mapping[str, tuple[str, ...]]
    environment: Mapping[str, str]
    unread: str


@dataclass(frozen=True)
class _Server:
    """What a default may depend on."""

    version: str
    gpus: tuple[ServingGpu, ...]
    settled: RunningConfig

    def number(self, name: str) -> float | None:
        """A setting that somebody said."""
        found = self.settled.settings.get(name)
        return None if found is None or isinstance(found.value, str) else found.value

    @property
    def gpu(self) -> ServingGpu | None:
        """What all its GPUs are; None where they differ, or none was seen."""
        kinds = {(each.name, each.memory): each for each in self.gpus}
        return next(iter(kinds.values())) if len(kinds) == 1 else None


def of(seen: Observation) -> tuple[Configuration, ...]:
    """The configuration of every server that was seen."""
    gpus = _gpus(seen)
    return tuple(
        _configuration(
            name, _Server(seen.versions.get(name, ""), gpus.get(name, ()), settled), seen.models.get(name, "")
        )
        for name, settled in seen.settled.items()
    )


def notes(seen: Observation) -> tuple[str, ...]:
    """What else has to be said; where sources disagree stands with the setting."""
    said = {note for name, each in seen.settled.items() for note in set(each.notes(name)) - set(each.problems)}
    return tuple(each for each in seen.notes if each not in said)


def _gpus(seen: Observation) -> dict[str, tuple[ServingGpu, ...]]:
    window = max(1, round((seen.instants[-1] - seen.instants[0]) / 1000 + seen.interval + 1))
    found = promql.evaluate(_GPUS.format(window), seen.samples, seen.instants[-1:])
    gpus: dict[str, list[ServingGpu]] = {}
    for labels, row, there in zip(found.labels, found.values, found.present, strict=True):
        if there[0]:
            gpu = ServingGpu(labels.get("gpu", ""), labels.get("name", ""), float(row[0]))
            gpus.setdefault(labels.get("instance", ""), []).append(gpu)
    return {name: tuple(sorted(each, key=lambda gpu: gpu.number)) for name, each in gpus.items()}


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
    missing = {why: tuple(names) for why, names in unknown.items()}
    return Configuration(
        instance, server.version, model, server.gpus, tuple(entries), missing, settled.environment, settled.unread
    )


def _entry(name: str, server: _Server) -> ConfigEntry | str:
    """Its line; else why its value is not known, "" for what is no flag of this release."""
    setting, flag = server.settled.settings.get(name), _flag(name)
    shown = flag if flag in known() else name
    if setting:
        return ConfigEntry(shown, setting.value, setting.source, setting.others, setting.contradicted)
    if flag not in known() or not known()[flag].in_release(server.version):
        return ""
    value = WORD_DEFAULTS.get(flag) if name in WORDS else _default(name, server)
    if value is not None:
        return ConfigEntry(shown, value, _source(name, server), assumed=True)
    if server.settled.unread:
        return ASK
    return ConfigEntry(shown, None, "") if flag in UNSET else _why(name, server)


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
        which = f"{newest}, the newest that is known"
    gpu = server.gpu
    on = f" on {gibibytes(gpu.memory, 0)}" if gpu and name in _BY_GPU else ""
    return f"default of {which}{on}" + (", if nobody set it" if server.settled.unread else "")


def _why(name: str, server: _Server) -> str:
    """Why a default is not known although it is clear that nobody set the flag."""
    if not server.version:
        return "the default depends on the version, which is not known"
    if name in _BY_GPU:
        return "the default depends on the GPU: none was seen, or several kinds; /server_info would tell"
    return "the default depends on the model and the platform: its log or /server_info would tell"
