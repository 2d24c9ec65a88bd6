"""KV blocks are offloaded and never read back: the copies cost memory and bandwidth and save no prefill."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, judged, reported

NEVER_HITS = "https://github.com/vllm-project/vllm/issues/47890"
LMCACHE = "https://github.com/LMCache/LMCache/issues/4094"

incident = Incident(
    id="kv_offload_ineffective",
    title="KV cache offloading without hits",
    severity="info",
    per=("instance", "engine"),
    live_window="30s",
    hold="7h",  # prefix_cache_ineffective, which explains it, is judged no sooner
    cause="""
        A KV connector (LMCache, Mooncake's store, vLLM's own offloading) stores KV blocks outside the GPU, and no
        prompt finds one there. Either no prompt comes back after the GPU has evicted it, or what comes back is not
        found: chunks that are longer than the shared prefixes, hashes that differ between processes (PYTHONHASHSEED),
        a store that is too small, or a model with several KV cache groups of which one is never found.
    """,
    impact="none by itself: host memory and PCIe bandwidth are spent, and every evicted prefix is prefilled again",
    symptoms=(
        signals.external_hit_rate.below(
            0.01, reported("0 hits in millions of tokens, hundreds of GB stored", NEVER_HITS)
        ),
        signals.kv_blocks_stored.at_least(
            1, judged("a connector that stores nothing is on a prefill instance, or is off")
        ),
    ),
    supports=(
        signals.prefix_cache_hit_rate.at_least(
            0.1, judged("prompts share prefixes while they are on the GPU, so some could be found outside")
        ),
        signals.dropped_stores.above(0.05, judged("what is left out cannot be found; its reasons name the setting")),
    ),
    looks_like=(
        LookAlike(
            "prefix_cache_ineffective",
            distinguish="Prompts that share no prefix hit neither cache: nothing is wrong with the offloading.",
        ),
        LookAlike(
            "a prefill instance",
            distinguish="It asks its connector for each prompt and finds nothing by design, and stores no block: the "
            "decode instance fetches them.",
        ),
        LookAlike(
            "a cold store",
            distinguish="Until the GPU's own cache has been filled twice, it still holds what could come back: the "
            "incident is not judged before.",
        ),
    ),
    fixes=(
        Fix.without_restart(
            change="Send one prompt of several thousand tokens, fill the GPU's cache with others, and send it again: "
            "external_prefix_cache_hits must grow by most of its length. If it does not, the store or the lookup is "
            "broken; if it does, your prompts do not come back.",
            effect="it separates a broken lookup from a load without reuse",
            why=judged("a prompt that is sent twice has to be found"),
        ),
        Fix(
            change="If the lookup is broken: set PYTHONHASHSEED=0 on every process that shares the store, make the "
            "chunk size no longer than the shared prefix, compare the releases of LMCache and vLLM, and read the "
            "connector's warnings at start (too little /dev/shm, no support for several KV cache groups).",
            effect="the hit rate of the offloaded KV cache rises above 0",
            why=reported("the start warned that too little shared memory was there, and no block was found", LMCACHE),
        ),
        Fix(
            change="If prompts do not come back, switch offloading off, or send conversations to the replica that has "
            "their blocks.",
            effect="the copies no longer cost host memory and PCIe bandwidth",
            why=judged("KV blocks that are never read need not be stored"),
        ),
    ),
    mitigate=("No immediate mitigation is needed: the responses are correct.",),
    hand_over=("--kv-transfer-config, the connector's configuration and release, and its log from the start on",),
)
