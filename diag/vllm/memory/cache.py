"""vLLM's KV cache in blocks, by its own rules (v1/core/kv_cache_utils.py and v1/kv_cache_interface.py of 0.32).

A block holds `block` tokens of the layers of one group. Layers with full attention and layers with a sliding window
form groups of their own, of the same number of layers, which share all blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from diag.vllm.command import values
from diag.vllm.memory.model import Model
from diag.vllm.memory.setup import Setup

NUMBER_BYTES: Mapping[str, float] = {
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
"""Of one number in the cache, by --kv-cache-dtype; other types keep scales of their own."""
RESERVED = 1
"""The null block, which vLLM never gives to a request. 0.32 counts it when it checks that one request fits."""


class NotCovered(Exception):
    """The KV cache of this model or with these flags cannot be computed; the message says why."""


@dataclass(frozen=True)
class CacheLayout:
    """How many blocks a request takes, and how many bytes a block is on one GPU.

    `layers` is the number of layers of a group; `groups` keep all tokens, `windows` the last `window` ones and those
    `in_flight`.
    """

    block: int
    layer_bytes: float
    layers: int
    groups: int
    windows: int = 0
    window: int = 0
    in_flight: int = 0

    def block_bytes(self, layers: int | None = None) -> int:
        """Of a block on a GPU that has so many of a group's layers."""
        return round(self.layer_bytes * self.block * (self.layers if layers is None else layers))

    def blocks(self, length: int) -> int:
        """How many a request of that many tokens takes."""
        held = min(self.window - 1 + self.in_flight, length)
        return self.groups * -(-length // self.block) + self.windows * (-(-held // self.block) + 1)

    def longest(self, blocks: int, most: int) -> int:
        """The longest request, up to `most`, that so many blocks hold; 0 where they hold none."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks(middle) + RESERVED <= blocks else (low, middle - 1)
        return low


def cache_layout(model: Model, setup: Setup) -> CacheLayout:
    """The KV cache of a model on one GPU; NotCovered where it is not known."""
    if model.unknown:
        raise NotCovered(model.unknown)
    in_layer = layer_bytes(model, setup)
    windows = {window for window in model.windows if window}
    full_layers = model.windows.count(0)
    if not windows or (full_layers and not setup.hybrid) or (not full_layers and min(windows) >= setup.length):
        return CacheLayout(setup.block, in_layer, model.layers, 1)
    if not full_layers:
        window = f"a sliding window of {min(windows):,} tokens"
        raise NotCovered(f"all layers have {window}, which releases treat differently")
    if setup.pipeline > 1:
        raise NotCovered("sliding windows with pipeline parallelism are not covered")
    return _hybrid_layout(setup, in_layer, full_layers, model.layers - full_layers, min(windows))


def layer_bytes(model: Model, setup: Setup) -> float:
    """Bytes of a token in one layer on one GPU."""
    number = _number_bytes(model, setup)
    if model.latent:
        return model.latent * number  # one vector for keys and values, on every GPU
    return 2 * max(1, model.kv_heads // setup.tensor) * model.head_dim * number


def _hybrid_layout(setup: Setup, layer_bytes: float, full: int, windowed: int, window: int) -> CacheLayout:
    """Layers with full attention and layers with a sliding window, in groups of one size."""
    fewer, more = sorted((full, windowed))
    group = more if more < fewer * 1.5 else fewer
    return CacheLayout(
        setup.block, layer_bytes, group, -(-full // group), -(-windowed // group), window, setup.in_flight
    )


def _number_bytes(model: Model, setup: Setup) -> float:
    """Bytes of one number in the cache."""
    if setup.kv_dtype != "auto":
        if setup.kv_dtype not in NUMBER_BYTES:
            raise NotCovered(
                f"how many bytes --kv-cache-dtype {values.name(setup.kv_dtype)[:40]!r} takes is unknown to diag"
            )
        return NUMBER_BYTES[setup.kv_dtype]
    settings = model.quantization or {}
    if settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo"):
        raise NotCovered(
            "the model's files ask for a quantized KV cache, which not every release follows: give"
            " --kv-cache-dtype fp8 or bfloat16"
        )
    return 4 if setup.float32 else 2
