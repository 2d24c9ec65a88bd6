"""Binders of a server at its ceiling, each declared like an incident: signals, thresholds, fixes with their values.

The signals are those of the doctor, over the whole step at which the ceiling was reached. `pressure` is how near to its
limit a resource is, 1 at the limit: it names the next binder.
"""

from collections.abc import Iterator
from typing import NamedTuple

from diag.core.incident import Condition, Fix, Incident, Signal, documented, judged, measured
from diag.knowledge.incident_files import FOLDER, read, shared
from diag.knowledge.signals import (
    api_server_cores,
    clock_loss,
    deferred_share,
    front_end_share,
    kv_cache_usage_peak,
    kv_cache_usage_peak_with_next,
    kv_cache_usage_with_next,
    requests_deferred,
    requests_running,
    requests_waiting_median,
)
from diag.ramp.step import STEP_TOKENS

WHOLE = "24h"
"""Longer than any step: its window is the whole step."""
SCHEDULER = "https://docs.vllm.ai/en/latest/configuration/engine_args.html#schedulerconfig"
OPTIMIZATION = "https://docs.vllm.ai/en/latest/configuration/optimization/"

held_up = Signal(
    "requests waiting (median), or preempted",
    "$requests_waiting_median + $preemptions",
    "requests that wait (median) or were preempted: {value}",
    "requests",
)
running_share_of_cap_median = Signal(
    "requests running / --max-num-seqs (median)",
    "clamp_max(round($requests_running_median + $requests_ending_per_step or $requests_running_median)"
    " / on (instance) group_left () $sequence_cap, 1)",
    "the median number of running requests is {value} of the sequence cap",
    "share",
)
token_budget_used = Signal(
    "tokens / step / --max-num-batched-tokens",
    f"({STEP_TOKENS}) / on (instance) group_left () $config_max_num_batched_tokens",
    "a step processes {value} of the token budget on average",
    "share",
)
throttled = Signal(
    "thermal slowdown or power brake (share of time)",
    "$thermal_slowdown_share_of_time + $power_brake_share",
    "the GPU spent {value} of the time in thermal slowdown or under the power brake",
    "share",
)

NEXT_STEPS = "2 ^ ceil(log2(4 * clamp_min($requests_running_mean + $requests_waiting_mean, 1)))"
requests_of_next_steps = Signal(
    "requests of the next two doublings",
    f"(({NEXT_STEPS}) < $requests_with_room) or $requests_with_room",
    "the next two doublings of the load need, and the KV cache holds, {value} requests at a time",
    "requests",
)
room_beyond_next_steps = Signal(
    "requests with room in the KV cache / requests of the next two doublings",
    f"$requests_with_room / (({NEXT_STEPS}) > 0)",
    "the KV cache holds {value} times the requests of the next two doublings",
    "ratio",
)

WAIT = requests_waiting_median.at_least(1, judged("in half of the samples a request waits"))
HAS_ROOM = kv_cache_usage_with_next.at_most(0.9, judged("one more request fits the KV cache"))
RUNS = requests_running.at_least(1, judged("where none runs, something other than the budget holds them up"))
AT_CAP = running_share_of_cap_median.at_least(
    0.95, documented("the scheduler admits up to --max-num-seqs: a flat line is the cap", SCHEDULER)
)
BELOW_CAP = running_share_of_cap_median.below(0.95, documented("below the cap, the cap is not the limit", SCHEDULER))


class Binder(NamedTuple):
    """A resource that binds if all of its symptoms hold; `pressure` is how near to its limit it is."""

    id: str
    name: str
    cause: str
    symptoms: tuple[Condition, ...]
    fixes: tuple[Fix, ...]
    pressure: Signal | None = None
    per: tuple[str, ...] = ("instance", "engine")

    @property
    def incident(self) -> Incident:
        """The binder as an incident over the whole step."""
        texts = (self.id, self.name, "info", self.per, self.cause, "")
        return Incident(*texts, self.symptoms, (), self.fixes, live_window=WHOLE, window=WHOLE, hold="0s")  # type: ignore[arg-type]


def _fixes(incident: str, *flags: str) -> tuple[Fix, ...]:
    """Return the fixes of an incident that set one of these flags."""
    return tuple(fix for fix in read(FOLDER / f"{incident}.incident").fixes if fix.flag in flags)


