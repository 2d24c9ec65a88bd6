"""Parts of a verdict of health: the evidence that each part was seen, and the conditions that contradict it.

A server is healthy if every part was seen, no incident is present, and no unknown incident shows in what was measured.
Pages, recordings and a Prometheus hold the same samples, so the parts are the same for all three. A log alone shows
failures and load, and not all parts. GPUs, processes and the log are no parts: a page shows without them whether users
are served, and a report names them under "Not seen".
"""

from typing import NamedTuple

from diag.core.incident import Condition, Signal, judged
from diag.core.metric_prefix import metric
from diag.knowledge import signals
from diag.knowledge.signals.answers import SERVED

ENGINE, INSTANCE = ("instance", "engine"), ("instance",)
USAGE = f"max by ($by) (max_over_time({metric('kv_cache_usage_perc')}[$window]))"
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
        harm=(signals.failed_share.above(0.1, HARMFUL),),  # requests given up are none: editors cancel most of theirs
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
    HealthPart(
        "KV cache",
        ENGINE,
        # A request is preempted only if no KV block is free. Behind Ray a counter that has counted nothing is absent,
        # so a cache with room stands for it.
        Signal(
            "KV cache usage and preemptions",
            f"({USAGE}) and ($preemptions or ({USAGE}) < 0.9)",
            "KV cache usage peaks at {value}",
            "share",
        ),
        "KV cache usage and preemptions",
        harm=(signals.preempts,),
    ),
)
HEALTH = Signal(
    "answer of /health",
    "max by ($by) (last_over_time(diag_vllm_health_status[$window]))",
    "GET /health answered {value}",
    "HTTP status",
)
"""Evidence for an engine: 200 shows that its server has one, any other status contradicts it. Without a status (nothing
asks /health, or the server has no such route) its page speaks alone."""
UNANSWERED = Signal(
    "/health unanswered while nothing moves",
    "min by ($by) (min_over_time(diag_vllm_health_unanswered[$window]))"
    " * on (instance) (max by (instance) ($tokens_and_requests_processed) == bool 0)"
    " unless on (instance) last_over_time(diag_vllm_health_status[$window])",
    "no answer came from /health: {value}",
    "bool",
)
"""The page says nothing of an idle engine: the API server writes it. A busy one shows by its tokens that it works. An
answer of vLLM's own in the window outweighs one that did not come."""
FAILS_WHOLE = Signal(
    "failed answers of a route without success",
    "round(max by ($by) ($failed_answers_by_route[5m]"
    f" unless on (instance, handler) sum by (instance, handler) (increase({SERVED}[5m])) > 0))",
    "answers of one route that failed while none succeeded: {value}",
    "answers",
)
"""A share of all answers hides a route that serves nothing, and a few answers at night are too few for a share."""
SHEDS = Signal(
    "requests refused by a full queue / requests",
    "$shed_share[5m]",
    "the full queue refuses {value} of the requests",
    "share",
)
FLICKERS = Signal(
    "scrapes that fail now and then / scrapes",
    "(1 - max by ($by) (avg_over_time(diag_vllm_up[15m]) or avg_over_time(up[15m]))) and $page_comes_and_goes",
    "{value} of the scrapes of 15 minutes failed, with answers between them",
    "share",
)
_CPU = "process_cpu_seconds_total[15m]"
REPEATS = Signal(
    "scrapes that repeat the page before / scrapes",
    f"1 - max by ($by) (changes({_CPU})) / (max by ($by) (count_over_time({_CPU})) - 1 >= 10)"
    " and max by ($by) (changes(process_cpu_seconds_total[5m])) <= 5"
    " and (max by ($by) ($tokens_and_requests_processed[15m]) > 0)",
    "{value} of the pages of 15 minutes repeat the page before",
    "share",
)
"""Each page and each token costs the API server CPU time: at most 30 % of real pages show none since the last one."""
_ITL = "($itl_median[5m] by (instance, engine) and on (instance, engine) $itl_count[5m] by (instance, engine) >= 100)"
SLOWEST_REPLICA = Signal(
    "slowest replica / its peers",
    f"max by ($by) ({_ITL} / on (instance) group_left () quantile by (instance) (0.5, {_ITL}))"
    f" and on (instance) count by (instance) ({_ITL}) >= 3",
    "ITL of the slowest data-parallel engine: {value} times that of its peers",
    "ratio",
)
LIVES = (
    HEALTH,
    Signal(
        "processes of engines",
        'count by ($by) (last_over_time(diag_vllm_process_cpu_seconds_total{role=~"engine|worker"}[$window])'
        " unless on (instance, pid) $ended_or_orphaned)",
        "processes of engines and workers: {value}",
        "processes",
    ),
)
"""What shows an idle engine now: an answer of /health, a process of its own. The page and its process are those of the
API server, which outlives an engine (VLLM_KEEP_ALIVE_ON_ENGINE_DEATH)."""
CONTRADICTED = (
    (
        PARTS[0],
        HEALTH.above(200, judged("vLLM answers 200 or, for a dead engine, 503")),
        "an answer of 200 from /health, which answered {value}",
    ),
    (PARTS[0], UNANSWERED.above(0, judged("one sample of it is one too many")), "an answer from /health"),
    (
        PARTS[0],
        FLICKERS.above(0.5, judged("what the pages between show is not seen")),
        "most pages: {value} of the scrapes of the last 15 minutes failed, with answers between them",
    ),
    (
        PARTS[0],
        REPEATS.above(0.8, judged("with five new pages in five minutes, each is up to a minute old")),
        "fresh pages: {value} of the last 15 minutes repeat the page before with all counters (a cache)",
    ),
    (
        PARTS[1],
        SHEDS.above(0.1, HARMFUL),
        "success: the full queue refuses {value} of the requests with HTTP 503 (--max-num-queued-reqs)",
    ),
    (
        PARTS[3],
        SLOWEST_REPLICA.above(3, judged("a full batch or longer contexts make a step twice as long at most")),
        "the reason why one data-parallel engine's ITL is {value} times that of its peers",
    ),
    (
        PARTS[1],
        FAILS_WHOLE.above(1.5, judged("one answer may be the fault of its request")),
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
