"""Signals of forward progress: whether the engine processes tokens, and whether it answers."""

from diag.core.incident import Signal
from diag.core.log_events import (
    COMPILED_WHILE_SERVING,
    ENGINE_DEAD,
    ENGINE_START_FAILED,
    FATAL,
    KILLED_BY_SIGNAL,
    SCHEDULER_PAUSED,
    SCHEDULER_RESUMED,
    SHUT_DOWN,
    WORKER_DIED,
)
from diag.core.startup_phases import READY
from diag.knowledge.signals.expressions import KV_USAGE, RUNNING, WAITING, in_flight
from diag.knowledge.signals.host import (
    EVENT_TIME,
    HEARSAY_TIME,
    LAST_PROGRESS_OF_INSTANCE,
    SERVES,
    event_time,
    last,
    since_start,
)
from diag.knowledge.signals.prefill import LONG_STEPS
from diag.knowledge.signals.startup import PHASE


def moved(window: str, unexported: str = "0 * ({grown})") -> str:
    """Tokens, requests and changes of KV cache usage in the window: 0 means no progress.

    A prefill in chunks with nobody decoding yields no token until it ends, but each chunk takes KV blocks, and every
    step reports its gauges. Running and waiting do not count: they move in a scheduler's deadlock too.
    """
    counters = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total")
    grown = " + ".join(f"sum by ($by) (increase({counter}[{window}]))" for counter in counters)
    new, old = (f"sum by ($by) (changes({gauge}[{window}]))" for gauge in KV_USAGE)
    return f"({grown} + ({new} or {old} or {unexported.format(grown=grown)}))"


def stands_still(window: str) -> str:
    """1 without progress, else 0; unknown where no token moves and the usage that a prefill moves is not exported."""
    return f"({moved(window, '0 * (({grown}) > 0)')} == bool 0)"


def seen_before(age: str) -> str:
    """1 where there are samples older than `age`: a shorter standstill proves nothing."""
    return f"(sum by ($by) (count_over_time({RUNNING}[$window] offset {age})) > bool 0)"


def stuck(window: str, least: int = 1) -> str:
    """Requests in flight throughout a window without progress; 0 where there was progress."""
    at_least = f" * ({in_flight(window)} >= bool {least})" if least > 1 else ""
    return f"{in_flight(window)}{at_least} * {stands_still(window)}"


