"""Compare the ceilings of `diag budget` with what others measured; nothing is run. Writes bench/capacity.md."""

import sys
from collections.abc import Iterator
from pathlib import Path

import table

sys.path[:0] = [str(Path(__file__).parent.parent / "tests")]
from support.public_figures import SOURCES, cache_figures, figures  # noqa: E402

RAMPS = "## What binds a server at its ceiling"
"""The section that bench/ramp.py writes."""
KINDS = {
    "run": ("Output tokens/s, prompts included", ",.0f"),
    "decode": ("Output tokens/s, decode alone", ",.0f"),
    "prefill": ("Prompt tokens/s", ",.0f"),
    "cost": ("Dollars per million output tokens", ".2f"),
}
LEFT_OUT = """
The figures are for vLLM and TensorRT-LLM (`trtllm`), on the same GPUs. The source of the figure for cost does not state
the batch: 64 requests of 2,048 tokens are assumed.

Two published figures are left out, because they exceed the memory bandwidth of the GPU:

- 195 tokens/s of Llama 3.1 8B in FP8 on an RTX 4090 at batch 1; reading 7.5 GB at 1,008 GB/s allows 134
  (<https://gigagpu.com/rtx-4090-24gb-fp8-llama-deployment/>)
- 5,500 tokens/s of Llama 3.1 8B in BF16 on one H100 at batch 16; reading 15 GB at 3,352 GB/s allows 3,570
  (<https://gpuadvisor.com/cost-to-serve-1m-tokens>)

Sources:

"""


def page() -> Iterator[str]:
    """The page, line by line."""
    found = list(figures())
    shares = [figure.reached for figure in found]
    yield "# Ceilings against public figures\n"
    reached = f"{min(shares):.0%} to {max(shares):.0%} of their ceilings"
    yield f"{len(found)} figures reach {reached}; none is above its own.\n"
    for kind, (title, form) in KINDS.items():
        bound = "at least" if kind == "cost" else "ceiling"
        yield f"## {title}\n\n| what | measured | {bound} | reached | source |\n|---|---:|---:|---:|---|"
        for figure in (one for one in found if one.kind == kind):
            numbers = f"{figure.measured:{form}} | {figure.bound:{form}} | {figure.reached:.0%}"
            yield f"| {figure.what} | {numbers} | {figure.source} |"
        yield ""
    yield "## KV cache size in tokens\n\n| what | logged | estimated | source |\n|---|---:|---:|---|"
    for size in cache_figures():
        estimated = f"{size.estimated.low:,} to {size.estimated.high:,}"
        yield f"| {size.what} | {size.measured:,} | {estimated} | {size.source} |"
    yield LEFT_OUT.rstrip()
    yield ""
    yield from (f"- {name}: <{address}>" for name, address in SOURCES.items())


if __name__ == "__main__":
    table.write("capacity.md", "\n".join(page()) + "\n" + table.kept("capacity.md", RAMPS))
