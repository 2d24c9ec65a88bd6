"""What a release runs with where nobody set a flag: its own defaults, by version and by GPU.

Read from the source of 59 releases, as the OpenAI server sets them (the class LLM has others): vllm/config, and
EngineArgs.get_batch_defaults for what depends on the GPU. From 0.8.0 on those of the V1 engine.
"""

from collections.abc import Mapping

from diag.core.formatting import GIB
from diag.vllm.flags.registry import known, release

Since = tuple[tuple[str, float | None], ...]
"""Releases and the default from each of them on, the oldest first; None where it depends on the model or the host."""

_ALWAYS = "0.0.0"
_DEFAULTS: Mapping[str, Since] = {
    "--gpu-memory-utilization": ((_ALWAYS, 0.90), ("0.20.0", 0.92)),
    "--tensor-parallel-size": ((_ALWAYS, 1.0),),
    "--pipeline-parallel-size": ((_ALWAYS, 1.0),),
    "--data-parallel-size": ((_ALWAYS, 1.0),),
    "--decode-context-parallel-size": ((_ALWAYS, 1.0),),
    "--max-num-partial-prefills": ((_ALWAYS, 1.0),),
    "--max-long-partial-prefills": ((_ALWAYS, 1.0),),
    "--long-prefill-token-threshold": ((_ALWAYS, 0.0),),
    "--long-prefill-token-threshold-adaptive": ((_ALWAYS, 0.0),),
    "--prefill-schedule-interval": ((_ALWAYS, 1.0),),
    "--scheduler-reserve-full-isl": ((_ALWAYS, 1.0),),
    "--watermark": ((_ALWAYS, 0.0),),
    "--max-loras": ((_ALWAYS, 1.0),),
    "--stream-interval": ((_ALWAYS, 1.0),),
    "--swap-space": ((_ALWAYS, 4.0),),
    "--cpu-offload-gb": ((_ALWAYS, 0.0),),
    "--enforce-eager": ((_ALWAYS, 0.0),),
    "--disable-custom-all-reduce": ((_ALWAYS, 0.0),),
    "--api-server-count": ((_ALWAYS, 1.0), ("0.15.0", None)),  # then one for each data-parallel rank
    "--async-scheduling": ((_ALWAYS, 0.0), ("0.14.0", None)),  # then on by itself where the executor can
    "--enable-chunked-prefill": ((_ALWAYS, None), ("0.8.0", 1.0), ("0.11.0", None)),
    "--enable-prefix-caching": ((_ALWAYS, 0.0), ("0.8.0", None)),
}
WORD_DEFAULTS: Mapping[str, str] = {
    "--dtype": "auto",
    "--kv-cache-dtype": "auto",
    "--performance-mode": "balanced",
    "--scheduling-policy": "fcfs",
}
UNSET = frozenset(
    {
        "--api-server-count",
        "--attention-backend",
        "--data-parallel-size-local",
        "--distributed-executor-backend",
        "--kv-cache-memory-bytes",
        "--kv-offloading-size",
        "--max-cpu-loras",
        "--max-num-active-seqs",
        "--max-num-scheduled-tokens",
        "--max-num-queued-reqs",
        "--max-num-queued-tokens",
        "--num-gpu-blocks-override",
        "--quantization",
    }
)
"""Flags without a default of their own: where nobody sets one, there is no such bound, or it follows from others."""

_BIG, _HUGE = 70 * GIB, 160 * GIB
_SEQS, _TOKENS = "--max-num-seqs", "--max-num-batched-tokens"
_SMALL_BATCH: Mapping[str, float] = {_SEQS: 256.0, _TOKENS: 2048.0}
_BIG_BATCH: Mapping[str, float] = {_SEQS: 1024.0, _TOKENS: 8192.0}
_HUGE_BATCH: Mapping[str, float] = {_SEQS: 1024.0, _TOKENS: 16384.0}


def default(flag: str, version: str, gpu_bytes: float | None = None, gpu_name: str = "") -> float | None:
    """The default of a flag such as --max-num-seqs in a release, switches as 0 and 1.

    `gpu_bytes` is the memory of one GPU as NVML counts it, `gpu_name` what NVML calls it. None where the release has no
    such flag, where it has no number of its own (`UNSET`), and where it depends on what is not known. An unknown
    release ("") has a default that all releases share. vLLM lowers --max-num-seqs to --max-num-batched-tokens, and that
    to --max-num-seqs x --max-model-len; `--performance-mode throughput` doubles both.
    """
    if flag not in known() or not known()[flag].in_release(version):
        return None
    if flag == "--disable-custom-all-reduce" and gpu_bytes is None:
        return None  # vLLM for CPUs disables it itself
    if flag in _SMALL_BATCH:
        return _batch(flag, version, gpu_bytes, gpu_name.lower())
    return _since(_DEFAULTS.get(flag, ()), version)


def _since(since: Since, version: str) -> float | None:
    if not release(version):
        return since[0][1] if len(since) == 1 else None
    reached = [value for first, value in since if release(first) <= release(version)]
    return reached[-1] if reached else None


def _batch(flag: str, version: str, gpu_bytes: float | None, gpu_name: str) -> float | None:
    """What grows with the GPU. On a CPU or a TPU vLLM has others, so without a GPU it is not known."""
    at = release(version)
    if at < (0, 8, 5):
        return _early_batch(flag, at, gpu_bytes, gpu_name)
    if gpu_bytes is None:
        return None
    if gpu_bytes >= _HUGE and at >= (0, 28, 0):
        return _HUGE_BATCH[flag]
    small = ("a100",) * (at >= (0, 9, 0)) + ("gb10",) * (at >= (0, 33, 0))  # big, but their throughput suffered
    if gpu_bytes >= _BIG and small and not gpu_name:
        return None
    is_small = gpu_bytes < _BIG or any(name in gpu_name for name in small)
    return (_SMALL_BATCH if is_small else _BIG_BATCH)[flag]


def _early_batch(flag: str, at: tuple[int, ...], gpu_bytes: float | None, gpu_name: str) -> float | None:
    """Up to 0.8.4: tokens by name; whether 0.8.4 itself has 1,024 requests on small GPUs already is not known."""
    if at < (0, 8, 0):
        return _SMALL_BATCH[flag] if at and flag == _SEQS else None  # as many tokens as --max-model-len, or fewer
    if flag == _SEQS:
        sure = at < (0, 8, 4) or (gpu_bytes is not None and gpu_bytes >= _BIG)
        return _BIG_BATCH[flag] if sure else None
    if not gpu_name:
        return None
    return (_BIG_BATCH if "h100" in gpu_name or "h200" in gpu_name else _SMALL_BATCH)[flag]