WARM_STEPS = 100
"""Steps after which an engine has met the common shapes of batches; each of the first ones may compile a kernel."""
progress = Signal(
    "tokens and requests processed",
    moved("$window"),
    "tokens and requests processed (changes of KV cache usage included): {value}",
    "tokens",
    window_scaling="peak",
)
steps_per_second = Signal(
    "engine steps / s",
    "sum by ($by) (rate(vllm:iteration_tokens_total_count[$window]))",
    "engine steps per second: {value}",
    "1/s",
)
# The probe request of the exporter (or of --probe) got no token, and no other request did either.
PROBE_FAILED = (
    f"{stands_still('$window')} * on (instance) group_left () "
    "(1 - max by (instance) (last_over_time(diag_probe_success[$window])))"
)
# A single request may be one huge prefill in one step, which shows no progress either: it gets two minutes. So does an
# engine whose steps have just been that long. One of an engine's first steps may compile a kernel that its warm-up did
# not cover, and so may a later one, as the log says: nobody can tell that from a stall for as long.
FIRST_STEPS = (
    f"((sum by ($by) (last_over_time(vllm:iteration_tokens_total_count[$window]))"
    f" or sum by ($by) (last_over_time(vllm:generation_tokens_total[$window]))) < {WARM_STEPS})"
)
COMPILED = event_time(COMPILED_WHILE_SERVING)
# The first request with an image or an adapter compiles too, often without a line in the log: its compiler is a child
# of the engine or of a worker, or their main thread works on memory that is new to it. A hang does neither: a thread
# that spinned or waited for 10 s had no page fault, one that compiled had thousands a second.
ENGINE_OR_WORKER = 'role=~"engine|worker"'
AT_WORK = (
    f"(max by (instance) (increase(diag_vllm_process_children_cpu_seconds_total{{{ENGINE_OR_WORKER}}}[2m])) > 1"
    f" or max by (instance) (rate(diag_vllm_process_page_faults_total{{{ENGINE_OR_WORKER}}}[30s])) > 100)"
)
# vLLM lists every set of adapters that has run since its start: with none, the first one may be what is compiled for.
NO_ADAPTER_YET = (
    "(count by (instance) (last_over_time(vllm:lora_requests_info[$window]))"
    ' unless count by (instance) (last_over_time(vllm:lora_requests_info{running_lora_adapters!=""}[$window])))'
)
COMPILES = (
    f"(max by (instance) ({COMPILED.replace('$by', 'instance')}) > time() - 120 or {AT_WORK} or {NO_ADAPTER_YET})"
)
STUCK_2M = f"(({stuck('2m')} * {seen_before('100s')}) > 0)"
requests_stuck = Signal(
    "requests in flight without progress",
    f"0 * ({moved('30s')} > 0) or ({PROBE_FAILED} > 0) or {STUCK_2M}"
    f" or ({stuck('$window', 2)} == 0) or (0 * ({LONG_STEPS} > 0))"
    f" or ({stuck('$window', 2)} * {seen_before('25s')} unless {FIRST_STEPS} unless on (instance) {COMPILES})",
    "requests in flight without any progress: {value}",
    "requests",
    needs=f"two minutes in the first {WARM_STEPS} steps of an engine, or where it compiles kernels (as for a first"
    " LoRA adapter)",
)
# A request in a step, however long the step, was counted as running before: a prefill in one step is no refused
# admission. Nor is a request that is deferred, until its KV transfer or its grammar is there.
NONE_RUNS = f"(sum by ($by) (max_over_time({RUNNING}[$window])) == bool 0)"
WAITS = f"sum by ($by) (min_over_time({WAITING}[$window]))"
DEFERRED = f"sum by ($by) (max_over_time({WAITING}_by_reason{{reason='deferred'}}[$window]))"
NOT_ADMITTED = (
    f"clamp_min({WAITS} - ({DEFERRED} or 0 * {WAITS}), 0) * {NONE_RUNS}"
    f" * ({moved('$window')} == bool 0) * {seen_before('25s')}"
)
requests_without_progress = Signal(
    "requests in flight while nothing moves",
    stuck("$window"),
    "requests in flight in a window without any progress: {value}",
    "requests",
    throughout=True,
)
standstill_was_prefill = Signal(
    "steps with long prefills",
    f"(0 * {STUCK_2M}) or ({LONG_STEPS}) or 0 * {in_flight('5m')}",
    "steps of over 10 s with long prefills, which the engine has come out of: {value}",
    "bool",
    hindsight=True,
)
SLEEP_STATE = "vllm:engine_sleep_state"
asleep = Signal(
    "engine asleep",
    # a release before 0.11.1 does not say, nor does one say that it was put to sleep
    f'1 - min by ($by) (last_over_time({SLEEP_STATE}{{sleep_state="awake"}}[$window]))'
    f" or 0 * sum by ($by) (last_over_time({RUNNING}[$window]))",
    "the engine is asleep: {value}",
    "bool",
)
sleep_level = Signal(
    "sleep level",
    f'max by ($by) (last_over_time({SLEEP_STATE}{{sleep_state="weights_offloaded"}}[$window]))'
    f' + 2 * max by ($by) (last_over_time({SLEEP_STATE}{{sleep_state="discard_all"}}[$window]))',
    "the engine sleeps at level {value}",
    "level",
)


def _asked(path: str) -> str:
    """How often this path of the API server was called with success since its start."""
    return f'sum by (instance) (last_over_time(http_requests_total{{handler="{path}",status="2xx"}}[$window]))'


