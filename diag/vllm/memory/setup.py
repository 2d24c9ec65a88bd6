"""The settings of a command that determine its memory, with defaults filled in; and the settings that vLLM refuses."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from diag.core.errors import BadUsage
from diag.core.formatting import GIB, parse_size
from diag.vllm.command import redaction
from diag.vllm.command.command import Command
from diag.vllm.devices import lacking
from diag.vllm.flags.registry import default, release, since, versions
from diag.vllm.gpus import capability, is_amd, is_part
from diag.vllm.memory.additions import Adapters, Draft, adapters, draft
from diag.vllm.memory.architectures import removed, stem
from diag.vllm.memory.model import Model
from diag.vllm.memory.quantization import block_size, group_size
from diag.vllm.memory.weights import feed_forward_width, has_head

MOST, MOST_TOKENS = 2**42, 2**26
"""Most bytes of a memory, and most tokens or requests of a step: a larger value is a typing error."""
_UNCOUNTED: Mapping[str, str] = {
    "--quantization-param-path": "the scales of --quantization-param-path",
    "--rope-scaling": "what --rope-scaling changes",
}
"""Flags that take memory that is not computed."""
_SAVINGS: Mapping[str, str] = {
    "--hf-overrides": "what --hf-overrides changes",
    "--decode-context-parallel-size": "decode context parallelism",
    "--offload-group-size": "weights that --offload-group-size keeps in host memory",
}
"""Flags that may save some of the computed memory."""
_OF_THE_HEAD = {"architectures", "classifier_from_token", "is_original_qwen3_reranker"}
"""Overrides of the head alone, which turn a reranker's head for tokens into one for scores."""
_OFF = {"--decode-context-parallel-size": "1", "--offload-group-size": "0"}
_REDUNDANT = re.compile(r"num[-_]redundant[-_]experts\W*[1-9]")
PARTITION, CPU_SPACE = "VLLM_PP_LAYER_PARTITION", "VLLM_CPU_KVCACHE_SPACE"
FLASHINFER = "VLLM_USE_FLASHINFER_SAMPLER"
CHUNKS = "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"
_CPU_BLOCK, _BLOCK = 128, 16
_CPU_DEFAULTS = {"--max-num-batched-tokens": 2048, "--max-num-seqs": 128}
"""Defaults of `vllm serve` on a CPU (engine/arg_utils.py)."""


