"""Two pools by prompt length, instead of replicas that mix them: where to split, how large, and with what effect.

The answer is simulated: requests with this server's own lengths, as many at a time as it has in flight, run through a
model of vLLM's scheduler. A step takes a fixed time and a time for each prompt token in it; a prompt is admitted when
the KV cache has room for all of it, and if no block is free, the request admitted last is preempted and recomputed.
The model has no free parameter that is fitted to latency or usage, so it is tested against the present first: if its
requests per second, TTFT and KV cache usage are not those of the server within `MOST_ERROR`, there is no answer.

Prompt and output lengths are drawn independently, since vLLM counts them in two histograms. A random seed is fixed and
the number of requests is bounded, so the answer is the same every time and takes less than half a second.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from diag.core.formatting import number, quantity
from diag.core.subjects import label_value
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.query_cache import QueryCache

MOST_ERROR = 0.25
"""Relative error of the model of the present from which on it says nothing."""
REPLICAS = (2, 3, 4)
"""Replicas to divide into two pools; the proportions hold for more of them."""
REQUESTS = 160
"""Simulated requests of each replica, of which the first third warms up the model."""
MOST_EDGES = 3
"""Split points to simulate for each number of replicas: bucket edges of the server's histogram of prompt lengths."""
LEAST_LONG, MOST_LONG = 0.01, 0.6
"""Share of requests beyond a split point."""
HELPS = 0.5
"""The pauses or the preemptions that remain at most, as a share of those of the mixed replicas."""
KEEPS = 0.97
"""Requests per second that two pools keep at least, as a share of those of the mixed replicas."""
FEWEST = 10
"""Finished requests below which their lengths say little."""

HISTOGRAMS = {
    "prompts": "sum by ($by, le) (increase(vllm:request_prompt_tokens_bucket[$window]))",
    "answers": "sum by ($by, le) (increase(vllm:request_generation_tokens_bucket[$window]))",
}
NUMBERS = {
    "running": "$requests_running_mean",
    "waiting": "$requests_waiting_mean",
    "usage": "$kv_cache_usage_mean",
    "finished": "$finished_requests",
    "seconds": "$window_seconds",
    "ttft": "sum by ($by) (increase(vllm:time_to_first_token_seconds_sum[$window])) / ($first_tokens > 0)",
    "step": "$itl_median",
    "prefill_rate": "$prefill_rate",
    "computed": "$prefilled_tokens / ($finished_prompt_tokens > 0)",
    "mean_prompt": "$finished_prompt_tokens / ($finished_requests > 0)",
    "mean_answer": "$finished_output_tokens / ($finished_requests > 0)",
}
SETTINGS = {
    "capacity": "$config_kv_cache_size_tokens",
    "budget": "$config_max_num_batched_tokens",
    "cap": "$sequence_cap by (instance)",
}


class Lengths(NamedTuple):
    """A histogram of lengths: the upper edges of its buckets, and the share of requests up to each."""

    edges: tuple[float, ...]
    shares: tuple[float, ...]

    def at(self, share: float) -> float:
        """Return the length below which this share of requests is; lengths are even within a bucket."""
        place = next((at for at, upto in enumerate(self.shares) if upto >= share), len(self.shares) - 1)
        low, below = (self.edges[place - 1], self.shares[place - 1]) if place else (0.0, 0.0)
        inside = (share - below) / max(self.shares[place] - below, 1e-9)
        return max(1.0, low + (self.edges[place] - low) * min(inside, 1.0))


class ServerModel(NamedTuple):
    """A replica: seconds of a step and of each prompt token in it, its limits, and the requests in flight at it."""

    step: float
    token: float
    capacity: float
    budget: float
    cap: float
    clients: int


class Outcome(NamedTuple):
    """Simulated figures: requests per second of a replica, mean TTFT, usage, preemptions per request, time in pauses."""

    rate: float
    ttft: float
    usage: float
    preemptions: float
    paused: float


