"""What a server's parts take of one GPU: weights from files or shape, activations by a bound on both sides."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal, Self

from diag.core.errors import BadUsage
from diag.core.sizes import GIB
from diag.vllm.flags.registry import release
from diag.vllm.memory.files import on_disk
from diag.vllm.memory.model import Model
from diag.vllm.memory.setup import Setup
from diag.vllm.memory.weights import (
    Precision,
    WeightPart,
    absorbed,
    block_size,
    group_size,
    of_stage,
    precision,
    rotary,
    stages,
    weigh,
)

Basis = Literal["exact", "estimated", "unknown"]
SCALES, QUANTISED, EYES = 0.01, 0.03, 0.1
"""By how much weights may be off: divided by shape, quantised but for a few layers, with a vision part by shape."""
GRAPHS = 0.1, 2.0
"""GiB of captured CUDA graphs in public logs: 0.23 (8B), 0.37 (0.6B), 0.67 (7B), 1.62 estimated (35B MoE)."""
ALONE, TOGETHER = (0.05, 0.4), (0.2, 1.2)
"""GiB that torch did not allocate: 0.05 - 0.26 on one GPU; 0.20 - 0.33 with TP 2 and 4, 0.95 with experts spread."""

_CUT_BLOCKS, _LEAST_BLOCK = (0, 29, 0), 32


@dataclass(frozen=True)
class ByteRange:
    """Bytes, at least and at most."""

    low: int
    high: int

    @classmethod
    def gib(cls, both: tuple[float, float]) -> Self:
        """Of numbers in GiB."""
        return cls(round(both[0] * GIB), round(both[1] * GIB))

    @classmethod
    def of(cls, size: int) -> Self:
        """A size that is known."""
        return cls(size, size)

    def plus(self, *others: "ByteRange") -> "ByteRange":
        """Together with others."""
        return ByteRange(self.low + sum(each.low for each in others), self.high + sum(each.high for each in others))

    def less(self, *others: "ByteRange") -> "ByteRange":
        """What is left after others were taken."""
        return ByteRange(self.low - sum(each.high for each in others), self.high - sum(each.low for each in others))


@dataclass(frozen=True)
class Stage:
    """One stage of pipeline parallelism: its layers, and what its weights weigh on one of its GPUs."""

    layers: int
    weights: ByteRange | None
    basis: Basis
    how: str


def check(model: Model, setup: Setup) -> None:
    """Refuse what vLLM refuses: BadUsage, with what would do."""
    if model.heads % setup.tensor:
        able = [each for each in range(1, 65) if not model.heads % each and _kv_divides(model, each)]
        raise BadUsage(
            f"vLLM refuses --tensor-parallel-size {setup.tensor}: the model's {model.heads} attention heads cannot be"
            f" divided by it; one of {', '.join(map(str, able))} can"
        )
    dense = 0 if model.family and model.family.experts else width(model)
    if not _kv_divides(model, setup.tensor) or dense % setup.tensor:
        what = f"{dense:,} columns of its feed-forward layers"
        what = what if _kv_divides(model, setup.tensor) else f"{model.kv_heads} key-value heads"
        raise BadUsage(
            f"vLLM refuses --tensor-parallel-size {setup.tensor}: the model's {what} cannot be divided by it"
        )
    _check_scales(model, setup)
    if setup.pipeline > model.layers > 0:
        raise BadUsage(f"--pipeline-parallel-size {setup.pipeline} is more than the model's {model.layers} layers")
    if setup.length > model.longest and not setup.overlong:
        raise BadUsage(
            f"vLLM refuses --max-model-len {setup.length}: the model's own longest context is {model.longest}; give"
            " that or less"
        )


def _check_scales(model: Model, setup: Setup) -> None:
    """Refuse a share of a matrix that ends within the numbers of one scale.

    Groups of inputs: awq, gptq and compressed-tensors. Blocks of fp8: experts, up to 0.28; newer releases cut the
    blocks down to 32 (fused_moe/oracle/fp8.py).
    """
    family, settings = model.family, model.quantization or {}
    if not family or setup.tensor * setup.data == 1:
        return
    group, block = group_size(settings), block_size(settings)
    attention = model.heads * (model.config.size("v_head_dim") if model.latent else model.head_dim)
    for inner in (attention,) if family.experts else (attention, width(model)):
        if group and group < inner and inner // setup.tensor % group:
            raise BadUsage(_cut(setup, f"{inner // setup.tensor:,} inputs of a matrix", f"groups of {group}"))
    if not (family.experts and block) or setup.spread:
        return
    share = model.config.size(family.width) // (setup.tensor * setup.data)
    finer = gcd(block, share, model.hidden) >= _LEAST_BLOCK and release(setup.version) >= _CUT_BLOCKS
    if share % block and not finer:
        raise BadUsage(_cut(setup, f"{share:,} columns of an expert", f"blocks of {block}"))


def _cut(setup: Setup, share: str, unit: str) -> str:
    among = f"--tensor-parallel-size {setup.tensor}"
    among += f" and --data-parallel-size {setup.data}" if setup.data > 1 else ""
    return f"{among} cannot work with vLLM {setup.version}: {share} on a GPU are no whole {unit}, which share a scale"


def _kv_divides(model: Model, tensor: int) -> bool:
    """Key-value heads are divided, or each copied to as many GPUs as every other."""
    return bool(model.latent) or not (model.kv_heads % tensor and tensor % model.kv_heads)


def width(model: Model) -> int:
    """Of a feed-forward layer that is not one of experts."""
    return model.config.size(model.family.dense, 0, least=0) if model.family else 0


def weights(model: Model, setup: Setup) -> list[Stage]:
    """Stage by stage; from the files where they are there, from the shape otherwise."""
    model = replace(model, vision=None) if setup.text_only else model
    bits = precision(model, setup.quantization, setup.whole)
    while_loading = bool(setup.quantization) and not model.quantization
    files = None if while_loading or setup.text_only else on_disk(model, setup.whole)
    if not (model.family and bits):
        return [_only_files(model, setup, files)] * setup.pipeline
    spans = stages(model, setup.pipeline)
    parts = [of_stage(model, each) for each in spans]
    total = sum(weigh(each, bits, 1, 1) for each in parts)
    copies = weigh([absorbed(model)], bits, setup.tensor, 1) // setup.pipeline + weigh([rotary(model)], bits, 1, 1)
    gpus = setup.gpus * setup.data
    measured = bits.exact and not model.vision if not files else gpus == 1
    exact = bool(measured) and not model.latent and not setup.offload and not bits.padded
    most = replace(bits, expert=bits.expert * _padding(model, setup.tensor * setup.data)) if bits.padded else bits
    by_shape = EYES if model.vision else SCALES if bits.exact else QUANTISED
    slack = 0 if exact else SCALES if files else by_shape
    how = "its *.safetensors files" if files else ", ".join(filter(None, ("the shape in config.json", bits.named)))
    how += f", a share of {gpus} GPUs" if gpus > 1 else ""
    found = []
    for span, own in zip(spans, parts, strict=True):
        low, high = (max(_share(own, each, setup, files, total) + copies - setup.offload, 0) for each in (bits, most))
        both = ByteRange(round(low * (1 - slack)), round(high * (1 + slack)))
        found.append(Stage(len(span), both, "exact" if exact else "estimated", how))
    return found


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


def _only_files(model: Model, setup: Setup, files: int | None) -> Stage:
    """Of a model whose architecture or quantisation is not known: divided evenly at best, not at all at worst."""
    layers = -(-model.layers // setup.pipeline)
    if not files:
        return Stage(layers, None, "unknown", "neither its shape nor its files are known: give --log")
    least = max(files // setup.gpus - setup.offload, 0)
    exact = setup.gpus == 1 and not setup.offload
    return Stage(layers, ByteRange(least, files), "exact" if exact else "estimated", "its *.safetensors files")


def activations(model: Model, setup: Setup) -> ByteRange:
    """What the profiling run takes at its peak: a step of --max-num-batched-tokens, or sampling for all sequences.

    At least the residual stream with the inner products of one dense feed-forward layer, or one float32 logit each. At
    most twice that, a mixture of experts' copies, and the logits eight times over: to cut off by top-p and top-k the
    sampler keeps them beside a copy, sorted, with 64-bit indices, as probabilities and as their sums.
    """
    number = 4 if setup.whole else 2
    inner = 3 * width(model) // setup.tensor
    sure = setup.batched * number * (2 * model.hidden + (0 if model.family and model.family.experts else inner))
    logits = 4 * min(setup.sequences, setup.batched) * model.vocabulary
    most = setup.batched * number * (2 * (2 * model.hidden + inner) + _copies(model, setup))
    return ByteRange(max(sure, logits), most + 8 * logits)


def _copies(model: Model, setup: Setup) -> int:
    """Numbers that a mixture of experts holds for a token: a stream for each expert that sees it."""
    family, config = model.family, model.config
    if not (family and family.experts):
        return 0
    seen = config.size("num_experts_per_tok", 1)
    return seen * (model.hidden + 3 * config.size(family.width) // setup.tensor)
