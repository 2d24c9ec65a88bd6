"""Long prompts are prefilled in steps so large that every stream that decodes stands still meanwhile."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, measured
from diag.signals import (
    chunked_prefill_is_off,
    freezes_per_request,
    hardly_evicts,
    long_prefills,
    long_prompts,
    ordinary_decode_share,
    prompt_lengths_spread,
    sequences_in_a_step,
    standstills,
    threshold_share_of_step,
    tokens_of_one_prompt_in_a_freeze,
    tokens_prefilled_in_a_freeze,
)

TUNING = "https://docs.vllm.ai/en/latest/configuration/optimization.html#chunked-prefill"
DISAGGREGATED = "https://docs.vllm.ai/en/latest/features/disagg_prefill.html"
HARDLY_FREEZES = freezes_per_request.at_most(0.1, measured("0.3-3.3 with freezes, 0 when cured", "contention_bigbatch"))
CHUNKED = chunked_prefill_is_off.at_most(
    0, documented("without it prompts are not divided, and a step must hold --max-model-len", TUNING)
)

incident = Incident(
    id="prefill_decode_contention",
    title="Long prefills freeze the streams that decode",
    severity="warning",
    per=("instance", "engine"),
    cause="""
        A step computes the next token of every running request and as many prompt tokens as its budget allows. When a
        long prompt takes the step, the step takes as long as the prompt, and every stream waits for it.
    """,
    impact="all streams stop for seconds whenever somebody sends a long prompt",
    symptoms=(
        ordinary_decode_share.below(0.65, measured("0.21-0.61 with freezes, 0.83-0.91 healthy", "contention_bigbatch")),
        freezes_per_request.above(0.1, measured("0.3-3.3 with freezes, 0 when cured", "contention_bigbatch")),
        long_prefills.above(0, measured("3-9 in 30 s", "contention_bigbatch")),
        long_prompts.above(0, judged("even a slow CPU reads 500 tokens in a second: shorter prompts freeze nobody")),
    ),
    supports=(prompt_lengths_spread.above(8, judged("long prompts among short ones: each long one stops many")),),
    looks_like=(
        LookAlike(
            "kv_eviction_cascade",
            distinguish="There, evicted requests are prefilled again and again.",
            requires=hardly_evicts,
        ),
        LookAlike(
            "engine_stalled",
            distinguish="A stall leaves one gap of its own length in every stream; no prompt accounts for it.",
            requires=standstills.at_most(0, measured("gaps of 42 s against 10 s at most", "engine_stalled")),
        ),
        LookAlike("gpu_thermal_throttling", distinguish="There, every gap grows, not a few of them."),
    ),
    fixes=(
        Fix(
            change="Send prompts of more than {value} tokens to a server of their own: what is prefilled in 0.6 of the"
            " freeze limit. Until the threshold is set.",
            value=tokens_prefilled_in_a_freeze,
            rounding="power_of_two_below",
            least=256,
            effect="freezes per request fall to 0 here",
            restart=False,
            expects=(HARDLY_FREEZES,),
            only_if=(prompt_lengths_spread.above(8, judged("where nearly all are long there is nothing to divert")),),
            why=judged("who is not there stops nobody"),
        ),
        Fix(
            flag="--long-prefill-token-threshold",
            value=tokens_of_one_prompt_in_a_freeze,
            rounding="power_of_two_below",
            least=256,
            direction="lower",
            only_if=(
                CHUNKED,
                threshold_share_of_step.below(1, judged("a step holds no more than its budget anyway")),
            ),
            expects=(HARDLY_FREEZES,),
            change="Cap what one long prompt may take of a step: its part of what this server prefills in 0.6 of the "
            "freeze limit.",
            effect="freezes per request fall to 0 (the 99th percentile of gaps rises: judge by the longest gap)",
            risk="the long prompt itself takes about a tenth longer",
            rollback="--long-prefill-token-threshold 0 and restart",
            why=measured("longest gap 3.8 -> 0.5 s, TTFT p95 of short requests 0.39 s", "contention_cure_threshold"),
        ),
        Fix(
            flag="--max-num-batched-tokens",
            value=tokens_prefilled_in_a_freeze,
            rounding="power_of_two_below",
            least=sequences_in_a_step,
            direction="lower",
            only_if=(CHUNKED,),
            expects=(HARDLY_FREEZES,),
            change="Cap the whole step instead: only where several long prompts at once share a step for all that.",
            effect="freezes per request fall to 0",
            risk="new short requests queue behind the long prompt: their TTFT p95 was 6.2 s instead of 0.39 s",
            rollback="set the old value again and restart",
            why=measured("the same gaps as with the threshold", "contention_smallbatch"),
        ),
        Fix(
            change="Separate prefill from decode: two pools of servers joined by --kv-transfer-config.",
            effect="long prompts no longer share a step with anybody's stream",
            why=documented("disaggregated prefill", DISAGGREGATED),
        ),
    ),
    mitigate=(
        "Divert prompts of more than a few thousand tokens to a server of their own until the threshold is set.",
    ),
    hand_over=("the lengths of the prompts over an hour, the version, and the launch command",),
    do_not=(
        "Do not set --max-num-partial-prefills above 1: V1 refuses to start with it.",
        "Do not judge the cure by the 99th percentile of gaps: it rises while the freezes go.",
    ),
)
