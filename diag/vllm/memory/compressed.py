"""Compressed attention (DeepSeek V4): its matrices, the caches of a layer, and the pool that packs them.

A layer keeps a window of tokens, an entry for each `ratio` of tokens, and the state of the compressor that makes
entries; at a ratio of 4 an indexer with entries of its own chooses among them. Read off vLLM 0.32.0:
models/deepseek_v4 (attention.py, compressor.py), sparse_swa.py and _get_packed_kv_cache_groups.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from diag.vllm.memory.config import Config, quote
from diag.vllm.memory.parts import Mixer, UnknownLayers, WeightPart, linear

_INDEXED, _OVERLAP = 4, 2
"""The ratio at which there is an indexer; entries of that ratio overlap by one."""
BLOCK, _WINDOW_BLOCK = 256, 64
"""Tokens of a block of entries, and of a block of the window."""
STATE_BLOCKS = {_INDEXED: 4, 128: 8}
"""Tokens of a block of compressor states, by the ratios that vLLM has."""
_ENTRY, _ALIGNMENT = 584, 576
"""Bytes of an entry in the type fp8_ds_mla, and of the unit that pages are rounded up to."""
_SCALE = 4
"""Bytes of the scale of an indexer's entry."""


class CompressedCache(NamedTuple):
    """A cache of a layer: the tokens of a block, the bytes of a block, and its window, 0 for all tokens."""

    kind: Literal["latent", "window"]
    block: int
    page: int
    window: int = 0


def compression(config: Config, names: Sequence[str], at: int) -> int:
    """Return the tokens that a layer joins to one; 0 if it keeps only a window. `names` are those of layers' kinds."""
    ratios, rates = config.list("compress_ratios"), config.part("compress_rates")
    found = ratios[at] if at < len(ratios) else rates.get(names[at], 0) if at < len(names) else 0
    if found not in (0, *STATE_BLOCKS):
        raise UnknownLayers(f"layers that compress {quote(found)} tokens to one are not covered")
    return int(found)


def compressed_attention(config: Config, ratio: int) -> Mixer:
    """Return a layer's compressed attention; the way down is copied to every GPU."""
    hidden, heads, size = config.size("hidden_size"), config.size("num_attention_heads"), config.size("head_dim")
    down, streams = config.size("q_lora_rank"), config.size("hc_mult", 4)
    out = config.size("o_groups", 8) * config.size("o_lora_rank", 1024)
    parts = [
        linear(down * hidden, "self_attn.q_a_proj", ways=1),
        linear(down * heads * size, "self_attn.q_b_proj"),
        linear(hidden * size, "self_attn.kv_proj", ways=1),
        linear(config.size("o_lora_rank", 1024) * heads * size, "self_attn.o_a_proj"),
        linear(out * hidden, "self_attn.o_b_proj"),
        WeightPart(down + size + heads),
        WeightPart(2 * ((2 + streams) * streams * (streams * hidden + 1) + 3)),  # hyper-connections
    ]
    index = 0
    if ratio:
        parts.append(_compressor(hidden, size, ratio))
    if ratio == _INDEXED:
        count, index = config.size("index_n_heads", 64), config.size("index_head_dim", 128)
        parts += [linear(count * index * down, "self_attn.indexer.wq_b", ways=1), WeightPart(count * hidden)]
        parts.append(_compressor(hidden, index, ratio))
    return Mixer(
        kind="compressed",
        parts=tuple(parts),
        heads=heads,
        kv_heads=1,
        head_dim=size,
        value_dim=size,
        window=config.size("sliding_window", 128),
        index=index,
        sparse=config.count("index_topk") if index else 0,
        rank=size,
        ratio=ratio,
    )


def _compressor(hidden: int, size: int, ratio: int) -> WeightPart:
    wide = size * (_OVERLAP if ratio == _INDEXED else 1)
    return WeightPart(2 * wide * hidden + ratio * wide + size)


def compressed_caches(mixer: Mixer) -> Iterator[CompressedCache]:
    """Yield the caches of a layer of compressed attention, in the type fp8_ds_mla."""
    yield CompressedCache("window", _WINDOW_BLOCK, _page(_WINDOW_BLOCK * _ENTRY), mixer.window)
    if not mixer.ratio:
        return
    sizes = [(_ENTRY, mixer.head_dim)] + [(mixer.index + _SCALE, mixer.index)] * bool(mixer.index)
    overlap = _OVERLAP if mixer.ratio == _INDEXED else 1
    block = STATE_BLOCKS[mixer.ratio]
    for entry, size in sizes:
        yield CompressedCache("latent", BLOCK, _page(BLOCK // mixer.ratio * entry))
        state = 2 * overlap * size * 4  # of float32, for keys and scores
        yield CompressedCache("window", block, _page(block * state), overlap * mixer.ratio)


def entries(mixer: Mixer, context: float) -> float:
    """Return the entries that a token of a context attends to: all of them, or those that the indexer chooses."""
    return min(context / mixer.ratio, mixer.sparse or context) if mixer.ratio else 0


def token_bytes(mixer: Mixer) -> float:
    """Return the bytes that a token adds: its place in the window, and its share of an entry and of an indexer's."""
    entry = (_ENTRY + (mixer.index + _SCALE if mixer.index else 0)) / mixer.ratio if mixer.ratio else 0
    return _ENTRY + entry


def bytes_read(mixer: Mixer, context: float) -> float:
    """Return the bytes of a request's caches that a step reads: window and entries, and all keys of the indexer."""
    keys = context / mixer.ratio * (mixer.index + _SCALE) if mixer.index else 0
    return (min(context, mixer.window) + entries(mixer, context)) * _ENTRY + keys


def _page(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def packed(caches: Sequence[tuple[int, CompressedCache]]) -> Iterator[list[tuple[int, CompressedCache]]]:
    """Yield the groups of a pool that packs pages of several sizes in a block.

    Caches of one kind, block and window are divided into groups of about equally many layers; a set with pages
    of several sizes, of which some are rarer than others, stays whole.
    """
    sets: dict[tuple[object, ...], dict[int, list[tuple[int, CompressedCache]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for at, cache in caches:
        pages = sets.setdefault((cache.kind, cache.block, cache.window), defaultdict(list))
        pages[cache.page].append((at, cache))
    balanced = {key: pages for key, pages in sets.items() if len(Counter(map(len, pages.values()))) == 1}
    counts = [len(next(iter(pages.values()))) for pages in balanced.values()]
    floor = max((len(next(iter(pages.values()))) for pages in balanced.values() if len(pages) > 1), default=0)
    share = _least_padding(counts, floor) if floor else 0
    for key, pages in sets.items():
        if key not in balanced or not share:
            yield [each for layers in pages.values() for each in layers]
            continue
        number = -(-len(next(iter(pages.values()))) // share)
        for first in range(number):
            yield [each for layers in pages.values() for each in layers[first::number]]


def _least_padding(counts: Sequence[int], floor: int) -> int:
    """Return the number to whose multiples all counts are rounded up with the least padding; the largest such."""
    return min(range(floor, max(counts) + 1), key=lambda size: (sum(-count % size for count in counts), -size))
