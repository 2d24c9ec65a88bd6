"""Long prompts are prefilled in steps so large that every decoding stream stalls meanwhile."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured
from diag.knowledge import shared_fixes

TUNING = "https://docs.vllm.ai/en/latest/configuration/optimization.html#chunked-prefill"
DISAGGREGATED = "https://docs.vllm.ai/en/latest/features/disagg_prefill.html"
PAUSED = measured(
    "18-100 % with stalls, 0 once fixed, less than a tenth on other servers with long prefills", "contention_bigbatch"
)
HARDLY_PAUSES = signals.paused_share.at_most(0.12, PAUSED)
CHUNKED = signals.chunked_prefill_is_off.at_most(
    0, documented("without chunked prefill, prompts are not split and a step must hold --max-model-len", TUNING)
)

incident = Incident(
    id="prefill_decode_contention",
    title="Long prefills stall decoding",
    severity="warning",
    per=("instance", "engine"),
    cause="""
        A step computes the next token of every running request and as many prompt tokens as its token budget allows.
        When a long prompt fills the step, the step takes as long as that prefill, and every decoding stream waits.
    """,
    impact="all running streams pause for seconds whenever a long prompt arrives",
    symptoms=(
        signals.paused_share.above(0.12, PAUSED),
        signals.prefills_in_pauses.above(0, measured("3-9 long prefills in 30 s", "contention_bigbatch")),
        signals.typical_decode_share.below(
            0.8, measured("21-77 % with stalls, 83-91 % on a healthy server", "contention_bigbatch")
        ),
    ),
    supports=(
        signals.prompt_lengths_spread.above(
            8, judged("long prompts among short ones: each long one stalls many streams")
        ),
    ),
    looks_like=(
        LookAlike(
            "kv_eviction_cascade",
            distinguish="Preempted requests are prefilled again and again.",
            requires=signals.hardly_preempts,
        ),
        LookAlike(
            "engine_stalled",
            distinguish="An engine stall leaves one pause of its own length in every stream, and no prompt accounts "
            "for it.",
            requires=signals.stream_pauses_unexplained.at_most(
                0, measured("pauses of 42 s in a stall, one of many requests in its prefill", "engine_stalled")
            ),
        ),
        LookAlike(
            "compiling_while_serving",
            distinguish="Every stream waits for the compiler, and so do the first tokens of new requests.",
            requires=signals.compiled.at_most(0, judged("while kernels are compiled, a pause proves no prefill")),
        ),
        LookAlike("gpu_thermal_throttling", distinguish="Every inter-token latency grows, not only a few of them."),
    ),
    explains=("requests_aborted", "contract_breached"),
    fixes=(
        Fix.without_restart(
            change="Divert prompts of more than {value} tokens to a separate server while short requests stream here.",
            value=signals.prompt_length_to_divert,
            rounding="power_of_two_below",
            least=256,
            effect="decode time in stream pauses falls to 0 on this server",
            expects=(HARDLY_PAUSES,),
            only_if=(
                signals.prompt_lengths_spread.above(
                    8, judged("where nearly all prompts are long, there is nothing to divert")
                ),
            ),
            why=judged("diverted prompts cannot block these streams"),
        ),
        Fix(
            flag="--long-prefill-token-threshold",
            value=signals.tokens_of_one_prompt_within_pause,
            rounding="power_of_two_below",
            least=256,
            direction="lower",
            only_if=(
                CHUNKED,
                signals.threshold_share_of_step.below(
                    1, judged("a threshold above the token budget of a step has no effect")
                ),
            ),
            expects=(HARDLY_PAUSES,),
            change="Cap how many tokens of one long prompt a step may take: its part of what this server prefills in "
            "60 % of the stream pause threshold.",
            effect="decode time in stream pauses falls to 0 (p99 of inter-token latency rises: judge by the maximum)",
            risk="the long prompt itself takes about 10 % longer",
            rollback="--long-prefill-token-threshold 0",
            why=measured(
                "maximum inter-token latency 3.8 s -> 0.5 s, TTFT p95 of short requests 0.39 s",
                "contention_cure_threshold",
            ),
        ),
        Fix(
            flag="--max-num-batched-tokens",
            value=signals.tokens_prefilled_within_pause,
            rounding="power_of_two_below",
            least=signals.sequences_in_a_step,
            direction="lower",
            only_if=(CHUNKED, signals.prefill_load_at_threshold.below(0.5, judged("else prompts queue"))),
            expects=(HARDLY_PAUSES,),
            change="Cap the whole step instead. Use this only where several long prompts still share a step.",
            effect="decode time in stream pauses falls to 0",
            risk="new short requests queue behind the long prompt: their TTFT p95 was 6.2 s instead of 0.39 s",
            rollback="set the old value again",
            why=measured("the same inter-token latency as with the threshold", "contention_smallbatch"),
        ),
        Fix(
            change="Run prefill and decode on separate servers, connected by --kv-transfer-config.",
            effect="long prompts no longer share a step with decoding streams",
            why=documented("disaggregated prefill keeps prefill from interrupting decode", DISAGGREGATED),
        ),
        shared_fixes.POOLS_BY_LENGTH,
    ),
    operations=("scale",),
    mitigate=(
        "Divert prompts of more than a few thousand tokens to a separate server while short requests stream here.",
    ),
    hand_over=("the prompt lengths over an hour, the vLLM version, and the launch command",),
    do_not=(
        "Do not set --max-num-partial-prefills above 1: V1 refuses to start with it.",
        "Do not judge the fix by p99 of inter-token latency: it rises while the pauses disappear.",
    ),
)