class Pools(NamedTuple):
    """Two pools: prompts up to `edge` tokens on `short` replicas, longer ones on `long`; `error` is the model's."""

    edge: float
    short: int
    long: int
    error: float
    mixed: Outcome
    split: Outcome

    @property
    def text(self) -> str:
        """The proposal in words, with the effect that changes most."""
        effects = [
            ("preemptions per finished request", number(self.mixed.preemptions), number(self.split.preemptions)),
            ("decode time in stream pauses", *(quantity(o.paused, "share") for o in (self.mixed, self.split))),
        ]
        harm = effects[0] if self.mixed.preemptions > self.mixed.paused else effects[1]
        ttft = ("TTFT (mean)", *(quantity(outcome.ttft, "seconds") for outcome in (self.mixed, self.split)))
        changes = ", ".join(f"{name} {before} -> about {after}" for name, before, after in (harm, ttft))
        return (
            f"Two pools instead of {self.short + self.long} mixed replicas: prompts up to {self.edge:,.0f} tokens on "
            f"{self.short}, longer ones on {self.long}: {changes} (simulated; model error {quantity(self.error, 'share')})."
        )


class _Request:
    __slots__ = ("answer", "arrived", "begun", "filled", "last", "made_at", "prompt")

    def __init__(self, prompt: float, answer: float, arrived: float) -> None:
        self.prompt, self.answer, self.arrived = prompt, answer, arrived
        self.filled, self.made_at, self.begun, self.last = 0.0, -1, -1.0, -1.0


