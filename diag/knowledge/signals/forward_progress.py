"""Signals of forward progress: the engine processes tokens, and the server responds."""

from diag.core import log_events as events
from diag.core.metric_prefix import metric
from diag.knowledge.signals.expressions import declared
from diag.knowledge.signals.log import CLAIM_TIME, event_time

WARM_STEPS = 100
"""Steps after which an engine has seen the common batch shapes; each earlier step may compile a kernel."""
STOPPING_SECONDS = 60
"""Seconds between the log line of a requested stop and the last page of the server."""
OOM_KILL_SECONDS = 120
"""Seconds between the end of a server and the kill of a process by the kernel; one of them is seen at a scrape."""
SLEEP_STATE = metric("engine_sleep_state")
HEALTH = "diag_vllm_health_status"
WORKER_EXIT = f'diag_vllm_log_value{{event="{events.WORKER_DIED}",field="exit_code"}}'
DEATHS_OF_ENGINES = (events.ENGINE_DEAD, events.WORKER_DIED)
DEATHS = (*DEATHS_OF_ENGINES, events.KILLED_BY_SIGNAL)


def _called(path: str) -> str:
    """Return the number of successful calls of a path of the API server since its start."""
    return f'sum by (instance) (last_over_time(http_requests_total{{handler="{path}",status="2xx"}}[$window]))'


PARTS, SIGNALS = declared(
    vars(),
    f"""
    # Time of the server's end: its last response, or the time in its log if no scrape has seen a response.
    time_of_death_line: unix time = {event_time(*DEATHS)}
    claimed_death: lines =
        count by ($by) (last_over_time({CLAIM_TIME}{{state="open",event=~"{"|".join(DEATHS_OF_ENGINES)}"}}[$window]))
    """,
)
