"""Signals of the KV cache (usage, preemptions, how many requests fit, the prefix cache) and of KV connectors.

A KV connector transfers KV blocks between prefill and decode instances, or offloads them. vLLM counts what it asks a
connector for (external_prefix_cache_queries, from 0.11.1 on): 0 without a connector, so that nothing can have failed.
With one, failures are known where the connector exports them (NIXL from 0.11.1 on, Mooncake from 0.33 on) or the log is
followed; LMCache and others have metrics of their own that a page may not show.
"""

from collections.abc import Mapping

from diag.core.incident import reported
from diag.core.log_events import KV_BLOCKS_EXPIRED, KV_LOAD_FAILED, KV_TRANSFER_FAILED
from diag.core.metric_prefix import metric
from diag.knowledge.signals.expressions import (
    declared,
    labelled,
)

KV_ERRORS = f'diag_vllm_log_events_total{{event=~"{KV_TRANSFER_FAILED}|{KV_BLOCKS_EXPIRED}|{KV_LOAD_FAILED}"}}'
KV_FETCHES = metric('num_requests_kv_fetch_by_stage{stage=~"waiting_to_start|in_progress"}')
OFFLOADING = (
    "kv_offload_store_bytes|simple_kv_offload_save_outcomes|mooncake_store_operation_keys|umbp_transfer_submitted"
    "|hf3fs_num_failed_save"
)
"""Counters that a page has if its connector offloads KV blocks."""
FEW = 2.5
"""Failures; fewer than three are no rate. `increase` extrapolates, so a count is not a whole number."""
FAILED_OFFLOADS = {
    "promotion of a tier": "kv_offload_tiering_promotion_job_failures_total",
    "cascade of a tier": "kv_offload_tiering_cascade_job_failures_total",
    "HF3FS load": "hf3fs_num_failed_load_total",
    "HF3FS save": "hf3fs_num_failed_save_total",
}
"""Jobs of offloading that fail; vLLM has no counter of jobs that succeed."""
DROPPED_STORES = {
    "no room": "kv_offload_allocation_failure_total",
    "promotions": "kv_offload_tiering_promotion_allocation_failures_total",
    "full": 'simple_kv_offload_save_outcomes_total{outcome="dropped_cpu_full"}',
    "slow tier": "kv_offload_tiering_backpressure_stores_dropped_total",
    "not reused": "kv_offload_stores_skipped_total",
}
"""Stores that vLLM leaves out, by the reason: effects of sizes and settings, no failures."""


def _increases(label: str, counters: Mapping[str, str]) -> str:
    """Return the increases of counters, each with its key as the value of a label."""
    return labelled(label, {key: f"increase({metric(name)}[$window])" for key, name in counters.items()})


LARGEST_KERNEL_BLOCK = 256
"""Tokens of the largest KV block that an attention backend asks for; a hybrid model's is larger (528, 1,056, 3,584)."""
FINE = 64
"""Tokens to which vLLM's documentation lowers --prefix-match-unit for a start."""
MOST_HITS = 0.5
"""Share of prompt tokens by which the hit rate falls where the prompts, their clients or their routing have changed."""
FLAT = 0.95
"""Share of the sequence cap from which on the number of running requests is a flat line at it."""


PARTS, SIGNALS = declared(
    vars(),
    *(
        f"""
    # failures and expired leases: only a prefill instance sees that KV blocks expire, and it counts no transfer; each
    # rank counts its own
    {connector}_transfers_lost: transfers =
        ${connector}_transfers_failed
        + (${connector}_leases_expired / on (instance) group_left ()
          ($config_tensor_parallel_size or 1 + 0 * sum by (instance) (${connector}_transfers_failed))
          or 0 * ${connector}_transfers_failed)
    # per transfer and finished request: 0 without a failure, missing while there are too few of them for a rate
    {connector}_lost_share: share =
        (${connector}_transfers_lost >= {FEW})
        / (${connector}_transfers_failed + ${connector}_transfers + $finished_requests)
        or 0 * (${connector}_transfers_lost == 0)
    """
        for connector in ("nixl", "mooncake")
    ),
)

PR_44594 = "https://github.com/vllm-project/vllm/pull/44594"
PREEMPTION_RATES = reported("0.08 in a healthy run, 2.4 in a cascade, 0.42 once it was fixed", PR_44594)
preempts = SIGNALS["preemptions_per_request"].above(0.2, PREEMPTION_RATES)
hardly_preempts = SIGNALS["preemptions_per_request"].at_most(0.2, PREEMPTION_RATES)
