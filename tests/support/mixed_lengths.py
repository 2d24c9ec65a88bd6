"""Servers that mix short and long prompts, and the pools that separate them; simulated by simulated_vllm."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from support import rewriting
from support.simulated_vllm import Engine, Limits, Request, page

BEGUN = 1_795_000_000.0
SLOW_PREFILL = Limits(max_num_batched_tokens=8192, max_num_seqs=128, token=0.0003, step=0.02)
LAUNCH = "vllm serve m --max-num-seqs 128 --max-num-batched-tokens 8192 --max-model-len 32768"
WARM_UP = 120.0


class Class(NamedTuple):
    """Requests per second, and the medians of their prompts and answers in tokens."""

    rate: float
    prompt: float
    answer: float


CHAT, DOCUMENTS = Class(2.5, 300, 150), Class(0.08, 12_000, 100)


def engine(classes: Iterable[Class], seconds: float, seed: int) -> Engine:
    """Start an engine to which requests of these classes come at random."""
    chance, server = random.Random(seed), Engine(SLOW_PREFILL, BEGUN - 1000)
    server.now = BEGUN
    for each in classes:
        at = chance.expovariate(each.rate)
        while at < seconds:
            prompt, answer = (round(median * chance.lognormvariate(0, 0.3)) for median in each[1:])
            server.send(Request(BEGUN + at, prompt, max(1, answer)))
            at += chance.expovariate(each.rate)
    return server


def recorded(folder: Path, classes: Sequence[Class], seconds: float, every: float, seed: int = 1) -> Path:
    """Record an engine after its warm-up."""
    server, scrapes = engine(classes, WARM_UP + seconds, seed), []
    for at in np.arange(WARM_UP, WARM_UP + seconds, every):
        server.run(BEGUN + at)
        scrapes.append((BEGUN + at, "h:1", page([server])))
    rewriting.write(folder, scrapes)
    (folder / "recording.toml").write_text(f'vllm = "0.32.0"\nlaunch = "{LAUNCH}"\n', encoding="utf-8")
    return folder


def latencies(classes: Sequence[Class], replicas: float, seconds: float, seed: int = 1) -> tuple[float, float, float]:
    """Serve the classes with so many replicas each; return the sum of TTFT, its count, and the time paused."""
    server = engine([each._replace(rate=each.rate / replicas) for each in classes], seconds, seed)
    server.run(BEGUN + seconds)
    first, gaps = (server.seen[f"vllm:{name}_seconds"] for name in ("time_to_first_token", "inter_token_latency"))
    paused = 1 - sum(count * edge for edge, count in zip(gaps.edges, gaps.counts, strict=True) if edge <= 1) / gaps.sum
    return first.sum, sum(first.counts), max(0.0, paused)
