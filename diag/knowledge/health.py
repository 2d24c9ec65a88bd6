"""Parts of a verdict of health: the evidence that each part was seen, and the conditions that contradict it.

A server is healthy if every part was seen, no incident is present, and no unknown incident shows in what was measured.
Pages, recordings and a Prometheus hold the same samples, so the parts are the same for all three. A log alone shows
failures and load, and not all parts. GPUs, processes and the log are no parts: a page shows without them whether users
are served, and a report names them under "Not seen".
"""

from typing import NamedTuple

from diag.core.incident import Condition, Signal, judged
from diag.knowledge import signals

ENGINE, INSTANCE = ("instance", "engine"), ("instance",)
COUNTED = 'sum by ($by) (increase({}_bucket{{le="+Inf"}}[$window]))'
"""Latencies counted by the buckets from which pauses and late tokens are told: their sums alone show neither."""
HARMFUL = judged("{threshold} of the answers or streams is what users notice")


class HealthPart(NamedTuple):
    """A part of health: it was seen on a subject if `evidence` has a value there, whatever the value is.

    `harm` are conditions of which each shows that users are affected. An incident that cannot be decided is reported if
    one of them holds on its server. `lacks` names the telemetry without which the part was not seen.
    """

    name: str
    per: tuple[str, ...]
    evidence: Signal
    lacks: str
    harm: tuple[Condition, ...] = ()


PARTS = (
    HealthPart("progress", ENGINE, signals.progress, "counters of tokens and requests"),
    HealthPart(
        "answers",
        INSTANCE,
        # an engine that ended no request in the window had none to fail
        Signal("answers without errors", "$failures", "answers that failed: {value}", "answers"),
        "HTTP answers, or requests by their end (vLLM >= 0.12)",
        harm=(
            signals.failed_share.above(0.1, HARMFUL),
            # fewer requests given up are none: editors cancel a quarter of theirs
            signals.given_up_unexplained.above(signals.MOST_BY_DESIGN, judged("more than an editor cancels")),
            signals.front_end_wait.above("queue_seconds", judged("users notice a wait in front of the engine as well")),
        ),
    ),
    HealthPart(
        "queue",
        ENGINE,
        Signal("requests waiting", "$queued_highest", "peak number of waiting requests: {value}", "requests"),
        "requests waiting",
        harm=(signals.queue_time.above("queue_seconds", judged("beyond it, users notice the queue")),),
    ),
    HealthPart(
        "latency",
        ENGINE,
        # without a request in the window there is no latency, and behind Ray no histogram either
        Signal(
            "latencies observed",
            f"({COUNTED.format(signals.TTFT)} + {COUNTED.format(signals.ITL)} + $e2e_count)"
            " or 0 * ($requests_in_flight_peak + ($finished_requests or 0 * $requests_in_flight_peak) == 0)",
            "latencies observed: {value}",
            "observations",
        ),
        "the buckets of TTFT and ITL, and end-to-end latency",
        harm=(
            signals.paused_share.above(0.12, HARMFUL),
            signals.error_budget_burn_rate.above(signals.FAST_BURN.factor, signals.SPENDS_BUDGET_FAST),
        ),
    ),
    HealthPart("KV cache", ENGINE, signals.kv_cache_seen, "KV cache usage and preemptions", harm=(signals.preempts,)),
)
LIVES = (signals.health_answer, signals.processes_of_engines)
"""What shows an idle engine now: an answer of /health, a process of its own. The page and its process are those of the
API server, which outlives an engine (VLLM_KEEP_ALIVE_ON_ENGINE_DEATH)."""
CONTRADICTED = (
    (
        PARTS[0],
        signals.health_answer.above(200, judged("vLLM answers 200 or, for a dead engine, 503")),
        "an answer of 200 from /health, which answered {value}",
    ),
    (
        PARTS[0],
        signals.health_unanswered.above(0, judged("one sample of it is one too many")),
        "an answer from /health",
    ),
    (
        PARTS[0],
        signals.page_flickers.above(0.5, judged("what the pages between show is not seen")),
        "most pages: {value} of the scrapes of the last 15 minutes failed, with answers between them",
    ),
    (
        PARTS[0],
        signals.page_repeats.above(0.8, judged("with five new pages in five minutes, each is up to a minute old")),
        "fresh pages: {value} of the last 15 minutes repeat the page before with all counters (a cache)",
    ),
    (
        PARTS[1],
        signals.queue_sheds.above(0.1, HARMFUL),
        "success: the full queue refuses {value} of the requests with HTTP 503 (--max-num-queued-reqs)",
    ),
    (
        PARTS[3],
        signals.slowest_replica.above(3, judged("a full batch or longer contexts make a step twice as long at most")),
        "the reason why one data-parallel engine's ITL is {value} times that of its peers",
    ),
    (
        PARTS[1],
        signals.route_fails_whole.above(1.5, judged("one answer may be the fault of its request")),
        "success at a route: {value} answers failed (HTTP 5xx), none succeeded",
    ),
    (
        PARTS[1],
        signals.refused_share.above(0.5, judged("a steady share of client errors is no news, but no success either")),
        "success: {value} of the answers are client errors (HTTP 4xx)",
    ),
    (
        PARTS[1],
        signals.error_burn_rate.above(signals.SLOW_BURN.factor, judged("a month's error budget lasts five days")),
        "success: errors (HTTP 5xx) burn the error budget {value} times too fast",
    ),
)
"""Conditions that contradict a part of health whatever the incidents say, and what they show."""
