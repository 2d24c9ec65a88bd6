"""The running configuration: each setting with its source. No default is assumed."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple

from diag.core.errors import BadUsage
from diag.core.formatting import printable
from diag.vllm.server import launch
from diag.vllm.server.launch import FLAGS, SET, WORDS, Launch, Value, number, word

Config = dict[str, float]
Labels = Mapping[str, str]
Values = Mapping[str, Value]
_CLOSE = 0.01
_OPEN = ("dtype", "quantization")
"""What is "auto" until a source has seen the model."""
_SECTIONS = (
    *("model_config", "cache_config", "parallel_config", "scheduler_config", "attention_config", "lora_config"),
    *("offload_config", "offload_config.uva", "device_config"),
)
_NAMES = {
    "cache_dtype": "kv_cache_dtype",
    "policy": "scheduling_policy",
    "backend": "attention_backend",
    "device_config": "device",
    "device_type": "device",
    "_api_process_count": "api_server_count",
}
"""What flags are called in vLLM's own configuration, where that is something else."""

SERVER_INFO, PROCESS, LOG, PAGE = "/server_info", "process command line", "log", "/metrics"
EXPORTER, MODELS, LAUNCH = "exporter", "/v1/models", "launch command"
TRUST = (SERVER_INFO, PROCESS, LOG, PAGE, EXPORTER, MODELS, LAUNCH)
"""Sources, the most trusted first: what runs, how this process was started, what it logged, what the user gave."""
OWN_TRUST = (SERVER_INFO, PAGE, LOG, EXPORTER, MODELS, PROCESS, LAUNCH)
"""The same for OWN: a command has only what was requested."""
OWN = frozenset(
    {
        *(
            "num_gpu_blocks",
            "num_gpu_blocks_override",
            "block_size",
            "kv_cache_memory_bytes",
        ),  # of one KV cache, from one source
        *("kv_cache_size_tokens", "kv_cache_max_concurrency", "data_parallel_size"),
        *("max_model_len", "max_num_batched_tokens", "enforce_eager", "async_scheduling"),
        *("enable_prefix_caching", "enable_chunked_prefill", "dtype", "attention_backend"),
    }
)
"""What vLLM decides itself whatever was requested (larger blocks for a hybrid model, more tokens for an image)."""


class ServerFacts(NamedTuple):
    """Facts about a server from outside its page: /version, /v1/models, /server_info, its log, its launch command.

    `root` is the model's folder or id in /v1/models; `process` is the command of its own process, where that was found;
    `launch` the one that the user gave; `log_whole` is whether the log has all that was set.
    """

    version: str = ""
    models: tuple[str, ...] = ()
    max_model_len: float | None = None
    server_info: Mapping[str, Value] = {}
    log: Mapping[str, Value] = {}
    launch: str = ""
    process: str = ""
    log_whole: bool = False
    root: str = ""


class SourcedValue(NamedTuple):
    """One value of a setting, and its source."""

    value: Value
    source: str


class Setting(NamedTuple):
    """A setting by the most trusted source, and the values of the `others`, which may agree.

    A source that only has that it is SET is trusted least.
    """

    name: str
    value: Value
    source: str
    others: tuple[SourcedValue, ...] = ()

    @property
    def conflicts(self) -> tuple[SourcedValue, ...]:
        """The other sources with another value."""
        return tuple(other for other in self.others if not _agree(self.name, self.value, other.value))


class RunningConfig(NamedTuple):
    """All that is known of how a server runs: `settings` and `environment` by name.

    `incomplete` is "" where everything that was set is here, so that other flags have their defaults; else the reason.
    `device` is what the model runs on: "cpu", "cuda", "" where no source tells.
    """

    settings: Mapping[str, Setting] = {}
    environment: Mapping[str, str] = {}
    incomplete: str = Launch().incomplete
    problems: tuple[str, ...] = ()
    device: str = ""

    @property
    def numbers(self) -> Config:
        """The numbers published as `diag_vllm_config`."""
        return {name: setting.value for name, setting in self.settings.items() if not isinstance(setting.value, str)}

    def notes(self, instance: str) -> list[str]:
        """A sentence for each number on which the sources conflict."""
        numbers = [setting for setting in self.settings.values() if not isinstance(setting.value, str)]
        found = list(self.problems)
        for setting in numbers:
            used = f"{setting.name} of {printable(instance)} is {setting.value:g} ({setting.source})"
            for other in setting.conflicts:
                found.append(f"{used} but {other.value:g} ({other.source}): {setting.value:g} is used")
        return found


def _agree(name: str, value: Value, other: Value) -> bool:
    """Numbers nearly, words unless one of them leaves it open; "auto" is what a KV cache can have in the end."""
    if isinstance(value, str) or isinstance(other, str):
        return value == other or SET in (value, other) or (name in _OPEN and "auto" in (value, other))
    return abs(value - other) <= _CLOSE * abs(value)