# Its last line in the log, which vLLM 0.20 does not write yet; else more calls of /pause than of /resume on the page.
PAUSED_BY_LOG = (
    f"(({since_start(SCHEDULER_PAUSED)}) * ({event_time(SCHEDULER_PAUSED)} > bool {event_time(SCHEDULER_RESUMED)}))"
).replace("$by", "instance")
PAUSE_LOGGED = f"({event_time(f'{SCHEDULER_PAUSED}|{SCHEDULER_RESUMED}')}) > 0".replace("$by", "instance")
PAUSED_BY_PAGE = f"(({_asked('/pause')} > bool {_asked('/resume')}) or ({_asked('/pause')} > bool 0))"
ENGINE_SEEN = f"0 * sum by ($by) (last_over_time({RUNNING}[$window]))"
scheduler_paused = Signal(
    "scheduler paused",
    f"{ENGINE_SEEN} + on (instance) group_left ()"
    f" (({PAUSED_BY_LOG} and {PAUSE_LOGGED}) or {PAUSED_BY_PAGE} or {PAUSED_BY_LOG})"
    # without a log and without the metrics of vLLM's own HTTP server, nobody has been seen to pause it
    f" or {ENGINE_SEEN}",
    "somebody has paused the scheduler (POST /pause), and it has not been resumed: {value}",
    "bool",
)
endpoint_without_vllm = Signal(
    "metrics endpoint without vLLM's metrics",
    # an exporter answers whether or not vLLM does
    "max by (instance) (max_over_time(up[$window]))"
    ' unless on (instance) last_over_time(diag_scrape_success{collector="vllm"}[$window])',
    "an endpoint answered without vLLM's metrics: {value}",
    "bool",
)
serves = Signal(
    "vLLM's metrics available",
    "max by (instance) (max_over_time(diag_vllm_up[$window])) or max by (instance) (max_over_time(up[$window]))",
    "vLLM's metrics were available: {value}",
    "bool",
)

# -- death ------------------------------------------------------------------------------------------------------------

IN_PHASE_READY = last(PHASE, f'phase="{READY}"')
ENGINE_PROCESSES = last("diag_vllm_processes", 'role="engine"')
# the log says that a start ended well, and no engine process is seen that would still serve: it had answered before
READY_BY_LOG = f"({IN_PHASE_READY}) == 1 unless on (instance) ({ENGINE_PROCESSES}) > 0"
ANSWERED_BEFORE = (
    f"(count by (instance) (count_over_time({RUNNING}[1d]))"
    f" or ({last('diag_vllm_last_up_timestamp_seconds')}) > time() - 86400 or ({READY_BY_LOG}))"
)
successful_scrapes = Signal(
    "successful scrapes",
    "max by (instance) ((avg_over_time(diag_vllm_up[$window]) and count_over_time(diag_vllm_up[$window]) >= 3)"
    " or (avg_over_time(up[$window]) and count_over_time(up[$window]) >= 3))"
    f" and on (instance) {ANSWERED_BEFORE}",
    "{value} of scrapes succeeded (the server had answered before)",
    "share",
)
engine_death_logged = Signal(
    "death of the engine in the log",
    f"({since_start(f'{ENGINE_DEAD}|{WORKER_DIED}')}) * (1 - ({since_start(ENGINE_START_FAILED)}))",
    "the log reports the death of the engine, and nothing has started since: {value}",
    "bool",
)
engine_processes = Signal(
    "engine processes", ENGINE_PROCESSES, "running engine processes of this server: {value}", "processes"
)
# The API server fails all requests once one data-parallel engine is gone. As many processes as engines were seen for
# most of the time: where some run on other hosts, or a fork had an engine's name for a moment, none is missing.
ENGINES = f"count by ($by) (count by ($by, engine) (last_over_time({RUNNING}[$window])))"
USUAL_PROCESSES = 'max by ($by) (quantile_over_time(0.9, diag_vllm_processes{role="engine"}[1d]))'
engines_lost = Signal(
    "engine process lost",
    f"({ENGINE_PROCESSES} < bool {ENGINES}) * ({USUAL_PROCESSES} >= bool {ENGINES})",
    "a data-parallel engine's process has ended: {value}",
    "bool",
)
shut_down = Signal(
    "shut down in order",
    f"({since_start(SHUT_DOWN)}) * (1 - {SERVES})",
    "the log reports an orderly shutdown, and nothing has started since: {value}",
    "bool",
)


