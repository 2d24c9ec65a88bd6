"""Signals of prefill and decode in the same step: inter-token latency, stream pauses, long prompts."""

from itertools import pairwise

from diag.core.contract import STALL_BUCKETS
from diag.core.incident import Signal
from diag.knowledge.signals.expressions import (
    FINISHED,
    ITL,
    KV_USAGE,
    PROMPT_TOKENS,
    RUNNING,
    configured,
    counted,
    edge,
    gauge,
    itl,
)

MEDIAN_ITL = (
    f"(histogram_quantile(0.5, sum by ($by, le) (increase({ITL[0]}_bucket[$window])))"
    f" or histogram_quantile(0.5, sum by ($by, le) (increase({ITL[1]}_bucket[$window]))))"
)
PAUSES = f"({itl('count')} - {itl('bucket', edge('$freeze_seconds'))})"
PAUSE_EDGES = (*STALL_BUCKETS, 80)


def pauses_over(edge_seconds: float, window: str = "$window") -> str:
    """Inter-token latencies above an edge of the histogram; 0 where the server lacks the edge."""
    count, within = itl("count"), itl("bucket", edge(f"{edge_seconds:g}"))
    return f"({count} - ({within} or {count}))".replace("$window", window)


# As the histogram bounds it from below: each pause lasted at least freeze_seconds, and from each further edge below it
# to the next one. Weighted by time, and without finished requests: in the worst case nobody finishes.
PAUSED_TIME = " + ".join(
    [
        f"$freeze_seconds * {PAUSES}",
        *(
            f"{above - below:g} * ($freeze_seconds <= bool {below:g}) * {pauses_over(above)}"
            for below, above in pairwise(PAUSE_EDGES)
        ),
    ]
)
paused_share = Signal(
    "decode time in stream pauses",
    f"({PAUSED_TIME}) / ({itl('sum')} > 0)",
    "at least {value} of decode time is spent in inter-token latencies above freeze_seconds",
    "share",
)
stream_pauses_per_request = Signal(
    "stream pauses / finished request",
    f"{PAUSES} / ({FINISHED} >= 3)",
    "{value} stream pauses (inter-token latency above freeze_seconds) per finished request",
    "ratio",
)

# -- prefills: vLLM books the tokens of a prompt at its first token, its length and its prefill time when it finishes

