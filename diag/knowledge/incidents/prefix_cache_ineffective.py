"""The prefix cache hit rate is low although the prompts are long enough to share prefixes."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured, reported

PREFIX_CACHING = "https://docs.vllm.ai/en/latest/features/automatic_prefix_caching.html"
SHORTER_THAN_A_BLOCK = "https://github.com/vllm-project/vllm/issues/40696"

COARSE = signals.prefix_match_length.above(
    signals.LARGEST_KERNEL_BLOCK,
    reported(
        "no attention backend asks for more than {threshold}; hybrid models get 528 and more", SHORTER_THAN_A_BLOCK
    ),
)
FEW_BLOCKS = signals.whole_blocks_per_prompt.below(
    4, measured("1.03 blocks of 544 tokens: hit rate 0 % although prompts share 520 tokens", "prefix_hybrid_blocks")
)
incident = Incident(
    id="prefix_cache_ineffective",
    title="Low prefix cache hit rate",
    severity="info",
    per=("instance", "engine"),
    window="1h",  # the mix of clients changes from minute to minute
    live_window="1h",
    hold="6h",
    cause=f"""
        Only whole KV blocks from the first token on can be shared. A timestamp, a user name or a random id before a
        common system prompt makes every prefix unique. Several replicas without prefix-aware routing have the same
        effect. A hybrid model (Mamba or linear attention) has blocks of 528 tokens and more, because one block has to
        hold a Mamba state, and twice as many with an FP8 KV cache: a prefix that is shorter than a block is never
        found, even in the same prompt sent twice. That is the reason if each hit is a multiple of more than
        {signals.LARGEST_KERNEL_BLOCK} tokens and a prompt spans few blocks.
    """,
    impact="none by itself: shared prefixes are prefilled again for every request",
    symptoms=(signals.prefix_cache_hit_rate.below(0.3, judged("60-80 % is usual for a chatbot with a system prompt")),),
    supports=(COARSE, FEW_BLOCKS),
    explains=("kv_offload_ineffective",),
    looks_like=(
        LookAlike(
            "short prompts",
            distinguish=f"A prompt of one or two KV blocks has no prefix worth sharing. Blocks above"
            f" {signals.LARGEST_KERNEL_BLOCK} tokens count as parts of {signals.FINE}, which "
            "--prefix-match-unit can make of them.",
            requires=signals.blocks_per_prompt.at_least(
                4, measured("6.7 blocks per prompt and a hit rate of 0 %", "prefix_unique")
            ),
        ),
        LookAlike(
            "a decode server",
            distinguish="Its prompts were prefilled elsewhere, or stored: a KV connector brings their KV cache.",
            requires=signals.prompt_share_from_connector.at_most(
                0.5, judged("what a connector brings is not prefilled here, and the prefix cache could not save it")
            ),
        ),
        LookAlike(
            "prompts that share nothing",
            distinguish="Counters of hits cannot tell them from a hybrid model that stores the Mamba state of a prompt "
            "behind the part that prompts share (vLLM before 0.23, or with a draft model). Send a prompt of two blocks "
            "twice, 2 s apart: the counter of cache hits grows by a block if the cache works. Then send two prompts "
            "that share only the first block.",
        ),
    ),
    fixes=(
        Fix(
            flag="--enable-prefix-caching",
            value="",
            only_if=(
                signals.running_value("enable_prefix_caching").at_most(
                    0, documented("prefix caching is on by default", PREFIX_CACHING)
                ),
            ),
            change="Enable prefix caching.",
            effect="the prefix cache hit rate rises where prompts share a prefix",
            rollback="--no-enable-prefix-caching",
            why=documented("it is on by default for generative models", PREFIX_CACHING),
        ),
        Fix(
            flag="--prefix-match-unit",
            value=16,
            only_if=(
                COARSE,
                FEW_BLOCKS,
                signals.stores_mamba_states.at_least(
                    1, documented("only Mamba states are found inside a block", PREFIX_CACHING)
                ),
            ),
            change="Find prefixes that end inside a block: a prompt that continues an earlier one, as in conversations "
            "and agents, hits at its end.",
            effect="the prefix cache hit rate rises where prompts continue earlier prompts; prompts that share only a "
            "beginning shorter than a block still miss",
            risk='has no effect if the log says "Disabling fine-grained prefix-cache hits" (some draft models)',
            rollback="remove the flag",
            why=measured("the same conversations: hit rate 66 % with it, 0 % without", "prefix_hybrid_match_unit"),
        ),
        Fix.without_restart(
            change="Make the common beginning of the prompts longer than {value} tokens, one block: system prompt, "
            "tools and examples first. If that is impossible, --mamba-ssm-cache-dtype bfloat16 (where the model "
            "tolerates it) or --kv-cache-dtype auto instead of FP8 halves the blocks.",
            value=signals.prefix_match_length,
            only_if=(COARSE, FEW_BLOCKS),
            effect="the prefix cache hit rate rises: each prompt finds the whole blocks of the common beginning",
            why=measured("prompts that share 2,000 of 2,070 tokens hit 78 % in blocks of 544", "prefix_hybrid_hits"),
        ),
        Fix.without_restart(
            change="If prompts should share a prefix, put the common part first and the variable part last, and "
            "route the requests of one conversation to the same replica.",
            effect="the prefix cache hit rate rises; TTFT falls",
            why=documented("only common prefixes are shared", PREFIX_CACHING),
        ),
    ),
    mitigate=("No immediate mitigation is needed: it costs prefill work, and the responses are correct.",),
    hand_over=(
        "two prompts of one client that should share a prefix, compared byte by byte; of a hybrid model also the line "
        '"Setting attention block size to ... tokens" of the log',
    ),
)
