"""Signals of GPUs and of the network between them: throttling, faults, memory; NVLink, InfiniBand, NCCL's ranks.

docs/metrics.md describes the metrics.
"""

from diag.core.incident import GROUP
from diag.knowledge.signals.expressions import declared

THERMAL = 'reason=~"sw_thermal|hw_thermal"'
BRAKE = 'reason="hw_power_brake"'
XIDS = 'xid!~"13|31|43|45"'
"""Xid 13, 31, 43 and 45 are caused by the application; all others by the hardware or the driver."""
UNCORRECTED = 'diag_gpu_ecc_errors_total{kind="uncorrected"}'
MUCH_MEMORY, NO_MEMORY_LEFT = 0.05, 0.02
"""Shares of a GPU's memory: more than a desktop or an agent holds; too little for the next allocation."""
FAR_SLOWER = 0.7
"""SM clock of a GPU / that of its fastest peer: power limits and chips differ by a tenth under the same load."""
SERVER = f"{', '.join(GROUP)}, leader"
"""The labels of a server that spans nodes (--nnodes)."""


def average(metric: str, matchers: str = "") -> str:
    """Return the mean of a gauge in the window, per subject, with at least three samples."""
    at = f"{metric}{{{matchers}}}[$window]"
    return f"max by ($by) (avg_over_time({at}) and count_over_time({at}) >= 3)"


def as_of_first_node(series: str, kept: str, more: str = "leader") -> str:
    """Return series of every node of a server as series of its first node; none for a server of one node.

    Each node has an exporter of its own, and the page of the first one has the metrics of the server. `more` are labels
    that the series get from `diag_vllm_node_info`, `kept` those that tell the series of a server apart: two exporters
    of one host, one of which has just been replaced, have the same ones.
    """
    return (
        f"max by ({SERVER}, instance, {kept})"
        f" (max by ({SERVER}, {kept}) ({series} * on (instance) group_left ({more}) $nodes)"
        f" * on ({SERVER}) group_left (instance) $first_nodes)"
    )


def _named(series: str, **texts: str) -> str:
    """Return series with a text for each of these labels that is there, in a label in_NAME; $$1 is its value."""
    for label, text in texts.items():
        series = f'label_replace({series}, "in_{label}", "{text}", "{label}", "(.+)")'
    return series


FAULTS = {
    "GPU lost": "$gpu_lost",
    "Xid": "$xid_errors",
    "reset": "$gpu_resets",
    "uncorrectable memory error": "$uncorrectable_memory_errors",
    "row that could not be replaced": "$rows_not_replaced",
}
_MISSING = "diag_nccl_missing_rank_operations"
LINK_ERRORS = "link_downed|link_error_recovery|local_link_integrity_errors|local_ack_timeout_err"
"""Counters that stand still on a sound link at work; single symbol errors are corrected and harmless."""
PORT = f"{', '.join(GROUP)}, instance, host, port"
LATELY = "10m"
"""A stall begins with the error and is seen a minute or more later, when nothing is counted any more."""
RETRAINED = "recovery|link_recovery|link_recovery_failed"
"""Counters of NVLinks that were trained again; a sound link replays a packet now and then."""


PARTS, SIGNALS = declared(
    vars(),
    f"""
    # The rank comes last: where a line is short, its middle is left out.
    named_nccl_operation = {_named(f"last_over_time({_MISSING}[$window])", collective="$$1 ", operation="$$1 of ")}
    named_nccl_communicator =
        {_named("$named_nccl_operation", communicator="communicator $$1 lacks ", rank="rank $$1", host=" on $$1")}
    """,
    *(
        f"""
    # from NVML's counters, otherwise from the samples that show a reason active
    {name}_counted_share: share = max by ($by) (rate(diag_gpu_throttle_seconds_total{{{reasons}}}[$window]))
    {name}_counted_seconds: seconds = max by ($by) (increase(diag_gpu_throttle_seconds_total{{{reasons}}}[$window]))
    {name}_sampled_share: share = {average("diag_gpu_throttle_active", reasons)}
    """
        for name, reasons in (("thermal_slowdown", THERMAL), ("power_brake", BRAKE))
    ),
)
