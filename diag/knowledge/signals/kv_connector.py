"""Signals of KV connectors: transfers between prefill and decode instances, and KV blocks that are offloaded.

vLLM counts what it asks a connector for (external_prefix_cache_queries, from 0.11.1 on): 0 without a connector, so that
nothing can have failed. With one, failures are known where the connector exports them (NIXL from 0.11.1 on, Mooncake
from 0.33 on) or the log is followed; LMCache and others have metrics of their own that a page may not show.
"""

from diag.core.incident import Signal
from diag.core.log_events import KV_BLOCKS_EXPIRED, KV_LOAD_FAILED, KV_TRANSFER_FAILED
from diag.knowledge.signals.expressions import FINISHED, RUNNING, configured, counted
from diag.knowledge.signals.forward_progress import any_of, requests_stuck

QUERIES, HITS = (f"vllm:external_prefix_cache_{what}_total" for what in ("queries", "hits"))
NO_CONNECTOR = f"0 * (sum by ($by) (last_over_time({QUERIES}[$window])) == 0)"
FEW = 2.5
"""Failures; fewer than three are no rate. `increase` extrapolates, so that a count is no whole number."""


def rated(failed: str, attempts: str) -> str:
    """Failures per attempt: 0 without a failure, missing while there are too few of them for a rate."""
    return f"(({failed} >= {FEW}) / {attempts} or 0 * ({failed} == 0))"


def lost_share(failed: str, expired: str, done: str) -> str:
    """Transfers that failed and leases that expired, per transfer and finished request.

    Only a prefill instance sees that KV blocks expire, and it counts no transfer; each rank counts its own.
    """
    ranks = f"({configured('tensor_parallel_size')} or 1 + 0 * sum by (instance) ({failed}))"
    lost = f"({failed} + ({expired} / on (instance) group_left () {ranks} or 0 * {failed}))"
    return rated(lost, f"({failed} + {done} + {FINISHED})")


NIXL = lost_share(
    counted("vllm:nixl_num_failed_transfers_total"),
    counted("vllm:nixl_num_kv_expired_reqs_total"),
    counted("vllm:nixl_xfer_time_seconds_count"),
)
MOONCAKE = lost_share(
    f"({counted('vllm:mooncake_num_failed_transfers_total')} + {counted('vllm:mooncake_num_failed_recvs_total')})",
    counted("vllm:mooncake_num_kv_expired_reqs_total"),
    counted("vllm:mooncake_xfer_time_seconds_count"),
)
LINES = counted("diag_vllm_log_events_total", f'event=~"{KV_TRANSFER_FAILED}|{KV_BLOCKS_EXPIRED}|{KV_LOAD_FAILED}"')
BY_LOG = rated(LINES, f"({LINES} + {FINISHED})")
FETCHING = (
    'sum by ($by) (min_over_time(vllm:num_requests_kv_fetch_by_stage{stage=~"waiting_to_start|in_progress"}[$window]))'
)
ALL_WAIT_FOR_KV = (
    f"(({requests_stuck.promql}) > bool 0) * ({FETCHING} > bool 0)"
    f" * (sum by ($by) (max_over_time({RUNNING}[$window])) == bool 0)"
)
kv_transfers_lost = Signal(
    "KV transfers that fail or expire / transfers and requests",
    any_of(stuck=f"({ALL_WAIT_FOR_KV})", lost=f"({NIXL} or {MOONCAKE} or {BY_LOG} or {NO_CONNECTOR})"),
    "KV transfers fail, expire or never end: {value} of them",
    "share",
)
ENDED_IN_ERROR = counted("vllm:request_success_total", 'finished_reason="error"')
error_share = Signal(
    "requests that ended in an error",
    f"{ENDED_IN_ERROR} / ({FINISHED} > 0)",
    "{value} of the finished requests ended in an internal error",
    "share",
)
read_after_expiry = Signal(
    "KV blocks read after they had expired",
    counted("vllm:nixl_num_notifications_after_expiry_total"),
    "transfers that ended after their KV blocks had been freed, so that other data may have been read: {value}",
    "transfers",
    window_scaling="peak",
)

# -- offloading -------------------------------------------------------------------------------------------------------

STORED = (
    'vllm:kv_offload_total_bytes_total{transfer_type="GPU_to_CPU"}',
    "vllm:kv_offload_store_bytes_total",
    'vllm:simple_kv_offload_save_outcomes_total{outcome="stored"}',
    'vllm:mooncake_store_operation_bytes_total{operation="save_put"}',
    "lmcache:num_stored_tokens_total",
)
"""What grows while KV blocks are stored: bytes, blocks or tokens, by connector and release."""
kv_blocks_stored = Signal(
    "KV blocks are stored",
    f"max by ($by) (({' or '.join(f'increase({counter}[$window])' for counter in STORED)}) > bool 0) or {NO_CONNECTOR}",
    "KV blocks are stored outside the GPU: {value}",
    "bool",
)
ASKED, FOUND = (f"sum by ($by) (last_over_time({counter}[$window]))" for counter in (QUERIES, HITS))
BY_SERVER = f"sum by (instance) (last_over_time({QUERIES}[$window]))"
TURNOVER = f"(2 * {configured('kv_cache_size_tokens')} or 2000000 + 0 * {BY_SERVER})"
"""Tokens that fill the GPU's own cache twice; where its size is not known, what fills a large one."""
external_hit_rate = Signal(
    "hit rate of the offloaded KV cache",
    # a prefix is looked for outside only once the GPU's own cache has evicted it, so that has to be filled twice first
    f"{FOUND} / ({ASKED} > 0 and {FOUND} > 0) or 0 * ({ASKED} > on (instance) group_left () {TURNOVER})",
    "since the start, {value} of the prompt tokens that the GPU did not have were found in the offloaded KV cache",
    "share",
)
