"""Memory beside the model's own weights: slots for LoRA adapters, and the draft of speculative decoding."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from diag.core.errors import BadUsage
from diag.core.formatting import parse_size
from diag.vllm.command import redaction
from diag.vllm.command.command import Command
from diag.vllm.flags.registry import since
from diag.vllm.memory.model import Model, load
from diag.vllm.memory.parts import Layer
from diag.vllm.memory.quantization import Modules, precision
from diag.vllm.memory.weights import embedding, layer, of_stage, weigh

_RANK, _SLOTS = 16, 1
"""Defaults of --max-lora-rank and --max-loras (config/lora.py)."""
_DRAFTLESS = ("ngram", "[ngram]", "ngram_gpu", "suffix")
_MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


class Adapters(NamedTuple):
    """Slots for LoRA adapters, which vLLM allocates when it starts, each of the largest rank."""

    slots: int
    rank: int


class Draft(NamedTuple):
    """Drafter of tokens: `layers` of a model with a cache of their own.

    A "model" drafts by itself; an "eagle" head and "mtp" layers read the target's states, and may share its embedding.
    """

    kind: Literal["model", "eagle", "mtp"]
    model: Model
    layers: tuple[Layer, ...]
    tensor: int


def adapters(command: Command) -> Adapters | None:
    """Return the slots of a command; None without --enable-lora."""
    if not command.switched("--enable-lora"):
        return None
    sizes = (
        int(parse_size(command.get(flag) or "") or usual)
        for flag, usual in (("--max-loras", _SLOTS), ("--max-lora-rank", _RANK))
    )
    slots, rank = (min(max(size, 1), 2**16) for size in sizes)
    return Adapters(slots, rank)


def draft(command: Command, model: Model, tensor: int, version: str) -> tuple[Draft | None, str]:
    """Return the draft of a command, and the reason why its memory is unknown: "" if it is known, or if none drafts."""
    keys = {name.replace("-", "_"): value for name, value in command.keys("--speculative-config").items()}
    name = str(keys.get("model") or command.get("--spec-model") or command.get("--speculative-model") or "")
    method = str(keys.get("method") or command.get("--spec-method") or "").lower()
    given = ("--speculative-config", "--spec-model", "--spec-method", "--speculative-model")
    if not any(each.name in given for each in command.given) or method in _DRAFTLESS or name in _DRAFTLESS:
        return None, ""
    if method == "mtp" or method.endswith("_mtp"):
        count = next((number for field in _MTP_FIELDS if (number := model.config.count(field))), 1)
        last = next((one for one in reversed(model.stack) if _attends(one)), None)
        return (Draft("mtp", model, (last,) * count, tensor), "") if last else (None, "the draft model")
    if not name or method not in ("", "draft_model", "eagle", "eagle3"):
        return None, "the draft model"
    try:
        found = load(name, command, version=version)
    except BadUsage:
        return None, f"the draft model {redaction.name(name)[:60]!r}, whose config.json is not here"
    if found.unknown or not found.stack:
        return None, "the draft model, whose architecture is unknown"
    is_eagle = method.startswith("eagle") or "eagle" in f"{found.architecture}{name}".lower()
    own = keys.get("draft_tensor_parallel_size")
    return Draft(
        "eagle" if is_eagle else "model", found, found.stack, own if isinstance(own, int) and own > 0 else tensor
    ), ""


def _attends(one: Layer) -> bool:
    return any(mixer.kind in ("full", "latent") for mixer in one.mixers)


def draft_bytes(found: Draft, float32: bool) -> tuple[int, int]:
    """Return the least and most bytes of a draft's weights on one GPU: without and with its own embedding and head.

    Packed checkpoints leave the layers that draft in 16 bits: 20.57 GiB were logged where 4 bits gave 17.9 to 19.1.
    """
    model = found.model
    method = str((model.quantization or {}).get("quant_method", ""))
    if found.kind == "mtp" and method != "fp8":
        model = replace(model, quantization=None, mixed=(), unquantized=Modules())
    bits = precision(model.quantization or {}, float32=float32)
    if bits is None:
        return 0, 0
    if found.kind == "model":
        size = weigh(of_stage(model, range(model.layers)), bits, found.tensor, found.tensor)
        return size, size
    at = model.layers - 1 if found.kind == "mtp" else 0
    once = weigh(layer(model, at), bits, found.tensor, found.tensor)
    layers = once * len(found.layers) if found.kind == "mtp" else _all_layers(model, found.tensor, float32)
    inputs = 2 if found.kind == "mtp" else 3  # states of three layers for EAGLE 3
    joined = inputs * model.hidden**2 * 2
    is_shared = model.config.fields.get("mtp_use_dedicated_embeddings") is False
    own = 0 if is_shared else 2 * weigh([embedding(model)], bits, found.tensor, 1)
    return layers + joined, layers + joined + own


def _all_layers(model: Model, tensor: int, float32: bool) -> int:
    bits = precision(model.quantization or {}, float32=float32)
    return sum(weigh(layer(model, at), bits, tensor, tensor) for at in range(model.layers)) if bits else 0


def adapter_bytes(model: Model, found: Adapters, tensor: int, version: str) -> tuple[int, int]:
    """Return the least and most bytes of the slots on one GPU: for linear layers, and for experts and the head too.

    The first matrix of a column-parallel layer is on every GPU, the second is divided; of a row-parallel one the other
    way round (lora/layers).
    """
    hidden = model.hidden
    linear = sum(size for one in model.stack for size in _linear_ranks(one, hidden, tensor))
    experts = 0
    if model.experts and since(version, "expert_adapters"):
        each = 3 * hidden + 3 * model.experts.width // tensor
        experts = model.experts.total * each * sum(one.has_experts for one in model.stack)
    head = 2 * (hidden + model.vocabulary)
    numbers = found.slots * found.rank
    return 2 * numbers * linear, 2 * numbers * (linear + experts + head)


def _linear_ranks(one: Layer, hidden: int, tensor: int) -> Iterator[int]:
    """Yield the numbers for one rank of the linear matrices of a layer."""
    for mixer in one.mixers:
        if mixer.kind != "state":
            queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * (mixer.head_dim + mixer.value_dim)
            yield 4 * hidden + (2 * queries + keys) // tensor
    if one.dense:
        yield 3 * hidden + 3 * one.dense // tensor
