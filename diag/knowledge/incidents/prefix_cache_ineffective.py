"""Prefix caching finds next to nothing, although the prompts are long enough to share something."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, measured
from diag.signals import blocks_per_prompt, prefix_cache_hit_ratio, requests_finished, running_value

PREFIX_CACHING = "https://docs.vllm.ai/en/latest/features/automatic_prefix_caching.html"

incident = Incident(
    id="prefix_cache_ineffective",
    title="The prefix cache finds next to nothing",
    severity="info",
    per=("instance", "engine"),
    cause="""
        Only whole KV blocks from the first token on can be shared. A time stamp, a user's name or a random id in front
        of a common system prompt makes every prompt a new one; several replicas without prefix-aware routing do too.
    """,
    impact="none by itself: prompts that share a beginning are prefilled again each time",
    symptoms=(
        prefix_cache_hit_ratio.below(0.3, judged("60-80 % is usual for a chatbot with a system prompt")),
        requests_finished.at_least(10, judged("fewer say little about what is shared")),
    ),
    looks_like=(
        LookAlike(
            "short prompts",
            distinguish="A prompt of a block or two has nothing that could be shared.",
            requires=blocks_per_prompt.at_least(4, measured("6.7 blocks per prompt, no hit", "prefix_unique")),
        ),
    ),
    fixes=(
        Fix(
            flag="--enable-prefix-caching",
            value="",
            only_if=(running_value("enable_prefix_caching").at_most(0, documented("on by default", PREFIX_CACHING)),),
            change="Turn prefix caching on.",
            effect="the prefix cache hit ratio rises where prompts share a beginning",
            rollback="--no-enable-prefix-caching and restart",
            why=documented("on by default for models that generate", PREFIX_CACHING),
        ),
        Fix(
            change="Where users mean to share a beginning: put what is common first and what varies last, and route "
            "requests of one conversation to the same replica.",
            effect="the prefix cache hit ratio rises, time to the first token falls",
            restart=False,
            why=documented("only a common beginning is shared", PREFIX_CACHING),
        ),
    ),
    mitigate=("Nothing needs relief: it costs prefill work, and answers are right.",),
    hand_over=("two prompts of one client that were meant to share a prefix, compared byte by byte",),
)
