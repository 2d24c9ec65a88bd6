"""The command that started a server: the flags read out of it, and its secrets taken out of it."""

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from diag.core.errors import BadUsage
from diag.core.formatting import flag_integer
from diag.vllm.command import redaction
from diag.vllm.command.command import Command, Given
from diag.vllm.command.parse import parse
from diag.vllm.command.redaction import VARIABLES, is_secret
from diag.vllm.command.shell import PLACEHOLDER

Value = float | str
Kind = Literal["size", "share", "switch"]
"""A whole number (perhaps with a suffix k, m, g), a plain number, or a boolean."""

FLAGS: Mapping[str, Kind] = {
    "max_num_seqs": "size",
    "max_num_batched_tokens": "size",
    "max_num_scheduled_tokens": "size",
    "max_num_active_seqs": "size",
    "max_num_queued_reqs": "size",
    "max_num_queued_tokens": "size",
    "max_num_partial_prefills": "size",
    "max_long_partial_prefills": "size",
    "long_prefill_token_threshold": "size",
    "max_model_len": "size",
    "tensor_parallel_size": "size",
    "pipeline_parallel_size": "size",
    "data_parallel_size": "size",
    "data_parallel_size_local": "size",
    "api_server_count": "size",
    "max_loras": "size",
    "max_cpu_loras": "size",
    "stream_interval": "size",
    "block_size": "size",
    "num_gpu_blocks": "size",
    "num_gpu_blocks_override": "size",
    "kv_cache_memory_bytes": "size",
    "kv_cache_size_tokens": "size",
    "kv_cache_max_concurrency": "share",
    "gpu_memory_utilization": "share",
    "watermark": "share",
    "cpu_offload_gb": "share",
    "swap_space": "share",
    "enforce_eager": "switch",
    "enable_chunked_prefill": "switch",
    "enable_prefix_caching": "switch",
    "async_scheduling": "switch",
    "disable_custom_all_reduce": "switch",
}
"""What may be published as `diag_vllm_config`; nothing else is read, recorded or printed of a configuration."""
_SMALLEST, _LARGEST = 1e-9, 1e18
"""Of a setting: what is beyond was not written by vLLM, and two such numbers have no quotient or product."""
WORDS = (
    "attention_backend",
    "device",
    "distributed_executor_backend",
    "dtype",
    "kv_cache_dtype",
    "performance_mode",
    "quantization",
    "scheduling_policy",
)
"""Settings that are a word, and harmless where they look like one; shown to people, published nowhere."""
_ALIASES = {"device_memory_utilization": "gpu_memory_utilization"}
_WORD_VALUE = re.compile(r"[A-Za-z0-9_.:-]{1,40}")
_VARIABLES = ("VLLM_", "NCCL_", "TORCH_NCCL_", "CUDA_", "PYTORCH_", "OMP_", "GLOO_", "HF_HUB_OFFLINE")
_VARIABLE_VALUE = re.compile(r"[A-Za-z0-9_.:,|=+*^-]{1,60}")
_ADDRESS = re.compile(r"\d+\.\d+\.\d|[A-Za-z]\.|\.[A-Za-z]|::|(?:[0-9A-Fa-f]+:){3}|(?<!\w)[A-Za-z][A-Za-z0-9-]*:\d{2}")
_ADDRESSED = re.compile(r".*_(?:IPS?|HOST|HOSTNAME|ADDR|ADDRESS|URL|SERVER)")
SET = "(set)"
"""Stands for a value that is not shown, or cannot be read."""
_OPEN = ("", "auto", "-1", "None")
"""Values that leave a number to vLLM."""


class Launch(NamedTuple):
    """The settings in FLAGS and WORDS that a command gives, and its environment; SET where a value is hidden.

    `incomplete` says why other flags may be set, "" where none can be.
    """

    flags: Mapping[str, Value] = {}
    environment: Mapping[str, str] = {}
    incomplete: str = "the launch command is unknown"


def read(text: str) -> Launch:
    """Read a command that starts vLLM; BadUsage where a quotation is not closed."""
    if not text.strip():
        return Launch()
    incomplete = ""
    try:
        command = parse(text)
    except BadUsage:
        command = parse(f"vllm serve {text}")  # a program of the site's own that passes flags on
        incomplete = "the launch command is a wrapper around vLLM"
    if command.config:
        incomplete = "the launch command reads a --config file"
    # a shell may put flags in the place of a variable; a hidden value is no flag, a hidden word may be one
    arguments = " ".join(command.words[command.arguments :])
    if "$" in PLACEHOLDER.sub(lambda found: "$" if found[1].startswith("WORD_") else "", arguments):
        incomplete = incomplete or "the launch command contains shell variables"
    return Launch(_flags(command), _environment(command), incomplete)


def _flags(command: Command) -> Mapping[str, Value]:
    """The last one counts where a flag is repeated."""
    found: dict[str, Value] = {}
    for given in command.given:
        option = given.option
        if option is None or option.key:
            continue
        name = option.flag.name.removeprefix("--").replace("-", "_")
        name = _ALIASES.get(name, name)
        if name in FLAGS:
            value = _number(name, given, option.on)
        else:
            value = word("".join(given.values)) if name in WORDS else None
            value = None if value == "auto" else value  # which leaves it to vLLM
        found |= {} if value is None else {name: value}
    return found


def _number(name: str, given: Given, on: bool) -> Value | None:
    kind, value = FLAGS[name], "".join(given.values)
    if kind == "switch":
        return float(on != (value.lower() in ("false", "0")))
    if not on or value in _OPEN:
        return None
    parsed = number(value) if kind == "share" else flag_integer(value)
    return SET if parsed is None else parsed


def _environment(command: Command) -> Mapping[str, str]:
    """The variables that matter to vLLM, NCCL and CUDA; of paths, keys and addresses only that they are set."""
    names = sorted(name for name in command.environment if name.startswith(_VARIABLES) and not is_secret(name))
    shown = dict.fromkeys(names, SET)
    for name in names:
        value = command.environment[name]
        is_harmless = name in VARIABLES and _VARIABLE_VALUE.fullmatch(value) and redaction.name(value) == value
        if is_harmless and not _ADDRESSED.fullmatch(name) and not _ADDRESS.search(value):
            shown[name] = value
    return shown


def word(value: object) -> str | None:
    """A setting as a word; None where it is not set, SET where it may be more than a harmless name."""
    name = str(value).removeprefix("torch.")
    if name in ("", "None"):
        return None
    return name if _WORD_VALUE.fullmatch(name) and redaction.name(name) == name else SET


def number(text: object) -> float | None:
    """A setting as a number: booleans are 0 and 1; None where it is not set or no number that a setting can be."""
    switch = {"True": 1.0, "False": 0.0}.get(str(text))
    if switch is not None:
        return switch
    try:
        value = float(str(text))
    except ValueError:
        return None
    return value if value == 0 or _SMALLEST <= abs(value) <= _LARGEST else None
