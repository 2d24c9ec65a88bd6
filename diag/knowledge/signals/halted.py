"""Signals of processes that the kernel has halted: stopped, held by a debugger, in uninterruptible sleep.

A process counts if it is halted in the last sample and in nine of ten samples in the window: reading a file puts a
process into uninterruptible sleep for a moment, and a debugger that takes a stack trace stops it for a moment.
"""

from diag.core.incident import Signal
from diag.knowledge.signals.expressions import any_of, parts

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


PARTS = parts(f"""
    vllm_up_sampled: samples = max by (instance) (count_over_time(diag_vllm_up[$window])) >= 3
    halted_processes: bool = {halted_by_engine(in_state(".+"))}
    stopped_by_any_exporter: bool = {halted_by_engine(OF_ANY)}
    halted_by_any_exporter: bool = $halted_processes or on (instance, pid) $stopped_by_any_exporter
    stopped_processes: bool = {halted_by_engine(in_state("stopped"))}
    traced_processes: bool = {halted_by_engine(in_state("traced"))}
    uninterruptible_processes: bool = {halted_by_engine(in_state("uninterruptible"))}
    stopped_or_traced_processes: bool = {halted_by_engine(in_state("stopped|traced", "engine|worker"))}
    stopped_processes_of_any_exporter: bool = $stopped_processes or on (instance, pid) $stopped_by_any_exporter
    stopped_processes_of_the_engine: processes = sum by ($by) ($stopped_or_traced_processes)
    # With a scrape interval above 10 s, 30 s do not show a standstill; the pauses of its streams do, once it is over.
    pauses_of_a_standstill: pauses =
        ($stream_pauses_over_40_s_without_a_prefill >= 2)
        * (max by ($by) (count_over_time(vllm:num_requests_running[30s])) < bool 3) * ($preemptions == bool 0)
""")


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


# a live look at a server whose page has never answered is told so by the kernel alone
api_server_stopped = Signal(
    "API server stopped",
    f"(sum by ($by) ({halted(in_state('stopped|traced', 'api_server'))}) > bool 0) * $does_not_answer",
    "the kernel has halted the API server, and /metrics does not answer: {value}",
    "bool",
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
requests_stuck_or_stopped = Signal(
    "requests stuck, or stopped processes",
    any_of(stuck="$requests_in_flight_without_progress", stopped="($stopped_processes_of_the_engine > 0)"),
    "requests in flight without any progress, or stopped processes of the engine: {value}",
    "requests",
    throughout=True,
    culprit_promql=culprits("$halted_by_any_exporter"),
    culprit_label=WHICH,
)
requests_not_admitted = Signal(
    "requests that are not admitted",
    "0 * ($stopped_processes_of_the_engine > 0) or $requests_not_admitted",
    "requests that wait while none runs and nothing moves: {value}",
    "requests",
    throughout=True,
)
stalled = Signal(
    "requests without progress, or stopped processes",
    "($pauses_of_a_standstill > 0) or $requests_stuck_or_stopped_processes",
    "requests in flight without any progress (or with a pause of over 40 s), or stopped processes: {value}",
    "requests",
    throughout=True,
    culprit_promql=culprits("$halted_by_any_exporter"),
    culprit_label=WHICH,
    formerly=("requests in flight without progress",),
)