class _Replica:
    """A scheduler whose decode steps are counted, not played: `steps` since the start give every output's length."""

    def __init__(self, model: ServerModel, freeze: float) -> None:
        self.model, self.freeze = model, freeze
        self.now, self.steps, self.held, self.decoding = 0.0, 0, 0.0, 0
        self.waiting: deque[_Request] = deque()
        self.running: list[_Request] = []
        self.filling: list[_Request] = []
        self.ends: list[tuple[int, int, _Request]] = []
        self.count = 0
        self.shown = self.held_time = self.decode_time = self.paused_time = 0.0
        self.preemptions = 0

    def reset(self) -> None:
        """Forget the figures of the warm-up."""
        self.held_time = self.decode_time = self.paused_time = 0.0
        self.preemptions = 0

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.waiting)

    def _admits(self) -> bool:
        return bool(
            self.waiting
            and len(self.running) < self.model.cap
            and self.held + self.waiting[0].prompt <= self.model.capacity
        )

    def next_event(self) -> float:
        """The time at which something other than decoding happens; infinite if nothing runs."""
        if self.filling or self._admits():
            return self.now
        if not self.decoding:
            return math.inf
        ahead = self.ends[0][0] - self.steps
        room = int((self.model.capacity - self.held) // self.decoding) + 1
        return self.now + max(1, min(ahead, room)) * self.model.step

    def decode_until(self, time: float) -> None:
        """Decode as many whole steps as fit; an idle replica only waits."""
        if not self.decoding or self.filling:
            self.now = max(self.now, time) if not self.running else self.now
            return
        steps = int((time - self.now) / self.model.step + 1e-6)
        if steps > 0:
            self._elapse(steps, self.model.step)

    def _elapse(self, steps: int, pace: float) -> None:
        took = steps * pace
        # the gauge of vLLM shows the usage of the last step that ended
        self.held_time += took * (self.shown if steps == 1 else self.held + self.decoding * steps / 2)
        self.decode_time += took * self.decoding
        self.paused_time += took * self.decoding if pace > self.freeze else 0.0
        self.now += took
        self.steps += steps
        self.held += self.decoding * steps
        self.shown = self.held

    def play(self) -> list[_Request]:
        """Play one step with prefill, or the end of a run of decode steps; return the requests that end."""
        while self._admits():
            request = self.waiting.popleft()
            self.running.append(request)
            self.filling.append(request)
            self.held += request.prompt  # reserved as a whole
        spent, begun = 0.0, []
        for request in self.filling:
            chunk = min(self.model.budget - self.decoding - spent, request.prompt - request.filled)
            if chunk <= 0:
                break
            request.filled += chunk
            spent += chunk
            if request.filled >= request.prompt:
                begun.append(request)
        if spent:
            self._elapse(1, self.model.step + self.model.token * spent)
        for request in begun:
            self.filling.remove(request)
            if request.last >= 0:  # it was preempted: its stream has paused since then
                pause = self.now - request.last
                self.decode_time += pause
                self.paused_time += pause if pause > self.freeze else 0.0
            request.begun = self.now if request.begun < 0 else request.begun
            request.made_at = self.steps
            self.decoding += 1
            self.count += 1
            heapq.heappush(self.ends, (self.steps + math.ceil(request.answer) - 1, self.count, request))
        while self.held > self.model.capacity and len(self.running) > 1:
            self._preempt()
        ended = []
        while self.ends and self.ends[0][0] <= self.steps:
            end, _, request = heapq.heappop(self.ends)
            if request.made_at >= 0 and end == request.made_at + math.ceil(request.answer) - 1:
                self.running.remove(request)
                self.decoding -= 1
                self.held -= request.prompt + self.steps - request.made_at
                ended.append(request)
        while self.ends and self.ends[0][2].made_at < 0:  # it was preempted
            heapq.heappop(self.ends)
        return ended

    def _preempt(self) -> None:
        request = self.running.pop()
        self.preemptions += 1
        if request.made_at < 0:
            self.filling.remove(request)
            self.held -= request.prompt
        else:
            made = self.steps - request.made_at
            self.decoding -= 1
            self.held -= request.prompt + made
            request.prompt, request.answer = request.prompt + made, max(1.0, request.answer - made)
            request.last = self.now
        request.filled, request.made_at = 0.0, -1
        self.waiting.appendleft(request)


def couple(prompts: Sequence[float], answers: Sequence[float], edge: float, long_mean: float) -> list[float]:
    """Order the answers so that prompts beyond the edge have about this mean of answers; all answers stay the same.

    Long prompts take those of the lowest (or highest) rank, blurred by chance until the mean is met.
    """
    long = [place for place, prompt in enumerate(prompts) if prompt > edge]
    chance = random.Random(len(answers))
    blur = np.array([chance.random() for _ in answers])
    ordered = np.sort(np.array(answers))
    ranks = np.arange(len(ordered)) / len(ordered)
    low, high = -20.0, 20.0
    for _ in range(16):
        tilt = (low + high) / 2
        order = np.argsort(blur + tilt * ranks)
        is_low = ordered[order[: len(long)]].mean() < long_mean
        low, high = (low, tilt) if is_low else (tilt, high)
    taken, rest = ordered[order[: len(long)]], ordered[order[len(long) :]]
    chance.shuffle(rest_list := rest.tolist())
    coupled = np.empty(len(answers))
    coupled[long] = taken
    others = np.ones(len(answers), bool)
    others[long] = False
    coupled[others] = rest_list
    return [float(each) for each in coupled]


def simulate(
    model: ServerModel, prompts: Sequence[float], answers: Sequence[float], freeze: float, pools: tuple[int, int], edge: float
) -> Outcome:
    """Simulate replicas: prompts up to `edge` go to the first pool, longer ones to the second, if it has replicas.

    Each of the clients in flight sends its next request when one ends, to the replica of the pool with the fewest.
    """
    replicas, total = sum(pools), len(prompts)
    servers = [_Replica(model, freeze) for _ in range(replicas)]
    sent, ended, first_tokens, warm = 0, 0, [], 0.0

    def send(time: float) -> None:
        nonlocal sent
        prompt, answer = prompts[sent % total], answers[sent % total]
        pool = servers[pools[0] :] if prompt > edge and pools[1] else servers[: pools[0]]
        server = min(pool, key=lambda each: each.in_flight)
        server.decode_until(time)
        server.waiting.append(_Request(prompt, answer, time))
        sent += 1

    for _ in range(model.clients * replicas):
        send(0.0)
    begun = total // 3
    while ended < total:
        server = min(servers, key=lambda each: each.next_event())
        due = server.next_event()
        if math.isinf(due):
            break
        server.decode_until(due)
        for request in server.play():
            ended += 1
            if ended == begun:
                warm = server.now
                for each in servers:
                    each.reset()
            if ended > begun:
                first_tokens.append(request.begun - request.arrived)
            send(server.now)
    took = max(max(server.now for server in servers) - warm, 1e-9)
    decode = sum(server.decode_time for server in servers)
    return Outcome(
        rate=max(ended - begun, 0) / took / replicas,
        ttft=sum(first_tokens) / max(len(first_tokens), 1),
        usage=sum(server.held_time for server in servers) / took / replicas / model.capacity,
        preemptions=sum(server.preemptions for server in servers) / max(ended - begun, 1),
        paused=sum(server.paused_time for server in servers) / max(decode, 1e-9),
    )
