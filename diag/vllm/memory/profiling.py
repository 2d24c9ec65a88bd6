"""Memory that vLLM measures when it starts: the profiling run, CUDA graphs, and buffers outside torch.

Each estimate is a central figure with bounds, and the reason for the distance of the bounds. The mechanisms are those
of vLLM's source, release by release; what the source cannot give is in estimates.toml, with the logs.
"""

from collections.abc import Mapping
from functools import cache

from diag.core.declarations import PACKAGE, read
from diag.core.formatting import GIB, MIB
from diag.vllm.flags.registry import release
from diag.vllm.memory.architectures import DEEP, is_gated, stem
from diag.vllm.memory.config import Config
from diag.vllm.memory.model import Model
from diag.vllm.memory.setup import Setup
from diag.vllm.memory.usage import ByteRange
from diag.vllm.memory.weights import feed_forward_width, has_head


@cache
def estimates() -> Mapping[str, tuple[float, ...]]:
    """Return the bounds that were fitted on logs, by name: least, most and likely."""
    return read(PACKAGE / "vllm" / "memory" / "estimates.toml", dict[str, tuple[float, ...]])


def _gib(name: str, why: str = "") -> ByteRange:
    return ByteRange.gib(estimates()[name], why)


_V2_FIRST: Mapping[tuple[int, int, int], frozenset[str]] = {
    (0, 22, 0): frozenset({"Qwen3ForCausalLM"}),
    (0, 23, 0): frozenset({"Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"}),
}
_V2_MIXTURES = frozenset({"DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM"})
_V2_MORE = frozenset({"DeepseekV4ForCausalLM", "KimiK3ForConditionalGeneration", "LongcatFlashNgramForCausalLM"})


def uses_runner_v2(model: Model, setup: Setup) -> bool:
    """Return True if vLLM runs a model with Model Runner V2 unless told otherwise (config/vllm.py of each release)."""
    version, name, is_dense = release(setup.version), model.architecture, not model.experts
    if setup.since("runner_v2"):
        return True
    if version >= (0, 25, 0):
        named = _V2_MIXTURES | (_V2_MORE if version >= (0, 28, 0) else frozenset())
        return name in named or (is_dense and not model.has_states)
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
_TRITON_ROWS = 132
"""Rows of logits in Triton's top-k."""
_FLASHINFER = 8.0
"""Least compute capability of FlashInfer."""
_HIDDEN_COPIES = 5
"""Streams of the hidden size that live beside a layer's products: residual, normed, queries, keys and output of
attention. Fitted on 1.97 GiB for Llava 1.5 7B in steps of 16,384 tokens (vLLM 0.10.2, H100)."""
_COMPILE_ERROR = 1.2
"""A start compiles unless torch.compile's cache has the model from an earlier one: Qwen3 8B had 1.18 and 0.19 GiB with
0.27.1, where the embedding has 1.16 and a step 0.22 (36,992 and 43,888 tokens of KV cache with 0.24.0). Inductor
measures combined kernels on arguments of their full size. Models with encoders get vectors instead of tokens, so that
the embedding is not compiled."""


def _logit_bytes(model: Model, setup: Setup) -> tuple[float, float, float, str]:
    """Return the bytes that the sampler takes for a logit: least, likely and most, and why they differ."""
    if uses_runner_v2(model, setup):
        return PLAIN, PLAIN, MASKED, ""
    if setup.since("triton_sampler"):
        return MASKED, MASKED, MASKED, ""
    runs_flashinfer = not setup.is_amd and (not setup.capability or setup.capability >= _FLASHINFER)
    if setup.flashinfer and runs_flashinfer:
        return MASKED, MASKED, MASKED, ""
    if setup.since("flashinfer_opt_in") or setup.flashinfer is False or not runs_flashinfer:
        return SORTED, SORTED, SORTED, ""
    if not setup.since("flashinfer_by_itself"):
        return 0, SORTED, SORTED, f"vLLM {setup.version} has two engines, and the older one may sample nothing"
    return MASKED, SORTED, SORTED, f"vLLM {setup.version} sorts all logits unless FlashInfer is installed"


