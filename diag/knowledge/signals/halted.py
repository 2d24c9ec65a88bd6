"""Signals of processes that the kernel has halted: stopped, held by a debugger, in uninterruptible sleep.

A process counts where it is halted in the last sample and in nine of ten in the window: one that reads a file is in
uninterruptible sleep for a moment too, and a debugger that takes a stack trace stops it for one.
"""

from diag.core.incident import Signal
from diag.knowledge.signals.expressions import PREEMPTIONS, RUNNING
from diag.knowledge.signals.forward_progress import NOT_ADMITTED, any_of, requests_stuck
from diag.knowledge.signals.prefill import stream_pauses_unexplained

OF_ANY = 'diag_vllm_process_stopped{pid=~"[0-9]+"}'
"""Halted in any state: all that an exporter says that has no diag_vllm_process_state yet."""
WHICH = "{state} {role} {rank} PID {pid} on {host}"


def in_state(state: str, role: str = ".+") -> str:
    """Selects the processes that are in this state, or not."""
    return f'diag_vllm_process_state{{pid=~"[0-9]+",role=~"{role}",state=~"{state}"}}'


def halted(selector: str) -> str:
    """1 for each process that is halted so throughout the window, else 0, with the label `engine` where it is of one.

    A worker without an engine in its rank is of the only one there is.
    """
    samples = "on (instance) group_left () (0.9 * (max by (instance) (count_over_time(diag_vllm_up[$window])) >= 3))"
    held = f"(sum_over_time({selector}[$window]) > bool {samples}) * last_over_time({selector}[$window])"
    labelled = f'label_join({held}, "engine", "/", "role", "rank")'
    engines = {"worker/[0-9]*": "0", "worker/([0-9]+)[.].*": "$$1", "engine/([0-9]+)": "$$1", ".*/.*": ""}
    for pattern, engine in engines.items():
        labelled = f'label_replace({labelled}, "engine", "{engine}", "engine", "{pattern}")'
    return labelled


def which(processes: str) -> str:
    """The halted ones of these, with a host and a state where no source names them."""
    named = f'label_replace(({processes}) == 1, "host", "its host", "host", "")'
    return f'label_replace({named}, "state", "stopped", "state", "")'


def _halted_in(state: str, sentence: str, processes: str) -> Signal:
    """How many processes of an engine or a server are in a state; 0 where the process table is not observed."""
    return Signal(
        f"processes {state}",
        f"sum by ($by) ({processes}) or 0 * max by ($by) (count_over_time(up[$window]))",
        sentence,
        "processes",
        culprit_promql=which(processes),
        culprit_label=WHICH,
    )


ANY = f"{halted(in_state('.+'))} or on (instance, pid) {halted(OF_ANY)}"
processes_stopped = _halted_in(
    "stopped",
    "vLLM processes that are stopped: {value}",
    f"{halted(in_state('stopped'))} or on (instance, pid) {halted(OF_ANY)}",
)
processes_traced = _halted_in(
    "held by a debugger", "vLLM processes that a debugger holds: {value}", halted(in_state("traced"))
)
processes_uninterruptible = _halted_in(
    "in uninterruptible sleep",
    "vLLM processes in uninterruptible sleep: {value}",
    halted(in_state("uninterruptible")),
)

STOPPED = f"sum by ($by) ({halted(in_state('stopped|traced', 'engine|worker'))})"
requests_stuck_or_stopped = Signal(
    "requests without progress, or stopped processes",
    any_of(stuck=f"({requests_stuck.promql})", stopped=f"({STOPPED} > 0)"),
    "requests in flight without any progress, or stopped processes of the engine: {value}",
    "requests",
    throughout=True,
    culprit_promql=which(ANY),
    culprit_label=WHICH,
)
requests_not_admitted = Signal(
    "requests that are not admitted",
    f"0 * ({STOPPED} > 0) or {NOT_ADMITTED}",
    "requests that wait while none runs and nothing moves: {value}",
    "requests",
    throughout=True,
)

# Scraped more rarely than every 10 s, no 30 s show a standstill. The pauses that it leaves do, once it is over.
TOO_RARE = f"(max by ($by) (count_over_time({RUNNING}[30s])) < bool 3)"
LEFT_PAUSES = f"((({stream_pauses_unexplained.promql}) >= 2) * {TOO_RARE} * ({PREEMPTIONS} == bool 0))"
stalled = Signal(
    requests_stuck_or_stopped.name,
    f"({LEFT_PAUSES} > 0) or ({requests_stuck_or_stopped.promql})",
    "requests in flight without any progress (or with a pause of over 40 s), or stopped processes: {value}",
    "requests",
    throughout=True,
    culprit_promql=which(ANY),
    culprit_label=WHICH,
    formerly=("requests in flight without progress",),
)
