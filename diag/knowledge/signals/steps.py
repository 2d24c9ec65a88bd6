"""Signals of an engine's steps: prefill and decode in the same step, and how near a step is to the GPUs' ceilings.

Inter-token latencies, stream pauses and long prompts show what a step holds. Shares of the GPUs' ceilings (the
roofline) are those of memory bandwidth (MBU), of FLOPs (MFU), and of tensor parallelism's links. The ceilings are from
data sheets; the work is vLLM's own estimate (--enable-mfu-metrics), otherwise the minimum for the model's shape
(diag/vllm/work.py). If GPU or model are unknown, there is no sample. Iterations without output are not counted; KV
blocks count as a whole.
"""

from diag.core.contract import STALL_BUCKETS
from diag.core.incident import reported
from diag.knowledge.signals.expressions import (
    ITL,
    declared,
    within,
)

PAUSE_EDGES = (*STALL_BUCKETS, 80)
"""Edges of the histogram of inter-token latencies, in seconds."""
_PUBLIC = (
    "https://github.com/NVIDIA/TensorRT-LLM/blob/138f96d45f90b9667426f7c47297d8c06bafac73/docs/source/performance.md"
)
REACHED = reported("servers in public figures reach 21 % to 80 % of their ceilings (bench/capacity.md)", _PUBLIC)
FULL, EMPTY = 0.6, 0.2
"""Shares of a ceiling: above FULL a GPU has little reserve; below EMPTY there is no public figure."""
FULL_LINK, HALF_FULL_LINK = 0.7, 0.4
"""Mean shares of a link's rate, of which it reaches 80 to 90 % (judged): nearly full all the time, or half of it."""
MUCH_PAUSED, PAUSED = 0.12, 0.03
"""Shares of decode time in stream pauses: the most that a window may hold of short ones, and less than what one pause
of 2.5 s, the default ITL SLO, takes of every minute of a stream: 4 %."""
PAUSED_ANSWERS = 0.33
"""Stream pauses per answer while long prompts come all the time: 0.3 - 2.8 where these are the cause, at most 0.19 on
healthy servers with long prompts."""
IDLE = 0.1
"""Utilisation below which a GPU takes no part in the work of the server."""
MUCH_WAITING = 0.2
"""Share of the link's rate that the all-reduces need: they overlap with no computation, so they take it as time."""
ENGINE = "by (instance, engine)"


def _name(seconds: float) -> str:
    """Return an edge as part of a name: 2_5_s."""
    return f"{seconds:g}_s".replace(".", "_")


def _known(metric: str, part: str = "") -> str:
    """Return a number of the server, or of a part of its weights, one for each instance."""
    matchers = f'{{part="{part}"}}' if part else ""
    return f"max by (instance) (last_over_time({metric}{matchers}[$window]))"


PARTS, SIGNALS = declared(
    vars(),
    *(
        f"""
    itl_within_{_name(above)}: tokens = {within(f"{above:g}", ITL)}
    # 0 if the server lacks the edge
    pauses_over_{_name(above)}: pauses = $itl_count - ($itl_within_{_name(above)} or $itl_count)
    """
        for above in PAUSE_EDGES
    ),
    # Each pause lasted freeze_seconds, each further bucket below it, and half of its own: without that half, two pauses
    # of 2.4 s count as 2 s. Half of the buckets on both sides of an edge are thus counted for the pauses over it.
    # Weighted by time, not by finished requests: in the worst case none finishes.
    *(
        f"pause_time_at_{_name(edge)}: seconds ="
        f" ({(edge - below) / 2:g} * ($freeze_seconds <= bool {below:g})"
        f" + {(above - edge) / 2:g} * ($freeze_seconds <= bool {edge:g})) * $pauses_over_{_name(edge)}"
        for below, edge, above in zip(PAUSE_EDGES, PAUSE_EDGES[1:], (*PAUSE_EDGES[2:], PAUSE_EDGES[-1]), strict=False)
    ),
    " + ".join(
        [
            f"paused_time: seconds = ($freeze_seconds + {(PAUSE_EDGES[1] - PAUSE_EDGES[0]) / 2:g}"
            f" * ($freeze_seconds <= bool {PAUSE_EDGES[0]:g})) * $stream_pauses"
        ]
        + [f"$pause_time_at_{_name(edge)}" for edge in PAUSE_EDGES[1:]]
    ),
)


NEAR_BANDWIDTH, NEAR_COMPUTE = (SIGNALS[name].at_least(FULL, REACHED) for name in ("bandwidth_share", "compute_share"))
