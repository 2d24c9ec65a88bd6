"""The running configuration of a server: each setting with its source. No default is assumed."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.core.errors import BadUsage
from diag.core.formatting import GIB, flag_integer, printable
from diag.core.log_events import LogEnding
from diag.vllm.command import redaction
from diag.vllm.command.command import Command
from diag.vllm.command.container import inner, items
from diag.vllm.command.free_text import is_secret
from diag.vllm.command.redaction import VARIABLES
from diag.vllm.command.shell import PLACEHOLDER

Value = float | str
Config = dict[str, float]
Labels = Mapping[str, str]
Values = Mapping[str, Value]
Kind = Literal["size", "share", "switch"]


class _Settings(NamedTuple):
    """The tables of settings.toml."""

    kinds: Mapping[Kind, tuple[str, ...]]
    word: tuple[str, ...]
    own: tuple[str, ...]
    sections: tuple[str, ...]
    names: Mapping[str, str]


_SETTINGS = read(PACKAGE / "vllm" / "settings.toml", _Settings)
FLAGS: Mapping[str, Kind] = {name: kind for kind, names in _SETTINGS.kinds.items() for name in names}
"""Settings that may be published as `diag_vllm_config`."""
WORDS = _SETTINGS.word
"""Settings that are a word; shown in reports, never published as a metric."""
_SMALLEST, _LARGEST = 1e-9, 1e18
"""Bounds of a setting: vLLM writes no number beyond them, and two such numbers have no quotient or product."""
_FLAG_ALIASES = {"device_memory_utilization": "gpu_memory_utilization"}
_WORD_VALUE = re.compile(r"[A-Za-z0-9_.:-]{1,40}")
_VARIABLES = ("VLLM_", "NCCL_", "TORCH_NCCL_", "CUDA_", "PYTORCH_", "OMP_", "GLOO_", "HF_HUB_OFFLINE", "HIP_", "ROCR_")
_VARIABLE_VALUE = re.compile(r"[A-Za-z0-9_.:,|=+*^-]{1,60}")
_ADDRESS = re.compile(r"\d+\.\d+\.\d|[A-Za-z]\.|\.[A-Za-z]|::|(?:[0-9A-Fa-f]+:){3}|(?<!\w)[A-Za-z][A-Za-z0-9-]*:\d{2}")
_ADDRESSED = re.compile(r".*_(?:IPS?|HOST|HOSTNAME|ADDR|ADDRESS|URL|SERVER)")
SET = "(set)"
"""Replaces a value that is not shown, or cannot be read."""
_ROCM = re.compile(r"VLLM_ROCM_|HIP_VISIBLE|ROCR_VISIBLE").match
_OTHERS = ("xpu", "tpu", "hpu", "neuron")
_LEFT_TO_VLLM = ("", "auto", "-1", "None")
"""Values with which vLLM chooses a number itself."""


class Launch(NamedTuple):
    """The settings in FLAGS and WORDS that a command gives, and its environment; SET for a hidden value.

    `incomplete` is the reason why other flags may be set, "" if none can be; `image` is the container's, "" if unknown.
    """

    flags: Mapping[str, Value] = {}
    environment: Mapping[str, str] = {}
    incomplete: str = "the launch command is unknown"
    image: str = ""


def read_launch(text: str) -> Launch:
    """Read a command that starts vLLM; BadUsage if a quotation is not closed."""
    if not text.strip():
        return Launch()
    from diag.vllm.command.parse import parse  # noqa: PLC0415  # without a launch command, its readers are not needed

    incomplete = ""
    try:
        command = parse(text)
    except BadUsage:
        command = parse(f"vllm serve {text}")  # a program of the site's own that passes flags on
        incomplete = "the launch command is a wrapper around vLLM"
    if command.config:
        incomplete = "the launch command reads a --config file"
    # a shell may replace a variable by flags; a hidden value is no flag, a hidden word may be one
    arguments = " ".join(command.words[command.arguments :])
    if "$" in PLACEHOLDER.sub(lambda found: "$" if found[1].startswith("WORD_") else "", arguments):
        incomplete = incomplete or "the launch command contains shell variables"

    names = sorted(name for name in command.environment if name.startswith(_VARIABLES) and not is_secret(name))
    environment = dict.fromkeys(names, SET)
    for name in names:
        value = command.environment[name]
        is_harmless = name in VARIABLES and _VARIABLE_VALUE.fullmatch(value) and redaction.name(value) == value
        if is_harmless and not _ADDRESSED.fullmatch(name) and not _ADDRESS.search(value):
            environment[name] = value
    values: dict[str, Value] = {}  # the last one counts if a flag is repeated
    for written in command.given:
        option, text = written.option, "".join(written.values)
        if option is None or option.key:
            continue
        name = option.flag.name.removeprefix("--").replace("-", "_")
        name = _FLAG_ALIASES.get(name, name)
        setting: Value | None = None
        if name in WORDS:
            setting = word(text)
            setting = None if setting == "auto" else setting  # vLLM chooses it itself
        elif FLAGS.get(name) == "switch":
            setting = float(option.on != (text.lower() in ("false", "0")))
        elif name in FLAGS and option.on and text not in _LEFT_TO_VLLM:
            parsed = number(text) if FLAGS[name] == "share" else flag_integer(text)
            setting = SET if parsed is None else parsed
        if setting is not None:
            values[name] = setting
    engine = (values.get(f"{kind}_parallel_size", 1.0) for kind in ("tensor", "pipeline"))
    ranks = prod(size for size in engine if not isinstance(size, str))
    offloaded = connector_bytes(command, int(ranks)) / GIB
    values = {"kv_offloading_size": offloaded, **values} if offloaded else values
    return Launch(values, environment, incomplete, command.image)


CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")


def connector_bytes(command: Command, ranks: int) -> float:
    """Return the host memory of one engine for the offloading connectors of --kv-transfer-config, in bytes.

    `ranks` are its tensor and pipeline parallel ranks. `cpu_bytes_to_use` counts for all ranks together,
    `cpu_bytes_to_use_per_rank` (SimpleCPUOffloadConnector) for each. A MultiConnector holds the configurations of
    several connectors.
    """
    config = command.keys("--kv-transfer-config")
    total = 0.0
    for connector in (config, *items(inner(config, "kv_connector_extra_config"), "connectors")):
        if connector.get("kv_connector") in CONNECTORS:
            extra = inner(connector, "kv_connector_extra_config")
            whole, of_a_rank = (extra.get(f"cpu_bytes_to_use{suffix}") for suffix in ("", "_per_rank"))
            total += _above_zero(of_a_rank) * ranks or _above_zero(whole)
    return total


def _above_zero(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 < value < float("inf") else 0.0


def word(value: object) -> str | None:
    """Read a setting that is a word; None if it is not set, SET if it may be more than a harmless name."""
    name = str(value).removeprefix("torch.")
    if name in ("", "None"):
        return None
    return name if _WORD_VALUE.fullmatch(name) and redaction.name(name) == name else SET


def number(text: object) -> float | None:
    """Read a setting that is a number, booleans as 0 and 1; None if it is not set or no plausible number."""
    switch = {"True": 1.0, "False": 0.0}.get(str(text))
    if switch is not None:
        return switch
    try:
        value = float(str(text))
    except ValueError:
        return None
    return value if value == 0 or _SMALLEST <= abs(value) <= _LARGEST else None


_CLOSE = 0.01
_OPEN = ("dtype", "quantization")
"""Words that are "auto" until a source has read the model."""

SERVER_INFO, PROCESS, LOG, PAGE = "/server_info", "process command line", "log", "/metrics"
EXPORTER, MODELS, LAUNCH = "exporter", "/v1/models", "launch command"
TRUST = (SERVER_INFO, PROCESS, PAGE, LOG, EXPORTER, MODELS, LAUNCH)
"""Sources, the most trusted first: the engine, the command of its process, its page, its log, into which clients can
write, and the command from the user.
"""
OWN_TRUST = (SERVER_INFO, PAGE, LOG, EXPORTER, MODELS, PROCESS, LAUNCH)
"""Sources of a setting that vLLM may change: a command has only the requested value."""


class ServerFacts(NamedTuple):
    """Facts about a server from outside its page: /version, /v1/models, /server_info, its log, its launch command.

    `root` is the model's folder or id in /v1/models; `process` is the command of the server's process, if that was
    found; `launch` is the command that the user gave; `log_whole` is True if the log has everything that was set;
    `platform` is vLLM's own word for its hardware, rocm for example, as it logs it; `releases` are those that ran one
    after the other, with the unix times of their starts, if its log shows an upgrade; `log_ending` is the state
    in which its log ends.
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
    platform: str = ""
    releases: tuple[tuple[float, str], ...] = ()
    log_ending: LogEnding | None = None


