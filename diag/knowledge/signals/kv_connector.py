"""Signals of KV connectors: transfers between prefill and decode instances, and KV blocks that are offloaded.

vLLM counts what it asks a connector for (external_prefix_cache_queries, from 0.11.1 on): 0 without a connector, so that
nothing can have failed. With one, failures are known where the connector exports them (NIXL from 0.11.1 on, Mooncake
from 0.33 on) or the log is followed; LMCache and others have metrics of their own that a page may not show.
"""

from diag.core.incident import Part, Signal
from diag.core.log_events import KV_BLOCKS_EXPIRED, KV_LOAD_FAILED, KV_TRANSFER_FAILED
from diag.knowledge.signals.forward_progress import any_of

FEW = 2.5
"""Failures; fewer than three are no rate. `increase` extrapolates, so a count is not a whole number."""


def _counted(metric: str) -> str:
    return f"sum by ($by) (increase({metric}[$window]))"


PARTS: tuple[Part, ...] = (
    Part(
        "external_cache_queries",
        "sum by ($by) (last_over_time(vllm:external_prefix_cache_queries_total[$window]))",
        "tokens",
    ),
    Part(
        "external_cache_hits", "sum by ($by) (last_over_time(vllm:external_prefix_cache_hits_total[$window]))", "tokens"
    ),
    Part("no_kv_connector", "0 * ($external_cache_queries == 0)", "bool"),
    Part("nixl_transfers_failed", _counted("vllm:nixl_num_failed_transfers_total"), "transfers"),
    Part("nixl_leases_expired", _counted("vllm:nixl_num_kv_expired_reqs_total"), "requests"),
    Part("nixl_transfers", _counted("vllm:nixl_xfer_time_seconds_count"), "transfers"),
    Part(
        "mooncake_transfers_failed",
        f"{_counted('vllm:mooncake_num_failed_transfers_total')} + {_counted('vllm:mooncake_num_failed_recvs_total')}",
        "transfers",
    ),
    Part("mooncake_leases_expired", _counted("vllm:mooncake_num_kv_expired_reqs_total"), "requests"),
    Part("mooncake_transfers", _counted("vllm:mooncake_xfer_time_seconds_count"), "transfers"),
    # failures and expired leases: only a prefill instance sees that KV blocks expire, and it counts no transfer; each
    # rank counts its own
    *(
        Part(
            f"{connector}_transfers_lost",
            f"${connector}_transfers_failed + (${connector}_leases_expired / on (instance) group_left ()"
            f" ($config_tensor_parallel_size or 1 + 0 * sum by (instance) (${connector}_transfers_failed))"
            f" or 0 * ${connector}_transfers_failed)",
            "transfers",
        )
        for connector in ("nixl", "mooncake")
    ),
    # per transfer and finished request: 0 without a failure, missing while there are too few of them for a rate
    *(
        Part(
            f"{connector}_lost_share",
            f"(${connector}_transfers_lost >= {FEW})"
            f" / (${connector}_transfers_failed + ${connector}_transfers + $finished_requests)"
            f" or 0 * (${connector}_transfers_lost == 0)",
            "share",
        )
        for connector in ("nixl", "mooncake")
    ),
    Part(
        "kv_transfer_errors_logged",
        _counted(f'diag_vllm_log_events_total{{event=~"{KV_TRANSFER_FAILED}|{KV_BLOCKS_EXPIRED}|{KV_LOAD_FAILED}"}}'),
        "lines",
    ),
    Part(
        "kv_transfer_errors_share",
        f"($kv_transfer_errors_logged >= {FEW}) / ($kv_transfer_errors_logged + $finished_requests)"
        " or 0 * ($kv_transfer_errors_logged == 0)",
        "share",
    ),
    Part(
        "requests_fetching_kv",
        "sum by ($by) (min_over_time("
        'vllm:num_requests_kv_fetch_by_stage{stage=~"waiting_to_start|in_progress"}[$window]))',
        "requests",
    ),
    Part(
        "all_wait_for_kv",
        "($requests_in_flight_without_progress > bool 0) * ($requests_fetching_kv > bool 0)"
        " * ($running_highest == bool 0)",
        "bool",
    ),
    Part(
        "kv_transfers_lost_share",
        "$nixl_lost_share or $mooncake_lost_share or $kv_transfer_errors_share or $no_kv_connector",
        "share",
    ),
    # -- offloading: counters of stored KV blocks, in bytes, blocks or tokens, by connector and release
    Part(
        "kv_blocks_stored",
        'max by ($by) ((increase(vllm:kv_offload_total_bytes_total{transfer_type="GPU_to_CPU"}[$window])'
        " or increase(vllm:kv_offload_store_bytes_total[$window])"
        ' or increase(vllm:simple_kv_offload_save_outcomes_total{outcome="stored"}[$window])'
        ' or increase(vllm:mooncake_store_operation_bytes_total{operation="save_put"}[$window])'
        " or increase(lmcache:num_stored_tokens_total[$window])) > bool 0)",
        "bool",
    ),
    # tokens that fill the GPU's own cache twice; if its size is unknown, those that fill a large one
    Part(
        "kv_cache_turnover",
        "2 * $config_kv_cache_size_tokens or 2000000 + 0 * $external_cache_queries by (instance)",
        "tokens",
    ),
)

kv_transfers_lost = Signal(
    "KV transfers that fail or expire / transfers and requests",
    any_of(stuck="$all_wait_for_kv", lost="$kv_transfers_lost_share"),
    "KV transfers fail, expire or never end: {value} of them",
    "share",
)
error_share = Signal(
    "requests that ended in an error",
    'sum by ($by) (increase(vllm:request_success_total{finished_reason="error"}[$window])) / ($finished_requests > 0)',
    "{value} of the finished requests ended in an internal error",
    "share",
)
read_after_expiry = Signal(
    "KV blocks read after they had expired",
    _counted("vllm:nixl_num_notifications_after_expiry_total"),
    "transfers that ended after their KV blocks had been freed, so that other data may have been read: {value}",
    "transfers",
    window_scaling="peak",
)
kv_blocks_stored = Signal(
    "KV blocks are stored",
    "$kv_blocks_stored or $no_kv_connector",
    "KV blocks are stored outside the GPU: {value}",
    "bool",
)
external_hit_rate = Signal(
    "hit rate of the offloaded KV cache",
    # a prefix is looked for outside only once the GPU's own cache has evicted it, so that has to be filled twice first
    "$external_cache_hits / ($external_cache_queries > 0 and $external_cache_hits > 0)"
    " or 0 * ($external_cache_queries > on (instance) group_left () $kv_cache_turnover)",
    "since the start, {value} of the prompt tokens that the GPU did not have were found in the offloaded KV cache",
    "share",
)
