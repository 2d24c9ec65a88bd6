"""The work of one step on one GPU, by the model's shape: bytes read, operations, bytes sent to other GPUs.

Counted is what cannot be avoided. Every weight is read once a step, of a mixture of experts those that the step's
tokens reach if routing is even; each request's KV cache is read once. Left out are activations, sampling, the logits
that tensor parallelism gathers, and speculation. What is left out makes the real step longer, never shorter, but for
routing: where the tokens of a step prefer the same experts, fewer are read.
"""

import math
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

from diag.core.errors import BadUsage
from diag.vllm.memory.model import Model
from diag.vllm.memory.setup import Setup
from diag.vllm.memory.usage import layer_bytes
from diag.vllm.memory.weights import WeightPart, embedding, layer, precision

_CHUNKED = "Llama4ForConditionalGeneration"
_FULL_EVERY = 4
"""Of Llama 4's layers one in four attends to everything, the others to a chunk of `attention_chunk_size` tokens."""


class Work(NamedTuple):
    """Work of one step on one GPU: bytes of weights and KV cache read, operations, and bytes sent in all-reduces.

    `matrix_flops` may run in the type of the weights, `attention_flops` in that of the KV cache.
    """

    weight_bytes: float
    cache_bytes: float
    matrix_flops: float
    attention_flops: float
    sent_bytes: float


def check(model: Model, setup: Setup) -> None:
    """Refuse a model whose work cannot be counted: BadUsage."""
    _bytes(model, setup, _layers(model)[:1], 1)


def decode(model: Model, setup: Setup, batch: float, context: float) -> Work:
    """The step in which each of `batch` requests of `context` tokens gets one more."""
    reached = sum(reach(model, at, context) for at in range(model.layers))
    matrices, head = _layers(model), [embedding(model)]
    return Work(
        _bytes(model, setup, [*matrices, *head], batch),
        batch * reached * layer_bytes(model, setup),
        2 * batch * _operands(model, setup, [*matrices, *head]),
        batch * reached * _attention_flops(model, absorbed=True) / setup.tensor,
        _sent(model, setup, batch),
    )


def prefill(model: Model, setup: Setup, tokens: float, length: float) -> Work:
    """A step of `tokens` prompt tokens, of prompts of `length`, each of which attends to those before it."""
    matrices = _layers(model)
    farthest = [reach(model, at, length) for at in range(model.layers)]
    reached = sum(most - most**2 / (2 * length) for most in farthest)  # the first tokens have few before them
    return Work(
        _bytes(model, setup, matrices, tokens),
        tokens * model.layers * layer_bytes(model, setup),
        2 * tokens * _operands(model, setup, matrices),
        tokens * reached * _attention_flops(model, absorbed=False) / setup.tensor,
        _sent(model, setup, tokens),
    )


def weights(model: Model, setup: Setup) -> tuple[float, float]:
    """Bytes on one GPU that every decode step reads, and those of all routed experts; BadUsage as `check`."""
    parts = [*_layers(model), embedding(model)]
    every = _bytes(model, setup, parts, 0)
    return every, _bytes(model, setup, parts, math.inf) - every


def experts_share(model: Model) -> float:
    """The share of a layer's experts that one token goes to; 1 without experts."""
    return _experts_hit(model, 1)


def reach(model: Model, at: int, context: float) -> float:
    """Tokens that a layer attends to, of a context."""
    window = model.windows[at]
    if model.architecture == _CHUNKED and (at + 1) % _FULL_EVERY:
        window = model.config.size("attention_chunk_size", 0, least=0)
    return min(context, window or context)


# -- weights ----------------------------------------------------------------------------------------------------------


def _layers(model: Model) -> list[WeightPart]:
    if model.family is None:
        raise BadUsage(f"{model.unknown or 'the architecture is unknown'}: diag cannot compute its ceilings")
    return list(chain.from_iterable(layer(model, at) for at in range(model.layers)))


def _bytes(model: Model, setup: Setup, parts: list[WeightPart], tokens: float) -> float:
    """Bytes of the weights that a step of `tokens` tokens reads."""
    bits, hit = precision(model, setup.quantization, setup.float32), _experts_hit(model, tokens)
    if bits is None:
        raise BadUsage("the quantization of the model is unknown: diag cannot compute its ceilings")
    return _on_one_gpu(setup, parts, lambda part: bits.of(part) / 8 * (hit if part.kind == "expert" else 1))


def _operands(model: Model, setup: Setup, parts: list[WeightPart]) -> float:
    """Numbers that one token is multiplied with."""
    share = _experts_hit(model, 1)
    return _on_one_gpu(setup, parts, lambda part: share if part.kind == "expert" else 1)


def _on_one_gpu(setup: Setup, parts: list[WeightPart], each: Callable[[WeightPart], float]) -> float:
    return sum(part.elements * each(part) / min(part.ways, setup.tensor) for part in parts)


def _experts_hit(model: Model, tokens: float) -> float:
    """The share of a layer's experts that at least one of so many tokens is expected to reach."""
    if not (model.family and model.family.experts):
        return 1.0
    count = model.config.size(model.family.experts, most=2**16)
    missed: float = (1 - min(model.config.size("num_experts_per_tok", 1) / count, 1.0)) ** tokens
    return 1 - missed


# -- attention and all-reduce -----------------------------------------------------------------------------------------


def _attention_flops(model: Model, absorbed: bool) -> float:
    """Operations for one token and one that it attends to in one layer; MLA decodes in its latent space."""
    if not model.latent:
        return 4.0 * model.heads * model.head_dim
    config = model.config
    if absorbed:
        return 2.0 * model.heads * (model.latent + config.size("kv_lora_rank"))
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return 2.0 * model.heads * sum(config.size(name) for name in sizes)


def _sent(model: Model, setup: Setup, tokens: float) -> float:
    """Bytes that a GPU sends: two all-reduces of the hidden state a layer, around a ring."""
    ring = 2 * (setup.tensor - 1) / setup.tensor
    return tokens * 2 * model.layers * model.hidden * (4 if setup.float32 else 2) * ring
