"""A simulated vLLM 0.32: a scheduler driven by events, and the /metrics page that it would show.

Requests arrive, wait, are prefilled in chunks within the token budget, decode a token a step, and finish or are given
up; the newest is preempted where no KV block is left. Names, labels and buckets are those of a recorded page, and every
value follows from the same events, so that counters, gauges and histograms fit each other.
"""

import heapq
import math
import re
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

from support import rewriting

SOURCE = "healthy"
NOT_SHOWN = re.compile(
    r"python_|\w+_created|vllm:(estimated|kv_block)_|http_(request_size|response_size)|.*_highr_|http_"
)
LINE = re.compile(r"([\w:]+?)(_bucket|_count|_sum)?(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="([^"]*)"')
BLOCK_SIZE = 16
ROUTE = "/v1/chat/completions"


@dataclass(frozen=True)
class Limits:
    """A server: its flags, its KV blocks, and the seconds of a step: for itself, for each request and each token."""

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 8192
    max_model_len: int = 32_768
    num_gpu_blocks: int = 20_000
    step: float = 0.018
    each: float = 0.00015
    token: float = 0.00006
    drafted: int = 0
    """Tokens that speculation proposes in a step; `accepted` of them are, none beyond `draft_context`."""
    accepted: float = 0.75
    draft_context: float = math.inf
    """Tokens that the running requests may hold on average, so that their drafts are accepted."""
    adapters: int = 0
    connector: str = ""
    """kv_producer or kv_consumer of a disaggregated pair."""


@dataclass(order=True)
class Request:
    """Lengths in tokens, `cached` of the prompt found in the prefix cache; given up at `until`; times in seconds."""

    arrived: float
    prompt: int = field(compare=False)
    answer: int = field(compare=False)
    cached: int = field(compare=False, default=0)
    until: float = field(compare=False, default=math.inf)
    adapter: str = field(compare=False, default="")
    client: float = field(compare=False, default=-1.0)
    """Seconds after which a client of a closed loop sends the next one."""
    scheduled: float = field(compare=False, default=-1.0)
    first: float = field(compare=False, default=-1.0)
    last: float = field(compare=False, default=-1.0)
    filled: int = field(compare=False, default=0)
    made: int = field(compare=False, default=0)
    preempted: int = field(compare=False, default=0)

    @property
    def blocks(self) -> int:
        """Its KV blocks."""
        return -(-(self.filled + self.made) // BLOCK_SIZE)


class Histogram:
    """Counts by bucket, and the sum."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * len(edges)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Observe a value so many times."""
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += value * times


@cache
def _template() -> tuple[tuple[str, str, tuple[tuple[str, str], ...], str], ...]:
    """The lines of the recorded page: family, suffix of a histogram, labels, value."""
    *_, (_, _, page) = rewriting.scrapes(SOURCE)
    found = (LINE.match(line) for line in page.splitlines() if not line.startswith("#") and not NOT_SHOWN.match(line))
    return tuple((m[1], m[2] or "", tuple(LABEL.findall(m[3] or "")), m[4]) for m in found if m)


@cache
def _edges(family: str, longest: int) -> tuple[float, ...]:
    """The buckets of a histogram; those of token counts go up to the longest sequence."""
    own = tuple(
        float(dict(labels)["le"]) for name, kind, labels, _ in _template() if (name, kind) == (family, "_bucket")
    )
    if not family.endswith("_tokens") or family == "vllm:iteration_tokens_total":
        return own
    up = (float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
    return (*(edge for edge in up if edge <= longest), math.inf)


class Engine:
    """One engine, from its process's start at `begun` on."""

    def __init__(self, limits: Limits, begun: float, index: int = 0, model: str = "llama-70b") -> None:
        self.limits, self.begun, self.now, self.index, self.model = limits, begun, begun, index, model
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.coming: list[Request] = []
        self.deferred: list[tuple[float, Request]] = []
        self.asleep = False
        self.busy = 0.0
        self.count: Counter[str] = Counter()
        self.http: Counter[tuple[str, str]] = Counter()
        self.adapters: dict[tuple[str, str], float] = {}
        families = {family for family, kind, _, _ in _template() if kind}
        self.seen = {family: Histogram(_edges(family, limits.max_model_len)) for family in sorted(families)}

    def send(self, request: Request) -> None:
        """Let a request arrive, now or later."""
        heapq.heappush(self.coming, request)

    def run(self, until: float) -> None:
        """Step until that time."""
        while self.now < until:
            self._receive()
            self._lose()
            self._admit()
            if self.running:
                self._step(until)
            else:
                ahead = [each[0].arrived for each in (self.coming,) if each] + [at for at, _ in self.deferred]
                self.now = max(self.now + 1e-6, min([until, *ahead, *(r.until for r in self.waiting)]))

    def _receive(self) -> None:
        while self.coming and self.coming[0].arrived <= self.now:
            request = heapq.heappop(self.coming)
            if self.limits.connector == "kv_consumer":
                self.deferred.append((request.arrived + 0.05 + 0.00002 * request.prompt, request))
            else:
                self.waiting.append(request)
        for due, request in [each for each in self.deferred if each[0] <= self.now]:
            self.deferred.remove((due, request))
            self.waiting.append(request)

    def _lose(self) -> None:
        """Requests whose users hung up are gone: of them vLLM observes the first token alone."""
        for queue in (self.waiting, self.running):
            for request in [each for each in queue if each.until <= self.now]:
                queue.remove(request)
                self._answered(request)

    def _answered(self, request: Request) -> None:
        self.http[ROUTE, "2xx"] += 1
        if request.client >= 0:
            again = Request(self.now + request.client, request.prompt, request.answer, request.cached)
            again.client, again.adapter = request.client, request.adapter
            self.send(again)

    def _lacks_slot(self, request: Request) -> bool:
        """Return True if the requests that run leave no slot for the adapter of a waiting one: it is deferred."""
        adapters = {each.adapter for each in (*self.running, request) if each.adapter}
        return bool(self.limits.adapters) and len(adapters) > self.limits.adapters

    def _admit(self) -> None:
        free = self.limits.num_gpu_blocks - self._used()
        while len(self.running) < self.limits.max_num_seqs:
            request = next((each for each in self.waiting if not self._lacks_slot(each)), None)
            if request is None or free < -(-request.prompt // BLOCK_SIZE):
                return
            free -= -(-request.prompt // BLOCK_SIZE)
            self.waiting.remove(request)
            self.running.append(request)
            if request.scheduled < 0:
                request.scheduled = self.now
                self.count["vllm:prefix_cache_queries_total"] += request.prompt
                self.count["vllm:prefix_cache_hits_total"] += request.cached
            handed = self.limits.connector == "kv_consumer"
            request.filled = request.prompt - 1 if handed else min(request.cached, request.prompt - 1)

    def _used(self) -> int:
        return sum(each.blocks for each in self.running)

    def _step(self, until: float) -> None:
        """One step with prefills in it, or as many steps of decoding alone as nothing happens between."""
        limits = self.limits
        decoding = [each for each in self.running if each.made]
        filling = [each for each in self.running if not each.made]
        pace = limits.step + limits.each * len(self.running)
        if not filling:
            next_event = [*(each.arrived for each in self.coming[:1]), *(at for at, _ in self.deferred)]
            ahead = min([until, *next_event, *(each.until for each in decoding)])
            held = sum(each.filled + each.made for each in decoding) / len(decoding)
            each_step = 1 + (int(limits.drafted * limits.accepted) if held <= limits.draft_context else 0)
            fewest = min(-(-(each.answer - each.made) // each_step) for each in decoding)
            steps = max(1, min(fewest, math.ceil((ahead - self.now) / pace)))
            self._spend(steps, pace, len(decoding) * each_step)
            self._decode(decoding, steps, pace, each_step, drafts=bool(limits.drafted))
        else:
            budget, done = limits.max_num_batched_tokens - len(decoding), []
            spent = 0
            for request in filling:
                chunk = min(budget, request.prompt - request.filled)
                request.filled += chunk
                budget -= chunk
                spent += chunk
                if chunk and request.filled >= request.prompt:
                    done.append(request)
            took = pace + limits.token * spent
            self._spend(1, took, len(decoding) + spent)
            self._decode(decoding, 1, took, 1)
            for request in done:
                self._begin(request)
        while self._used() > limits.num_gpu_blocks:
            self._preempt()
        for request in [each for each in self.running if each.made >= each.answer]:
            self.running.remove(request)
            self._finish(request)
        if limits.adapters:
            at = [",".join(sorted({r.adapter for r in queue if r.adapter})) for queue in (self.running, self.waiting)]
            self.adapters[at[0], at[1]] = self.now

    def _spend(self, steps: int, pace: float, tokens: int) -> None:
        self.now += steps * pace
        self.busy += steps * pace
        self.seen["vllm:iteration_tokens_total"].add(tokens, steps)

    def _decode(
        self, decoding: list[Request], steps: int, pace: float, each_step: int, *, drafts: bool = False
    ) -> None:
        for request in decoding:
            made = min(steps * each_step, request.answer - request.made)
            request.made += made
            request.last = self.now
            self.count["vllm:generation_tokens_total"] += made
        self.seen["vllm:inter_token_latency_seconds"].add(pace, steps * len(decoding))
        if drafts:
            self.count["drafts"] += steps * len(decoding)
            self.count["accepted"] += steps * len(decoding) * (each_step - 1)

    def _begin(self, request: Request) -> None:
        request.made, request.last = request.made + 1, self.now
        self.count["vllm:generation_tokens_total"] += 1
        if request.first >= 0:
            return  # it was preempted
        request.first = self.now
        self.seen["vllm:time_to_first_token_seconds"].add(self.now - request.arrived)
        handed = request.prompt - 1 if self.limits.connector == "kv_consumer" else 0
        cached = 0 if handed else min(request.cached, request.prompt - 1)
        computed = request.prompt - cached - handed
        self.count["vllm:prompt_tokens_total"] += request.prompt
        source = "vllm:prompt_tokens_by_source_total"
        self.count[f"{source} local_compute"] += computed
        self.count[f"{source} local_cache_hit"] += cached
        self.count[f"{source} external_kv_transfer"] += handed
        self.count["vllm:prompt_tokens_cached_total"] += cached + handed
        self.count["vllm:prompt_tokens_cached_by_source_total device"] += cached
        self.count["vllm:external_prefix_cache_queries_total"] += handed
        self.count["vllm:external_prefix_cache_hits_total"] += handed

    def _preempt(self) -> None:
        victim = self.running.pop()
        victim.filled, victim.preempted = 0, victim.preempted + 1
        victim.prompt, victim.answer = victim.prompt + victim.made, max(1, victim.answer - victim.made)
        victim.made = 0
        self.waiting.appendleft(victim)
        self.count["vllm:num_preemptions_total"] += 1

    def _finish(self, request: Request) -> None:
        reason = "length" if request.answer == 1 or request.answer % 3 == 0 else "stop"
        self.count[f"vllm:request_success_total {reason}"] += 1
        begun, first, end = request.scheduled, request.first, request.last
        observed = {
            "e2e_request_latency_seconds": end - request.arrived,
            "request_queue_time_seconds": begun - request.arrived,
            "request_inference_time_seconds": end - begun,
            "request_prefill_time_seconds": first - begun,
            "request_decode_time_seconds": end - first,
            "request_time_per_output_token_seconds": (end - first) / max(1, request.made - 1),
            "request_prompt_tokens": request.prompt,
            "request_generation_tokens": request.made,
            "request_max_num_generation_tokens": request.made,
            "request_params_max_tokens": max(request.answer, 256),
            "request_params_n": 1,
            "request_num_preemptions": request.preempted,
            "request_prefill_kv_computed_tokens": request.prompt - request.cached,
        }
        for name, value in observed.items():
            self.seen[f"vllm:{name}"].add(value)
        self._answered(request)

    def text(self) -> str:
        """Its part of the page."""
        deferred = sum(map(self._lacks_slot, self.waiting))
        gauges = {
            "vllm:num_requests_running": len(self.running),
            "vllm:num_requests_waiting": len(self.waiting) + len(self.deferred),
            "vllm:num_requests_waiting_by_reason capacity": len(self.waiting) - deferred,
            "vllm:num_requests_waiting_by_reason deferred": len(self.deferred) + deferred,
            "vllm:engine_sleep_state awake": int(not self.asleep),
            "vllm:engine_sleep_state weights_offloaded": int(self.asleep),
            "vllm:kv_cache_usage_perc": self._used() / self.limits.num_gpu_blocks,
            "vllm:cache_config_info": 1,
        }
        told: dict[str, float] = {**self.count, **gauges}
        for family, held in self.seen.items():
            so_far = [*accumulate(held.counts)]
            told |= zip((f"{family} {edge}" for edge in held.edges), so_far, strict=True)
            told |= {f"{family}_count": so_far[-1], f"{family}_sum": held.sum}
        lines = [f"{text} {told.get(key, 0)}\n" for text, key in _lines(self.limits, self.index, self.model)]
        for (running, waiting), at in self.adapters.items():
            both = f'running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
            lines.append(f'vllm:lora_requests_info{{max_lora="{self.limits.adapters}",{both}}} {at}\n')
        if drafted := self.limits.drafted:
            drafts = self.count["drafts"]
            made = {"drafts": drafts, "draft_tokens": drafts * drafted, "accepted_tokens": self.count["accepted"]}
            own = f'{{engine="{self.index}",model_name="{self.model}"}}'
            lines += [f"vllm:spec_decode_num_{name}_total{own} {value}\n" for name, value in made.items()]
        return "".join(lines)


@cache
def _lines(limits: Limits, index: int, model: str) -> list[tuple[str, str]]:
    """Every series of an engine's page, with the key of its value."""
    tokens = BLOCK_SIZE * limits.num_gpu_blocks
    pool = {
        "block_size": f"{BLOCK_SIZE}",
        "num_gpu_blocks": f"{limits.num_gpu_blocks}",
        "num_gpu_blocks_override": "None",
    }
    pool |= {"kv_cache_size_tokens": f"{tokens}", "kv_cache_max_concurrency": f"{tokens / limits.max_model_len}"}
    own = {"engine": str(index), "model_name": model, **pool}
    lines = []
    for family, kind, labels, _ in _template():
        named = {name: own.get(name, value) for name, value in labels}
        rest = (
            [] if family == "vllm:cache_config_info" else [v for name, v in labels if name not in own and name != "le"]
        )
        if not family.startswith("vllm:"):
            continue
        if kind != "_bucket":
            lines.append((_series(family + kind, named), " ".join([family + kind, *rest])))
        elif float(named["le"]) == _edges(family, limits.max_model_len)[0]:  # all buckets come with the first
            for edge in _edges(family, limits.max_model_len):
                le = "+Inf" if edge == math.inf else str(edge)
                lines.append((_series(f"{family}_bucket", named | {"le": le}), f"{family} {edge}"))
    return lines


def _series(name: str, labels: dict[str, str]) -> str:
    return name + "{" + ",".join([f'{label}="{told}"' for label, told in labels.items()]) + "}"


def page(engines: list[Engine]) -> str:
    """The /metrics page of an API server with these engines."""
    answered: Counter[tuple[str, str]] = Counter()
    for engine in engines:
        answered.update(engine.http)
    own = [f"process_start_time_seconds {engines[0].begun}\n"]
    own += [f"process_cpu_seconds_total {0.2 * (engines[0].now - engines[0].begun):.2f}\n"]
    for (handler, status), value in answered.items():
        own.append(f'http_requests_total{{handler="{handler}",method="POST",status="{status}"}} {value}\n')
    lines = (line for engine in engines for line in engine.text().splitlines(keepends=True))
    return "".join([*dict.fromkeys(lines), *own])
