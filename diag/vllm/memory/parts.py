"""The parts of a layer: matrices, what a layer keeps of a request, and how both are divided among GPUs."""

from dataclasses import dataclass
from typing import Literal

MOST_WAYS = 2**16
"""More ways than a server has GPUs: the matrix is always divided."""

PartKind = Literal["plain", "linear", "expert", "vocabulary"]


class UnknownLayers(Exception):
    """The layers of a model cannot be read; the message is the reason, with the fields."""


@dataclass(frozen=True)
class WeightPart:
    """Some matrices: the count of their numbers, and the most GPUs among which they can be divided.

    `modules` are their names in the layer; they all have one size. `bits` is the size of a number,
    0 for that of the kind.
    """

    elements: int
    ways: int = 1
    kind: PartKind = "plain"
    modules: tuple[str, ...] = ()
    bits: float = 0


def linear(elements: int, *modules: str, ways: int = MOST_WAYS) -> WeightPart:
    """Return matrices of linear layers, which a quantization may cover."""
    return WeightPart(elements, ways, "linear", modules)


@dataclass(frozen=True)
class State:
    """Numbers of a fixed size that a layer keeps of a request; `recurrent` ones may have a type of their own.

    `groups` x `per_group` further numbers are divided by groups, which are copied if there are fewer than GPUs.
    """

    elements: int
    recurrent: bool = False
    groups: int = 0
    per_group: int = 0

    def share(self, tensor: int) -> int:
        """Return the numbers on one of `tensor` GPUs (mamba_utils.py, extra_groups_for_head_shards)."""
        groups = self.groups if not self.groups or self.groups % tensor == 0 else tensor
        return (self.elements + groups * self.per_group) // tensor


Kind = Literal["full", "window", "chunk", "latent", "state", "cross", "compressed"]


@dataclass(frozen=True)
class Mixer:
    """The part of a layer in which tokens see each other, with its matrices and its cache.

    `window` is the tokens that a window or a chunk holds, 0 for all; `value_dim` is the width of a value. A layer that
    reads the cache of another one has `cached` False. `index` is the bytes of a token in the cache of a sparse indexer,
    `sparse` the tokens that it chooses, 0 for all.
    With latent attention `head_dim` is the width of a token in the cache, `rank` the part of it that is key and value,
    `key_dim` the width of a key that is multiplied out. With compressed attention `ratio` is the
    tokens that are joined to one, 0 for a window alone. `checkpoint` is the first release that keeps one more state of
    a request for prefix caching.
    """

    kind: Kind
    parts: tuple[WeightPart, ...]
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    window: int = 0
    states: tuple[State, ...] = ()
    cached: bool = True
    index: int = 0
    sparse: int = 0
    rank: int = 0
    key_dim: int = 0
    float32_state: bool = False
    is_mamba: bool = False
    checkpoint: str = ""
    ratio: int = 0


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer: their number, how many a token goes to, and the width of one."""

    total: int
    active: int
    width: int


@dataclass(frozen=True)
class Layer:
    """A layer: mixers, and the matrices of its feed-forward part and of its norms; `dense` is a feed-forward width."""

    mixers: tuple[Mixer, ...]
    parts: tuple[WeightPart, ...]
    has_experts: bool = False
    dense: int = 0
