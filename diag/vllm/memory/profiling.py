"""Memory that vLLM measures when it starts: the profiling run, CUDA graphs, and buffers outside torch.

Each estimate is a central figure with bounds, and the reason for the distance of the bounds. The mechanisms are those
of vLLM's source, release by release; a constant that the source cannot give names the logs that it was fitted on.
"""

from collections.abc import Mapping
from typing import NamedTuple

from diag.core.formatting import GIB
from diag.vllm.flags.registry import release
from diag.vllm.memory.architectures import stem
from diag.vllm.memory.model import Model
from diag.vllm.memory.setup import Setup
from diag.vllm.memory.usage import ByteRange
from diag.vllm.memory.weights import feed_forward_width, has_head

_MIB = 2**20


class Estimate(NamedTuple):
    """A size with its bounds; `why` is the reason why the bounds are apart."""

    size: ByteRange
    why: str = ""


def _is_hybrid(model: Model) -> bool:
    return any(mixer.kind == "state" for layer in model.stack for mixer in layer.mixers)


_V2_FIRST: Mapping[tuple[int, int, int], frozenset[str]] = {
    (0, 22, 0): frozenset({"Qwen3ForCausalLM"}),
    (0, 23, 0): frozenset({"Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"}),
}
_V2_MIXTURES = frozenset({"DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM"})
_V2_MORE = frozenset({"DeepseekV4ForCausalLM", "KimiK3ForConditionalGeneration", "LongcatFlashNgramForCausalLM"})


def uses_runner_v2(model: Model, setup: Setup) -> bool:
    """Return True if vLLM runs a model with Model Runner V2 unless told otherwise (config/vllm.py of each release)."""
    version, name, is_dense = release(setup.version), model.architecture, not model.experts
    if version >= (0, 32, 0):
        return True
    if version >= (0, 25, 0):
        named = _V2_MIXTURES | (_V2_MORE if version >= (0, 28, 0) else frozenset())
        return name in named or (is_dense and not _is_hybrid(model))
    if version >= (0, 24, 0):
        return name in _V2_FIRST[0, 23, 0] | _V2_MIXTURES
    first = next((names for since, names in reversed(list(_V2_FIRST.items())) if version >= since), frozenset[str]())
    return name in first and is_dense and not model.quantization


# -- the profiling run ------------------------------------------------------------------------------------------------

SORTED = 38
"""Bytes of a logit if torch sorts: 2 as computed, 4 in float32, 12 sorted with indices, 20 of torch.sort's own."""
MASKED = 14
"""Bytes of a logit in FlashInfer's or Triton's kernels: 2, 4 in float32, 4 masked, 4 as a probability."""
PLAIN = 6
"""Bytes of a logit in Model Runner V2, whose profiling run skips top-k and top-p (gpu/model_runner.py)."""
_TRITON, _TRITON_ROWS = (0, 17, 0), 132
"""First release whose top-k runs in Triton, with a row of logits for each multiprocessor (topk_topp_triton.py)."""
_BY_ITSELF, _OPT_IN, _FLASHINFER = (0, 9, 0), (0, 11, 1), 8.0
"""Releases that sample with FlashInfer where it is installed, which their packages leave to the user; since the latter
they do with VLLM_USE_FLASHINFER_SAMPLER=1 only. Least compute capability of FlashInfer."""
_HIDDEN_COPIES = 5
"""Streams of the hidden size that live beside a layer's products: residual, normed, queries, keys and output of
attention. Fitted on 1.97 GiB for Llava 1.5 7B in steps of 16,384 tokens (vLLM 0.10.2, H100)."""
_WORKSPACES = (0, 10, 0)
"""First release whose experts have two workspaces of the hidden size (fused_moe/modular_kernel.py)."""
_FORWARD_ERROR, _EXPERTS_ERROR = (0.75, 1.4), (0.3, 1.6)
_COMPILED, _COMPILE_ERROR = (0, 24, 0), 1.2
"""First release with logs in which torch.compile adds a copy of the embedding to the peak, unless its cache has the
model from an earlier start: Qwen3 8B had 1.18 and 0.19 GiB with 0.27.1, where the embedding has 1.16 and a step 0.22
(36,992 and 43,888 tokens of KV cache with 0.24.0). Inductor measures combined kernels on arguments of their full
size. Models with encoders get vectors instead of tokens, so that the embedding is not compiled."""