BOOKED = counted("vllm:prompt_tokens_total")
KV_GROWTH = " or ".join(f"sum by ($by) (delta({name}[$window]))" for name in KV_USAGE)
# The KV cache takes a prompt step by step. Each running request may also have taken a block that is not yet full.
UNBOOKED = (
    f"(({KV_GROWTH}) * on (instance) group_left () {configured('kv_cache_size_tokens')}"
    f" - sum by ($by) (max_over_time({RUNNING}[$window])) * on (instance) group_left () {configured('block_size')}"
    f" - {counted('vllm:generation_tokens_total')} - {BOOKED})"
)
PREFILLED_PER_STEP = (
    f"(({BOOKED} + clamp_min({UNBOOKED}, 0) or {BOOKED}) / ({counted('vllm:iteration_tokens_total_count')} > 0))"
)
typical_decode_share = Signal(
    "decode time at typical ITL",
    # where each step prefills much, the typical latency is that of a prefill
    f"{MEDIAN_ITL} * {itl('count')} / ({itl('sum')} > 0) * ({PREFILLED_PER_STEP} < bool 500)",
    "{value} of decode time is spent at a typical inter-token latency that is not that of prefills",
    "share",
)
long_prefills = Signal(
    "prefills over freeze_seconds",
    f"{counted('vllm:request_prefill_time_seconds_count')}"
    f" - {counted('vllm:request_prefill_time_seconds_bucket', edge('$freeze_seconds'))}",
    "prefills that took longer than freeze_seconds: {value}",
    "requests",
    window_scaling="peak",
)
long_prompts = Signal(
    "prompts over 500 tokens",
    f"{counted('vllm:request_prompt_tokens_count')} - {counted('vllm:request_prompt_tokens_bucket', edge('500'))}",
    "prefilled prompts of more than 500 tokens: {value}",
    "requests",
    window_scaling="peak",
)
LATE_FIRST_TOKENS = (
    f"({counted('vllm:time_to_first_token_seconds_count')}"
    f" - {counted('vllm:time_to_first_token_seconds_bucket', edge('$freeze_seconds'))})"
)
LONG_DONE = f"(({long_prefills.promql}) * (({long_prompts.promql}) > bool 0))"
LONG_BEGUN = f"(({BOOKED} >= bool 500 * {counted('vllm:time_to_first_token_seconds_count')}) * {LATE_FIRST_TOKENS})"
LONG_IN_PROGRESS = f"({UNBOOKED} >= bool 500)"
prefills_in_pauses = Signal(
    "long prefills, done or in progress",
    f"({LONG_DONE} > 0) or ({LONG_BEGUN} > 0) or ({LONG_DONE} + {LONG_IN_PROGRESS})",
    "prefills that took longer than freeze_seconds, or whose prompt still takes KV cache: {value}",
    "requests",
    window_scaling="peak",
    formerly=("prefills over freeze_seconds",),
)
# Long prompts that take long as a rule, or one that takes KV cache now: a stall hits a prefill now and then only.
AS_A_RULE = (
    f"(({LONG_DONE} + {LONG_BEGUN} > bool 0) * (({long_prefills.promql}) >= bool 0.5 * ({long_prompts.promql})))"
).replace("$window", "5m")
PROMPTS_ACCOUNT = f"({LONG_IN_PROGRESS} == 1 or {AS_A_RULE})"
LONG_STEPS = "({count} > bool 0) * ({account} or 0 * {count})".format(
    count=pauses_over(10, "5m"), account=PROMPTS_ACCOUNT.replace("$window", "5m")
)
stream_pauses_unexplained = Signal(
    "stream pauses over 40 s without a prefill",
    f"{pauses_over(40)} * (1 - {PROMPTS_ACCOUNT})",
    "inter-token latencies above 40 s for which no long prefill accounts: {value}",
    "pauses",
    window_scaling="peak",
    formerly=("stream pauses over 40 s",),
)
prompt_lengths_spread = Signal(
    "prompt length p95 / p50",
    "histogram_quantile(0.95, sum by ($by, le) (increase(vllm:request_prompt_tokens_bucket[$window])))"
    " / (histogram_quantile(0.5, sum by ($by, le) (increase(vllm:request_prompt_tokens_bucket[$window]))) > 0)",
    "the 95th percentile of prompt lengths is {value} times the median",
    "ratio",
)
# Cached prompt tokens are not prefilled; releases before 0.13 do not export the difference.
PREFILLED = f"({counted('vllm:request_prefill_kv_computed_tokens_sum')} or {PROMPT_TOKENS})"
# While no long prompt has finished, what the KV cache takes of one in the time that its streams wait for tokens.
PREFILL_RATE = (
    f"({PREFILLED} / ({counted('vllm:request_prefill_time_seconds_sum')} > 0)"
    f" or ({UNBOOKED} >= 500) * {gauge('avg_over_time(', RUNNING)} / ({itl('sum')} > 0))"
)
tokens_prefilled_within_pause = Signal(
    "tokens prefilled in 60 % of freeze_seconds",
    # a margin of 60 %: prefill slows down as the context grows
    f"0.6 * $freeze_seconds * {PREFILL_RATE}",
    "{value} prompt tokens are prefilled in 60 % of freeze_seconds",
    "tokens",
)
PREFILLS_AT_A_TIME = "sum by ($by) (rate(vllm:request_prefill_time_seconds_sum[$window]))"
tokens_of_one_prompt_within_pause = Signal(
    "tokens of one prompt in 60 % of freeze_seconds",
    # concurrent prefills share a step: each gets its part of the tokens
    f"{tokens_prefilled_within_pause.promql} / (1 + {PREFILLS_AT_A_TIME})",
    "{value} tokens of each concurrent prompt are prefilled in 60 % of freeze_seconds",
    "tokens",
)
threshold_share_of_step = Signal(
    "proposed threshold / --max-num-batched-tokens",
    # 256 is the minimum that is proposed; where the token budget is not known, the fix is not ruled out
    f"clamp_min({tokens_of_one_prompt_within_pause.promql}, 256) / on (instance) group_left ()"
    f" {configured('max_num_batched_tokens')} or 0 * {tokens_of_one_prompt_within_pause.promql}",
    "the proposed threshold is {value} of a step's token budget",
    "share",
)