def _cap_fixes() -> Iterator[Fix]:
    """Return the doctor's fixes of the sequence cap, with what the next steps of a ramp need as their value."""
    for flag in ("--max-num-seqs", "--max-num-active-seqs"):
        (fix, *_) = _fixes("queue_saturation", flag)
        for reached, change in (
            (
                room_beyond_next_steps.at_least(1, judged("the next steps end before the KV cache does")),
                "Admit what the next two doublings of the load need, as a power of two; the KV cache has room for it.",
            ),
            (
                room_beyond_next_steps.below(1, judged("the KV cache ends before the next steps do")),
                "Admit as many requests as the KV cache holds at the observed lengths: it is the next limit, before "
                "the load has doubled twice.",
            ),
        ):
            why = judged("beyond the next steps nothing was measured; beyond the KV cache, requests preempt each other")
            conditions = (*fix.only_if[:-1], reached)
            yield fix._replace(value=requests_of_next_steps, only_if=conditions, change=change, why=why)


HEAT = Binder(
    "power_or_heat",
    "power or heat",
    "the GPU lowers its clock for heat or power",
    (
        throttled.above(0.1, judged("short moments at a load step are normal")),
        clock_loss.above(0.05, judged("a throttle that costs no clock costs no throughput")),
    ),
    (
        Fix(
            change="Improve cooling or power first: the GPU is slower than its data sheet.",
            effect="the SM clock rises to its maximum",
            restart=False,
            why=judged("no flag raises what the hardware holds back"),
        ),
    ),
    clock_loss,
    ("instance", "gpu"),
)
KV_FETCH = Binder(
    "kv_fetch",
    "KV fetch",
    "requests wait for KV blocks from elsewhere, or for a LoRA slot, although the engine has capacity",
    (
        requests_deferred.at_least(1, judged("on average at least one request is deferred")),
        deferred_share.above(
            0.5, documented("a deferred request waits for a KV transfer or a LoRA slot, not for capacity", SCHEDULER)
        ),
    ),
    (
        Fix(
            change="Look at the KV connector: the prefill instances, the network between them and this server, or the"
            " store that holds the blocks.",
            effect="fewer requests are deferred",
            restart=False,
            why=judged("no setting of the engine serves a request whose KV blocks have not arrived"),
        ),
    ),
)
API_SERVER = Binder(
    "api_server",
    "API server",
    "the process that accepts requests and sends tokens uses a full CPU core",
    (
        api_server_cores.at_least(0.9, documented("one Python process computes on one core", OPTIMIZATION)),
        front_end_share.above(0.3, measured("at most 6 % on servers that are not CPU-bound", "api_server_bound")),
    ),
    _fixes("api_server_bound", "--api-server-count", "--stream-interval"),
    api_server_cores,
    ("instance",),
)
KV_CACHE = Binder(
    "kv_cache",
    "KV cache",
    "requests wait for KV blocks, or are preempted for lack of them",
    (
        kv_cache_usage_peak_with_next.above(0.95, judged("one more request does not fit")),
        held_up.at_least(1, judged("requests wait for KV blocks, or lose theirs")),
    ),
    shared()["MORE_KV_CAPACITY"],
    kv_cache_usage_peak,
)
SEQUENCES = Binder(
    "sequence_cap",
    "sequence cap",
    "as many requests run as --max-num-seqs admits, and the KV cache has room for more",
    (WAIT, AT_CAP, HAS_ROOM),
    tuple(_cap_fixes()),
    running_share_of_cap_median,
)
TOKENS = Binder(
    "token_budget",
    "token budget",
    "requests wait although fewer run than --max-num-seqs admits and the KV cache has room: a step processes no more"
    " tokens than --max-num-batched-tokens",
    (WAIT, BELOW_CAP, HAS_ROOM, RUNS),
    tuple(fix._replace(only_if=()) for fix in _fixes("queue_saturation", "--max-num-batched-tokens")),
    token_budget_used,
)
BINDERS = (HEAT, KV_FETCH, API_SERVER, KV_CACHE, SEQUENCES, TOKENS)
"""Ordered so that a cause comes before its effects."""
COMPUTE_FIX = Fix(
    change="Run more replicas, or faster hardware: no setting of the scheduler serves more tokens from this one."
    " Quantised weights (FP8, INT4), speculative decoding or a smaller model cost less for each token.",
    effect="throughput rises with the number of replicas",
    restart=False,
    why=judged("the step is full: more requests in it only make it longer"),
)
CLIENT_FIX = Fix(
    change="Generate the load from more processes or hosts: this client is the limit, and the server's ceiling is"
    " higher than measured.",
    effect="the offered number of requests is in flight",
    restart=False,
    why=judged("a server cannot refuse requests that it was not offered"),
)
