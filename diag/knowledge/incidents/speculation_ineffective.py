"""Few tokens of speculative decoding are accepted: drafting costs time and hardly speeds up any step."""

from diag import signals
from diag.core.metric_prefix import metric
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured, reported

SPECULATION = "https://docs.vllm.ai/en/latest/features/spec_decode/"
AUTOMATE = "https://github.com/vllm-project/vllm/issues/4565"

BEGINS_WELL = judged("a first token that is accepted less often is not worth drafting")
RARELY_ACCEPTED = signals.draft_acceptance_rate.below(
    signals.WORTHWHILE, measured("2 % where the next token is random", "speculation_ineffective")
)
incident = Incident(
    id="speculation_ineffective",
    title="Low draft acceptance rate",
    severity="info",
    per=("instance", "engine"),
    window="1h",  # the mix of clients changes from minute to minute
    live_window="1h",
    hold="6h",
    cause="""
        A step verifies all tokens of a draft and accepts those before the first one that the model would not have
        generated. Unpredictable text, sampling at a high temperature or a draft method that does not match the model
        leave few of them. Rejected tokens cost drafting and verification too; with large batches, which use the GPU
        fully without speculation, that time is taken from all requests.
    """,
    impact="none visible by itself: hardly faster than without speculation, and slower once batches are large",
    symptoms=(
        RARELY_ACCEPTED,
        signals.speculates.at_least(1, documented("only a server that speculates has an acceptance rate", SPECULATION)),
    ),
    supports=(
        signals.requests_running_median.at_least(32, reported("the more requests run, the smaller the gain", AUTOMATE)),
    ),
    looks_like=(
        LookAlike(
            "a long draft that pays",
            distinguish="Only two of ten draft tokens are accepted, and yet each step generates three tokens instead "
            "of one.",
            requires=signals.accepted_per_draft.at_most(
                1, judged("above {threshold}, a step generates more than twice as many tokens")
            ),
        ),
        LookAlike("a server without speculative decoding", distinguish="It proposes no draft tokens."),
    ),
    fixes=(
        Fix(
            change="Draft at most {value} tokens per step: num_speculative_tokens in --speculative-config, or "
            "--spec-tokens.",
            value=signals.worthwhile_draft_length,
            direction="lower",
            current=signals.draft_length,
            only_if=(signals.first_token_acceptance_rate.at_least(signals.WORTHWHILE, BEGINS_WELL),),
            effect=f"the draft acceptance rate rises above {RARELY_ACCEPTED.limit_with_unit}: most of the remaining "
            "draft tokens are accepted",
            risk="a step generates slightly fewer tokens; where few requests run and drafting is cheap, responses may "
            "get slower",
            rollback="set the old value again",
            why=documented("vLLM counts accepted tokens per draft position", SPECULATION),
        ),
        Fix(
            flag="--speculative-config",
            only_if=(signals.first_token_acceptance_rate.below(signals.WORTHWHILE, BEGINS_WELL),),
            change="Disable speculative decoding: not even the first token of a draft is accepted often enough.",
            effect="no draft tokens; inter-token latency stays the same or falls",
            risk="repetitive text (edited code, for example) loses its speed-up",
            rollback="set the old --speculative-config again",
            why=reported("with a low acceptance rate, speculation raises latency", AUTOMATE),
        ),
        Fix(
            change="Or use a draft method that matches the model: an EAGLE or MTP head trained for it instead of "
            "n-grams or a small model of another family.",
            effect="the acceptance rate of the first draft token rises",
            why=documented("vLLM supports several draft methods", SPECULATION),
        ),
    ),
    mitigate=("No immediate mitigation is needed: responses are the same as without speculation.",),
    hand_over=(
        "--speculative-config, the draft method and draft model, and accepted tokens per position "
        f"({metric('spec_decode_num_accepted_tokens_per_pos_total')}) by hour of the day",
    ),
    do_not=(
        "Do not judge it by one prompt: repetitive output with greedy sampling accepts nearly every draft token.",
        "Do not raise num_speculative_tokens: a token is accepted only if all tokens before it were.",
    ),
)