@dataclass(frozen=True)
class GpuSpec:
    """One GPU: its memory in bytes as CUDA counts it, None if it is unknown, and its name."""

    total: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Setup:
    """The settings of a server; sizes are in bytes.

    `length` is --max-model-len, `auto_length` is True if vLLM chooses it, `allows_overlong` if it may exceed the
    model's own. `kv_cache_bytes` and `blocks` fix the size of the KV cache; `free` is the free memory at the start,
    by the log. `graphs_in_budget` is True if CUDA graphs count against the budget (0.20.0 and later).
    `expert_parallel` keeps each expert whole on one GPU. `hybrid` is True if layers with a window drop what is
    before it, `hybrid_chunks` if layers with chunks do. `prefix_caching` is True if layers that keep a state keep
    it for later prompts too, as `mamba_mode` says; `state_type` and `mamba_type` are types of states, "" for the
    model's. `capability` is the GPU's in CUDA, 0 if it is unknown. `default_sequences` is True if the launch names
    no --max-num-seqs. `captured` is the largest batch in a CUDA graph, 0 for none, None for the default;
    `full_graphs` is True if steps that only decode are captured whole; `skips_encoder` is True if the profiling run
    leaves the encoders out; `flashinfer` is True or False if the launch chooses the sampler; `pooling` is True if
    requests end in vectors instead of tokens; `is_part` is True for a part of a GPU. `refused` says what the GPU lacks
    of the launch, `removed` that the release lacks the architecture. `uncounted` names memory
    that is in no row, `savings` names what may reduce a row.
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
    default_sequences: bool = False
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
    hybrid_chunks: bool = False
    prefix_caching: bool = True
    mamba_mode: str = ""
    state_type: str = ""
    mamba_type: str = ""
    cpu: bool = False
    text_only: bool = False
    allows_overlong: bool = False
    uncounted: tuple[str, ...] = ()
    savings: tuple[str, ...] = ()
    capability: float = 0
    expert_parallel: bool = False
    captured: int | None = None
    full_graphs: bool = True
    skips_encoder: bool = False
    flashinfer: bool | None = None
    pooling: bool = False
    adapters: Adapters | None = None
    draft: Draft | None = None
    is_amd: bool = False
    is_part: bool = False
    refused: str = ""
    removed: str = ""

    @property
    def in_flight(self) -> int:
        """Return the tokens that may be in flight: two steps of them since scheduling is asynchronous."""
        steps = 2 if self.since("steps_in_flight") and not self.cpu else 1  # platforms/cpu.py
        return max(steps, self.pipeline) * self.batched_tokens

    @property
    def gpus(self) -> int:
        """Return the number of GPUs that share the work of one replica."""
        return self.tensor * self.pipeline

    @property
    def number_bytes(self) -> int:
        """Return the bytes of a number that is not quantized."""
        return 4 if self.float32 else 2

    def since(self, change: str) -> bool:
        """Return True if the release has a change of changes.toml."""
        return since(self.version, change)


def invalid(what: str, text: str, expected: str) -> str:
    """Return the sentence about an invalid value, without secrets."""
    value = redaction.number(text)
    return f"invalid value for {what}{f': {value}' if value else ''} (expected {expected})"


def size(text: str, what: str, least: int = 1, most: int = MOST) -> int:
    """Read a number with a unit, 32k or 79.1GiB, as a whole number; BadUsage if it is none, or absurd."""
    number = parse_size(text) or 0
    if not least <= number <= most:
        bounds = f"{least / GIB:g} to {most / GIB:g} GiB" if least >= GIB else f"{least} to {most}"
        raise BadUsage(invalid(what, text, f"a size such as 32768, 32k or 79.1GiB, from {bounds}"))
    return int(number)


def setup(command: Command, model: Model, gpu: GpuSpec, version: str = "") -> Setup:
    """Return the setup of a command, with the defaults of the release, without one of the newest release."""
    version = version or versions()[-1]
    if not release(version):
        named = redaction.name(version)[:40]
        raise BadUsage(f"invalid value for --vllm-version: {named!r} (expected a vLLM release such as 0.32.0)")
    cpu = CPU_SPACE in command.environment or gpu.name == "cpu"
    text = command.get("--max-model-len")
    auto_length = text in ("auto", "-1")
    length = model.usual if text is None or auto_length else size(text, "--max-model-len", most=2**30)

    fixed, space, kv_cache_bytes = command.get("--kv-cache-memory-bytes"), command.environment.get(CPU_SPACE), None
    if fixed is not None:
        kv_cache_bytes = size(fixed, "--kv-cache-memory-bytes")
    elif cpu and space:
        kv_cache_bytes = size(f"{space}GiB", CPU_SPACE)

    flag, expected = "--gpu-memory-utilization", "a number above 0 and up to 1"
    share = _number(command, flag, default(flag, version) or 0.92, lambda share: 0 < share <= 1, expected)
    tensor, pipeline, data = (_count(command, f"--{kind}-parallel-size") for kind in ("tensor", "pipeline", "data"))
    drafting, unknown = draft(command, model, tensor, version)
    limits = {str(limit) for limit in command.keys("--limit-mm-per-prompt").values()}  # no items: no encoder is loaded
    is_on = {flag: bool(command.switched(flag)) for flag in _SWITCHES}
    level, dtype = capability(gpu.name), command.get("--dtype")
    planned = Setup(
        version=version,
        total=gpu.total,
        length=length,
        auto_length=auto_length,
        utilization=share,
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        block=_whole(command, "--block-size") or (_CPU_BLOCK if cpu and not model.latent else _BLOCK),
        batched_tokens=_batched_tokens(command, version, gpu, length),
        default_sequences=command.get("--max-num-seqs") is None,
        sequences=_whole(command, "--max-num-seqs") or _default("--max-num-seqs", version, gpu, 1024),
        float32=dtype in ("float32", "float") or (dtype in (None, "auto") and lacks_half(model, level)),
        quantization=command.get("--quantization") or "",
        kv_cache_bytes=kv_cache_bytes,
        blocks=_whole(command, "--num-gpu-blocks-override"),
        offload=int(_number(command, "--cpu-offload-gb", 0, lambda gib: 0 <= gib < 2**20, "a size in GiB") * GIB),
        eager=is_on["--enforce-eager"] or cpu,
        cpu=cpu,
        text_only=is_on["--language-model-only"] or limits == {"0"},
        pooling=_pools(command, model),
        skips_encoder=is_on["--skip-mm-profiling"],
        uncounted=tuple(dict.fromkeys((*filter(None, (unknown,)), *_uncounted(command, model)))),
        capability=level,
        expert_parallel=is_on["--enable-expert-parallel"],
        captured=_captured(command),
        full_graphs=_graph_mode(command) not in ("NONE", "PIECEWISE"),
        adapters=adapters(command),
        draft=drafting,
        is_amd=is_amd(gpu.name),
        is_part=is_part(gpu.name),
        refused=next((lacks for _, lacks in lacking(command, _method(model), gpu.name, version)), ""),
        removed=_removed(command, model, version),
    )
    return _completed(planned, command)


def _method(model: Model) -> str:
    return str((model.quantization or {}).get("quant_method", "")).lower()


def _removed(command: Command, model: Model, version: str) -> str:
    """Return what of a model a release no longer has, its architecture or its method, with the last that had it."""
    for name in (model.architecture, _method(model), command.get("--quantization") or ""):
        last, mark, _ = removed().get(name, version).partition("+")
        was_there = last != "never"
        if not was_there or release(version) > release(last):
            served = f"{last} is the last release that serves" if was_there else "no release is known that serves"
            instead = "; whether it starts with the code of Transformers instead is not known" if mark else ""
            return f"vLLM {version} has no {name}: {served} the model{instead}"
    return ""


_BFLOAT16 = 8.0
_NO_FLOAT16 = ("gemma2", "gemma3", "gemma3text", "glm4")
"""Architectures that vLLM refuses to run in float16 (`_FLOAT16_NOT_SUPPORTED_MODELS`, config/model.py)."""


def lacks_half(model: Model, level: float) -> bool:
    """Return True if vLLM takes float32: a GPU of that compute capability has no bfloat16, and the model no float16."""
    return 0 < level < _BFLOAT16 and stem(model.architecture) in _NO_FLOAT16


_SWITCHES = ("--enforce-eager", "--language-model-only", "--skip-mm-profiling", "--enable-expert-parallel")


def _completed(planned: Setup, command: Command) -> Setup:
    """Return a setup with what variables and flags say that change the model or what a server keeps of a request."""
    environment = command.environment
    estimates = environment.get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS")
    is_changed = _mentions(command, "--hf-overrides") or _mentions(command, "--rope-scaling")
    savings = [why for flag, why in _SAVINGS.items() if _mentions(command, flag)]
    overrides = command.keys("--hf-overrides")
    if overrides and overrides.keys() <= _OF_THE_HEAD:
        savings.remove(_SAVINGS["--hf-overrides"])
    if PARTITION in environment and planned.pipeline > 1:
        savings.append(f"how {PARTITION} divides the layers")
    is_hybrid = planned.since("hybrid_cache") and not command.switched("--disable-hybrid-kv-cache-manager")
    prefixes = command.switched("--enable-prefix-caching")
    return replace(
        planned,
        graphs_in_budget=estimates == "1" if estimates in ("0", "1") else planned.since("graphs_in_budget"),
        allows_overlong=is_changed or environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1",
        savings=tuple(savings),
        flashinfer={"0": False, "1": True}.get(environment.get(FLASHINFER, "")),
        kv_dtype=command.get("--kv-cache-dtype") or "auto",
        hybrid=is_hybrid and (not planned.cpu or planned.since("cpu_windows")),
        hybrid_chunks=environment.get(CHUNKS) == "1",
        prefix_caching=planned.since("hybrid_prefixes") if prefixes is None else prefixes,
        mamba_mode=command.get("--mamba-cache-mode") or "",
        state_type=(command.get("--mamba-ssm-cache-dtype") or "").replace("auto", ""),
        mamba_type=(command.get("--mamba-cache-dtype") or "").replace("auto", ""),
    )


_POOLING_TASKS = ("embed", "embedding", "classify", "score", "reward")


def _pools(command: Command, model: Model) -> bool:
    """Return True if requests end in vectors: as the launch says, else by the model (config/model.py)."""
    runner, task = command.get("--runner"), command.get("--task")
    if runner not in (None, "auto") or task not in (None, "auto"):
        return runner == "pooling" or task in _POOLING_TASKS
    return not has_head(model) or not model.keeps_tokens


_LEVEL_MODES = {"0": "NONE", "1": "PIECEWISE"}
"""Modes of CUDA graphs by --optimization-level (config/vllm.py); a higher one captures decoding steps whole."""


def _graph_mode(command: Command) -> str:
    """Return the mode of CUDA graphs, "NONE" or "PIECEWISE"; "" for the default."""
    mode = command.keys("--compilation-config").get("cudagraph_mode")
    return str(mode or _LEVEL_MODES.get(command.get("--optimization-level") or "", "")).upper()


def _captured(command: Command) -> int | None:
    """Return the largest batch in a CUDA graph, 0 for none; None for the default."""
    keys = command.keys("--compilation-config")
    if _graph_mode(command) == "NONE":
        return 0
    most = command.get("--max-cudagraph-capture-size") or keys.get("max_cudagraph_capture_size")
    sizes = keys.get("cudagraph_capture_sizes")
    if isinstance(sizes, list) and sizes and all(isinstance(one, int) for one in sizes):
        return int(max(sizes))
    return size(str(most), "--max-cudagraph-capture-size", least=0, most=MOST_TOKENS) if most is not None else None


def _mentions(command: Command, flag: str) -> bool:
    """Return True if a flag is given, whole or by one of its keys, and not switched off."""
    return any(one.name == flag and " ".join(one.values) != _OFF.get(flag) for one in command.given)


def _uncounted(command: Command, model: Model) -> Iterator[str]:
    yield from (why for flag, why in _UNCOUNTED.items() if _mentions(command, flag))
    if any(_REDUNDANT.search(f"{one.spelled} {' '.join(one.values)}") for one in command.given):
        yield "redundant experts"
    if any(model.windows) and 0 in model.windows and _mentions(command, "--kv-transfer-config"):
        yield "whether layers keep their windows with the connector of --kv-transfer-config"  # not all support it
    if model.unquantized.unread:
        yield f"what the files leave unquantized by {model.unquantized.unread[0][:60]!r}"


def _whole(command: Command, flag: str) -> int | None:
    text = command.get(flag)
    return None if text is None else size(text, flag, most=MOST_TOKENS)


def _count(command: Command, flag: str) -> int:
    count = _whole(command, flag) or 1
    if count > 2**12:
        raise BadUsage(f"{flag} {count} is more than any server has")
    return count


def _number(command: Command, flag: str, usual: float, is_valid: Callable[[float], bool], expected: str) -> float:
    text = command.get(flag)
    try:
        value = usual if text is None else float(text)
    except ValueError:
        value = math.nan
    if not is_valid(value):
        raise BadUsage(invalid(flag, str(text), expected))
    return value


def _default(flag: str, version: str, gpu: GpuSpec, worst: int) -> int:
    """Return the release's default; the largest of all if it depends on something unknown."""
    if gpu.name == "cpu":
        worst = _CPU_DEFAULTS.get(flag, worst)
    return int(default(flag, version, gpu.total, gpu.name) or worst)


