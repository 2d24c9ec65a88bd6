"""The KV cache as vLLM lays it out: groups of layers, the tokens of a block, and the blocks that a request takes.

Read off v1/core/kv_cache_utils.py, v1/kv_cache_interface.py and platforms/interface.py of 0.32.0. Other layouts that
VLLM_KV_CACHE_LAYOUT can ask for are left out. With compressed attention (DeepSeek V4) a layer keeps a window of tokens,
an entry for each `ratio` of tokens, and the state of the compressor that makes entries; at a ratio of 4 an indexer with
entries of its own chooses among them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from diag.vllm.command import redaction
from diag.vllm.flags.registry import release
from diag.vllm.memory.mixers import INDEXED, OVERLAP, STATE_BLOCKS
from diag.vllm.memory.model import Model
from diag.vllm.memory.parts import Kind, Mixer
from diag.vllm.memory.quantization import tables
from diag.vllm.memory.setup import Setup

_DECODING = 2
"""Tokens in flight of a request that decodes: one in each of two steps; drafted ones take no block more up to 17."""
RESERVED = 1
"""The null block, which no request gets. 0.32 counts it when it checks that one request fits."""
LATENT_ALIGNMENT = 128
"""Blocks of layers with MLA beside layers that keep a state are a multiple of this (platforms/interface.py)."""
UNEVEN_FROM = 1.5
"""vLLM pads groups to the largest kind of layers if it has less than so many times the layers of the smallest."""
COMPRESSED_BLOCK, _WINDOW_BLOCK = 256, 64
"""Tokens of a block of compressed entries, and of a block of their window."""
_PLAIN_FP8 = (10.0, 10.3)
"""Compute capabilities whose sparse MLA has a cache in fp8 without scales: FlashInfer's (platforms/cuda.py)."""
_ENTRY, _ALIGNMENT = 584, 576
"""Bytes of an entry in the type fp8_ds_mla, and of the unit that pages are rounded up to."""
_SCALE = 4
"""Bytes of the scale of an indexer's entry."""


class NotCovered(Exception):
    """The KV cache of this model or with these flags cannot be computed; the message is the reason."""


