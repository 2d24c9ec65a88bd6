"""Signals of the network between ranks: the ranks that NCCL misses, and errors of InfiniBand, RoCE and NVLink."""

from diag.core.incident import Part, Signal

_MISSING = "diag_nccl_missing_rank_operations"
_LABELS = '"named", ";", "rank", "host", "collective", "operation", "communicator"'
_PLACE = "rank $$1 on $$2"
LINK_ERRORS = "link_downed|link_error_recovery|local_link_integrity_errors|local_ack_timeout_err"
"""Counters that stand still on a sound link at work; single symbol errors are corrected and harmless."""
RETRAINED = "recovery|link_recovery|link_recovery_failed"
"""Counters of NVLinks that were trained again; a sound link replays a packet now and then."""

PARTS: tuple[Part, ...] = (
    # an idle job has no collective to miss, and its service may answer late
    Part(
        "nccl_processes_missing",
        'sum by ($by) (last_over_time(diag_nccl_processes{state!="answering"}[$window]))'
        " * ($requests_in_flight_minimum > bool 0)",
        "processes",
    ),
    Part(
        "named_nccl_rank",
        f'label_replace(label_join(last_over_time({_MISSING}{{state="behind"}}[$window]), {_LABELS}), "named",'
        f' "{_PLACE} has not entered $$3 $$4 of communicator $$5", "named", "(.*);(.*);(.*);(.*);(.*)")'
        f' or label_replace(label_join(last_over_time({_MISSING}{{state!="behind"}}[$window]), {_LABELS}), "named",'
        f' "{_PLACE} does not answer NCCL", "named", "(.*);(.*);(.*);(.*);(.*)")',
    ),
    Part(
        "infiniband_errors",
        "max by (instance, host, port, kind)"
        f' (increase(diag_infiniband_errors_total{{kind=~"{LINK_ERRORS}"}}[$window]))',
        "errors",
    ),
    # a port that is down all the time may have no cable
    Part(
        "infiniband_ports_lost",
        "max by (instance, host, port) (max_over_time(diag_infiniband_port_active[1h]))"
        " > max by (instance, host, port) (last_over_time(diag_infiniband_port_active[$window]))",
        "ports",
    ),
    Part(
        "nvlink_recoveries",
        f'max by (instance, gpu, kind) (increase(diag_gpu_nvlink_errors_total{{kind=~"{RETRAINED}"}}[$window]))',
        "errors",
    ),
)

nccl_ranks_missing = Signal(
    "ranks missing from NCCL",
    "$nccl_processes_missing",
    "processes of the NCCL job that are behind their peers or do not answer: {value}",
    "processes",
    culprit_promql="$named_nccl_rank",
    culprit_label="{named}",
)
infiniband_link_errors = Signal(
    "InfiniBand and RoCE link errors",
    "sum by ($by) ($infiniband_errors)",
    "errors that InfiniBand or RoCE ports of this host have counted: {value}",
    "errors",
    culprit_promql="$infiniband_errors > 0",
    culprit_label="{kind} on {port} of {host}",
)
infiniband_ports_down = Signal(
    "InfiniBand ports gone down",
    "count by ($by) ($infiniband_ports_lost)"
    " or 0 * count by ($by) (last_over_time(diag_infiniband_port_active[$window]))",
    "InfiniBand or RoCE ports that were active within an hour and are not now: {value}",
    "ports",
    culprit_promql="$infiniband_ports_lost",
    culprit_label="{port} of {host}",
)
nvlink_recoveries = Signal(
    "NVLinks trained again",
    "sum by ($by) ($nvlink_recoveries)",
    "recoveries of NVLinks: {value}",
    "errors",
    culprit_promql="$nvlink_recoveries > 0",
    culprit_label="GPU {gpu}",
)
