"""The running configuration as numbers: `diag_vllm_config{flag}`. No default is assumed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from diag.sources import launch
from diag.sources.launch import FLAGS, number
from diag.sources.text import printable

Config = dict[str, float]
Labels = Mapping[str, str]
_CLOSE = 0.01
_SECTIONS = ("model_config", "cache_config", "parallel_config", "scheduler_config")


@dataclass(frozen=True)
class Told:
    """What is known of a server beside its page: /version, /v1/models, /server_info, its log, how it was started."""

    version: str = ""
    models: tuple[str, ...] = ()
    max_model_len: float | None = None
    server_info: Mapping[str, float] = field(default_factory=dict)
    log: Mapping[str, float] = field(default_factory=dict)
    launch: str = ""


def from_page(infos: Sequence[Labels], engines: int) -> Config:
    """The labels of every `vllm:cache_config_info` of a page (vLLM 0.9 - 0.33) with so many engines, 0 not known."""
    if not infos:
        return {}
    config = _labels(infos)
    if engines:
        config["data_parallel_size"] = engines
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


def _tokens(info: Labels, config: Config, engines: int) -> float | None:
    """Of one engine, where vLLM (before 0.24) does not say it; `num_gpu_blocks` is the sum over all engines.

    With a sliding window or state-space layers a block is not worth its size in tokens.
    """
    plain = info.get("sliding_window") == "None" and info.get("mamba_block_size", "None") == "None"
    blocks, size = config.get("num_gpu_blocks"), config.get("block_size")
    return blocks * size // engines if plain and blocks and size else None


def from_server_info(answer: Any) -> Config:
    """The flags in the answer of /server_info?config_format=json (vLLM >= 0.11, development mode)."""
    config: Config = {}
    whole = answer.get("vllm_config") if isinstance(answer, dict) else None
    for settings in map(whole.get, _SECTIONS) if isinstance(whole, dict) else ():
        config |= numbers(settings) if isinstance(settings, dict) else {}
    return config


def settle(instance: str, by_page: Config, told: Told) -> tuple[Config, list[str]]:
    """The running configuration of a target, and a sentence for each setting that the sources disagree about."""
    by_launch, problem = _from_launch(told.launch)
    notes = [problem] if problem else []
    ranked = (
        ("/server_info", told.server_info),
        ("its page", by_page),
        ("its log", told.log),
        ("its launch command", by_launch),
        ("/v1/models", {} if told.max_model_len is None else {"max_model_len": told.max_model_len}),
    )
    config: Config = {}
    said_by: dict[str, str] = {}
    for source, values in ranked:
        for flag, value in sorted(values.items()):
            if flag not in config:
                config[flag], said_by[flag] = value, source
            elif abs(config[flag] - value) > _CLOSE * abs(config[flag]):
                used = f"{flag} of {printable(instance)} is {config[flag]:g} by {said_by[flag]}"
                notes.append(f"{used} and {value:g} by {source}: {config[flag]:g} was used")
    return config, notes


@lru_cache(maxsize=256)  # an exporter asks at every scrape
def _from_launch(command: str) -> tuple[Config, str]:
    """What a launch command says, or what is wrong with it."""
    try:
        return launch.flags(command), ""
    except ValueError as error:
        return {}, f"the launch command could not be read: {error}"
