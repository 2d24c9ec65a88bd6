"""The command that started a server: the flags read out of it, and its secrets taken out of it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from diag.errors import BadUsage
from diag.vllm.command import Command, Given, parse
from diag.vllm.shell import HIDDEN

Value = float | str
Kind = Literal["size", "share", "switch"]
"""A whole number (perhaps with a suffix k, m, g), a plain number, or a boolean."""

FLAGS: Mapping[str, Kind] = {
    "max_num_seqs": "size",
    "max_num_batched_tokens": "size",
    "max_num_scheduled_tokens": "size",
    "max_num_active_seqs": "size",
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
WORDS = (
    "attention_backend",
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
_SUFFIX = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG]?)")

REDACTED = HIDDEN
_SECRET = r"(?:key|keys|keyfile|token|secret|secrets|password|passwd|pass|credential|credentials|auth|authorization)"
_SECRET_NAME = re.compile(rf"(?i)(?:^|.*[-_.]){_SECRET}(?:[-_.].*)?$")
_HARMLESS = ("_threshold", "_token_ids", "_adapter_token")
_TOKEN = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:\\.|[^"\\])*+"|['"\\])+""", re.DOTALL)
_INSIDE = (
    (re.compile(r"(://)[^/\s'\"]+@"), rf"\1{REDACTED}@"),
    (re.compile(rf"(?i)(\"[\w.-]*{_SECRET}\\?\"\s*:\s*)\"[^\"]*\""), rf'\1"{REDACTED}"'),
    (re.compile(r"\b(?:hf_|sk-|ghp_|glpat-|xox[bp]-)[A-Za-z0-9_-]{8,}"), REDACTED),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {REDACTED}"),
    (re.compile(r"(?:/home|/Users)/[^/\s'\"]+"), "~"),
)


@dataclass(frozen=True)
class Launch:
    """What a command says of the settings in FLAGS and WORDS, and of the environment.

    `unread` says what else may set a flag where the command is not the whole story.
    """

    flags: Mapping[str, Value] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    unread: str = "it is not known"


def read(text: str) -> Launch:
    """Read a command that starts vLLM; BadUsage where a quotation is not closed."""
    if not text.strip():
        return Launch()
    unread = ""
    try:
        command = parse(text)
    except BadUsage:
        command = parse(f"vllm serve {text}")  # a program of the site's own that passes flags on
        unread = "it is no command of vLLM's own"
    if command.config:
        unread = "it reads more flags from a file (--config)"
    if any("$" in word for word in command.words[command.arguments :]):
        unread = unread or "it has variables of a shell in it"
    return Launch(_flags(command), _environment(command), unread)


def _flags(command: Command) -> Mapping[str, Value]:
    """What is given last counts."""
    found: dict[str, Value] = {}
    for given in command.given:
        option = given.option
        if option is None or option.key:
            continue
        name = option.flag.name.removeprefix("--").replace("-", "_")
        name = _ALIASES.get(name, name)
        value = _number(name, given, option.on) if name in FLAGS else _named(name, given)
        found |= {} if value is None else {name: value}
    return found


def _number(name: str, given: Given, on: bool) -> float | None:
    kind, value = FLAGS[name], "".join(given.values)
    if kind == "switch":
        return float(on != (value.lower() in ("false", "0")))
    if not on:
        return None
    if kind == "share":
        return number(value)
    match = _SIZE.fullmatch(value)
    return float(match[1]) * _SUFFIX.get(match[2], 1) if match else None


def _named(name: str, given: Given) -> str | None:
    """A word that was asked for; "auto" asks for none."""
    value = word("".join(given.values)) if name in WORDS else None
    return None if value == "auto" else value


def _environment(command: Command) -> Mapping[str, str]:
    """The variables that matter to vLLM, NCCL and CUDA; paths, keys and addresses are only said to be set."""
    names = sorted(each for each in command.environment if each.startswith(_VARIABLES) and not _is_secret(each))
    return {name: _shown(command.environment[name]) for name in names}


def _shown(value: str) -> str:
    return value if _VARIABLE_VALUE.fullmatch(value) and hidden(value) == value else "(set)"


def word(value: object) -> str | None:
    """A setting as a word; None where it is not set, or may be more than a harmless name."""
    name = str(value).removeprefix("torch.")
    return name if name != "None" and _WORD_VALUE.fullmatch(name) and hidden(name) == name else None


def number(text: object) -> float | None:
    """A setting as a number: booleans are 0 and 1; None where it is not set or no (finite) number."""
    switch = {"True": 1.0, "False": 0.0}.get(str(text))
    if switch is not None:
        return switch
    try:
        value = float(str(text))
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def redact(command: str) -> str:
    """Take secrets, credentials in URLs and the names of home folders out of a command."""
    spans = [(each.start(), each.end()) for each in _TOKEN.finditer(command)]
    words = _redacted([command[start:end] for start, end in spans])
    gaps = (command[end:start] for (_, end), (start, _) in pairwise([(0, 0), *spans, (len(command), 0)]))
    return "".join(gap + word for gap, word in zip(gaps, [*words, ""], strict=True))


def _redacted(words: Sequence[str]) -> Iterator[str]:
    hide = False
    for word in words:
        hide = hide and not word.startswith("-")
        yield REDACTED if hide else _redacted_word(word)
        hide = hide or (word.startswith("-") and "=" not in word and _is_secret(word))


def _redacted_word(word: str) -> str:
    if " --" in word:  # sh -c '...'
        return word[0] + redact(word[1:-1]) + word[-1]
    parts = word.split("=")
    secret = next((i for i, part in enumerate(parts[:-1], 1) if _is_secret(part.lstrip("'\""))), 0)
    return f"{'='.join(parts[:secret])}={REDACTED}" if secret else hidden(word)


def _is_secret(name: str) -> bool:
    flag = name.lstrip("-").replace("-", "_").lower()
    return flag not in FLAGS and not flag.endswith(_HARMLESS) and bool(_SECRET_NAME.match(name))


def hidden(text: str) -> str:
    """Replace what looks like a secret by its shape, wherever it stands."""
    for pattern, instead in _INSIDE:
        text = pattern.sub(instead, text)
    return text
