"""The prefix cache hit rate is low although the prompts are long enough to share prefixes."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, measured
from diag.signals import blocks_per_prompt, prefix_cache_hit_rate, prompt_share_from_connector, running_value

PREFIX_CACHING = "https://docs.vllm.ai/en/latest/features/automatic_prefix_caching.html"

incident = Incident(
    id="prefix_cache_ineffective",
    title="Low prefix cache hit rate",
    severity="info",
    per=("instance", "engine"),
    window="1h",  # the mix of clients changes from minute to minute
    live_window="1h",
    hold="6h",
    cause="""
        Only whole KV blocks from the first token on can be shared. A timestamp, a user name or a random id before a
        common system prompt makes every prefix unique. Several replicas without prefix-aware routing have the same
        effect.
    """,
    impact="none by itself: shared prefixes are prefilled again for every request",
    symptoms=(prefix_cache_hit_rate.below(0.3, judged("60-80 % is usual for a chatbot with a system prompt")),),
    explains=("kv_offload_ineffective",),
    looks_like=(
        LookAlike(
            "short prompts",
            distinguish="A prompt of one or two KV blocks has no prefix worth sharing.",
            requires=blocks_per_prompt.at_least(
                4, measured("6.7 blocks per prompt and a hit rate of 0 %", "prefix_unique")
            ),
        ),
        LookAlike(
            "a decode server",
            distinguish="Its prompts were prefilled elsewhere, or stored: a KV connector brings their KV cache.",
            requires=prompt_share_from_connector.at_most(
                0.5, judged("what a connector brings is not prefilled here, and the prefix cache could not save it")
            ),
        ),
    ),
    fixes=(
        Fix(
            flag="--enable-prefix-caching",
            value="",
            only_if=(
                running_value("enable_prefix_caching").at_most(
                    0, documented("prefix caching is on by default", PREFIX_CACHING)
                ),
            ),
            change="Enable prefix caching.",
            effect="the prefix cache hit rate rises where prompts share a prefix",
            rollback="--no-enable-prefix-caching and restart",
            why=documented("it is on by default for generative models", PREFIX_CACHING),
        ),
        Fix(
            change="If prompts should share a prefix, put the common part first and the variable part last, and "
            "route the requests of one conversation to the same replica.",
            effect="the prefix cache hit rate rises; TTFT falls",
            restart=False,
            why=documented("only common prefixes are shared", PREFIX_CACHING),
        ),
    ),
    mitigate=("No immediate mitigation is needed: it costs prefill work, and the responses are correct.",),
    hand_over=("two prompts of one client that should share a prefix, compared byte by byte",),
)
