"""The settings of a command that decide about memory, with the defaults of the release and the GPU filled in."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from diag.core.errors import BadUsage
from diag.core.formatting import GIB, parse_size
from diag.vllm.command import values
from diag.vllm.command.command import Command
from diag.vllm.flags.defaults import default
from diag.vllm.flags.registry import release, versions
from diag.vllm.hardware.gpus import capability
from diag.vllm.memory.model import Model

MOST, MOST_TOKENS = 2**42, 2**26
"""Bytes of any memory, and tokens or requests of a step: more is a typing error."""
_UNCOUNTED: Mapping[str, str] = {
    "--speculative-config": "the draft model",
    "--speculative-model": "the draft model",
    "--spec-model": "the draft model",
    "--enable-lora": "LoRA adapters",
    "--lora-modules": "LoRA adapters",
    "--quantization-param-path": "the scales of --quantization-param-path",
    "--rope-scaling": "what --rope-scaling changes",
    "--num-redundant-experts": "redundant experts",
}
"""Flags that take memory in a way that is not computed."""
_SAVINGS: Mapping[str, str] = {
    "--hf-overrides": "what --hf-overrides changes",
    "--decode-context-parallel-size": "decode context parallelism",
    "--offload-group-size": "weights that --offload-group-size keeps in host memory",
}
"""Flags that may save some of what is computed."""
_OFF = {"--decode-context-parallel-size": "1", "--offload-group-size": "0", "--num-redundant-experts": "0"}
_REDUNDANT = re.compile(r"num[-_]redundant[-_]experts\W*[1-9]")
PARTITION, CPU_SPACE = "VLLM_PP_LAYER_PARTITION", "VLLM_CPU_KVCACHE_SPACE"
_CPU_BLOCK, _BLOCK = 128, 16


@dataclass(frozen=True)
class GpuSpec:
    """One GPU: its memory in bytes as CUDA counts it, None where it is not known, and its name."""

    total: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Setup:
    """How a server is to run; sizes are in bytes.

    `length` is --max-model-len, `auto_length` where vLLM chooses it itself, `allows_overlong` where it may exceed the
    model's own. `kv_cache_bytes` and `blocks` fix the size of the KV cache; `free` is what a log says is free at the
    start. `graphs_in_budget` is whether CUDA graphs count against the budget (0.20.0 and later).
    `expert_parallel` keeps each expert whole on one GPU. `capability` is CUDA's of the GPU, 0 where it is not known.
    `uncounted` takes memory that stands in no row, `savings` may reduce what does.
    """

    version: str
    total: int | None
    length: int
    auto_length: bool = False
    utilization: float = 0.92
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    block: int = _BLOCK
    batched_tokens: int = 8192
    sequences: int = 1024
    kv_dtype: str = "auto"
    float32: bool = False
    quantization: str = ""
    kv_cache_bytes: int | None = None
    blocks: int | None = None
    free: int | None = None
    offload: int = 0
    eager: bool = False
    graphs_in_budget: bool = True
    hybrid: bool = True
    cpu: bool = False
    text_only: bool = False
    allows_overlong: bool = False
    uncounted: tuple[str, ...] = ()
    savings: tuple[str, ...] = ()
    capability: float = 0
    expert_parallel: bool = False

    @property
    def in_flight(self) -> int:
        """Tokens that may be scheduled and not settled: two steps of them since scheduling is asynchronous."""
        steps = 2 if release(self.version) >= (0, 14, 0) else 1
        return max(steps, self.pipeline) * self.batched_tokens

    @property
    def gpus(self) -> int:
        """How many GPUs share the work of one replica."""
        return self.tensor * self.pipeline


def invalid(what: str, text: str, expected: str) -> str:
    """The sentence on a value that cannot be used, without secrets."""
    given = values.number(text)
    return f"invalid value for {what}{f': {given}' if given else ''} (expected {expected})"


def size(text: str, what: str, least: int = 1, most: int = MOST) -> int:
    """A number with a unit, 32k or 79.1GiB, as a whole number; BadUsage where it is none, or absurd."""
    number = parse_size(text) or 0
    if not least <= number <= most:
        bounds = f"{least / GIB:g} to {most / GIB:g} GiB" if least >= GIB else f"{least} to {most}"
        raise BadUsage(invalid(what, text, f"a size such as 32768, 32k or 79.1GiB, from {bounds}"))
    return int(number)


def setup(command: Command, model: Model, gpu: GpuSpec, version: str = "") -> Setup:
    """The setup of a command; what it does not say is the default of the release, of the newest where none is given."""
    version = version or versions()[-1]
    if not release(version):
        named = values.name(version)[:40]
        raise BadUsage(f"invalid value for --vllm-version: {named!r} (expected a vLLM release such as 0.32.0)")
    number, cpu = release(version), CPU_SPACE in command.environment or gpu.name == "cpu"
    length, auto_length = _length(command, model)
    return Setup(
        version=version,
        total=gpu.total,
        length=length,
        auto_length=auto_length,
        utilization=_share(command, version),
        tensor=_count(command, "--tensor-parallel-size"),
        pipeline=_count(command, "--pipeline-parallel-size"),
        data=_count(command, "--data-parallel-size"),
        block=_whole(command, "--block-size") or (_CPU_BLOCK if cpu else _BLOCK),
        batched_tokens=_batched_tokens(command, version, gpu, length),
        sequences=_whole(command, "--max-num-seqs") or _default("--max-num-seqs", version, gpu, 1024),
        kv_dtype=command.get("--kv-cache-dtype") or "auto",
        float32=command.get("--dtype") in ("float32", "float"),
        quantization=command.get("--quantization") or "",
        kv_cache_bytes=_kv_cache_bytes(command, cpu),
        blocks=_whole(command, "--num-gpu-blocks-override"),
        offload=int(_number(command, "--cpu-offload-gb") * GIB),
        eager=bool(command.switched("--enforce-eager")) or cpu,
        graphs_in_budget=_graphs_in_budget(command, number),
        hybrid=number >= (0, 9, 1) and not command.switched("--disable-hybrid-kv-cache-manager") and not cpu,
        cpu=cpu,
        text_only=bool(command.switched("--language-model-only")),
        allows_overlong=_allows_overlong(command),
        uncounted=tuple(dict.fromkeys(_uncounted(command, model))),
        savings=tuple(_savings(command)),
        capability=capability(gpu.name),
        expert_parallel=bool(command.switched("--enable-expert-parallel")),
    )


def _mentions(command: Command, flag: str) -> bool:
    """Whether a flag is given, whole or by one of its keys, and not switched off."""
    return any(given.name == flag and " ".join(given.values) != _OFF.get(flag) for given in command.given)


def _allows_overlong(command: Command) -> bool:
    changed = _mentions(command, "--hf-overrides") or _mentions(command, "--rope-scaling")
    return changed or command.environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"


def _uncounted(command: Command, model: Model) -> Iterator[str]:
    yield from (why for flag, why in _UNCOUNTED.items() if _mentions(command, flag))
    if any(_REDUNDANT.search(f"{given.spelled} {' '.join(given.values)}") for given in command.given):
        yield "redundant experts"
    if any(model.windows) and 0 in model.windows and _mentions(command, "--kv-transfer-config"):
        yield "whether layers keep their windows with the connector of --kv-transfer-config"  # not all support it
    if model.unquantized.unread:
        yield f"what the files leave unquantized by {model.unquantized.unread[0][:60]!r}"


def _savings(command: Command) -> Iterator[str]:
    yield from (why for flag, why in _SAVINGS.items() if _mentions(command, flag))
    if PARTITION in command.environment and _count(command, "--pipeline-parallel-size") > 1:
        yield f"how {PARTITION} divides the layers"


def _length(command: Command, model: Model) -> tuple[int, bool]:
    given = command.get("--max-model-len")
    if given in ("auto", "-1"):
        return model.usual, True
    return (size(given, "--max-model-len", most=2**30), False) if given is not None else (model.usual, False)


def _whole(command: Command, flag: str) -> int | None:
    given = command.get(flag)
    return None if given is None else size(given, flag, most=MOST_TOKENS)


def _count(command: Command, flag: str) -> int:
    given = _whole(command, flag) or 1
    if given > 2**12:
        raise BadUsage(f"{flag} {given} is more than any server has")
    return given


def _number(command: Command, flag: str) -> float:
    given = command.get(flag)
    try:
        value = float(given) if given is not None else 0.0
    except ValueError:
        value = -1.0
    if not 0 <= value < 2**20:
        raise BadUsage(invalid(flag, str(given), "a size in GiB"))
    return value


def _share(command: Command, version: str) -> float:
    given = command.get("--gpu-memory-utilization")
    if given is None:
        return default("--gpu-memory-utilization", version) or 0.92
    try:
        value = float(given)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise BadUsage(invalid("--gpu-memory-utilization", given, "a number above 0 and up to 1"))
    return value


def _default(flag: str, version: str, gpu: GpuSpec, worst: int) -> int:
    """The release's default; the largest of all where it depends on what is not known."""
    return int(default(flag, version, gpu.total, gpu.name) or worst)


def _batched_tokens(command: Command, version: str, gpu: GpuSpec, length: int) -> int:
    given = _whole(command, "--max-num-batched-tokens")
    if given is not None:
        return given
    chunked = command.switched("--enable-chunked-prefill")
    usual = _default("--max-num-batched-tokens", version, gpu, 8192)
    is_whole_prompt = chunked is False or (release(version) < (0, 8, 0) and not chunked and length <= 2**15)
    return max(length, 2048) if is_whole_prompt else usual


def _kv_cache_bytes(command: Command, cpu: bool) -> int | None:
    given = command.get("--kv-cache-memory-bytes")
    if given is not None:
        return size(given, "--kv-cache-memory-bytes")
    space = command.environment.get(CPU_SPACE) if cpu else None
    return size(f"{space}GiB", CPU_SPACE) if space else None


def _graphs_in_budget(command: Command, number: tuple[int, ...]) -> bool:
    estimates = command.environment.get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS")
    return estimates == "1" if estimates in ("0", "1") else number >= (0, 20, 0)
