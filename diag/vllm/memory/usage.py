"""What weights and activations take of one GPU: weights from files or shape, activations by a bound on both sides."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from diag.vllm.memory.byte_range import ByteRange
from diag.vllm.memory.files import on_disk
from diag.vllm.memory.model import Model
from diag.vllm.memory.setup import Setup
from diag.vllm.memory.weights import (
    Precision,
    WeightPart,
    absorbed,
    feed_forward_width,
    of_stage,
    precision,
    rotary,
    stages,
    weigh,
)

Basis = Literal["exact", "estimated", "unknown"]
BY_FILES, QUANTIZED, VISION = 0.01, 0.03, 0.1
"""By how much weights may be off: divided by shape, quantized but for a few layers, with a vision part by shape."""


@dataclass(frozen=True)
class Stage:
    """One stage of pipeline parallelism: its layers, and what its weights take of one of its GPUs."""

    layers: int
    weights: ByteRange | None
    basis: Basis
    source: str


def weights(model: Model, setup: Setup) -> list[Stage]:
    """Stage by stage; from the files where they are there, from the shape otherwise."""
    model = replace(model, vision=None) if setup.text_only else model
    bits = precision(model, setup.quantization, setup.float32)
    quantized_while_loading = bool(setup.quantization) and not model.quantization
    files = None if quantized_while_loading or setup.text_only else on_disk(model, setup.float32)
    if not (model.family and bits):
        return [_by_files_alone(model, setup, files)] * setup.pipeline
    return _by_shape(model, setup, bits, files)


def _by_shape(model: Model, setup: Setup, bits: Precision, files: int | None) -> list[Stage]:
    """Every stage as the shape says; what the files weigh is divided among them."""
    spans = stages(model, setup.pipeline)
    parts = [of_stage(model, span) for span in spans]
    total = sum(weigh(stage, bits, 1, 1) for stage in parts)
    copies = weigh([absorbed(model)], bits, setup.tensor, 1) // setup.pipeline + weigh([rotary(model)], bits, 1, 1)
    exact = _is_exact(model, setup, bits, files)
    slack = 0 if exact else _slack(model, bits, files)
    padded = replace(bits, expert=bits.expert * _padding(model, setup.tensor * setup.data)) if bits.padded else bits
    source, found = _source(setup, bits, files), []
    for span, stage in zip(spans, parts, strict=True):
        low, high = (
            max(_share(stage, width, setup, files, total) + copies - setup.offload, 0) for width in (bits, padded)
        )
        bounds = ByteRange(round(low * (1 - slack)), round(high * (1 + slack)))
        found.append(Stage(len(span), bounds, "exact" if exact else "estimated", source))
    return found


def _is_exact(model: Model, setup: Setup, bits: Precision, files: int | None) -> bool:
    known = setup.gpus * setup.data == 1 if files else bits.exact and not model.vision
    return bool(known) and not model.latent and not setup.offload and not bits.padded


def _slack(model: Model, bits: Precision, files: int | None) -> float:
    if files:
        return BY_FILES
    return VISION if model.vision else BY_FILES if bits.exact else QUANTIZED


def _source(setup: Setup, bits: Precision, files: int | None) -> str:
    shape = ", ".join(filter(None, ("the shape in config.json", bits.named)))
    gpus = setup.gpus * setup.data
    return ("the *.safetensors files" if files else shape) + (f", divided among {gpus} GPUs" if gpus > 1 else "")


def _padding(model: Model, ways: int) -> float:
    """By how much kernels enlarge MXFP4 experts at most, divided among so many GPUs.

    Marlin and TRT-LLM want a hidden size in steps of 256 and a width in steps of 128 (fused_moe/oracle/mxfp4.py).
    """
    share = -(-model.config.size(model.family.width) // ways) if model.family else 1
    return -(-model.hidden // 256) * 256 / model.hidden * (-(-share // 128) * 128 / share)


def _share(parts: Sequence[WeightPart], bits: Precision, setup: Setup, files: int | None, total: int) -> int:
    """Bytes on one GPU of a stage; what the files weigh is divided as the shape says."""
    own = weigh(list(parts), bits, setup.tensor, setup.tensor * setup.data)
    return round(files * own / total) if files else own


def _by_files_alone(model: Model, setup: Setup, files: int | None) -> Stage:
    """Of an unknown architecture or quantization: divided evenly at best, not at all at worst."""
    layers = -(-model.layers // setup.pipeline)
    if not files:
        return Stage(layers, None, "unknown", "neither the model's shape nor its files are known: give --log")
    least = max(files // setup.gpus - setup.offload, 0)
    exact = setup.gpus == 1 and not setup.offload
    return Stage(layers, ByteRange(least, files), "exact" if exact else "estimated", "the *.safetensors files")


def activations(model: Model, setup: Setup) -> ByteRange:
    """What the profiling run takes at its peak: a step of --max-num-batched-tokens, or sampling for all sequences.

    At least the residual stream with the inner products of one dense feed-forward layer, or one float32 logit each. At
    most twice that, a mixture of experts' copies, and the logits eight times over: to cut off by top-p and top-k the
    sampler keeps them beside a copy, sorted, with 64-bit indices, as probabilities and as their sums.
    """
    number = 4 if setup.float32 else 2
    inner = 3 * feed_forward_width(model) // setup.tensor
    sure = setup.batched_tokens * number * (2 * model.hidden + (0 if model.family and model.family.experts else inner))
    logits = 4 * min(setup.sequences, setup.batched_tokens) * model.vocabulary
    most = setup.batched_tokens * number * (2 * (2 * model.hidden + inner) + _expert_copies(model, setup))
    return ByteRange(max(sure, logits), most + 8 * logits)


def _expert_copies(model: Model, setup: Setup) -> int:
    """Numbers that a mixture of experts holds for a token: a stream for each expert that processes it."""
    family, config = model.family, model.config
    if not (family and family.experts):
        return 0
    active = config.size("num_experts_per_tok", 1)
    return active * (model.hidden + 3 * config.size(family.width) // setup.tensor)
