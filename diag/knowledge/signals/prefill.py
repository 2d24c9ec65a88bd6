"""Signals of prefill and decode in the same step: inter-token latency, stream pauses, long prompts."""

from diag.core.incident import Signal
from diag.knowledge.signals.expressions import FINISHED, ITL, PROMPT_TOKENS, configured, counted, edge, itl

MEDIAN_ITL = (
    f"(histogram_quantile(0.5, sum by ($by, le) (increase({ITL[0]}_bucket[$window])))"
    f" or histogram_quantile(0.5, sum by ($by, le) (increase({ITL[1]}_bucket[$window]))))"
)
typical_decode_share = Signal(
    "decode time at typical ITL",
    # weighted by time: a pause is one of thousands of tokens, but most of the time
    f"{MEDIAN_ITL} * {itl('count')} / ({itl('sum')} > 0)",
    "{value} of decode time is spent at typical inter-token latency",
    "share",
)
stream_pauses_per_request = Signal(
    "stream pauses / finished request",
    f"({itl('count')} - {itl('bucket', edge('$freeze_seconds'))}) / ({FINISHED} >= 3)",
    "{value} stream pauses (inter-token latency above freeze_seconds) per finished request",
    "ratio",
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
stream_pauses_over_40_s = Signal(
    "stream pauses over 40 s",
    f"{itl('count')} - {itl('bucket', edge('40'))}",
    "inter-token latencies above 40 s: {value}",
    "pauses",
    window_scaling="peak",
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
PREFILL_RATE = f"({PREFILLED} / ({counted('vllm:request_prefill_time_seconds_sum')} > 0))"
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
