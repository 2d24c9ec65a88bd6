"""The running configuration: each setting with who says it. No default is assumed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any

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
    *("offload_config", "offload_config.uva"),
)
_NAMES = {
    "cache_dtype": "kv_cache_dtype",
    "policy": "scheduling_policy",
    "backend": "attention_backend",
    "_api_process_count": "api_server_count",
}
"""What flags are called in vLLM's own configuration, where that is something else."""

SERVER_INFO, PROCESS, LOG, PAGE = "/server_info", "its own command line", "its log", "its page"
EXPORTER, MODELS, LAUNCH = "its exporter", "/v1/models", "its launch command"
TRUST = (SERVER_INFO, PROCESS, LOG, PAGE, EXPORTER, MODELS, LAUNCH)
"""Sources, the most trusted first: what runs, what this very process was told, what it said, what somebody says."""
OWN_TRUST = (SERVER_INFO, PAGE, LOG, EXPORTER, MODELS, PROCESS, LAUNCH)
"""The same for OWN: a command says what was asked for."""
OWN = frozenset(
    {
        *("num_gpu_blocks", "num_gpu_blocks_override", "block_size", "kv_cache_memory_bytes"),  # one pool, one source
        *("kv_cache_size_tokens", "kv_cache_max_concurrency", "data_parallel_size"),
        *("max_model_len", "max_num_batched_tokens", "enforce_eager", "async_scheduling"),
        *("enable_prefix_caching", "enable_chunked_prefill", "dtype", "attention_backend"),
    }
)
"""What vLLM settles itself whatever it was asked for (larger blocks for a hybrid model, more tokens for an image)."""


@dataclass(frozen=True)
class ServerFacts:
    """What is known of a server beside its page: /version, /v1/models, /server_info, its log, how it was started.

    `process` is the command of its own process, where that was seen; `launch` the one that somebody says; `log_whole`
    is whether the log has all that was set.
    """

    version: str = ""
    models: tuple[str, ...] = ()
    max_model_len: float | None = None
    server_info: Values = field(default_factory=dict)
    log: Values = field(default_factory=dict)
    launch: str = ""
    process: str = ""
    log_whole: bool = False


@dataclass(frozen=True)
class SourcedValue:
    """One value of a setting, and the source that says it."""

    value: Value
    source: str


@dataclass(frozen=True)
class Setting:
    """A setting by the source that is trusted most, and what the `others` say, who may agree.

    A source that only says that it is SET is trusted least.
    """

    name: str
    value: Value
    source: str
    others: tuple[SourcedValue, ...] = ()

    @property
    def contradicted(self) -> tuple[SourcedValue, ...]:
        """The others that say something else."""
        return tuple(each for each in self.others if not _agree(self.name, self.value, each.value))


@dataclass(frozen=True)
class RunningConfig:
    """All that is known of how a server runs: `settings` and `environment` by name.

    `unread` is "" where everything that was set is here, so that any other flag has its default; else what is lacking.
    """

    settings: Mapping[str, Setting] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    unread: str = Launch().unread
    problems: tuple[str, ...] = ()

    @property
    def numbers(self) -> Config:
        """What is published as `diag_vllm_config`."""
        return {name: each.value for name, each in self.settings.items() if not isinstance(each.value, str)}

    def notes(self, instance: str) -> list[str]:
        """A sentence for each number that the sources disagree about."""
        return [*self.problems, *(_note(instance, each, said) for each, said in self._disputes())]

    def _disputes(self) -> list[tuple[Setting, SourcedValue]]:
        numbers = [each for each in self.settings.values() if not isinstance(each.value, str)]
        return [(each, said) for each in numbers for said in each.contradicted]


def _note(instance: str, setting: Setting, said: SourcedValue) -> str:
    used = f"{setting.name} of {printable(instance)} is {setting.value:g} by {setting.source}"
    return f"{used} and {said.value:g} by {said.source}: {setting.value:g} was used"


def _agree(name: str, one: Value, other: Value) -> bool:
    """Numbers nearly, words where none of them leaves it open; "auto" is what a KV cache can have in the end."""
    if isinstance(one, str) or isinstance(other, str):
        return one == other or SET in (one, other) or (name in _OPEN and "auto" in (one, other))
    return abs(one - other) <= _CLOSE * abs(one)


def from_page(infos: Sequence[Labels], engines: int) -> Config:
    """The labels of every `vllm:cache_config_info` of a page (vLLM 0.9 - 0.33) with so many engines, 0 not known."""
    if not infos:
        return {}
    config = _labels(infos)
    if engines:
        config["data_parallel_size"] = float(engines)
    tokens = config.get("kv_cache_size_tokens") or _tokens(infos[0], config, max(engines, 1))
    if tokens:
        config["kv_cache_size_tokens"] = tokens
    concurrency = config.get("kv_cache_max_concurrency")
    if tokens and concurrency and "kv_cache_size_tokens" in infos[0]:
        config["max_model_len"] = float(round(tokens / concurrency))
    return config


def _labels(infos: Sequence[Labels]) -> Config:
    """Where engines differ, the smallest pool counts: it fills up first."""
    config: Config = {}
    for info in infos:
        for name, value in numbers(info).items():
            config[name] = min(value, config.get(name, value))
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
    """Of one engine, where vLLM (before 0.24) does not say it; `num_gpu_blocks` is the sum over all engines.

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


def settle(by_page: Values, told: ServerFacts, by_exporter: Config | None = None) -> RunningConfig:
    """The running configuration of a target; `by_page` is what the labels of its page say.

    An exporter relays what it was told itself: where another source says the same, that one is the source.
    """
    process, problem = _read(told.process)
    given, trouble = _read(told.launch)
    said: dict[str, Values] = {
        SERVER_INFO: told.server_info,
        PROCESS: process.flags,
        LOG: told.log,
        PAGE: by_page,
        MODELS: {} if told.max_model_len is None else {"max_model_len": told.max_model_len},
        LAUNCH: given.flags,
    }
    said[EXPORTER] = {
        name: value
        for name, value in (by_exporter or {}).items()
        if not any(_says(each, name, value) for each in said.values())
    }
    unread = process.unread if told.process else given.unread
    return RunningConfig(
        settings={name: _setting(name, said) for name in sorted({each for values in said.values() for each in values})},
        environment=process.environment if told.process else given.environment,
        unread="" if told.server_info or told.log_whole else unread,
        problems=tuple(each for each in (problem, trouble) if each),
    )


def _says(values: Values, name: str, value: Value) -> bool:
    return name in values and _agree(name, value, values[name])


def _setting(name: str, said: Mapping[str, Values]) -> Setting:
    order = OWN_TRUST if name in OWN else TRUST
    found = (SourcedValue(said[source][name], source) for source in order if name in said[source])
    first, *others = sorted(found, key=lambda each: each.value == SET)
    return Setting(name, first.value, first.source, tuple(others))


@lru_cache(maxsize=256)  # an exporter asks at every scrape
def _read(command: str) -> tuple[Launch, str]:
    """What a command says, or what is wrong with it."""
    try:
        return launch.read(command), ""
    except BadUsage as error:
        return Launch(unread="it could not be read"), f"the launch command could not be read: {error}"
