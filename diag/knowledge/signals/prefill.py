"""Signals of prefill and decode in the same step: inter-token latency, stream pauses, long prompts."""

from itertools import pairwise

from diag.core.contract import STALL_BUCKETS
from diag.knowledge.signals.expressions import ITL, KV_USAGE, TTFT, parts, renamed, signal, within

PAUSE_EDGES = (*STALL_BUCKETS, 80)
"""Edges of the histogram of inter-token latencies, in seconds."""


MEDIAN = "histogram_quantile(0.5, sum by ($by, le) (increase({}_bucket[$window])))"


def _name(seconds: float) -> str:
    """Return an edge as part of a name: 2_5_s."""
    return f"{seconds:g}_s".replace(".", "_")


PARTS = parts(
    f"""
    itl_median: seconds = {renamed(MEDIAN, ITL)}
    itl_within_freeze_seconds: tokens = {within("$freeze_seconds", ITL)}
    # -- prefills: vLLM counts a prompt's tokens at its first token, its length and prefill time when it finishes
    kv_cache_usage_growth: share = sum by ($by) ({renamed("delta({}[$window])", KV_USAGE)})
    # The KV cache takes a prompt step by step. Each running request may also have taken a block that is not yet full.
    unbooked_prompt_tokens: tokens =
        $kv_cache_usage_growth * on (instance) group_left () $config_kv_cache_size_tokens
        - $running_highest * on (instance) group_left () $config_block_size - $output_tokens - $prompt_tokens
    tokens_prefilled_per_step: tokens =
        ($prompt_tokens + clamp_min($unbooked_prompt_tokens, 0) or $prompt_tokens) / ($engine_steps > 0)
    prefills_within_freeze_seconds: requests = {within("$freeze_seconds", ("vllm:request_prefill_time_seconds",))}
    prefills: requests = sum by ($by) (increase(vllm:request_prefill_time_seconds_count[$window]))
    prompts: requests = sum by ($by) (increase(vllm:request_prompt_tokens_count[$window]))
    prompts_within_500_tokens: requests = {within("500", ("vllm:request_prompt_tokens",))}
    late_first_tokens: requests = $first_tokens - {within("$freeze_seconds", TTFT)}
    first_tokens_after_10_s: requests = $first_tokens - {within("10", TTFT)}
    long_prefills_done: requests = $prefills_over_freeze_seconds * ($prompts_over_500_tokens > bool 0)
    long_prefills_begun: requests = ($prompt_tokens >= bool 500 * $first_tokens) * $late_first_tokens
    long_prefill_in_progress: bool = $unbooked_prompt_tokens >= bool 500
    # Long prompts usually take long, or one takes KV cache now: a stall rarely coincides with a prefill.
    long_prompts_take_long: bool =
        ($long_prefills_done + $long_prefills_begun > bool 0)
        * ($prefills_over_freeze_seconds >= bool 0.5 * $prompts_over_500_tokens)
    prompts_account_for_pauses: bool = $long_prefill_in_progress == 1 or $long_prompts_take_long[5m]
    # without a pause there is nothing to account for; a pause on a page that does not show its prompts is unknown
    long_prefill_steps: bool =
        0 * ($pauses_over_10_s[5m] <= 0) or ($pauses_over_10_s[5m] > 0) * $prompts_account_for_pauses[5m] > bool 0
    # cached prompt tokens are not prefilled; releases before 0.13 do not export the difference
    prefilled_tokens: tokens =
        sum by ($by) (increase(vllm:request_prefill_kv_computed_tokens_sum[$window])) or $finished_prompt_tokens
    # While no long prompt has finished: the growth of the KV cache by a prompt while streams wait for tokens.
    prefill_rate: tokens/s =
        $prefilled_tokens / (sum by ($by) (increase(vllm:request_prefill_time_seconds_sum[$window])) > 0)
        or ($unbooked_prompt_tokens >= 500) * $requests_running_mean / ($itl_sum > 0)
    prefills_at_a_time: requests = sum by ($by) (rate(vllm:request_prefill_time_seconds_sum[$window]))
    """,
    *(
        f"""
    itl_within_{_name(above)}: tokens = {within(f"{above:g}", ITL)}
    # 0 if the server lacks the edge
    pauses_over_{_name(above)}: pauses = $itl_count - ($itl_within_{_name(above)} or $itl_count)
    """
        for above in PAUSE_EDGES
    ),
    # The lower bound of the histogram: each pause lasted at least freeze_seconds, and also from each further edge below
    # it to the next one. Weighted by time, not by finished requests: in the worst case none finishes.
    *(
        f"pause_time_up_to_{_name(above)}: seconds ="
        f" {above - below:g} * ($freeze_seconds <= bool {below:g}) * $pauses_over_{_name(above)}"
        for below, above in pairwise(PAUSE_EDGES)
    ),
    " + ".join(
        ["paused_time: seconds = $freeze_seconds * $stream_pauses"]
        + [f"$pause_time_up_to_{_name(above)}" for above in PAUSE_EDGES[1:]]
    ),
)

