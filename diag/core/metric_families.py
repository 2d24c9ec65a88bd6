"""The metrics that the exporter serves.

`FAMILIES` is a contract: incidents, alerts, dashboards, recordings and other people's rules are written against it. A
collector yields `Sample`s; a value that it cannot know has no sample, never 0, -1 or NaN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from diag.core.log_events import LOG_EVENTS, STARTUP_PHASES

Sample = tuple[str, tuple[str, ...], float]
"""A family's name, the values of its labels in the family's order, and the value."""


@dataclass(frozen=True)
class MetricFamily:
    """One metric: `help` names the unit, `labels` are in the order in which a sample gives their values.

    unread: the purpose of a metric that no incident and no dashboard of diag reads.
    """

    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()
    unread: str = ""


@dataclass(frozen=True)
class Collected:
    """The samples of a collector at one scrape; a `problem` sets diag_scrape_success to 0, samples are still served."""

    samples: Sequence[Sample]
    problem: str = ""


class Collector(Protocol):
    """One part of the page; `name` is its label in diag_scrape_success."""

    name: str

    def collect(self) -> Collected:
        """Collect samples now; an exception costs only this part of the page."""


def _gauge(help: str, *labels: str, unread: str = "") -> MetricFamily:
    return MetricFamily("gauge", help, labels, unread)


def _counter(help: str, *labels: str, unread: str = "") -> MetricFamily:
    return MetricFamily("counter", help, labels, unread)


FOR_READERS = "For people who investigate, and for rules of their own."
GPU = ("gpu", "uuid")
PROCESS = ("pid", "role", "rank")
THROTTLE_REASONS = {
    "gpu_idle": 0x1,
    "applications_clocks": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "display_clocks": 0x100,
    "board_limit": 0x200,
    "reliability": 0x400,
}
"""Reasons why a GPU lowers its clocks, each with its bit in nvmlClocksEventReasons (nvml.h 13.5) and in DCGM."""
LABELS: Mapping[str, str] = {
    "cause": "the exception that the quoted one was raised from; empty if there is none",
    "clock": "sm or memory",
    "collective": "the kind of collective as NCCL names it, AllReduce for example; empty if it is not known",
    "collector": "the part of the page: vllm, nvml (amdsmi where the GPUs are AMD's), log, process, nccl or infiniband",
    "communicator": "hash of the communicator, as in NCCL's own log",
    "compute_capability": "of the GPU, 9.0 for example; empty for AMD's",
    "device": "the device that runs the model, cpu, cuda, rocm, xpu or tpu; empty if it is not known",
    "direction": "tx (sent) or rx (received)",
    "driver_version": "release of the NVIDIA or AMD driver",
    "dtype": "the type of the weights: bf16 (also fp16), fp8, fp4, int8, int4 or mxfp4",
    "event": "; ".join(f"{event.name}: {event.meaning}" for event in LOG_EVENTS)
    + "; of a cgroup's memory high, max (its limits were met), oom (an allocation failed), oom_kill",
    "field": "; ".join(f"{event.name}: {', '.join(event.fields)}" for event in LOG_EVENTS if event.fields),
    "file": "the log file, as named on the command line of the exporter; empty for standard input",
    "flag": "a flag of `vllm serve`, with underscores and without its leading hyphens",
    "frames": "the traceback's innermost frames: of any package, of vLLM, of an optional part of it; empty if unknown",
    "gpu": "index of the GPU, as nvidia-smi or amd-smi counts",
    "host": "name of the host or container in which the PID counts; of an NCCL rank the address of its node",
    "kind": "model or route, of what a client asked for; the kind of error: corrected or uncorrected for memory (AMD "
    "also deferred: found, and not read yet), the name in nvml.h for NVLink, of the kernel's counter for InfiniBand",
    "leader": "address and port of the first node, as --master-addr and --master-port name it on every node",
    "line": "number of the line in the file; empty if it is not known",
    "model": "the name under which the model is served",
    "name": "product name of the GPU; the model or the route that a client asked for, up to 100 characters",
    "node": "number of the node, --node-rank",
    "operation": "number of a collective operation of this kind in this communicator, from 1 on; empty if not known",
    "part": "every_step, or experts (the routed ones)",
    "path": "nvlink, pix, pxb, phb, node or sys, as in `nvidia-smi topo -m`; xgmi between AMD's GPUs",
    "pci_bus_id": "PCI address of the GPU",
    "peer": "index of the other GPU",
    "prefix": "the prefix of the names of vLLM's metrics: kserve_vllm:, ray_vllm_, vllm_",
    "process": "the process of vLLM that wrote the line, as vLLM calls it; empty if the line does not name it",
    "port": "device and number of the port, mlx5_0/1 for example",
    "phase": "; ".join(f"{phase.name}: {phase.meaning}" for phase in STARTUP_PHASES),
    "pid": "process id, as this host or container counts",
    "rank": "rank of a worker within its engine or its NCCL communicator, index of an engine; empty if not known",
    "reason": ", ".join(THROTTLE_REASONS),
    "resource": "cpu, memory or io",
    "role": "api_server, engine or worker; on a GPU also other (not of this vLLM) and unknown",
    "row": "current, or longest: the longest one before it since the server was started",
    "sensor": "gpu (AMD: the edge of the die), hotspot (AMD only) or memory",
    "state": "stopped (SIGSTOP), traced (a debugger), uninterruptible (state D: storage, driver) or zombie; of a "
    "retired page reserved, pending (until the next reset) or unreservable; for NCCL answering, behind (it has "
    "launched fewer collectives than its peers), unresponsive or dead; of a claim of the log open or refuted",
    "status": "2xx; 400, 401, 403, 404, 413 or 422; 4xx for any other client error; 5xx",
    "text": "the line without its head, without secrets, up to 300 characters",
    "uuid": "identity of the GPU, the same after a reboot",
    "version": "release of diag, of vLLM",
    "which": "current or max",
    "xid": "number of the Xid error, as in NVIDIA's list",
}
"""The meaning of each label."""

FAMILIES: Mapping[str, MetricFamily] = {
    "diag_build_info": _gauge("Always 1; the label names the release of diag.", "version", unread=FOR_READERS),
    "diag_scrape_success": _gauge("1 when this part of the page could be read, 0 when not.", "collector"),
    "diag_scrape_duration_seconds": _gauge(
        "Seconds that this part of the page took.",
        "collector",
        unread="It shows which part is slow if a scrape times out.",
    ),
    "diag_vllm_up": _gauge("1 when vLLM's /metrics answered with metrics of vLLM, 0 when not."),
    "diag_vllm_health_status": _gauge(
        "HTTP status of vLLM's own answer to GET /health: 200, or 503 if its engine is dead; no sample if it did not"
        " come in time, if there is no such route, or if a proxy answered."
    ),
    "diag_vllm_elastic_scaling": _gauge(
        "1 while vLLM refuses every request with HTTP 503 to change the number of its data-parallel engines; no sample"
        " otherwise."
    ),
    "diag_vllm_metrics_renamed": _gauge(
        "1 when vLLM's /metrics named its metrics with this prefix instead of vllm:; no sample if it never did.",
        "prefix",
    ),
    "diag_vllm_last_up_timestamp_seconds": _gauge(
        "Unix time at which vLLM's /metrics answered last with metrics of vLLM; no sample before the first answer."
    ),
    "diag_vllm_config": _gauge("Running value of a vLLM flag; booleans are 0 and 1.", "flag"),
    "diag_vllm_info": _gauge(
        "Always 1; the labels name the release of vLLM, the model and the device.", "version", "model", "device"
    ),
    "diag_vllm_weight_bytes": _gauge(
        "Bytes of weights on one GPU: read by every decode step, or of all routed experts (0 without experts).",
        "part",
    ),
    "diag_vllm_experts_per_token_ratio": _gauge(
        "Share of the routed experts of a layer that one token goes to (0 to 1); 1 without experts."
    ),
    "diag_vllm_kv_cache_bytes_per_token": _gauge(
        "Bytes of KV cache that a decode step reads on one GPU for each token of context, in layers with full "
        "attention."
    ),
    "diag_vllm_flops_per_token": _gauge(
        "Arithmetic operations with the weights on one GPU for each token, without attention and the output layer.",
        "dtype",
    ),
    "diag_vllm_all_reduce_bytes_per_token": _gauge(
        "Bytes that one GPU sends for each token in the all-reduces of tensor parallelism; 0 without it."
    ),
    "diag_vllm_startup_phase": _gauge("1 for the start-up phase that vLLM is in, 0 for the others.", "phase"),
    "diag_vllm_startup_phase_seconds": _gauge("Seconds spent in this start-up phase so far.", "phase"),
    "diag_vllm_startup_progress_ratio": _gauge(
        "Progress within the current start-up phase (0 to 1), where the log has a progress bar."
    ),
    "diag_vllm_startup_last_progress_timestamp_seconds": _gauge("Unix time of the last progress of the start."),
    "diag_vllm_log_consecutive_crashes": _gauge(
        "Crashes of the server that its log or the kubelet shows, since it last served for ten minutes or was stopped."
    ),
    "diag_vllm_log_crash_timestamp_seconds": _gauge(
        "Unix time at which the server, once it served, last ended by itself; kept after it starts again. The labels"
        " quote the log line with the reason.",
        *("event", "process", "file", "line", "text", "cause", "frames"),
    ),
    "diag_vllm_log_events_total": _counter("Log lines that show this event, since the exporter started.", "event"),
    "diag_vllm_log_event_last_timestamp_seconds": _gauge(
        "Unix time of the last log line that shows this event, 0 when there was none.", "event"
    ),
    "diag_vllm_log_hearsay_timestamp_seconds": _gauge(
        "Unix time of the last log line that looks like this event, without proof that vLLM wrote it: it may explain"
        " other symptoms, but does not count as an event.",
        "event",
    ),
    "diag_vllm_log_claim_timestamp_seconds": _gauge(
        "Unix time of the last log line that reports this event although the server's process still answers; it is no"
        " event. The labels quote the first such line; state is refuted if tokens or /health prove that the server goes"
        " on, else open.",
        *("event", "file", "line", "text", "state"),
    ),
    "diag_vllm_log_value": _gauge("A number in the last log line that shows this event.", "event", "field"),
    "diag_vllm_log_value_total": _counter(
        "Sum of a number over all log lines that show this event, since the exporter started.", "event", "field"
    ),
    "diag_vllm_log_answers_total": _counter(
        "Answers to requests for inference in the access log since the server was started, also at a path that vLLM "
        "does not serve.",
        "status",
    ),
    "diag_vllm_log_refused_in_a_row": _gauge(
        "Requests for inference in the access log that were refused (HTTP 4xx) one after the other, none in between "
        "answered 2xx.",
        "row",
    ),
    "diag_vllm_log_refused_name_timestamp_seconds": _gauge(
        "Unix time of the last log line that shows a request for a model or a route that the server does not serve. The"
        " label is a client's text.",
        *("kind", "name"),
    ),
    "diag_vllm_log_error_timestamp_seconds": _gauge(
        "Unix time of the log line with the reason for the last failed start or server death; labels quote the line.",
        *("event", "process", "file", "line", "text", "cause", "frames"),
    ),
    "diag_vllm_log_last_line_timestamp_seconds": _gauge("Unix time of the last log line."),
    "diag_probe_success": _gauge("1 when the exporter's last one-token request was answered, 0 when not."),
    "diag_probe_duration_seconds": _gauge(
        "Seconds until the exporter's last one-token request ended.", unread=FOR_READERS
    ),
    "diag_probe_first_token_seconds": _gauge(
        "Seconds until the first token of the exporter's last one-token request.", unread=FOR_READERS
    ),
    "diag_vllm_process_start_time_seconds": _gauge("Unix time at which the server's topmost process was started."),
    "diag_vllm_node_info": _gauge(
        "Always 1 for a server that spans nodes; the labels name the address of its first node, the number of this node"
        " and its host.",
        *("leader", "node", "host"),
    ),
    "diag_vllm_processes": _gauge(
        "Running processes of this vLLM in this role; 0 once all processes seen of this server have ended.", "role"
    ),
    "diag_vllm_process_cpu_seconds_total": _counter("CPU time of a vLLM process in seconds.", *PROCESS),
    "diag_vllm_process_cpu_wait_seconds_total": _counter(
        "Seconds for which the main thread of a vLLM process was ready to run and got no CPU.", *PROCESS
    ),
    "diag_vllm_process_children_cpu_seconds_total": _counter(
        "CPU time in seconds of processes that a vLLM process started, other than vLLM's own: compilers, for example.",
        *PROCESS,
    ),
    "diag_vllm_process_page_faults_total": _counter(
        "Page faults of the main thread of a vLLM process: none if it hangs, many while it loads or compiles.", *PROCESS
    ),
    "diag_vllm_process_read_bytes_total": _counter("Bytes read from storage for a vLLM process.", *PROCESS),
    "diag_vllm_process_resident_memory_bytes": _gauge("Host memory in bytes of a vLLM process (RSS).", *PROCESS),
    "diag_vllm_process_stopped": _gauge(
        "1 when the kernel calls this process stopped, traced, zombie or uninterruptible, 0 when not.", *PROCESS
    ),
    "diag_vllm_process_state": _gauge(
        "1 when the kernel has halted this process in this state, 0 when not.", *PROCESS, "host", "state"
    ),
    "diag_vllm_process_orphaned": _gauge(
        "1 when the API server that started this engine has ended, 0 when not: no request reaches it, and it keeps its "
        "memory.",
        *PROCESS,
        "host",
    ),
    "diag_vllm_stray_engine": _gauge(
        "Always 1, while no API server of this server is visible: an engine process of vLLM on this host whose API "
        "server has ended, without proof that it is of this server.",
        *("pid", "host"),
        unread="A note of the doctor names it; it is evidence of no incident of this server.",
    ),
    "diag_host_oom_kills_total": _counter(
        "Processes that the kernel of this host has killed for lack of memory since it booted, of vLLM or not.",
        unread="The time of its last growth shows what killed a server; the number itself is for readers.",
    ),
    "diag_host_last_oom_kill_timestamp_seconds": _gauge(
        "Unix time at which the exporter last saw diag_host_oom_kills_total grow; before that, the time at which the "
        "kernel's log reports that a process of vLLM was killed for lack of memory, 0 if it reports none."
    ),
    "diag_host_memory_limit_bytes": _gauge(
        "Host memory in bytes that the server may use: the limit of its cgroup, or the host's memory if that leaves "
        "less room."
    ),
    "diag_host_memory_used_bytes": _gauge(
        "Host memory in bytes in use under diag_host_memory_limit_bytes, without page cache and caches of the kernel."
    ),
    "diag_host_memory_events_total": _counter("Memory events of the server's cgroup (memory.events).", "event"),
    "diag_host_cpu_limit_cores": _gauge(
        "CPU quota of the server's cgroup in cores; no sample without one.",
        unread="It shows the CPU limit that would have to be raised.",
    ),
    "diag_host_cpu_throttled_seconds_total": _counter(
        "Seconds for which the CPU quota has kept the server's cgroup from running, summed over all CPUs."
    ),
    "diag_host_cpu_periods_total": _counter("CPU quota periods (100 ms by default) in which the server's cgroup ran."),
    "diag_host_cpu_throttled_periods_total": _counter("CPU quota periods in which the server's cgroup was throttled."),
    "diag_host_pressure_ratio": _gauge(
        "Share of the last 10 s in which a task of the server's cgroup waited for this resource (PSI; 0 to 1).",
        "resource",
    ),
    "diag_nccl_processes": _gauge(
        "Processes of the server's NCCL job in this state by NCCL's RAS service, in its last two statuses.", "state"
    ),
    "diag_nccl_missing_rank_operations": _gauge(
        "Collective operations by which a rank that is missing from its communicator is behind its peers; the labels "
        "name the operation that it has not launched. 0 if its process does not answer NCCL's RAS service.",
        *("communicator", "rank", "host", "state", "collective", "operation"),
    ),
    "diag_nccl_dump_timestamp_seconds": _gauge(
        "Unix time of the newest dump of PyTorch's flight recorder since the server started, 0 without one."
    ),
    "diag_infiniband_port_active": _gauge("1 when this InfiniBand or RoCE port is active, 0 when not.", "port", "host"),
    "diag_infiniband_errors_total": _counter(
        "Errors of this kind on an InfiniBand or RoCE port since its counters were reset.", "port", "host", "kind"
    ),
    "diag_gpu_up": _gauge("1 when this GPU answers, 0 when it is lost.", *GPU),
    "diag_gpu_info": _gauge(
        "Always 1; the labels describe this GPU.", *GPU, "name", "pci_bus_id", "driver_version", "compute_capability"
    ),
    "diag_gpu_temperature_celsius": _gauge(
        "Temperature in degrees Celsius.",
        *GPU,
        "sensor",
        unread="Every model has a limit of its own: conditions read the margin to it, and throttling.",
    ),
    "diag_gpu_temperature_margin_celsius": _gauge("Degrees Celsius below the slowdown temperature.", *GPU),
    "diag_gpu_clock_hertz": _gauge("Clock frequency in hertz.", *GPU, "clock"),
    "diag_gpu_clock_max_hertz": _gauge("Highest clock frequency in hertz.", *GPU, "clock"),
    "diag_gpu_power_watts": _gauge("Power draw in watts.", *GPU),
    "diag_gpu_power_limit_watts": _gauge("Enforced power limit in watts.", *GPU),
    "diag_gpu_power_limit_min_watts": _gauge("Lowest power limit that can be set, in watts.", *GPU),
    "diag_gpu_power_limit_default_watts": _gauge(
        "Power limit as the vendor set it, in watts.", *GPU, unread="It shows whether the limit was changed."
    ),
    "diag_gpu_memory_bandwidth_max_bytes_per_second": _gauge(
        "Bandwidth of the GPU's memory in bytes per second, by its data sheet; no sample with MIG.", *GPU
    ),
    "diag_gpu_flops_max": _gauge(
        "Dense operations per second with weights of this type, by the GPU's data sheet.", *GPU, "dtype"
    ),
    "diag_gpu_nvlink_max_bytes_per_second": _gauge(
        "Bandwidth of all NVLinks or XGMI links of a GPU in one direction in bytes per second, by its data sheet.", *GPU
    ),
    "diag_gpu_energy_joules_total": _counter(
        "Energy in joules since the driver was loaded or the GPU was reset.",
        *GPU,
        unread="For the energy that tokens cost.",
    ),
    "diag_gpu_utilization_ratio": _gauge("Share of time in which the GPU ran kernels (0 to 1).", *GPU),
    "diag_gpu_memory_busy_ratio": _gauge(
        "Share of time in which GPU memory was read or written (0 to 1).", *GPU, unread=FOR_READERS
    ),
    "diag_gpu_memory_total_bytes": _gauge("GPU memory in bytes.", *GPU),
    "diag_gpu_memory_used_bytes": _gauge("Allocated GPU memory in bytes.", *GPU),
    "diag_gpu_memory_free_bytes": _gauge("Free GPU memory in bytes.", *GPU),
    "diag_gpu_memory_reserved_bytes": _gauge(
        "GPU memory in bytes that driver and firmware reserve.",
        *GPU,
        unread="It equals total memory minus used and free memory.",
    ),
    "diag_gpu_throttle_active": _gauge("1 when this reason holds the clocks down now, 0 when not.", *GPU, "reason"),
    "diag_gpu_throttle_seconds_total": _counter(
        "Seconds for which this reason has held the clocks down; on AMD since the exporter started.", *GPU, "reason"
    ),
    "diag_gpu_pcie_bytes_total": _counter("Bytes sent or received over PCIe.", *GPU, "direction"),
    "diag_gpu_pcie_throughput_bytes_per_second": _gauge(
        "Bytes per second over PCIe, sampled for 20 ms by the driver; where it has no byte counter.", *GPU, "direction"
    ),
    "diag_gpu_pcie_link_generation": _gauge("PCIe generation of the link; it falls when idle.", *GPU, "which"),
    "diag_gpu_pcie_link_width": _gauge("Number of PCIe lanes of the link.", *GPU, "which"),
    "diag_gpu_pcie_replays_total": _counter("PCIe packets that were sent again.", *GPU, unread=FOR_READERS),
    "diag_gpu_nvlink_bytes_total": _counter(
        "Bytes sent or received over all NVLinks, on AMD over all XGMI links.", *GPU, "direction"
    ),
    "diag_gpu_nvlink_errors_total": _counter("Errors of this kind on all NVLinks.", *GPU, "kind"),
    "diag_gpu_nvlink_active_links": _gauge("Number of NVLinks that are up, on AMD of XGMI links.", *GPU),
    "diag_gpu_peer_info": _gauge(
        "Always 1; the labels name the path between two GPUs.",
        "gpu",
        "peer",
        "path",
        unread="It shows which GPUs a tensor-parallel group should use.",
    ),
    "diag_gpu_ecc_errors_total": _counter(
        "Errors of this kind that error correction found since the driver was loaded, on AMD in all blocks of the GPU.",
        *GPU,
        "kind",
    ),
    "diag_gpu_remapped_rows": _gauge(
        "Memory rows replaced after errors of this kind.",
        *GPU,
        "kind",
        unread="A replaced row does its work; conditions read the rows that could not be replaced.",
    ),
    "diag_gpu_remap_pending": _gauge(
        "1 when a memory row waits for a reset of the GPU to be replaced, 0 when not.",
        *GPU,
        unread="diag preflight reads it before a launch.",
    ),
    "diag_gpu_persistence_mode": _gauge(
        "1 when the driver stays loaded without a process on the GPU, 0 when not.",
        *GPU,
        unread="diag preflight reads it before a launch.",
    ),
    "diag_gpu_remap_failure": _gauge("1 when a memory row could not be replaced, 0 when not.", *GPU),
    "diag_gpu_xid_errors_total": _counter("Xid errors of this number since the exporter started.", *GPU, "xid"),
    "diag_gpu_retired_pages": _gauge(
        "Memory pages that AMD's driver took out of use after errors.",
        *GPU,
        "state",
        unread="A retired page does no harm; conditions read the errors.",
    ),
    "diag_gpu_resets_total": _counter("Resets of an AMD GPU by its driver since the exporter started.", *GPU),
    "diag_gpu_process_memory_bytes": _gauge("GPU memory in bytes of a process on this GPU.", *GPU, *PROCESS),
    "diag_gpu_process_utilization_ratio": _gauge(
        "Share of the GPU's time that a process used (0 to 1); NVIDIA only.", *GPU, *PROCESS
    ),
    "diag_gpu_serving": _gauge("1 when a process of this vLLM uses this GPU, 0 when not.", *GPU),
}