def _batched_tokens(command: Command, version: str, gpu: GpuSpec, length: int) -> int:
    tokens = _whole(command, "--max-num-batched-tokens")
    if tokens is not None:
        return tokens
    chunked = command.switched("--enable-chunked-prefill")
    usual = _default("--max-num-batched-tokens", version, gpu, 8192)
    is_whole_prompt = chunked is False or (not since(version, "usual_chunks") and not chunked and length <= 2**15)
    return max(length, 2048) if is_whole_prompt else usual


_LEAST_BLOCK = 32
"""The smallest block of fp8 experts in releases that cut them."""


def check(model: Model, setup: Setup) -> None:
    """Refuse a setup that vLLM refuses: BadUsage, with a value that works."""
    refused = f"vLLM refuses --tensor-parallel-size {setup.tensor}: it does not divide the model's"
    if model.heads % setup.tensor:
        sizes = [size for size in range(1, 65) if not model.heads % size and _divides_kv_heads(model, size)]
        raise BadUsage(f"{refused} {model.heads} attention heads; possible sizes: {', '.join(map(str, sizes))}")
    if not _divides_kv_heads(model, setup.tensor):
        raise BadUsage(f"{refused} {model.kv_heads} key-value heads")
    width = feed_forward_width(model)
    if not model.experts and width % setup.tensor:
        raise BadUsage(f"{refused} {width:,} feed-forward columns")

    if model.stack and setup.tensor * setup.data > 1:
        group = group_size(model.quantization or {})  # of awq, gptq and compressed-tensors
        attention = model.heads * (model.config.size("v_head_dim") if model.latent else model.head_dim)
        for inputs in (attention,) if model.experts else (attention, width):
            share = inputs // setup.tensor
            if group and group < inputs and share % group:
                raise BadUsage(_splits_scale(setup, f"{share:,} inputs of a matrix", f"groups of {group}"))

        block = block_size(model.quantization or {})  # of fp8 experts
        if model.experts and block and not setup.expert_parallel:
            share = model.experts.width // (setup.tensor * setup.data)
            is_cut = setup.since("finer_blocks") and math.gcd(block, share, model.hidden) >= _LEAST_BLOCK
            if share % block and not is_cut:
                raise BadUsage(_splits_scale(setup, f"{share:,} columns of an expert", f"blocks of {block}"))

    if setup.pipeline > model.layers > 0:
        raise BadUsage(f"--pipeline-parallel-size {setup.pipeline} is more than the model's {model.layers} layers")
    if setup.length > model.longest and not setup.allows_overlong:
        raise BadUsage(
            f"vLLM refuses --max-model-len {setup.length}: the model supports at most {model.longest} tokens"
        )


def _divides_kv_heads(model: Model, tensor: int) -> bool:
    """Return True if key-value heads can be divided, or each copied to equally many GPUs."""
    return bool(model.latent) or not (model.kv_heads % tensor and tensor % model.kv_heads)


def _splits_scale(setup: Setup, share: str, unit: str) -> str:
    flags = f"--tensor-parallel-size {setup.tensor}"
    flags += f" and --data-parallel-size {setup.data}" if setup.data > 1 else ""
    return f"{flags} cannot work with vLLM {setup.version}: {share} per GPU are no whole {unit}, which share a scale"
