"""The part of the table about a server that goes on serving: what makes it slow, and requests that fail."""

from diag.exporter.log.pattern import BAR, FAILED, SAID, WARNED, Pattern

WARNING, ERROR = frozenset({"WARNING"}), frozenset({"ERROR"})
_NIXL = "nixl_connector.py worker.py base_worker.py pull_worker.py push_worker.py"
"""A failure is logged in the name of its caller, and NIXL's connector has been one file, then several."""
_COLLECTIVE = "custom_all_reduce.py"
_MOONCAKE = "mooncake_connector.py"
_SCHEDULER = "scheduler.py"
UNPROCESSED = "request_preprocessing_failed"
STATS = r"(?:Engine \d+: |\d+ Engines Aggregated: )?Avg prompt throughput: "
CORRUPTED = r".{0,400}, Corrupted: [1-9]"

_BALANCE = r"avg_tokens=(?P<avg_tokens>[\d.]+), max_tokens=(?P<max_tokens>\d+), balancedness=(?P<balancedness>[\d.]+)"

SERVING_PATTERNS = (
    Pattern(
        "event",
        "eplb_balance",
        r"EPLB step: \d+",
        SAID,
        "0.9.2",
        numbers=_BALANCE,
        logger="eplb_state.py",
    ),
    Pattern("event", "custom_all_reduce_disabled", r"Custom allreduce is disabled ", WARNED, logger=_COLLECTIVE),
    Pattern(
        "event", "custom_all_reduce_disabled", r"Custom collectives are disabled ", WARNED, "0.27.0", logger=_COLLECTIVE
    ),
    Pattern(
        "event", "preemption_v0", r"Sequence group \S+ is preempted by ", WARNED, last="0.10.2", logger="scheduler.py"
    ),
    Pattern("event", "output_corrupted", STATS + CORRUPTED, SAID, "0.11.1", logger="loggers.py"),
    Pattern("event", "output_corrupted", r"NaNs detected in logits: ", FAILED, "0.32.0"),
    Pattern("event", "kv_transfer_failed", r"NIXL transfer failure: ", ERROR, "0.13.0", logger=_NIXL),
    Pattern(
        "event",
        "kv_transfer_failed",
        r"NIXL transfer (?:failed for request|setup/initiation failed) ",
        ERROR,
        "0.11.1",
        "0.12.0",
        logger=_NIXL,
    ),
    Pattern(
        "event", "kv_transfer_failed", r"pulling kv_caches for .{0,300} failed: ", ERROR, "0.13.0", logger=_MOONCAKE
    ),
    Pattern("event", "kv_blocks_expired", r"Releasing expired KV blocks for request ", WARNING, "0.10.1", logger=_NIXL),
    Pattern(
        "event",
        "kv_blocks_expired",
        r"Request \S+ timed out after \d+ seconds without being sent\.",
        WARNING,
        "0.13.0",
        logger=_MOONCAKE,
    ),
    Pattern(
        "event",
        "kv_load_failed",
        r"Failing \d+ request\(s\) due to KV load failure ",
        ERROR,
        "0.12.0",
        logger=_SCHEDULER,
    ),
    Pattern("event", "kv_load_failed", r"Recovered from KV load failure: ", WARNING, "0.11.1", logger=_SCHEDULER),
    Pattern("event", "multimodal_cache_miss", r"Expected a cached item for mm_hash=", FAILED, "0.10.1", of=UNPROCESSED),
    Pattern("event", "multimodal_cache_miss", r"Encoder cache miss for ", FAILED, "0.8.0"),
    Pattern(
        "event",
        UNPROCESSED,
        r"Unexpected error pre-processing request ",
        ERROR,
        "0.11.1",
        logger="core.py",
    ),
    Pattern(
        "event", "scheduler_paused", r"setting pause state to PAUSED_(?:NEW|ALL)$", SAID, "0.21.0", logger=_SCHEDULER
    ),
    Pattern("event", "scheduler_resumed", r"setting pause state to UNPAUSED$", SAID, "0.21.0", logger=_SCHEDULER),
    Pattern("event", "input_thread_died", r"Exception in thread Thread-\d+ \(process_input_sockets\):", BAR, "0.8.0"),
)