class _Cache(NamedTuple):
    """The cache of a layer: its kind, the tokens of a block, the bytes of a block, and the tokens that it keeps."""

    kind: Kind
    block: int
    page: int
    window: int = 0


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a table of blocks: their numbers in the model, and the bytes that each has in a block.

    `window` is the tokens of a window, a chunk or an encoder, or the states that a request has.
    """

    kind: Kind
    block: int
    layers: tuple[int, ...]
    pages: tuple[int, ...]
    window: int = 0

    def blocks(self, length: int, in_flight: int) -> int:
        """Return the blocks that a request of `length` tokens takes, with `in_flight` tokens not yet settled."""
        if self.kind == "state" and self.window:
            return self.window
        if self.kind == "window":  # a window may begin inside a block
            return -(-min(self.window - 1 + in_flight, length) // self.block) + 1
        held = {"chunk": min(self.window + in_flight, length), "cross": self.window}.get(self.kind, length)
        return -(-held // self.block)


@dataclass(frozen=True)
class CacheLayout:
    """The groups of a model's layers; `block` is the tokens of a block of full attention."""

    block: int
    groups: tuple[CacheGroup, ...]
    in_flight: int = 0
    by_requests: bool = True

    def token_bytes(self, block_bytes: int) -> float:
        """Return the bytes of a token in the groups that keep every token."""
        return sum(block_bytes / group.block for group in self.groups if group.kind in ("full", "latent"))

    def number(self, *kinds: Kind) -> int:
        """Return the number of groups of these kinds."""
        return sum(group.kind in kinds for group in self.groups)

    def block_bytes(self, span: range | None = None) -> int:
        """Return the bytes of a block on a GPU that has the layers of `span`, all without it."""
        return max(
            sum(page for at, page in zip(group.layers, group.pages, strict=True) if span is None or at in span)
            for group in self.groups
        )

    def blocks(self, length: int, decoding: bool = False) -> int:
        """Return the blocks that a request of `length` tokens is admitted for to read its prompt, or has after that."""
        in_flight = min(_DECODING, self.in_flight) if decoding else self.in_flight
        return sum(group.blocks(length, in_flight) for group in self.groups)

    def requests(self, blocks: int, length: int) -> int:
        """Return the requests that so many blocks hold: each is admitted beside others that decode (allocate_slots)."""
        free = blocks - RESERVED - self.blocks(length)
        return 0 if free < 0 else 1 + free // self.blocks(length, decoding=True)

    def longest(self, blocks: int, most: int) -> int:
        """Return the longest request, up to `most`, that so many blocks hold; 0 if they hold none."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks(middle) + RESERVED <= blocks else (low, middle - 1)
        return low

    def logged_tokens(self, blocks: int, length: int) -> int:
        """Return the tokens that vLLM logs as the size of a KV cache of so many blocks."""
        if self.by_requests or len(self.groups) == 1:
            return int(blocks / self.blocks(length) * length)
        return blocks // len(self.groups) * min(group.block for group in self.groups)


def cache_layout(model: Model, setup: Setup) -> CacheLayout:
    """Return the KV cache layout of a model on one GPU; NotCovered if it is unknown."""
    if model.unknown:
        raise NotCovered(model.unknown)
    stack = [(model, setup, layer) for layer in model.stack]
    if setup.draft:
        of_draft = replace(setup, tensor=setup.draft.tensor)
        stack += [(setup.draft.model, of_draft, layer) for layer in setup.draft.layers]
    if any(mixer.kind == "compressed" for _, _, layer in stack for mixer in layer.mixers):
        if not setup.hybrid:
            raise NotCovered("compressed attention without the hybrid KV cache manager is not covered")
        if setup.draft:
            raise NotCovered("the KV cache of a draft beside compressed attention is not covered")
        if not setup.kv_dtype.startswith(("fp8", "auto")):
            kind = redaction.name(setup.kv_dtype)[:40]
            raise NotCovered(f"compressed attention is covered with --kv-cache-dtype fp8, not with {kind!r}")
        layers = [(at, mixer) for at, layer in enumerate(model.stack) for mixer in layer.mixers]
        compressed = [(at, cache) for at, mixer in layers for cache in _compressed_caches(mixer)]
        groups = tuple(map(_group, _packed(compressed)))
        return CacheLayout(COMPRESSED_BLOCK, groups, setup.in_flight, setup.since("size_by_requests"))
    block, padded = block_tokens(model, setup)
    mixers = [(at, entry, mixer) for at, entry in enumerate(stack) for mixer in entry[2].mixers]
    caches = [
        (at, cache)
        for at, (owner, owner_setup, _), mixer in mixers
        for cache in _caches(owner, owner_setup, mixer, block, padded)
    ]
    if not caches:
        raise NotCovered("the model keeps nothing of a request in a KV cache")
    kinds = {cache.kind for _, cache in caches}
    # vLLM switches the hybrid manager off for models with chunks, unless
    # VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=1; without it, windows and chunks keep every token
    is_hybrid = setup.hybrid and ("chunk" not in kinds or setup.hybrid_chunks)
    if not is_hybrid and kinds & {"full", "latent"}:
        promoted = ("window", "chunk")
        caches = [
            (at, cache._replace(kind="full", window=0) if cache.kind in promoted else cache) for at, cache in caches
        ]
    windows = [cache.window for _, cache in caches]
    if kinds == {"window"} and min(windows) < setup.length and not setup.since("size_by_requests"):
        window = f"a sliding window of {min(windows):,} tokens"
        raise NotCovered(f"all layers have {window}, which releases treat differently")
    block = max((cache.block for _, cache in caches if cache.kind != "state"), default=setup.block)
    return CacheLayout(block, tuple(_groups(caches)), setup.in_flight, setup.since("size_by_requests"))


def _caches(model: Model, setup: Setup, mixer: Mixer, block: int, padded: int) -> Iterator[_Cache]:
    """Yield what a mixer keeps, in blocks of so many tokens and states of so many bytes."""
    if not mixer.cached:
        return
    if mixer.kind == "state":
        mode = setup.mamba_mode
        if not mode and mixer.is_mamba and not setup.since("hybrid_prefixes"):
            mode = "all"  # where the model's code can
        checkpoint = mixer.checkpoint and release(setup.version) >= release(mixer.checkpoint)
        # the states that a request has, 0 for one in each block
        states = 0 if mode == "all" else 2 + bool(checkpoint)
        page = padded or state_bytes(model, mixer, setup)
        yield _Cache("state", block, page, states if setup.prefix_caching else 1)
    else:
        yield _Cache(mixer.kind, block, round(block * token_bytes(model, mixer, setup)), mixer.window)
        if mixer.index:
            yield _Cache(mixer.kind, block, block * mixer.index)


def block_tokens(model: Model, setup: Setup) -> tuple[int, int]:
    """Return the tokens of a block, and the bytes to which a state is padded, 0 for none.

    Of a model with attention and states, the block of attention is large enough for a state.
    """
    mixers = [mixer for mixer in model.mixers if mixer.cached]
    states = [state_bytes(model, mixer, setup) for mixer in mixers if mixer.kind == "state"]
    tokens = [token_bytes(model, mixer, setup) for mixer in mixers if mixer.kind not in ("state", "cross")]
    if not states or not tokens:
        return setup.block, 0
    step = max(setup.block, LATENT_ALIGNMENT) if model.latent else setup.block
    block = max(setup.block, step * -(-max(states) // round(step * max(tokens))))
    return block, round(block * max(tokens))


def state_bytes(model: Model, mixer: Mixer, setup: Setup) -> int:
    """Return the bytes of a layer's states on one GPU."""
    usual = 4 if setup.float32 or setup.mamba_type == "float32" else 2
    wanted = setup.state_type or str(model.config.get("mamba_ssm_cache_dtype") or model.traits.state_type)
    wanted = wanted or str(model.config.get("mamba_ssm_dtype") or "")
    recurrent = 4 if wanted == "float32" or mixer.float32_state else 2 if wanted in ("float16", "bfloat16") else usual
    return sum(state.share(setup.tensor) * (recurrent if state.recurrent else usual) for state in mixer.states)


