"""Speculative decoding drafts tokens of which few are accepted: the work is paid, and hardly a step writes more."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, measured, reported
from diag.signals import (
    PAYS,
    accepted_per_draft,
    accepted_share,
    draft_tokens,
    draft_tokens_that_pay,
    first_accepted,
    requests_running_median,
)

SPECULATION = "https://docs.vllm.ai/en/latest/features/spec_decode/"
AUTOMATE = "https://github.com/vllm-project/vllm/issues/4565"

BEGINS_WELL = judged("a first token that is accepted less often is not worth drafting")
incident = Incident(
    id="speculation_ineffective",
    title="Speculative decoding drafts what is thrown away",
    severity="info",
    per=("instance", "engine"),
    cause="""
        A step checks all the tokens of a draft and keeps those up to the first that the model would not have written.
        Text that the draft cannot foresee, sampling at a high temperature or a draft that does not fit the model leave
        few of them. What is thrown away was drafted and computed as well, and with many requests in a batch, which
        fills the GPU without it, that time is taken from all of them.
    """,
    impact="none that shows by itself: at best little faster, and slower than without it once the batch is large",
    symptoms=(
        accepted_share.below(PAYS, measured("0.02 where the next token is chance", "speculation_ineffective")),
        draft_tokens.at_least(200, judged("of fewer, the share may be chance")),
    ),
    supports=(requests_running_median.at_least(32, reported("the more requests, the less it gives", AUTOMATE)),),
    looks_like=(
        LookAlike(
            "a long draft that pays",
            distinguish="Of ten tokens two are kept, and yet each step writes three instead of one.",
            requires=accepted_per_draft.at_most(1, judged("beyond it, a step writes more than twice as much")),
        ),
        LookAlike("a server without speculative decoding", distinguish="It drafts nothing."),
    ),
    fixes=(
        Fix(
            change="Draft no more than {value} at a time: num_speculative_tokens in --speculative-config, or "
            "--spec-tokens.",
            value=draft_tokens_that_pay,
            only_if=(first_accepted.at_least(PAYS, BEGINS_WELL),),
            effect="accepted / draft tokens rises above 0.3: what is left of the drafts is mostly kept",
            risk="a step writes a little less; where few requests run and drafting is cheap, answers may get slower",
            rollback="the old number again, and restart",
            why=documented("how often each position of a draft is accepted is counted", SPECULATION),
        ),
        Fix(
            flag="--speculative-config",
            only_if=(first_accepted.below(PAYS, BEGINS_WELL),),
            change="Serve without it: not even the first token of a draft is accepted often enough.",
            effect="no draft tokens; the gap between two tokens stays or falls",
            risk="text that does repeat itself, code that is edited for one, loses what it gained",
            rollback="--speculative-config as it was, and restart",
            why=reported("with a low accuracy latency rises instead", AUTOMATE),
        ),
        Fix(
            change="Or draft by what knows the model: an EAGLE or MTP head trained for it instead of n-grams or a "
            "small model of another family.",
            effect="first draft tokens accepted rise",
            why=documented("methods of speculation", SPECULATION),
        ),
    ),
    mitigate=("Nothing needs relief: answers are those of the model alone.",),
    hand_over=(
        "--speculative-config, the method and the draft model, and accepted tokens by position "
        "(vllm:spec_decode_num_accepted_tokens_per_pos_total) by hour of the day",
    ),
    do_not=(
        "Do not judge it by one prompt: greedy answers that repeat themselves accept nearly all.",
        "Do not raise num_speculative_tokens: a token is accepted only where all before it were.",
    ),
)
