"""Signals of the host: memory, CPU time and halts of a server's processes and its cgroup, and faults of its devices.

A process is halted if it is stopped, held by a debugger or in uninterruptible sleep in the last sample and in nine of
ten samples in the window: reading a file puts a process into uninterruptible sleep for a moment, and a debugger that
takes a stack trace stops it for a moment.
"""

from diag.core import log_events as events
from diag.core.formatting import GIB
from diag.core.incident import Signal
from diag.knowledge.signals.expressions import declared
from diag.knowledge.signals.log import event_time

DEVICE_FAULTS = (events.CUDA_ERROR, events.NCCL_TIMEOUT, events.ALL_TO_ALL_TIMEOUT)
LATE = 0.25
"""Seconds between two tokens: slower than reading speed."""
SLOWER = 3
"""Multiple of a server's own fast tokens that load alone seldom causes while its engine waits for a CPU (judged)."""
SLOWER_THAN_USUAL, ENOUGH_TOKENS = 1.8, 1000
"""Multiple of the mean of that many earlier tokens or more: an engine that waits for half of its time takes twice as
long for a step, less what overlaps with the GPU (judged)."""
NEARLY_FULL = 0.9
"""Share of its memory from which on a host may run out of it."""
OVERSIZE = 1.92
"""Multiple of --kv-offloading-size that vLLM 0.26 was seen to take of a hybrid model (vllm#53042, open)."""
ROOM = 0.8
"""Share of the host's memory that a smaller buffer aims at: below NEARLY_FULL, with room for bursts."""
SECONDS_TO_DRAIN = 900
"""Seconds in which a server drains and another one starts; the sentence of `host_memory_ends` writes them in words."""

OF_ANY = 'diag_vllm_process_stopped{pid=~"[0-9]+"}'
"""Processes halted in any state, from an exporter that has no diag_vllm_process_state yet."""
WHICH = "{state} {role} {rank} PID {pid} on {host}"
ENGINES = {"worker/[0-9]*": "0", "worker/([0-9]+)[.].*": "$$1", "engine/([0-9]+)": "$$1", ".*/.*": ""}
"""The engine of a process by its role and rank; without an engine in the rank there is only one."""


def in_state(state: str, role: str = ".+") -> str:
    """Return the selector of the processes in this role: 1 in this state, 0 otherwise."""
    return f'diag_vllm_process_state{{pid=~"[0-9]+",role=~"{role}",state=~"{state}"}}'


def halted(selector: str) -> str:
    """Return 1 for each selected process that is halted throughout the window, else 0."""
    samples = "on (instance) group_left () (0.9 * $vllm_up_sampled)"
    return f"(sum_over_time({selector}[$window]) > bool {samples}) * last_over_time({selector}[$window])"


def halted_by_engine(selector: str) -> str:
    """Return `halted`, each process labelled with its engine."""
    labelled = f'label_join({halted(selector)}, "engine", "/", "role", "rank")'
    for pattern, engine in ENGINES.items():
        labelled = f'label_replace({labelled}, "engine", "{engine}", "engine", "{pattern}")'
    return labelled


def culprits(processes: str) -> str:
    """Return the halted processes, with a host and a state for those without such labels."""
    named = f'label_replace({processes} == 1, "host", "its host", "host", "")'
    return f'label_replace({named}, "state", "stopped", "state", "")'


SIZE_OF_ROOM = round(ROOM / OVERSIZE, 3)


PARTS, SIGNALS = declared(
    vars(),
    f"""
    host_memory_meets_its_limit: bool =
        ($limit_hits > bool 0) * $host_memory_limit_is_constant * ($vllm_up or $up_last)
        * ($stalls_at_the_host_memory_limit
          or ($host_memory_limit - $host_memory) / clamp_min($host_memory_growth_last_minute, 1)
          < bool {SECONDS_TO_DRAIN / 3:g})
    # page cache does not count: a full cgroup whose processes stall for memory has none left to give up
    stalls_at_the_host_memory_limit: bool =
        group by ($by) (avg_over_time(diag_host_pressure_ratio{{resource="memory"}}[1m]) > 0.1)
        and $host_memory_fill > {NEARLY_FULL}
    # -- faults of a device
    time_of_device_fault: unix time = {event_time(*DEVICE_FAULTS)}
    halted_processes: bool = {halted_by_engine(in_state(".+"))}
    stopped_processes: bool = {halted_by_engine(in_state("stopped"))}
    traced_processes: bool = {halted_by_engine(in_state("traced"))}
    uninterruptible_processes: bool = {halted_by_engine(in_state("uninterruptible"))}
    stopped_or_traced_processes: bool = {halted_by_engine(in_state("stopped|traced", "engine|worker"))}
    """,
    GIB=GIB,
)


def _halted_in(state: str, sentence: str, processes: str) -> Signal:
    """Return the number of halted processes of an engine or a server; 0 if the process table is not observed."""
    return Signal(
        f"processes {state}",
        f"sum by ($by) ({processes}) or 0 * max by ($by) (count_over_time(up[$window]))",
        sentence,
        "processes",
        culprit_promql=culprits(processes),
        culprit_label=WHICH,
    )


processes_stopped = _halted_in(
    "stopped", "vLLM processes that are stopped: {value}", "$stopped_processes_of_any_exporter"
)
processes_traced = _halted_in(
    "held by a debugger", "vLLM processes that a debugger holds: {value}", "$traced_processes"
)
processes_uninterruptible = _halted_in(
    "in uninterruptible sleep", "vLLM processes in uninterruptible sleep: {value}", "$uninterruptible_processes"
)
