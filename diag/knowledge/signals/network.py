"""Signals of the network between ranks: the ranks that NCCL misses, and errors of InfiniBand, RoCE and NVLink."""

from diag.core.incident import GROUP, Part, Signal

SERVER = f"{', '.join(GROUP)}, leader"
"""The labels of a server that spans nodes (--nnodes)."""


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


_MISSING = "diag_nccl_missing_rank_operations"
LINK_ERRORS = "link_downed|link_error_recovery|local_link_integrity_errors|local_ack_timeout_err"
"""Counters that stand still on a sound link at work; single symbol errors are corrected and harmless."""
PORT = f"{', '.join(GROUP)}, instance, host, port"
LATELY = "10m"
"""A stall begins with the error and is seen a minute or more later, when nothing is counted any more."""
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
    # The rank comes last: where a line is short, its middle is left out.
    Part(
        "named_nccl_operation", _named(f"last_over_time({_MISSING}[$window])", collective="$$1 ", operation="$$1 of ")
    ),
    Part(
        "named_nccl_communicator",
        _named("$named_nccl_operation", communicator="communicator $$1 lacks ", rank="rank $$1", host=" on $$1"),
    ),
    Part(
        "named_nccl_rank",
        'label_join(label_replace($named_nccl_communicator, "in_state", " ($$1)", "state", "(unresponsive|dead)"),'
        ' "named", "", "in_collective", "in_operation", "in_communicator", "in_rank", "in_host", "in_state")',
    ),
    # An instance that has just become another node is none for the length of the window: a join refuses two.
    Part("node_infos", f"max by ({SERVER}, instance, host) (last_over_time(diag_vllm_node_info[$window]))"),
    Part("nodes", "$node_infos unless on (instance) count by (instance) ($node_infos) > 1"),
    Part("first_node_infos", f'max by ({SERVER}, instance) (last_over_time(diag_vllm_node_info{{node="0"}}[$window]))'),
    Part("first_nodes", f"$first_node_infos unless on ({SERVER}) count by ({SERVER}) ($first_node_infos) > 1"),
    Part(
        "infiniband_errors_of_host",
        f'max by ({PORT}, kind) (increase(diag_infiniband_errors_total{{kind=~"{LINK_ERRORS}"}}[{LATELY}]))',
        "errors",
    ),
    Part("infiniband_errors_of_nodes", as_of_first_node("$infiniband_errors_of_host", "host, port, kind"), "errors"),
    Part(
        "infiniband_errors",
        "$infiniband_errors_of_nodes or $infiniband_errors_of_host unless on (instance) $infiniband_errors_of_nodes",
        "errors",
    ),
    # a port that is down all the time may have no cable
    Part(
        "infiniband_ports_lost_of_host",
        f"max by ({PORT}) (max_over_time(diag_infiniband_port_active[1h]))"
        f" > bool max by ({PORT}) (last_over_time(diag_infiniband_port_active[$window]))",
        "ports",
    ),
    Part("infiniband_ports_lost_of_nodes", as_of_first_node("$infiniband_ports_lost_of_host", "host, port"), "ports"),
    Part(
        "infiniband_ports_lost",
        "$infiniband_ports_lost_of_nodes"
        " or $infiniband_ports_lost_of_host unless on (instance) $infiniband_ports_lost_of_nodes",
        "ports",
    ),
    Part(
        "nvlink_recoveries",
        f'max by (instance, gpu, kind) (increase(diag_gpu_nvlink_errors_total{{kind=~"{RETRAINED}"}}[{LATELY}]))',
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
    "errors that InfiniBand or RoCE ports of the server's hosts have counted: {value}",
    "errors",
    culprit_promql="$infiniband_errors > 0",
    culprit_label="{kind} on {port} of {host}",
)
infiniband_ports_down = Signal(
    "InfiniBand ports gone down",
    "sum by ($by) ($infiniband_ports_lost)",
    "InfiniBand or RoCE ports that were active within an hour and are not now: {value}",
    "ports",
    culprit_promql="$infiniband_ports_lost > 0",
    culprit_label="{port} of {host}",
)
nvlinks_trained_again = Signal(
    "NVLinks trained again",
    "sum by ($by) ($nvlink_recoveries)",
    "recoveries of NVLinks: {value}",
    "errors",
    culprit_promql="$nvlink_recoveries > 0",
    culprit_label="GPU {gpu}",
)
flight_recorder_dumps = Signal(
    "flight recorder dumps",
    # without an exporter beside the server no dump is seen, and none is worth a search
    "(max by ($by) (last_over_time(diag_nccl_dump_timestamp_seconds[$window])) > bool 0) or $scraped",
    "PyTorch's flight recorder has written dumps: {value}",
    "bool",
)