class SourcedValue(NamedTuple):
    """One value of a setting, and its source."""

    value: Value
    source: str


class Setting(NamedTuple):
    """A setting by its most trusted source, and the values of the `others`, which may agree.

    A source with a hidden value (SET) is trusted least.
    """

    name: str
    value: Value
    source: str
    others: tuple[SourcedValue, ...] = ()

    @property
    def conflicts(self) -> tuple[SourcedValue, ...]:
        """Return the other sources with another value."""
        return tuple(other for other in self.others if not _agree(self.name, self.value, other.value))


class RunningConfig(NamedTuple):
    """The settings and the environment of a running server, by name.

    `incomplete` is "" if everything that was set is here, so that other flags have their defaults; else the reason.
    `device` is "cpu", "cuda", "rocm", "xpu", "tpu" ..., "" if no source names it.
    """

    settings: Mapping[str, Setting] = {}
    environment: Mapping[str, str] = {}
    incomplete: str = Launch().incomplete
    problems: tuple[str, ...] = ()
    device: str = ""

    @property
    def numbers(self) -> Config:
        """Return the numbers published as `diag_vllm_config`."""
        return {name: setting.value for name, setting in self.settings.items() if not isinstance(setting.value, str)}

    def notes(self, instance: str) -> list[str]:
        """Return a sentence for each number on which the sources conflict."""
        notes = list(self.problems)
        for name, value in self.numbers.items():
            used = f"{name} of {printable(instance)} is {value:g} ({self.settings[name].source})"
            for other in self.settings[name].conflicts:
                notes.append(f"{used} but {other.value:g} ({other.source}): {value:g} is used")
        return notes


