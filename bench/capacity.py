"""Compare the ceilings and sizes of `diag budget` with what others measured; nothing is run. Writes capacity.md."""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import table

sys.path[:0] = [str(Path(__file__).parent.parent / "tests")]
from support.kv_starts import Start, left_out, starts  # noqa: E402
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
        estimated = f"{size.estimated.central:,} ({size.estimated.low:,} to {size.estimated.high:,})"
        yield f"| {size.what} | {size.measured:,} | {estimated} | {size.source} |"
    yield from memory()
    yield LEFT_OUT.rstrip()
    yield ""
    yield from (f"- {name}: <{address}>" for name, address in SOURCES.items())


MEMORY = """
## Sizes against logged starts

Starts of public servers whose log has their memory (tests/data/kv_starts.csv): the estimate from the launch, the
model's config.json and the GPU, and nothing of the log. Constants were fitted on the calibration rows. A third of the
rows, those whose SHA-256 is a multiple of three, was chosen before anything was fitted and kept aside; a few further
starts were found after the fit. The second set was gathered later, 32 of its 42 starts with the GPU or its memory. Half
of it, the rows with an even SHA-256, was kept aside before anything was estimated and compared once, after the second
fit, on the other half. Three starts that led to the rule for compiling and one that an earlier constant was fitted on
are in that other half whatever their SHA-256. Seven of the 42 were gathered after the second fit.
The third set, eleven starts of November 2026, was divided in the same way before anything was fitted on it. The third
fit made the first start on a host, which compiles, the likely one, and counts cached files on GPUs that share their
host's memory. The fourth set, 41 starts of November 2026, was divided by even SHA-256 before anything was estimated;
the memory of a few of its GPUs follows from the log's own shares of it.

- layout: tokens of the KV cache if its bytes are those of the log
- weights: GiB on one GPU
- KV cache: GiB from the launch and the GPU alone, tokens where the log has no GiB. Where the log names no
  --gpu-memory-utilization, the default is assumed, although the launch may have had another one, unless the log lists
  the arguments that are not defaults; "NVIDIA A100" is taken for 80 GB; where it names no published release, the
  newest one is assumed, and the range is that of all releases since 0.9.2

One rule was corrected after the kept-aside rows had been compared once, from the packages' metadata: FlashInfer is an
extra of vLLM 0.11.0 too, so that its sampler may sort. Two were found in calibration rows after the second kept-aside
rows had been compared, with 90 % within 8.1 % then: tensor parallelism divides the encoders, and ChatGLMModel has a
head. After the third comparison (21 of 26 kept-aside KV caches in their range) two ranges were widened, both from
calibration rows: cards of one name differ by 0.2 %, and one GPU of AMD has up to 1.2 GiB outside torch.
Before anything was changed for the fourth set, all 42 kept-aside KV caches together had a median error of 2.6 %, 90 %
within 15.1 %, a bias of +0.3 % and a median width of 12.3 %, and 38 were in their range. What changed then is from
vLLM's source, with the constants from calibration rows: what is kept of encoders' outputs, frames of a profiled video,
the workspace of a sparse indexer, logits sorted before 0.11.1, one step in a window, memory of NCCL. The rows that
missed were seen by then, so that the figures below are no first comparison for them. Two starts of the second set got
`--limit-mm-per-prompt` from their logs after they had been compared.
The fifth set, 21 starts of 2025 and 2026 from other repositories, was compared once before anything was changed for
it. Of 17 KV caches with a known GPU (thirteen on one pair of GB10) the median error was 6.1 %, 90 % within 8.3 %, 16
in their range; of the four on H100 and H200 0.3 to 3.4 %; the layout's median error was 0.0 %. Weights had no range
then if the shape was exact, so that 71 of 124 starts, and 10 of 18 new ones, lay inside, with a median error of 0.2 %.
Since then weights are the most that torch held while it loaded: 0.4 % less to 1 % and 96 MiB more, fitted on the
calibration rows. A head that a checkpoint quantizes counts as such, and a full graph of a recurrent model counts 24
MiB in every release: four starts that vLLM refused for their state blocks are met within 2 % instead of 5 %, one kept-
aside start (Qwen3.6 27B on four L4) by 13 % instead of 7 %.

| what | rows | starts | median error | 90 % within | worst | in the range |
|---|---|---:|---:|---:|---:|---:|
"""
KNOWN = ("release, GPU and share named", "share or size not named", "release not named")
Error = Callable[[Start], float | None]


