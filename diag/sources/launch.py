"""The command that started a server: the flags read out of it, and its secrets taken out of it."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

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
_ALIASES = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dpl": "data_parallel_size_local",
    "-asc": "api_server_count",
    "--device-memory-utilization": "gpu_memory_utilization",
    "--kv-cache-memory": "kv_cache_memory_bytes",
}
_SUFFIX = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG]?)")

REDACTED = "REDACTED"
_SECRET = r"(?:key|keys|keyfile|token|secret|secrets|password|passwd|pass|credential|credentials|auth|authorization)"
_SECRET_NAME = re.compile(rf"(?i)(?:^|.*[-_.]){_SECRET}(?:[-_.].*)?$")
_HARMLESS = ("_threshold", "_token_ids", "_adapter_token")
_WORD = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:\\.|[^"\\])*+"|['"\\])+""", re.DOTALL)
_INSIDE = (
    (re.compile(r"(://)[^/\s'\"]+@"), rf"\1{REDACTED}@"),
    (re.compile(rf"(?i)(\"[\w.-]*{_SECRET}\\?\"\s*:\s*)\"[^\"]*\""), rf'\1"{REDACTED}"'),
    (re.compile(r"\b(?:hf_|sk-|ghp_|glpat-|xox[bp]-)[A-Za-z0-9_-]{8,}"), REDACTED),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {REDACTED}"),
    (re.compile(r"(?:/home|/Users)/[^/\s'\"]+"), "~"),
)


def flags(command: str) -> dict[str, float]:
    """The values of the flags that are known, booleans as 0 and 1; ValueError where a quotation is not closed."""
    found: dict[str, float] = {}
    for word, after in pairwise([*_words(command), ""]):
        name, joined, value = word.partition("=")
        known = _known(name)
        if known:
            number = _read(*known, value if joined else after)
            found |= {} if number is None else {known[0]: number}
    return found


def _words(command: str) -> Iterator[str]:
    for word in shlex.split(command):
        yield from _words(word) if " --" in word else (word,)  # sh -c '...'


def _known(option: str) -> tuple[str, bool] | None:
    """The flag and whether it is switched on, of a word such as --no-enable-prefix-caching."""
    if option in _ALIASES:
        return _ALIASES[option], True
    if not option.startswith("--"):
        return None
    name = option[2:].replace("-", "_")
    if name in FLAGS:
        return name, True
    positive = name.removeprefix("no_")
    return (positive, False) if FLAGS.get(positive) == "switch" else None


def _read(name: str, on: bool, value: str) -> float | None:
    kind = FLAGS[name]
    if kind == "switch":
        return float(on != (value.lower() in ("false", "0")))
    if kind == "share":
        return number(value)
    match = _SIZE.fullmatch(value)
    return float(match[1]) * _SUFFIX.get(match[2], 1) if match else None


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
    spans = [(each.start(), each.end()) for each in _WORD.finditer(command)]
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