def activations(model: Model, setup: Setup) -> ByteRange:
    """Estimate the peak memory of the profiling run: a step of --max-num-batched-tokens, then sampling.

    The larger of both counts. Samples are taken for --max-num-seqs requests, beside the hidden states of the step. If
    compiling takes more, that is the likely peak: the first start on a host finds no compiled model. In large steps the
    encoders' memory may still be held when the step has its peak.
    """
    hidden, experts, tokens = model.hidden, model.experts, setup.batched_tokens
    # a dense layer holds the two products of gate and up beside their product; experts have two workspaces with a row
    # for each expert that a token goes to (fused_moe, workspace_shapes), which stay when the layer ends
    wide = 3 * feed_forward_width(model) / setup.tensor
    if experts:
        width = experts.width / (1 if setup.expert_parallel else setup.tensor)
        inner = max(width, hidden) if setup.since("expert_workspaces") else width
        wide = max(wide, experts.active * (inner + max(2 * width, hidden)) + hidden)
    forward = tokens * setup.number_bytes * (wide + _HIDDEN_COPIES * hidden)

    samples = not setup.pooling and has_head(model)
    logits = min(setup.sequences, tokens) * model.vocabulary if samples else 0
    states = tokens * hidden * setup.number_bytes
    low, likely, high, why = _logit_bytes(model, setup)
    in_triton = setup.since("triton_sampler") and likely == MASKED
    rows = _TRITON_ROWS * model.vocabulary * 4 if in_triton else 0
    encoder, kept = encoder_peak(model, setup), 0
    if model.encoders and not (setup.text_only or setup.skips_encoder):  # their output, while a step is measured
        items = _LONG_VIDEO if _has_long_video(model, setup) else max(_largest_item(model, setup), tokens)
        deep = max(len(Config(fields, model.config.place).list(DEEP)) for fields in model.encoders.values())
        kept = items * hidden * (1 + deep) * setup.number_bytes
    index = max((mixer.index for layer in model.stack for mixer in layer.mixers if mixer.kind == "latent"), default=0)
    if index and setup.since("indexer_workspace"):  # 40 contexts of keys (mla/indexer.py), beside logits
        kept += 40 * setup.length * index + 512 * MIB
    is_compiled = not setup.eager and (not model.encoders or setup.text_only) and setup.since("compile_peak")
    embedding = model.vocabulary // setup.tensor
    compiled = (embedding + tokens) * hidden * setup.number_bytes if is_compiled else 0

    least, most = estimates()["experts" if experts else "forward"]
    usual = max(kept + forward, kept + states + likely * logits + rows, encoder.central)
    largest = kept + max(forward * most, states + high * logits + rows, compiled * _COMPILE_ERROR)
    is_large = tokens >= _LARGE_STEP
    highest = round(largest + encoder.high if is_large else max(largest, encoder.high))
    if compiled > usual:
        why = "a start that finds the model in torch.compile's cache needs less than one that compiles it"
    elif (2 if is_large else 1) * encoder.high >= highest:
        why = "how many patches the vision encoder is profiled with depends on files that config.json does not have"
        if _has_long_video(model, setup):
            why = f"vLLM {setup.version} profiles a video of {_LONG_VIDEO:,} tokens unless the launch allows no video"
    lowest = round(max(kept + forward * least, kept + states + low * logits, encoder.low))
    why = why or "the peak of a step is estimated from the model's shape"
    return ByteRange(lowest, highest, round(max(usual, compiled)), why=why)


# -- encoders of images -----------------------------------------------------------------------------------------------

_LARGEST_ITEM = 16_384
"""Tokens of the largest image in models of any resolution: max_pixels of Qwen's preprocessors, 28 x 28 or 32 x 32."""
_LARGE_STEP = 16_384
"""Tokens of a step from which the peaks of encoders and of the step may add up: 20.4 GiB were gone for Gemma 3 27B in
steps of 16,384 (vLLM 0.11.2, B200); in smaller steps no log needs the sum."""
_LONG_VIDEO, _WITH_LONG_VIDEO = 153_600, frozenset({"qwen3vl", "qwen3vlmoe"})
"""Tokens of the video with which old releases profile these models, unless the launch allows no video: about 10
GB for Qwen3-VL 8B (https://github.com/vllm-project/vllm/issues/27992), 4 GiB on each of four GPUs for the 30B."""
_MOST_PAIRS, _WITH_FRAMES = 7, frozenset({"qwen2vl", "qwen25vl", "qwen25omni", "qwen25omnithinker"})
"""Pairs of the 14 frames with which these are profiled, each as large as an image, if the context has room for them."""