def _agree(name: str, value: Value, other: Value) -> bool:
    """Return True for nearly equal numbers and equal words; a word that is open or hidden agrees with any other."""
    if isinstance(value, str) or isinstance(other, str):
        return value == other or SET in (value, other) or (name in _OPEN and "auto" in (value, other))
    return abs(value - other) <= _CLOSE * abs(value)


def from_page(infos: Sequence[Labels], engines: int) -> Config:
    """Read the labels of every `cache_config_info` of a page (vLLM 0.9 - 0.33); `engines` is 0 if unknown."""
    if not infos:
        return {}
    config: Config = {}
    for info in infos:  # if engines differ, the smallest KV cache counts: it fills up first
        config |= {name: min(value, config.get(name, value)) for name, value in numbers(info).items()}
    if engines:
        config["data_parallel_size"] = float(engines)

    info = infos[0]
    tokens = config.get("kv_cache_size_tokens")
    if not tokens:  # before 0.24; with a sliding window or state-space layers a block is not worth its size in tokens
        plain = info.get("sliding_window") == "None" and info.get("mamba_block_size", "None") == "None"
        blocks, size = config.get("num_gpu_blocks"), config.get("block_size")
        # num_gpu_blocks is the sum over all engines
        tokens = blocks * size // max(engines, 1) if plain and blocks and size else None
    if tokens:
        config["kv_cache_size_tokens"] = tokens
    concurrency = config.get("kv_cache_max_concurrency")
    if tokens and concurrency and "kv_cache_size_tokens" in info:
        config["max_model_len"] = float(round(tokens / concurrency))
    return config


