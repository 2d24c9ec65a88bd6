"""vLLM's KV cache in blocks, by its own rules (v1/core/kv_cache_utils.py and v1/kv_cache_interface.py of 0.32).

A block holds `block` tokens of the layers of one group. Layers that attend to all tokens and layers that attend to a
window are groups of their own, of the same number of layers, which take their blocks from one pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from diag.vllm.memory.model import Model
from diag.vllm.memory.setup import Setup

BYTES: Mapping[str, float] = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "nvfp4": 1 / 2 + 1 / 16,
}
"""Of one number of the cache; what is not here keeps scales of its own."""
RESERVED = 1
"""The null block, which the pool never gives away. vLLM 0.32 counts it when it checks that one request fits."""


class NotCovered(Exception):
    """The KV cache of this model or with these flags cannot be computed; the message says why."""


@dataclass(frozen=True)
class Cache:
    """How many blocks a request takes, and how many bytes a block is on one GPU.

    `layers` is the number of layers of a group; of `groups` all tokens are kept, of `windows` the last `window` ones
    and those `in_flight`.
    """

    block: int
    layer_bytes: float
    layers: int
    groups: int
    windows: int = 0
    window: int = 0
    in_flight: int = 0

    def block_bytes(self, layers: int | None = None) -> int:
        """Of a block on a GPU that has so many of its layers."""
        return round(self.layer_bytes * self.block * (self.layers if layers is None else layers))

    def blocks(self, length: int) -> int:
        """What a request of that many tokens takes."""
        held = min(self.window - 1 + self.in_flight, length)
        return self.groups * -(-length // self.block) + self.windows * (-(-held // self.block) + 1)

    def longest(self, blocks: int, most: int) -> int:
        """The longest request, up to `most`, that so many blocks hold; 0 where they hold none."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks(middle) + RESERVED <= blocks else (low, middle - 1)
        return low


def cache(model: Model, setup: Setup) -> Cache:
    """The cache of a model on one GPU; NotCovered where it is not known."""
    if model.unknown:
        raise NotCovered(model.unknown)
    number = _number_bytes(model, setup)
    if model.latent:
        layer_bytes = model.latent * number  # one vector for keys and values, on every GPU
    else:
        layer_bytes = 2 * max(1, model.kv_heads // setup.tensor) * model.head_dim * number
    sizes = {each for each in model.windows if each}
    everything = model.windows.count(0)
    if not sizes or (everything and not setup.hybrid) or (not everything and min(sizes) >= setup.length):
        return Cache(setup.block, layer_bytes, model.layers, 1)
    if not everything:
        raise NotCovered(f"all layers attend to a window of {min(sizes):,} tokens, which releases treat differently")
    if setup.pipeline > 1:
        raise NotCovered("windows and pipeline parallelism together are not covered")
    some, many = sorted((everything, model.layers - everything))
    group = many if many < some * 1.5 else some
    windows = -(-(model.layers - everything) // group)
    full = -(-everything // group)
    return Cache(setup.block, layer_bytes, group, full, windows, min(sizes), setup.in_flight)


def _number_bytes(model: Model, setup: Setup) -> float:
    """Bytes of one number in the cache."""
    if setup.kv_dtype != "auto":
        if setup.kv_dtype not in BYTES:
            raise NotCovered(f"how many bytes --kv-cache-dtype {setup.kv_dtype[:40]!r} takes is not known to diag")
        return BYTES[setup.kv_dtype]
    settings = model.quantization or {}
    if settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo"):
        raise NotCovered(
            "the model's files ask for a quantised KV cache, which not every release follows: give"
            " --kv-cache-dtype fp8 or bfloat16"
        )
    return 4 if setup.whole else 2