STOPPING_SECONDS = 60
"""Seconds between the line that says that a server was told to stop and its last page."""
LAST_UP = last("diag_vllm_last_up_timestamp_seconds", by="instance")
OOM_KILL = last("diag_host_last_oom_kill_timestamp_seconds", by="instance")
DEATHS = f"{ENGINE_DEAD}|{WORKER_DIED}|{KILLED_BY_SIGNAL}"
LAST_DEATH = f"max by (instance) (last_over_time({EVENT_TIME}{{event=~'{DEATHS}'}}[$window]))"
ENDED = f"(({LAST_UP}) > 0 or ({LAST_DEATH}) > 0)"
"""When the server ended: its last answer, or what its log says where nobody has seen it answer."""
SOON = 120
"""Seconds between the end of a server and a process that the kernel killed, of which one is seen at a scrape."""
WORKER_EXIT = last("diag_vllm_log_value", f'event="{WORKER_DIED}",field="exit_code"', by="instance")
"""Below 0, it is the number of the signal that ended the worker."""
# what a library or the shell prints has no head of vLLM's: a client may have sent it, so it explains a death at most
HEARSAY_OF_DEATH = (
    f'label_replace((last_over_time({HEARSAY_TIME}{{event=~"{"|".join(FATAL)}"}}[$window])'
    f" > on (instance) group_left () ({LAST_UP} - {SOON})),"
    ' "event", "$$1 (without proof that vLLM logged it)", "event", "(.*)")'
)


def any_of(**signs: str) -> str:
    """The largest of several signs: of yes or no, 1 where one shows, 0 where those that can be seen do not."""
    named = (f'label_replace({sign}, "sign", "{name}", "", "")' for name, sign in signs.items())
    return f"max by ($by) ({' or '.join(named)})"


# a long step can keep the page from answering for tens of seconds: while the engine runs, 30 s of silence decide
BUSY_NOT_DEAD = (
    f"({ENGINE_PROCESSES}) > 0 and on (instance)"
    " max by (instance) (max_over_time(diag_vllm_up[30s]) or max_over_time(up[30s])) > 0"
)
SILENT_PAGE = f"((({successful_scrapes.promql}) == bool 0) unless on (instance) ({BUSY_NOT_DEAD}))"
evidence_of_death = Signal(
    "server or engine dead",
    any_of(
        page=SILENT_PAGE,
        log=f"({engine_death_logged.promql})",
        process=f"(({ENGINE_PROCESSES}) == bool 0)",
        part=f"({engines_lost.promql})",
    ),
    "/metrics does not answer any more, the log reports the death of the engine, or its process has ended: {value}",
    "bool",
    culprit_promql=f'(last_over_time({EVENT_TIME}{{event=~"{"|".join(FATAL)}"}}[$window]) > 0)'
    f" >= on (instance) group_left () ({LAST_PROGRESS_OF_INSTANCE})"
    f" or label_replace({WORKER_EXIT} < 0 and on (instance) ({since_start(WORKER_DIED)}) > 0,"
    ' "event", "killed_by_signal", "", "")'
    f' or label_replace(abs({OOM_KILL} - {ENDED}) < {SOON}, "event", "kernel_oom_kill", "", "")'
    f" or {HEARSAY_OF_DEATH}",
    culprit_label="{event}",
    formerly=("evidence of death",),
)
# an engine that is told to stop ends before the page does
STOPS = (
    f"({ENGINE_PROCESSES} == bool 0) * ({since_start(SHUT_DOWN)})"
    f" * (time() - {event_time(SHUT_DOWN)} < bool {STOPPING_SECONDS})"
)
# a shared log, or processes that are seen wrongly, do not stand against tokens; both together do, against those of the
# data-parallel engines that are left
GENERATES = (
    "((sum by ($by) (increase(vllm:generation_tokens_total[$window]))"
    f" + sum by ($by) (increase(vllm:prompt_tokens_total[$window]))) * {SERVES} > bool 0)"
)
tokens_or_shutdown = Signal(
    "generating, or shut down in order",
    any_of(
        tokens=f"({GENERATES} unless on (instance) (({engine_death_logged.promql}) * ({engines_lost.promql}) > 0))",
        shutdown=f"({shut_down.promql})",
        stops=f"({STOPS})",
    )
    + " or 0 * max by ($by) (count_over_time(up[$window]))",
    "tokens are processed, or the server was shut down in order: {value}",
    "bool",
    formerly=("tokens or an orderly shutdown",),
)