def _logit_bytes(model: Model, setup: Setup) -> tuple[float, float, float, str]:
    """Return the bytes that the sampler takes for a logit: least, likely and most, and why they differ."""
    version = release(setup.version)
    if uses_runner_v2(model, setup):
        return PLAIN, PLAIN, MASKED, ""
    if version >= _TRITON:
        return MASKED, MASKED, MASKED, ""
    runs_flashinfer = not setup.is_amd and (not setup.capability or setup.capability >= _FLASHINFER)
    if setup.flashinfer and runs_flashinfer:
        return MASKED, MASKED, MASKED, ""
    if version >= _OPT_IN or setup.flashinfer is False or not runs_flashinfer:
        return SORTED, SORTED, SORTED, ""
    if version < _BY_ITSELF:
        return 0, SORTED, SORTED, f"vLLM {setup.version} has two engines, and the older one may sample nothing"
    why = f"vLLM {setup.version} sorts all logits unless FlashInfer is installed"
    return MASKED, (MASKED + SORTED) / 2, SORTED, why


def _forward(model: Model, setup: Setup) -> float:
    """Return the peak bytes of a step of --max-num-batched-tokens in one layer.

    A dense layer holds the two products of gate and up beside their product. Experts have two workspaces with a row for
    each expert that a token goes to (fused_moe, workspace_shapes), which stay when the layer ends.
    """
    hidden, experts = model.hidden, model.experts
    dense = 3 * feed_forward_width(model) / setup.tensor
    if experts:
        width = experts.width / (1 if setup.expert_parallel else setup.tensor)
        inner = width if release(setup.version) < _WORKSPACES else max(width, hidden)
        routed = experts.active * (inner + max(2 * width, hidden)) + hidden
        dense = max(dense, routed)
    number = 4 if setup.float32 else 2
    return setup.batched_tokens * number * (dense + _HIDDEN_COPIES * hidden)