def from_page(infos: Sequence[Labels], engines: int) -> Config:
    """The labels of every `vllm:cache_config_info` of a page (vLLM 0.9 - 0.33) with so many engines, 0 not known."""
    if not infos:
        return {}
    config: Config = {}
    for info in infos:  # where engines differ, the smallest KV cache counts: it fills up first
        config |= {name: min(value, config.get(name, value)) for name, value in numbers(info).items()}
    if engines:
        config["data_parallel_size"] = float(engines)
    tokens = config.get("kv_cache_size_tokens") or _tokens(infos[0], config, max(engines, 1))
    if tokens:
        config["kv_cache_size_tokens"] = tokens
    concurrency = config.get("kv_cache_max_concurrency")
    if tokens and concurrency and "kv_cache_size_tokens" in infos[0]:
        config["max_model_len"] = float(round(tokens / concurrency))
    return config


def numbers(texts: Mapping[str, object]) -> Config:
    """The settings that are known and set, out of any names and values."""
    read = ((name, number(texts[name])) for name in FLAGS if name in texts)
    return {name: value for name, value in read if value is not None}


def words(texts: Mapping[str, object]) -> dict[str, str]:
    """The settings that are a word, likewise, under the name of their flag."""
    read = ((_NAMES.get(name, name), word(value)) for name, value in texts.items())
    return {name: value for name, value in read if name in WORDS and value is not None}


def settings(texts: Mapping[str, object]) -> dict[str, Value]:
    """Numbers and words, out of vLLM's own names."""
    named = {_NAMES.get(name, name): value for name, value in texts.items()}
    return {**numbers(named), **words(named)}


def words_of_page(infos: Sequence[Labels]) -> dict[str, str]:
    """The words in the labels of `vllm:cache_config_info`, which are the same for every engine."""
    return words({"cache_dtype": infos[0].get("cache_dtype")}) if infos else {}


def _tokens(info: Labels, config: Config, engines: int) -> float | None:
    """KV cache of one engine in tokens, before vLLM 0.24 published it; `num_gpu_blocks` is the sum over all engines.

    With a sliding window or state-space layers a block is not worth its size in tokens.
    """
    plain = info.get("sliding_window") == "None" and info.get("mamba_block_size", "None") == "None"
    blocks, size = config.get("num_gpu_blocks"), config.get("block_size")
    return blocks * size // engines if plain and blocks and size else None


def from_server_info(answer: Any) -> dict[str, Value]:
    """The flags in the answer of /server_info?config_format=json (vLLM >= 0.11, development mode)."""
    whole = _inside(answer, "vllm_config")
    config = settings(whole)
    for path in _SECTIONS:
        config |= settings(reduce(_inside, path.split("."), whole))
    return config


def _inside(node: Any, name: str) -> dict[str, Any]:
    found = node.get(name) if isinstance(node, dict) else None
    return found if isinstance(found, dict) else {}


def settle(by_page: Values, facts: ServerFacts, by_exporter: Config | None = None) -> RunningConfig:
    """The running configuration of a target; `by_page` is what the labels of its page have.

    An exporter relays what it was given itself: where another source has the same value, that one is the source.
    """
    process, process_problem = _read(facts.process)
    given, launch_problem = _read(facts.launch)
    sources = _by_source(by_page, facts, process, given, by_exporter or {})
    command = process if facts.process else given
    names = sorted({name for values in sources.values() for name in values})
    settings = {name: _setting(name, sources) for name in names}
    return RunningConfig(
        settings=settings,
        environment=command.environment,
        incomplete="" if facts.server_info or facts.log_whole else command.incomplete,
        problems=tuple(filter(None, (process_problem, launch_problem))),
        device=_device(settings, command.environment, facts.version),
    )


def _device(settings: Mapping[str, Setting], environment: Mapping[str, str], version: str) -> str:
    """Return the device that a source names, else "cpu" if the version or a variable is of the CPU backend."""
    if "device" in settings and settings["device"].value != SET:
        return str(settings["device"].value).partition(":")[0]
    is_cpu = version.endswith("+cpu") or any(name.startswith("VLLM_CPU_") for name in environment)
    return "cpu" if is_cpu else ""


def _by_source(
    by_page: Values, facts: ServerFacts, process: Launch, given: Launch, by_exporter: Config
) -> dict[str, Values]:
    """The settings of every source; those of an exporter that no other source has."""
    sources: dict[str, Values] = {
        SERVER_INFO: facts.server_info,
        PROCESS: process.flags,
        LOG: facts.log,
        PAGE: by_page,
        MODELS: {} if facts.max_model_len is None else {"max_model_len": facts.max_model_len},
        LAUNCH: given.flags,
    }
    relayed = {
        name
        for name, value in by_exporter.items()
        if any(name in values and _agree(name, value, values[name]) for values in sources.values())
    }
    return sources | {EXPORTER: {name: value for name, value in by_exporter.items() if name not in relayed}}


def _setting(name: str, sources: Mapping[str, Values]) -> Setting:
    order = OWN_TRUST if name in OWN else TRUST
    found = (SourcedValue(sources[source][name], source) for source in order if name in sources[source])
    first, *others = sorted(found, key=lambda sourced: sourced.value == SET)
    return Setting(name, first.value, first.source, tuple(others))


@lru_cache(maxsize=256)  # an exporter asks at every scrape
def _read(command: str) -> tuple[Launch, str]:
    """The settings of a command, and what is wrong with it."""
    try:
        return launch.read(command), ""
    except BadUsage as error:
        return Launch(
            incomplete="the launch command could not be parsed"
        ), f"the launch command could not be parsed: {error}"
