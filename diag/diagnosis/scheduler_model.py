"""A model of vLLM's scheduler: replicas, pools, and requests with given lengths, so many in flight at a time.

A step takes a fixed time and a time for each prompt token in it; a prompt is admitted when the KV cache has room for
all of it; if no block is free, the request that was admitted last is preempted and recomputed. No parameter is fitted
to the figures that come out. Chance has a fixed seed, so the same requests have the same outcome.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from diag.core.contract import STALL_BUCKETS

MOST_EVENTS = 20_000
"""Steps with prefill, arrivals and ends that are simulated at most: a tenth of a second."""


class LengthHistogram(NamedTuple):
    """A histogram of lengths: the upper edges of its buckets, and the share of requests up to each."""

    edges: tuple[float, ...]
    shares: tuple[float, ...]

    def at(self, share: float) -> float:
        """Return the length below which this share of requests is; lengths are even within a bucket."""
        place = next((at for at, upto in enumerate(self.shares) if upto >= share), len(self.shares) - 1)
        low, below = (self.edges[place - 1], self.shares[place - 1]) if place else (0.0, 0.0)
        inside = (share - below) / max(self.shares[place] - below, 1e-9)
        return max(1.0, low + (self.edges[place] - low) * min(inside, 1.0))

    def share_up_to(self, edge: float) -> float:
        """Return the share of requests up to an edge."""
        return self.shares[self.edges.index(edge)]


Requests = list[tuple[float, float, bool]]
"""Tokens of a prompt, tokens of its output, and whether the prompt is beyond the split point."""


class ServerModel(NamedTuple):
    """A replica: seconds of a step and of each prompt token in it, its limits, and its clients.

    capacity: tokens of the KV cache. budget: tokens of a step. cap: sequences. freeze: seconds from which on a gap is a
    pause.
    """

    step: float
    token: float
    capacity: float
    budget: float
    cap: float
    clients: int
    freeze: float


class ReplicaFigures(NamedTuple):
    """Figures of a replica: requests per second, mean TTFT, usage, preemptions per request, share of time in pauses."""

    rate: float
    ttft: float
    usage: float
    preemptions: float
    paused: float


class _Request:
    __slots__ = ("answer", "arrived", "begun", "filled", "last", "made_at", "prompt")

    def __init__(self, prompt: float, answer: float, arrived: float) -> None:
        self.prompt, self.answer, self.arrived = prompt, answer, arrived
        self.filled, self.made_at, self.begun, self.last = 0.0, -1, -1.0, -1.0


class _Replica:
    """A scheduler whose decode steps are counted, not played: `steps` since the start give every output's length."""

    def __init__(self, model: ServerModel) -> None:
        self.model = model
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
        self.paused_time += steps * self.decoding * self._shown_pause(pace)
        self.now += took
        self.steps += steps
        self.held += self.decoding * steps
        self.shown = self.held

    def _shown_pause(self, gap: float) -> float:
        """Return the part of a gap that a histogram shows as a pause: its last edge below the gap."""
        return max((edge for edge in STALL_BUCKETS if self.model.freeze <= edge < gap), default=0.0)

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
        if spent or self.filling:  # a budget below the sequences that decode leaves no token for a prompt
            self._elapse(1, self.model.step + self.model.token * spent)
        for request in begun:
            self.filling.remove(request)
            if request.last >= 0:  # it was preempted: its stream has paused since then
                pause = self.now - request.last
                self.decode_time += pause
                self.paused_time += self._shown_pause(pause)
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


def draw(
    prompts: LengthHistogram,
    outputs: LengthHistogram,
    means: tuple[float, float],
    long_mean: float,
    is_long: Sequence[bool],
) -> Requests:
    """Draw prompts and outputs as often as the histograms say, with these means, for requests in their order.

    Long prompts are the longest ones. They take the outputs of the lowest (or highest) rank, blurred by chance until
    theirs have about the mean `long_mean`.
    """
    count, many = len(is_long), sum(is_long)
    chance = np.random.default_rng(count)
    quantiles = [(k + 0.5) / count for k in range(count)]
    lengths = [np.array([histogram.at(share) for share in quantiles]) for histogram in (prompts, outputs)]
    drawn, ordered = (np.maximum(each * (mean / each.mean()), 1.0) for each, mean in zip(lengths, means, strict=True))
    blur, ranks = chance.random(count), np.arange(count) / count
    low, high = -20.0, 20.0
    for _ in range(16):  # the more tilt, the more of the lowest ranks
        tilt = (low + high) / 2
        order = np.argsort(blur + tilt * ranks)
        low, high = (low, tilt) if ordered[order[:many]].mean() < long_mean else (tilt, high)
    parts = zip(
        (chance.permutation(drawn[: count - many]), chance.permutation(drawn[count - many :])),
        (chance.permutation(ordered[order[many:]]), chance.permutation(ordered[order[:many]])),
        strict=True,
    )
    classes = [iter(zip(part.tolist(), output.tolist(), strict=True)) for part, output in parts]
    return [(*next(classes[each]), bool(each)) for each in is_long]


def simulate(
    model: ServerModel, requests: Requests, pools: tuple[int, int], arrivals: Sequence[float] = ()
) -> ReplicaFigures:
    """Simulate replicas: long prompts go to the second pool, if it has replicas, all others to the first.

    A request goes to the replica of its pool with the fewest in flight: at the time of its arrival, or, without such
    times, when one of the clients gets its answer. NaN if the requests take too many events.
    """
    replicas, total = sum(pools), len(requests)
    servers = [_Replica(model) for _ in range(replicas)]
    sent, ended, warm = 0, 0, 0.0
    first_tokens: list[float] = []

    def send(time: float) -> None:
        nonlocal sent
        prompt, answer, is_long = requests[sent % total]
        pool = servers[pools[0] :] if is_long and pools[1] else servers[: pools[0]]
        server = min(pool, key=lambda each: each.in_flight)
        server.decode_until(time)
        server.waiting.append(_Request(min(prompt, 0.9 * model.capacity), answer, time))
        sent += 1

    coming = iter(arrivals)
    arrival = next(coming, math.inf)
    for _ in range(0 if arrivals else model.clients * replicas):
        send(0.0)
    begun = total // 3
    for _ in range(MOST_EVENTS):
        if ended >= total:
            break
        server = min(servers, key=lambda each: each.next_event())
        due = server.next_event()
        if arrival <= due and arrival < math.inf:
            send(arrival)
            arrival = next(coming, math.inf)
            continue
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
            if not arrivals:
                send(server.now)
    if ended < total:
        return ReplicaFigures(*[math.nan] * len(ReplicaFigures._fields))
    took = max(max(server.now for server in servers) - warm, 1e-9)
    decode = sum(server.decode_time for server in servers)
    return ReplicaFigures(
        rate=max(ended - begun, 0) / took / replicas,
        ttft=sum(first_tokens) / max(len(first_tokens), 1),
        usage=sum(server.held_time for server in servers) / took / replicas / model.capacity,
        preemptions=sum(server.preemptions for server in servers) / max(ended - begun, 1),
        paused=sum(server.paused_time for server in servers) / max(decode, 1e-9),
    )