def _compiled(model: Model, setup: Setup) -> int:
    """Return the peak bytes of a start that compiles the model; 0 if compiling takes no more than a step."""
    is_whole = not model.encoders or setup.text_only
    if setup.eager or not is_whole or release(setup.version) < _COMPILED:
        return 0
    number = 4 if setup.float32 else 2
    return (model.vocabulary // setup.tensor + setup.batched_tokens) * model.hidden * number


def activations(model: Model, setup: Setup) -> Estimate:
    """Estimate the peak memory of the profiling run: a step of --max-num-batched-tokens, then sampling.

    The larger of both counts. Samples are taken for --max-num-seqs requests, beside the hidden states of the step. If
    compiling takes more, that is the likely peak: the first start on a host finds no compiled model. In large steps the
    encoders' memory may still be held when the step has its peak.
    """
    number = 4 if setup.float32 else 2
    samples = not setup.pooling and has_head(model)
    logits = min(setup.sequences, setup.batched_tokens) * model.vocabulary if samples else 0
    states = setup.batched_tokens * model.hidden * number
    forward = _forward(model, setup)
    low, likely, high, why = _logit_bytes(model, setup)
    rows = _TRITON_ROWS * model.vocabulary * 4 if release(setup.version) >= _TRITON and likely == MASKED else 0
    encoder = encoder_peak(model, setup)
    least, most = _EXPERTS_ERROR if model.experts else _FORWARD_ERROR
    usual, compiled = max(forward, states + likely * logits + rows, encoder.central), _compiled(model, setup)
    largest = max(forward * most, states + high * logits + rows, compiled * _COMPILE_ERROR)
    is_large = setup.batched_tokens >= _LARGE_STEP
    peak = ByteRange(
        round(max(forward * least, states + low * logits, encoder.low)),
        round(largest + encoder.high if is_large else max(largest, encoder.high)),
        round(max(usual, compiled)),
    )
    if compiled > usual:
        why = "a start that finds the model in torch.compile's cache needs less than one that compiles it"
    elif (2 if is_large else 1) * encoder.high >= peak.high:
        why = "how many patches the vision encoder is profiled with depends on files that config.json does not have"
        if _has_long_video(model, setup):
            why = f"vLLM {setup.version} profiles a video of {_LONG_VIDEO:,} tokens unless the launch allows no video"
    return Estimate(peak, why or "the peak of a step is estimated from the model's shape")


# -- encoders of images -----------------------------------------------------------------------------------------------

_LARGEST_ITEM = 16_384
"""Tokens of the largest image in models of any resolution: max_pixels of Qwen's preprocessors, 28 x 28 or 32 x 32."""
_ENCODER_ERROR = 0.5, 2.2
_LARGE_STEP = 16_384
"""Tokens of a step from which the peaks of encoders and of the step may add up: 20.4 GiB were gone for Gemma 3 27B in
steps of 16,384 (vLLM 0.11.2, B200); in smaller steps no log needs the sum."""
_LONG_VIDEO, _LONG_VIDEO_END, _WITH_LONG_VIDEO = 153_600, (0, 11, 1), frozenset({"qwen3vl", "qwen3vlmoe"})
"""Tokens of the video with which releases before that profile these models, unless the launch allows no video: about 10
GB for Qwen3-VL 8B (https://github.com/vllm-project/vllm/issues/27992), 4 GiB on each of four GPUs for the 30B."""


def encoder_peak(model: Model, setup: Setup) -> ByteRange:
    """Estimate the peak memory of the encoders, which are profiled with as many images as a step has tokens for.

    A patch holds the product of the wide matrix and about five numbers of the hidden size: 1.21 GiB was logged for
    Qwen3.8 27B (65,536 patches of 1,152 and 4,304 numbers, vLLM 0.28 and 0.29). Tensor parallelism divides the product,
    queries, keys and values.
    """
    is_out = setup.text_only or setup.skips_encoder
    likely, longest = (
        max((_patches_peak(model, setup, one, tokens) for one in model.encoders.values() if not is_out), default=0)
        for tokens in (_LARGEST_ITEM, _LONG_VIDEO)
    )
    least, most = _ENCODER_ERROR
    high = max(round(most * likely), longest if _has_long_video(model, setup) else 0)
    return ByteRange(round(least * likely), high, likely)


def _has_long_video(model: Model, setup: Setup) -> bool:
    return release(setup.version) < _LONG_VIDEO_END and stem(model.architecture) in _WITH_LONG_VIDEO


def _patches_peak(model: Model, setup: Setup, fields: Mapping[str, object], largest: int) -> int:
    def size(name: str, default: int = 0) -> int:
        value = fields.get(name)
        return value if isinstance(value, int) and 0 < value < 2**20 else default

    hidden = size("embed_dim") or size("hidden_size") or size("d_model")
    width, image = size("intermediate_size") or 4 * hidden, size("image_size")
    outer = model.config.get("spatial_merge_size")
    merge = size("spatial_merge_size") or (outer if isinstance(outer, int) else 1)
    if image:  # of one resolution
        patches = (image // size("patch_size", 14)) ** 2
        tokens = model.config.count("mm_tokens_per_image") or patches // merge**2
        patches *= max(setup.batched_tokens // max(tokens, 1), 1)
    else:
        patches = max(setup.batched_tokens, largest) * merge**2
    return 2 * patches * (2 * hidden + (width + 3 * hidden) // setup.tensor)


# -- CUDA graphs ------------------------------------------------------------------------------------------------------

_MOST_CAPTURED = 512
_ESTIMATED_V2 = (0, 29, 0)
"""First release that estimates graphs of Model Runner V2; before it counts none
(https://github.com/vllm-project/vllm/issues/49224)."""
_LAYER_GRAPH_V2 = 0.38 * _MIB
"""One layer of a full graph in the estimate of Model Runner V2: about 0.44 GiB for 35 graphs of Llama 3.1 8B and 0.35
for Qwen2.5 1.5B, if the rest of the logged peaks is what compiling takes (vLLM 0.31)."""
_FULL_GRAPH_RECURRENT, _TRANSIENT = 24 * _MIB, (0, 26, 0)
"""One full graph of a model with recurrent layers since 0.26
(https://github.com/vllm-project/vllm/issues/50780): 1.11 GiB for 35 of them in logs of Qwen3.8 27B."""
_GRAPH_BASE, _PIECEWISE_GRAPH, _FULL_GRAPH = 300 * _MIB, 4 * _MIB, 6 * _MIB
"""The estimate of Model Runner V1: fitted on 0.31 to 0.79 GiB in eleven logs with 51 + 35, 35 + 19, 5 + 4 and 1 + 1
graphs (vLLM 0.18 - 0.26)."""
_GRAPH_ERROR = 0.3, 2.2
CAPTURED_GIB = 0.1, 2.0, 0.5
"""Captured graphs that are not counted: 0.23 (8B), 0.37 (0.6B), 0.67 (7B), 1.62 estimated (35B MoE)."""


def captured_sizes(most: int) -> int:
    """Return the number of batch sizes up to `most` that vLLM captures: 1, 2, 4, steps of 8 to 256, steps of 16."""
    return sum(size <= most for size in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)))


def graphs(model: Model, setup: Setup) -> Estimate:
    """Estimate the CUDA graphs: what vLLM subtracts from the KV cache if it counts them, else what it captures."""
    if not setup.graphs_in_budget:
        low, high, likely = (round(gib * GIB) for gib in CAPTURED_GIB)
        return Estimate(ByteRange(low, high, likely))
    if setup.captured == 0:
        return Estimate(ByteRange(0, 0, 0))
    most = setup.captured or min(2 * setup.sequences, _MOST_CAPTURED)
    piecewise, full = captured_sizes(most), captured_sizes(min(most, setup.sequences))
    version, is_v2 = release(setup.version), uses_runner_v2(model, setup)
    if is_v2 and version < _ESTIMATED_V2:
        return Estimate(ByteRange(0, _GRAPH_BASE, 0), "Model Runner V2 counts no graphs before 0.29.0")
    if _is_hybrid(model) and version >= _TRANSIENT:
        size = _GRAPH_BASE + full * _FULL_GRAPH_RECURRENT
    elif is_v2:
        size = round(full * model.layers * _LAYER_GRAPH_V2)
    else:
        size = _GRAPH_BASE + piecewise * _PIECEWISE_GRAPH + full * _FULL_GRAPH
    least, most_size = (round(size * error) for error in _GRAPH_ERROR)
    return Estimate(ByteRange(least, most_size, size), "vLLM extrapolates CUDA graphs from two that it captures")


# -- outside torch ----------------------------------------------------------------------------------------------------

_CONSUMED = (0, 27, 0)
"""First release that counts all memory that is gone since the start, with the runner's buffers and workspaces."""
_AFTER_NCCL = (0, 11, 1)
"""First release that looks at the free memory after NCCL has started, so that NCCL is not counted."""
_SINGLE = (0.0, 0.55, 0.07)
"""One GPU up to 0.26: 0.02 to 0.07 in logs of 0.10.2 - 0.25, 0.26 with a vision encoder, 0.5 on a workstation."""
_SINGLE_ROCM = (0.0, 1.2, 0.5)
"""One GPU of AMD up to 0.26: 0.26 and 0.94 with the MI300X in two starts of 0.17.1."""
_SINGLE_CONSUMED = (0.2, 0.7, 0.32)
"""One GPU since 0.27: 0.26 to 0.33 in six logs of 0.27 - 0.31, 0.56 in two of Qwen3.8 27B."""
_SHARED_WITH_HOST, _CACHED_FILES = (0.3, 5.0, 1.7), (0.0, 0.1, 0.07)
"""A GPU without memory of its own, where the memory of the server's processes counts too, and a share of the weights,
whose files stay in the host's page cache: 2.2 GiB with 1 GiB of weights, 1.7 with 14, 5.0 and 6.4 with 51 (GB10, vLLM
0.13 and 0.27.1)."""
_NVLINK_NCCL, _PCIE_NCCL = (0.3, 1.9, 0.8), (0.1, 0.5, 0.25)
"""Several GPUs up to 0.11.0: 1.38 for two H200, 1.84 for four H100; 0.21 and 0.30 for eight and two L40S."""
_NVLINK, _PCIE = (0.1, 1.2, 0.5), (0.05, 0.5, 0.15)
"""Several GPUs from 0.11.1 to 0.26: 0.95 for four GB200; 0.09 for two L40S."""
_OLDER_NVLINK, _OLDER_NVLINK_LATER = (0.1, 1.5, 0.4), (0.05, 1.0, 0.3)
"""Several GPUs before Hopper, which have no symmetric memory (symm_mem.py): 0.13 for two A100 without peer access."""
_PARALLEL_CONSUMED = (0.3, 1.8, 0.7)
"""Several GPUs since 0.27: 1.70 for four RTX PRO 6000, 1.74 for eight H200, of which about 1.0 are experts' workspaces,
which are in the profiling run here."""
_WITH_NVLINK, _SYMMETRIC, _INTEGRATED = (7.0, 8.0, 9.0, 10.0, 10.3), 9.0, (11.0, 12.1)
"""Compute capabilities: of GPUs with NVLink, of the first with symmetric memory, and of GPUs without own memory."""


def non_torch(setup: Setup, weights: int = 0) -> Estimate:
    """Estimate the memory outside torch: the libraries' buffers, and since 0.27 all buffers beside the weights.

    `weights` are the bytes of the weights, whose files a host that shares its memory with the GPU may cache.
    """
    version = release(setup.version)
    is_shared = setup.capability in _INTEGRATED
    if is_shared:
        cached = (share * weights / GIB for share in _CACHED_FILES)
        bounds = tuple(map(sum, zip(_SHARED_WITH_HOST, cached, strict=True)))
    elif setup.gpus * setup.data == 1:
        bounds = _SINGLE_CONSUMED if version >= _CONSUMED else _SINGLE_ROCM if setup.is_amd else _SINGLE
    elif version >= _CONSUMED:
        bounds = _PARALLEL_CONSUMED
    else:
        has_nvlink = setup.capability in _WITH_NVLINK
        counted, left = (_NVLINK_NCCL, _NVLINK) if has_nvlink else (_PCIE_NCCL, _PCIE)
        if has_nvlink and setup.capability < _SYMMETRIC:
            counted, left = _OLDER_NVLINK, _OLDER_NVLINK_LATER
        bounds = left if version >= _AFTER_NCCL else counted
    low, high, likely = (round(gib * GIB) for gib in bounds)
    why = "buffers between GPUs depend on their links" if setup.gpus * setup.data > 1 else ""
    if is_shared:
        why = "the GPU shares its memory with the host, whose other uses count too"
    return Estimate(ByteRange(low, high, likely), why)