def numbers(texts: Mapping[str, object]) -> Config:
    """Return the settings in FLAGS that are set, out of any names and values."""
    read = ((name, number(texts[name])) for name in FLAGS if name in texts)
    return {name: value for name, value in read if value is not None}


def words(texts: Mapping[str, object]) -> dict[str, str]:
    """Return the settings in WORDS that are set, under the name of their flag."""
    read = ((_SETTINGS.names.get(name, name), word(value)) for name, value in texts.items())
    return {name: value for name, value in read if name in WORDS and value is not None}


def settings(texts: Mapping[str, object]) -> dict[str, Value]:
    """Return the settings in FLAGS and WORDS, out of vLLM's own names."""
    named = {_SETTINGS.names.get(name, name): value for name, value in texts.items()}
    return {**numbers(named), **words(named)}


def words_of_page(infos: Sequence[Labels]) -> dict[str, str]:
    """Return the words in the labels of `cache_config_info`, which all engines have in common."""
    return words({"cache_dtype": infos[0].get("cache_dtype")}) if infos else {}


def from_server_info(answer: Any) -> dict[str, Value]:
    """Read the flags from the answer of /server_info?config_format=json (vLLM >= 0.11, development mode)."""
    whole = inner(answer, "vllm_config")
    config = settings(whole)
    for path in _SETTINGS.sections:
        config |= settings(inner(whole, *path.split(".")))
    return config


def settle(by_page: Values, facts: ServerFacts, by_exporter: Config | None = None) -> RunningConfig:
    """Return the running configuration of a target; `by_page` are the labels of its page.

    An exporter relays what it was given: if another source has the same value, that source counts.
    """
    process, process_problem = _read(facts.process)
    launch, launch_problem = _read(facts.launch)
    command = process if facts.process else launch
    sources: dict[str, Values] = {
        SERVER_INFO: facts.server_info,
        PROCESS: process.flags,
        LOG: facts.log,
        PAGE: by_page,
        MODELS: {} if facts.max_model_len is None else {"max_model_len": facts.max_model_len},
        LAUNCH: launch.flags,
    }
    sources[EXPORTER] = {
        name: value
        for name, value in (by_exporter or {}).items()
        if not any(name in values and _agree(name, value, values[name]) for values in sources.values())
    }

    by_name: dict[str, Setting] = {}
    for name in sorted({name for values in sources.values() for name in values}):
        order = OWN_TRUST if name in _SETTINGS.own else TRUST
        values = [SourcedValue(sources[source][name], source) for source in order if name in sources[source]]
        first, *others = sorted(values, key=lambda sourced: sourced.value == SET)
        by_name[name] = Setting(name, first.value, first.source, tuple(others))

    on_cpu = facts.version.endswith("+cpu") or any(name.startswith("VLLM_CPU_") for name in command.environment)
    names = (facts.platform, facts.version, launch.image)  # rocm, 0.14.0+rocm700, rocm/vllm or vllm/vllm-openai-rocm
    on_rocm = any("rocm" in name for name in names) or any(map(_ROCM, command.environment))
    device = str(by_name["device"].value) if "device" in by_name else SET
    own = "cpu" if on_cpu else "rocm" if on_rocm else facts.platform if facts.platform in _OTHERS else ""
    return RunningConfig(
        settings=by_name,
        environment=command.environment,
        incomplete="" if facts.server_info or facts.log_whole else command.incomplete,
        problems=tuple(filter(None, (process_problem, launch_problem))),
        # vLLM calls the device of ROCm cuda, as torch does
        device=own if device == SET or (on_rocm and device.startswith("cuda")) else device.partition(":")[0],
    )


@lru_cache(maxsize=256)  # an exporter asks at every scrape
def _read(command: str) -> tuple[Launch, str]:
    """Read the settings of a command; also return the problem with it, or ""."""
    try:
        return read_launch(command), ""
    except BadUsage as error:
        problem = "the launch command could not be parsed"
        return Launch(incomplete=problem), f"{problem}: {error}"