def memory() -> Iterator[str]:
    """Yield the errors of the sizes, over the rows, and for each row."""
    found = starts()
    kinds: dict[str, Error] = {"layout": Start.layout_error, "weights": Start.weights_error}
    kinds |= {f"KV cache: {known}": of_known(known) for known in KNOWN}
    yield MEMORY.strip()
    for what, error in kinds.items():
        for rows in ROWS:
            of_rows = [
                (start, abs(one)) for start in found if start.row["set"] == rows and (one := error(start)) is not None
            ]
            is_inside = Start.is_inside_range if what.startswith("KV") else Start.has_weights_inside
            inside = [bool(is_inside(start)) for start, _ in of_rows] if what != "layout" else []
            share = f"{sum(inside)} of {len(inside)}" if inside else ""
            yield f"| {what} | {rows} | {_errors([one for _, one in of_rows])} | {share} |"
    yield "\n| KV cache of starts that were kept aside | starts | median error | bias | in the range | median width |"
    yield "|---|---:|---:|---:|---:|---:|"
    yield from (f"| {name} | {figures} |" for name, figures in _classes(found))
    yield "\n| model | release | GPUs | known | rows | logged | estimated | error |"
    yield "|---|---|---|---|---|---:|---:|---:|"
    for known in KNOWN:
        for start in found:
            error = of_known(known)(start)
            if error is not None:
                cells = (start.label, known, start.row["set"], start.figures, f"{error:+.1%}")
                yield f"| {' | '.join(cells)} |"
    yield "\nNot compared:\n"
    yield from (f"- {count}: {why}" for why, count in left_out().items())


ROWS = (
    *("calibration", "kept aside", "found later", "second calibration", "second kept aside"),
    *("third calibration", "third kept aside", "fourth calibration", "fourth kept aside", "fifth kept aside"),
)


def _classes(found: Sequence[Start]) -> Iterator[tuple[str, str]]:
    """Yield the classes of models, and the errors and widths of their kept-aside starts."""
    groups: dict[str, list[tuple[float, bool, float]]] = {}
    for start in found:
        size = start.estimate.kv_cache if start.is_kept_aside else None
        if size and (error := start.memory_error()) is not None:
            measured = (error, bool(start.is_inside_range()), (size.high - size.low) / max(size.central, 1))
            for name in (start.kind, f"all: {start.known}", "all"):
                groups.setdefault(name, []).append(measured)
    for name, members in sorted(groups.items()):
        errors, inside, widths = zip(*members, strict=True)
        median = statistics.median(map(abs, errors))
        bias, width = statistics.median(errors), statistics.median(widths)
        yield name, f"{len(members)} | {median:.1%} | {bias:+.1%} | {sum(inside)} of {len(inside)} | {width:.1%}"


def of_known(known: str) -> Error:
    """Return the error of the KV cache of starts whose log names so much, None for the others."""
    return lambda start: start.memory_error() if start.known == known else None


def _errors(errors: Sequence[float]) -> str:
    if not errors:
        return "0 | | |"
    ordered = sorted(errors)
    ninth = ordered[min(len(ordered) - 1, -(-9 * len(ordered) // 10) - 1)]
    return f"{len(errors)} | {statistics.median(errors):.1%} | {ninth:.1%} | {ordered[-1]:.1%}"


if __name__ == "__main__":
    table.write("capacity.md", "\n".join(page()) + "\n" + table.kept("capacity.md", RAMPS))
