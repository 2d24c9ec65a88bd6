"""Draft tokens are accepted at short contexts and rejected at long ones: the draft model was not trained for them."""

from diag import signals
from diag.incident import Effect, Fix, Incident, LookAlike, documented, judged, reported

SPECULATION = "https://docs.vllm.ai/en/latest/features/spec_decode/"
SPECULATIVE_CONFIG = "https://docs.vllm.ai/en/latest/api/vllm/config/speculative/"
BY_LENGTH = "https://github.com/vllm-project/speculators/pull/684"
LOSS = "https://github.com/vllm-project/vllm/issues/47602"

LOST = signals.acceptance_at_long_contexts.below(
    signals.WORTHWHILE, reported("1.30 accepted tokens per draft at 2,000 tokens of context, 0.09 at 16,000", BY_LENGTH)
)
COLLAPSED = signals.acceptance_kept_at_length.below(
    0.5, reported("7 % is left of a draft trained on short texts", BY_LENGTH)
)
PAYS_AT_FIRST = signals.acceptance_at_short_contexts.at_least(
    signals.WORTHWHILE, judged("below {threshold}, speculation does not pay off at any length")
)
incident = Incident(
    id="speculation_lost_at_length",
    title="Draft acceptance collapses with context length",
    severity="info",
    per=("instance", "engine"),
    window="1h",  # the mix of clients changes from minute to minute
    live_window="1h",
    hold="6h",
    cause=f"""
        A draft model or head (EAGLE, MTP) that was trained on short texts predicts the next tokens of a long context
        badly; some have no positions beyond 2,048 tokens. Every step of a long request then pays for drafting and
        verifying tokens that are rejected. The page has no acceptance by request: periods of two minutes in which
        the running requests hold fewer than {signals.SHORT_CONTEXT:,} tokens on average are compared with periods of
        {signals.LONG_CONTEXT:,} and more. Without both kinds of period within the hour it cannot be told.
    """,
    impact="none visible by itself: long requests are slower than without speculation",
    symptoms=(
        LOST,
        COLLAPSED,
        signals.speculates.at_least(1, documented("only a server that speculates has an acceptance rate", SPECULATION)),
    ),
    supports=(PAYS_AT_FIRST,),
    may_explain=(Effect("speculation_ineffective", where=(PAYS_AT_FIRST,)),),
    looks_like=(
        LookAlike(
            "speculation_ineffective",
            distinguish="Drafts are rejected at any context length.",
            refuted_by=COLLAPSED,
        ),
        LookAlike(
            "other texts in long requests",
            distinguish="Long requests may be of another kind, such as summaries sampled at a high temperature: send "
            "one prompt cut to 2,000 tokens and whole, at temperature 0, and compare the acceptance.",
        ),
    ),
    fixes=(
        Fix(
            change="Use a draft that was trained on contexts as long as yours (its training length, not "
            "max_position_embeddings, counts), or one whose attention has a sliding window.",
            effect="the draft acceptance rate at long contexts rises",
            why=reported("a draft with a sliding window keeps 0.56 accepted tokens per draft at 16,000", BY_LENGTH),
        ),
        Fix(
            change=f'Or stop drafting for long contexts: "max_model_len": {signals.SHORT_CONTEXT} in '
            "--speculative-config. While any running request is longer, vLLM drafts for none of the batch.",
            effect="no draft tokens at long contexts; inter-token latency of long requests falls",
            risk="one long request takes the speed-up from all that run beside it: separate long prompts",
            rollback="remove the key",
            why=documented("speculation is skipped beyond the draft's max_model_len", SPECULATIVE_CONFIG),
        ),
        Fix.without_restart(
            change="Or send long prompts to servers without speculation.",
            effect="short requests keep their speed-up, long ones pay for no drafts",
            why=reported("speculation turned into a loss well before the longest context", LOSS),
        ),
    ),
    mitigate=("No immediate mitigation is needed: responses are the same as without speculation.",),
    hand_over=(
        "--speculative-config, the draft's config.json and training length, and the acceptance rate by prompt length",
    ),
    do_not=("Do not judge a draft by a benchmark of short prompts.",),
)