paused_share = signal(
    "decode time in stream pauses: share = $paused_time / ($itl_sum > 0)",
    "at least {value} of decode time is spent in inter-token latencies above the stream pause threshold",
)
stream_pauses_per_request = signal(
    "stream pauses / finished request: ratio = $stream_pauses / ($finished_requests >= 3)",
    "{value} stream pauses (inter-token latency above the stream pause threshold) per finished request",
)
typical_decode_share = signal(
    # if each step prefills many tokens, the typical latency is that of a prefill
    "decode time at typical ITL: share ="
    " $itl_median * $itl_count / ($itl_sum > 0) * ($tokens_prefilled_per_step < bool 500)",
    "{value} of decode time is spent at a typical inter-token latency that is not that of prefills",
)
prefilled_per_step = signal(
    "prompt tokens prefilled per step: tokens = $tokens_prefilled_per_step",
    "a step prefills {value} prompt tokens on average",
    context=True,
)
long_prefills = signal(
    "prefills over freeze_seconds: requests = $prefills - $prefills_within_freeze_seconds",
    "prefills that took longer than the stream pause threshold: {value}",
    window_scaling="peak",
)
long_prompts = signal(
    "prompts over 500 tokens: requests = $prompts - $prompts_within_500_tokens",
    "prefilled prompts of more than 500 tokens: {value}",
    window_scaling="peak",
)
prefills_in_pauses = signal(
    "long prefills, done or in progress: requests ="
    " ($long_prefills_done > 0) or ($long_prefills_begun > 0) or ($long_prefills_done + $long_prefill_in_progress)",
    "prefills that took longer than the stream pause threshold, or whose prompt still takes KV cache: {value}",
    window_scaling="peak",
    formerly=("prefills over freeze_seconds",),
)
stream_pauses_unexplained = signal(
    "stream pauses over 40 s without a prefill: pauses = $pauses_over_40_s * (1 - $prompts_account_for_pauses)",
    "inter-token latencies above 40 s for which no long prefill accounts: {value}",
    window_scaling="peak",
    formerly=("stream pauses over 40 s",),
)
prompt_lengths_spread = signal(
    "prompt length p95 / p50: ratio ="
    " histogram_quantile(0.95, sum by ($by, le) (increase(vllm:request_prompt_tokens_bucket[$window])))"
    " / (histogram_quantile(0.5, sum by ($by, le) (increase(vllm:request_prompt_tokens_bucket[$window]))) > 0)",
    "the 95th percentile of prompt lengths is {value} times the median",
)
tokens_prefilled_within_pause = signal(
    # a margin of 60 %: prefill slows down as the context grows
    "tokens prefilled in 60 % of the stream pause threshold: tokens = 0.6 * $freeze_seconds * $prefill_rate",
    "{value} prompt tokens are prefilled in 60 % of the stream pause threshold",
)
tokens_of_one_prompt_within_pause = signal(
    # concurrent prefills share the tokens of a step
    "tokens of one prompt in 60 % of the stream pause threshold: tokens ="
    f" ${tokens_prefilled_within_pause.id} / (1 + $prefills_at_a_time)",
    "{value} tokens of each concurrent prompt are prefilled in 60 % of the stream pause threshold",
)
threshold_share_of_step = signal(
    # 256 is the lowest proposed value; if the token budget is unknown, the fix is not ruled out
    "proposed threshold / --max-num-batched-tokens: share ="
    f" clamp_min(${tokens_of_one_prompt_within_pause.id}, 256) / on (instance) group_left ()"
    f" $config_max_num_batched_tokens or 0 * ${tokens_of_one_prompt_within_pause.id}",
    "the proposed threshold is {value} of a step's token budget",
)
