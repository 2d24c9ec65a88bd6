"""Memory beside the model's own weights: slots for LoRA adapters, and the draft of speculative decoding."""

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
_SPECULATIVE = ("--speculative-config", "--spec-model", "--spec-method", "--speculative-model")
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
    is_drafting = any(flag.name in _SPECULATIVE for flag in command.given)
    if not is_drafting or method in _DRAFTLESS or name in _DRAFTLESS:
        return None, ""
    if method == "mtp" or method.endswith("_mtp"):
        count = next((number for field in _MTP_FIELDS if (number := model.config.count(field))), 1)
        attending = [one for one in model.stack if {"full", "latent"} & {mixer.kind for mixer in one.mixers}]
        last = attending[-1] if attending else None
        return (Draft("mtp", model, (last,) * count, tensor), "") if last else (None, "the draft model")
    if not name or method not in ("", "draft_model", "eagle", "eagle3"):
        return None, "the draft model"
    try:
        drafter = load(name, command, version=version)
    except BadUsage:
        return None, f"the draft model {redaction.name(name)[:60]!r}, whose config.json is not here"
    if drafter.unknown or not drafter.stack:
        return None, "the draft model, whose architecture is unknown"
    is_eagle = method.startswith("eagle") or "eagle" in f"{drafter.architecture}{name}".lower()
    size = keys.get("draft_tensor_parallel_size")
    size = size if isinstance(size, int) and size > 0 else tensor
    return Draft("eagle" if is_eagle else "model", drafter, drafter.stack, size), ""


def draft_bytes(draft: Draft, float32: bool) -> tuple[int, int]:
    """Return the least and most bytes of a draft's weights on one GPU: without and with its own embedding and head.

    Packed checkpoints leave the layers that draft in 16 bits: 20.57 GiB were logged where 4 bits gave 17.9 to 19.1.
    """
    model, tensor = draft.model, draft.tensor
    method = str((model.quantization or {}).get("quant_method", ""))
    if draft.kind == "mtp" and method != "fp8":
        model = replace(model, quantization=None, mixed=(), unquantized=Modules())
    bits = precision(model.quantization or {}, float32=float32)
    if bits is None:
        return 0, 0
    if draft.kind == "model":
        size = weigh(of_stage(model, range(model.layers)), bits, tensor, tensor)
        return size, size
    if draft.kind == "mtp":
        layers = len(draft.layers) * weigh(layer(model, model.layers - 1), bits, tensor, tensor)
    else:
        layers = sum(weigh(layer(model, at), bits, tensor, tensor) for at in range(model.layers))
    inputs = 2 if draft.kind == "mtp" else 3  # states of three layers for EAGLE 3
    joined = inputs * model.hidden**2 * 2
    is_shared = model.config.fields.get("mtp_use_dedicated_embeddings") is False
    ends = 0 if is_shared else 2 * weigh([embedding(model)], bits, tensor, 1)
    return layers + joined, layers + joined + ends


def adapter_bytes(model: Model, slots: Adapters, tensor: int, version: str) -> tuple[int, int]:
    """Return the least and most bytes of the slots on one GPU: for linear layers, and for experts and the head too.

    The first matrix of a column-parallel layer is on every GPU, the second is divided; of a row-parallel one the other
    way round (lora/layers).
    """
    hidden, linear, experts = model.hidden, 0, 0  # numbers for one rank
    for mixer in model.mixers:
        if mixer.kind != "state":
            queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * (mixer.head_dim + mixer.value_dim)
            linear += 4 * hidden + (2 * queries + keys) // tensor
    linear += sum(3 * hidden + 3 * one.dense // tensor for one in model.stack if one.dense)
    if model.experts and since(version, "expert_adapters"):
        of_one = 3 * hidden + 3 * model.experts.width // tensor
        experts = model.experts.total * of_one * sum(one.has_experts for one in model.stack)
    head = 2 * (hidden + model.vocabulary)
    numbers = slots.slots * slots.rank
    return 2 * numbers * linear, 2 * numbers * (linear + experts + head)