def token_bytes(model: Model, mixer: Mixer, setup: Setup) -> float:
    """Return the bytes of a token in one layer of attention on one GPU; NotCovered if they are unknown."""
    if mixer.kind == "compressed":
        # a token's place in the window, and its share of an entry and of an indexer's
        entry = (_ENTRY + (mixer.index + _SCALE if mixer.index else 0)) / mixer.ratio if mixer.ratio else 0
        return _ENTRY + entry
    kind = cache_type(model, setup)
    is_packed = setup.capability not in _PLAIN_FP8 or not setup.since("plain_sparse_fp8")
    if mixer.kind == "latent" and kind.startswith("fp8") and model.config.has("index_topk") and is_packed:
        return tables().latent_bytes["fp8_ds_mla"]
    if mixer.kind == "latent" and kind in tables().latent_bytes:
        return tables().latent_bytes[kind]
    number: float = setup.number_bytes
    if kind != "auto":
        if kind not in tables().number_bytes:
            raise NotCovered(f"how many bytes --kv-cache-dtype {redaction.name(kind)[:40]!r} takes is unknown to diag")
        number = tables().number_bytes[kind]
    if mixer.kind == "latent":
        return mixer.head_dim * number  # one vector for keys and values, on every GPU
    return max(1, mixer.kv_heads // setup.tensor) * (mixer.head_dim + mixer.value_dim) * number


def cache_type(model: Model, setup: Setup) -> str:
    """Return --kv-cache-dtype, or the type that the model's files ask for; NotCovered if the release may not follow."""
    settings = model.quantization or {}
    method = str(settings.get("quant_method", ""))
    asked = settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo")
    if setup.kv_dtype != "auto" or not asked or not method.startswith(("modelopt", "compressed-tensors")):
        return setup.kv_dtype
    if not setup.since("cache_follows_files"):
        raise NotCovered(
            "the model's files ask for a quantized KV cache, which not every release follows: give"
            " --kv-cache-dtype fp8 or bfloat16"
        )
    if isinstance(asked, dict):
        return "nvfp4" if asked.get("num_bits") == 4 else "fp8"
    return str(asked).lower() if str(asked).lower() in tables().number_bytes else "auto"


def _groups(caches: list[tuple[int, _Cache]]) -> Iterable[CacheGroup]:
    """Divide layers into groups as `get_kv_cache_groups` does: of one kind, with pages of one size, equally many."""
    kinds = {(cache.kind, cache.block, cache.window) for _, cache in caches}
    if len(kinds) == 1:  # pages may differ: each layer has its own
        yield _group(caches)
        return
    page = max(cache.page for _, cache in caches)
    alike: dict[_Cache, list[tuple[int, _Cache]]] = defaultdict(list)
    for at, cache in caches:
        times, rest = divmod(page, cache.page)
        if cache.kind != "state" and not rest:
            same = cache._replace(page=page, block=cache.block * times)
        elif cache.kind == "latent":
            raise NotCovered("layers whose blocks differ in size with MLA beside them are not covered")
        else:
            same = cache._replace(page=page)
        alike[same].append((at, same))
    fewest, most = (pick(len(layers) for layers in alike.values()) for pick in (min, max))
    size = most if most < fewest * UNEVEN_FROM else fewest
    for layers in alike.values():
        number = -(-len(layers) // size)
        for first in range(number):
            yield _group(layers[first::number])


def _group(caches: list[tuple[int, _Cache]]) -> CacheGroup:
    first = caches[0][1]
    layers, pages = tuple(at for at, _ in caches), tuple(cache.page for _, cache in caches)
    return CacheGroup(first.kind, first.block, layers, pages, first.window)


# -- compressed attention


def _compressed_caches(mixer: Mixer) -> Iterator[_Cache]:
    """Yield the caches of a layer of compressed attention, in the type fp8_ds_mla."""
    yield _Cache("window", _WINDOW_BLOCK, _page(_WINDOW_BLOCK * _ENTRY), mixer.window)
    if not mixer.ratio:
        return
    sizes = [(_ENTRY, mixer.head_dim)] + [(mixer.index + _SCALE, mixer.index)] * bool(mixer.index)
    overlap = OVERLAP if mixer.ratio == INDEXED else 1
    block = STATE_BLOCKS[mixer.ratio]
    for entry, size in sizes:
        yield _Cache("latent", COMPRESSED_BLOCK, _page(COMPRESSED_BLOCK // mixer.ratio * entry))
        state = 2 * overlap * size * 4  # of float32, for keys and scores
        yield _Cache("window", block, _page(block * state), overlap * mixer.ratio)


def entries(mixer: Mixer, context: float) -> float:
    """Return the entries that a token of a context attends to: all of them, or those that the indexer chooses."""
    return min(context / mixer.ratio, mixer.sparse or context) if mixer.ratio else 0


def bytes_read(mixer: Mixer, context: float) -> float:
    """Return the bytes of a request's caches that a step reads: window and entries, and all keys of the indexer."""
    keys = context / mixer.ratio * (mixer.index + _SCALE) if mixer.index else 0
    return (min(context, mixer.window) + entries(mixer, context)) * _ENTRY + keys


def _page(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _packed(caches: Sequence[tuple[int, _Cache]]) -> Iterator[list[tuple[int, _Cache]]]:
    """Yield the groups of a pool that packs pages of several sizes in a block.

    Caches of one kind, block and window are divided into groups of about equally many layers; a set with pages
    of several sizes, of which some are rarer than others, stays whole.
    """
    sets: dict[tuple[object, ...], dict[int, list[tuple[int, _Cache]]]] = {}
    for at, cache in caches:
        pages = sets.setdefault((cache.kind, cache.block, cache.window), defaultdict(list))
        pages[cache.page].append((at, cache))
    balanced = {key: pages for key, pages in sets.items() if len(Counter(map(len, pages.values()))) == 1}
    counts = [len(next(iter(pages.values()))) for pages in balanced.values()]
    floor = max((len(next(iter(pages.values()))) for pages in balanced.values() if len(pages) > 1), default=0)
    # the number to whose multiples all counts are rounded up with the least padding; the largest such
    sizes = range(floor, max(counts, default=0) + 1) if floor else ()
    share = min(sizes, key=lambda size: (sum(-count % size for count in counts), -size), default=0)
    for key, pages in sets.items():
        if key not in balanced or not share:
            yield [cache for layers in pages.values() for cache in layers]
            continue
        number = -(-len(next(iter(pages.values()))) // share)
        for first in range(number):
            yield [cache for layers in pages.values() for cache in layers[first::number]]
