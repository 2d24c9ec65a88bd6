"""Servers that mix short and long prompts, and the same requests played by replicas and by pools.

Played by simulated_vllm: a scheduler with its own rules, which shares no code with diag's queueing model.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from support import rewriting
from support.simulated_vllm import Engine, Limits, Request, page

BEGUN = 1_795_000_000.0
WARM_UP = 120.0


class RequestKind(NamedTuple):
    """Requests per second, medians of their prompts and answers in tokens, and the scatter of both.

    `bound`: how much longer the answers of longer prompts are (1: in proportion, -1: shorter in proportion).
    """

    rate: float
    prompt: float
    answer: float
    scatter: float = 0.3
    bound: float = 0.0


class MixedLoad(NamedTuple):
    """Kinds of requests at each server; `clients` wait for their answers, `burst` requests come together."""

    kinds: tuple[RequestKind, ...]
    limits: Limits
    clients: int = 0
    burst: int = 1
    servers: int = 1

    @property
    def launch(self) -> str:
        """The launch command of the server."""
        limits = self.limits
        return (
            f"vllm serve m --max-num-seqs {limits.max_num_seqs} --max-num-batched-tokens "
            f"{limits.max_num_batched_tokens} --max-model-len {limits.max_model_len}"
        )


def requests(load: MixedLoad, servers: int, seconds: float, seed: int) -> list[Request]:
    """Draw the requests of so many servers."""
    chance, found = random.Random(seed), []
    for kind in load.kinds:
        at = 0.0
        while (at := at + chance.expovariate(kind.rate * servers / load.burst)) < seconds:
            for _ in range(load.burst):
                wide = chance.gauss(0, kind.scatter)
                prompt = round(kind.prompt * np.exp(wide))
                answer = round(kind.answer * np.exp(kind.bound * wide + chance.gauss(0, kind.scatter)))
                longest = load.limits.max_model_len - 1
                prompt = min(max(4, prompt), longest - 100)
                found.append(Request(BEGUN + at, prompt, min(max(1, answer), longest - prompt)))
    mixed = sum(kind.rate for kind in load.kinds)
    for _client in range(load.clients * servers):
        kind = chance.choices(load.kinds, [each.rate / mixed for each in load.kinds])[0]
        request = Request(BEGUN + chance.random(), round(kind.prompt), round(kind.answer))
        request.client = 0.0
        found.append(request)
    return sorted(found)


def record(folder: Path, load: MixedLoad, seconds: float, every: float, seed: int) -> Path:
    """Record the servers after their warm-up."""
    servers = {f"h{number}:1": _engine(load.limits) for number in range(load.servers)}
    for number, server in enumerate(servers.values()):
        for request in requests(load, 1, WARM_UP + seconds, 100 * seed + number):
            server.send(request)
    scrapes = []
    for at in np.arange(WARM_UP, WARM_UP + seconds, every):
        for name, server in servers.items():
            server.run(BEGUN + at)
            scrapes.append((BEGUN + at, name, page([server])))
    rewriting.write(folder, scrapes)
    (folder / "recording.toml").write_text(f'vllm = "0.32.0"\nlaunch = "{load.launch}"\n', encoding="utf-8")
    return folder


class Played(NamedTuple):
    """TTFT of each request, by prompt length; preemptions and requests that wait at the end, of all servers."""

    short: np.ndarray
    long: np.ndarray
    preemptions: float
    waiting: int


def play(load: MixedLoad, edge: float, pools: tuple[int, int], seconds: float, seed: int) -> Played:
    """Serve the whole load by pools of servers: prompts up to the edge on the first, others on the rest.

    Without servers in the second pool, all of them share the whole load. A request goes to one of its pool at random.
    """
    chance = random.Random(seed + 1)
    servers = [_engine(load.limits) for _ in range(sum(pools))]
    sent = requests(load, load.servers, seconds, seed)
    prompts = [request.prompt for request in sent]
    for request in sent:
        pool = servers[pools[0] :] if pools[1] and request.prompt > edge else servers[: pools[0]]
        chance.choice(pool).send(request)
    for server in servers:
        server.run(BEGUN + seconds)
    ttft = np.array([(each.first if each.first >= 0 else BEGUN + seconds) - each.arrived for each in sent])
    settled = np.array([each.arrived >= BEGUN + WARM_UP for each in sent])
    is_long = np.array(prompts) > edge
    finished = sum(sum(server.seen["vllm:request_prompt_tokens"].counts) for server in servers)
    preemptions = sum(server.count["vllm:num_preemptions_total"] for server in servers) / max(1, finished)
    waiting = sum(len(server.waiting) for server in servers)
    return Played(ttft[settled & ~is_long], ttft[settled & is_long], preemptions, waiting)


def _engine(limits: Limits) -> Engine:
    server = Engine(limits, BEGUN - 1000)
    server.now = BEGUN
    return server


def unseen(seeds: Sequence[int]) -> Iterator[tuple[int, str, MixedLoad]]:
    """Yield random loads with their seeds and kinds: servers, lengths, rates and couplings differ in each."""
    for seed in seeds:
        chance = random.Random(1000 + seed)
        shape = (*["documents"] * 5, "long answers", "bursts", "clients", "small cache")[seed % 9]
        token = chance.choice((0.00006, 0.00012, 0.0002, 0.0003))
        limits = Limits(
            max_num_batched_tokens=chance.choice((2048, 8192, 16_384)),
            max_num_seqs=chance.choice((128, 256)),
            max_model_len=chance.choice((32_768, 65_536)),
            num_gpu_blocks=chance.choice((10_000, 20_000, 40_000)) if shape != "small cache" else 4000,
            step=chance.choice((0.012, 0.02, 0.03)),
            token=token,
        )
        prompt = chance.choice((200, 400, 800))
        long = chance.choice((8000, 14_000, 24_000))
        busy = chance.uniform(0.15, 0.75)  # share of time that prefill takes
        of_long = chance.uniform(0.6, 0.97)
        short_rate = min(busy * (1 - of_long) / (prompt * token), 30 / (200 * limits.step))
        long_rate = busy * of_long / (long * token)
        kinds = (
            RequestKind(short_rate, prompt, chance.choice((60, 150, 250)), 0.5, chance.choice((0.0, 0.8))),
            RequestKind(long_rate, long, chance.choice((80, 300)), 0.3, chance.choice((-0.5, 0.0, 0.8))),
        )
        if shape == "long answers":
            kinds = (kinds[0], kinds[1]._replace(answer=2500))
        clients, burst = (20, 1) if shape == "clients" else (0, 12 if shape == "bursts" else 1)
        if clients:
            kinds = tuple(kind._replace(rate=kind.rate / 50) for kind in kinds)
        yield seed, shape, MixedLoad(kinds, limits, clients, burst, chance.choice((1, 1, 2, 3)))