def encoder_peak(model: Model, setup: Setup) -> ByteRange:
    """Estimate the peak memory of the encoders, which are profiled with as many images as a step has tokens for.

    A patch holds the product of the wide matrix, thrice if it is gated, and about five numbers of the hidden size: 1.21
    GiB was logged for Qwen3.8 27B (65,536 patches of 1,152 and 4,304 numbers, vLLM 0.28 and 0.29), 15.4 GiB for
    Qwen2.5-VL 7B (458,752 of 1,280 and 3,420, 0.23.0). Tensor parallelism divides product, queries, keys and values.
    """
    is_out = setup.text_only or setup.skips_encoder
    encoders = [] if is_out else list(model.encoders.values())
    likely, longest = (
        max((_patches_peak(model, setup, fields, tokens) for fields in encoders), default=0)
        for tokens in (_largest_item(model, setup), _LONG_VIDEO)
    )
    least, most = estimates()["encoder"]
    high = max(round(most * likely), longest if _has_long_video(model, setup) else 0)
    return ByteRange(round(least * likely), high, likely)


def _largest_item(model: Model, setup: Setup) -> int:
    pairs = setup.length // _LARGEST_ITEM if stem(model.architecture) in _WITH_FRAMES else 1
    return _LARGEST_ITEM * min(max(pairs, 1), _MOST_PAIRS)


def _has_long_video(model: Model, setup: Setup) -> bool:
    return not setup.since("no_long_video") and stem(model.architecture) in _WITH_LONG_VIDEO


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
    products = 3 if is_gated(fields) else 1
    return 2 * patches * (2 * hidden + (products * width + 3 * hidden) // setup.tensor)


# -- CUDA graphs ------------------------------------------------------------------------------------------------------

_MOST_CAPTURED = 512


def captured_sizes(most: int) -> int:
    """Return the number of batch sizes up to `most` that vLLM captures: 1, 2, 4, steps of 8 to 256, steps of 16."""
    return sum(size <= most for size in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)))


def graphs(model: Model, setup: Setup) -> ByteRange:
    """Estimate the CUDA graphs: what vLLM subtracts from the KV cache if it counts them, else what it captures."""
    if not setup.graphs_in_budget:
        return _gib("captured")
    if setup.captured == 0:
        return ByteRange.of(0)
    most = setup.captured or min(2 * setup.sequences, _MOST_CAPTURED)
    piecewise, full = captured_sizes(most), captured_sizes(min(most, setup.sequences))
    is_v2, fitted = uses_runner_v2(model, setup), estimates()
    base = fitted["graph_base"][0] * MIB
    if is_v2 and not setup.since("v2_graphs"):
        return ByteRange(0, round(base), 0, why="Model Runner V2 counts no graphs before 0.29.0")
    one_full = fitted["recurrent_full_graph" if model.has_states else "full_graph"][0] * MIB
    if model.has_states and setup.since("recurrent_graphs"):
        size = base + full * one_full
    elif is_v2:
        size = round(full * model.layers * (fitted["layer_of_a_graph"][0] * MIB))
    else:
        size = base + piecewise * fitted["piecewise_graph"][0] * MIB + full * one_full
    least, largest = (round(size * error) for error in fitted["graphs"])
    return ByteRange(least, largest, round(size), why="vLLM extrapolates CUDA graphs from two that it captures")


# -- outside torch ----------------------------------------------------------------------------------------------------

_WITH_NVLINK, _SYMMETRIC, _INTEGRATED = (7.0, 8.0, 9.0, 10.0, 10.3), 9.0, (11.0, 12.1)
"""Compute capabilities: of GPUs with NVLink, of the first with symmetric memory, and of GPUs without own memory."""


def non_torch(setup: Setup, weights: int = 0) -> ByteRange:
    """Estimate the memory outside torch: the libraries' buffers, and since 0.27 all buffers beside the weights.

    `weights` are the bytes of the weights, whose files a host that shares its memory with the GPU may cache.
    """
    is_parallel = setup.gpus * setup.data > 1
    if setup.capability in _INTEGRATED:
        cached = (share * weights / GIB for share in estimates()["cached_files"])
        bounds = tuple(map(sum, zip(estimates()["shared_with_host"], cached, strict=True)))
        return ByteRange.gib(bounds, "the GPU shares its memory with the host, whose other uses count too")
    if setup.since("all_counted"):
        return _gib("parallel_all_counted", _BY_LINKS) if is_parallel else _gib("single_all_counted")
    if not is_parallel:
        return _gib("single_rocm" if setup.is_amd else "single")
    link = "pcie"
    if setup.capability in _WITH_NVLINK:
        link = "nvlink" if setup.capability >= _SYMMETRIC else "older_nvlink"
    return _gib(link if setup.since("after_nccl") else f"{link}_with_nccl", _BY_LINKS)


_BY_LINKS = "buffers between GPUs depend on their links"
