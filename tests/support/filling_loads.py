"""Loads that fill a KV cache, loads that look so and do not, and what an incident says of them.

They are simulated like those of healthy_loads.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from support.healthy_loads import KINDS, Kind, Rate, steady, wave
from support.simulated_vllm import Limits

from diag.core.contract import Contract
from diag.core.incident import Incident, seconds
from diag.core.subjects import Floats
from diag.diagnosis.decision_table import COMPARE
from diag.diagnosis.query_cache import QueryCache, Window
from diag.knowledge.signals import time_until_full
from diag.promql import Formula
from diag.sources.recording.reader import read

EVERY = 15
FULL = (
    "(max by (instance, engine) (max_over_time(vllm:kv_cache_usage_perc[31s])) > bool 0.99)"
    " + (sum by (instance, engine) (increase(vllm:num_preemptions_total[61s])) > bool 0)"
)


def ramp(low: float, high: float) -> Rate:
    """A load that rises in a straight line over most of the hour."""
    return lambda t: low + (high - low) * min(1.0, max(0.0, (t - 300) / 3000))


def level(high: float) -> Rate:
    """A load that rises for twenty minutes and stays."""
    return lambda t: high * min(1.0, max(0.1, (t - 300) / 1200))


LONG = Limits(step=0.04, num_gpu_blocks=32_000, max_model_len=65_536)
REASONING = Kind(history=300, prompt=500, answer=5000, longest=16_000)
BATCH = replace(REASONING, rate=steady(0.03), answer=6000, scatter=0.1)
FILLING: dict[str, Kind] = {
    "chat grows": Kind(ramp(4, 7.5), limits=Limits(num_gpu_blocks=4000)),
    "chat grows, large server": Kind(ramp(9, 17), limits=Limits(num_gpu_blocks=12_000, max_num_seqs=512)),
    "rag grows": Kind(ramp(0.7, 2.2), prompt=6000, answer=150, cached=0.0),
    "reasoning grows": replace(REASONING, rate=ramp(0.2, 0.7)),
    "batch of long answers": Kind(
        steady(0.1),
        history=300,
        prompt=400,
        answer=9000,
        scatter=0.2,
        longest=16_000,
        bursts=(70, 1100),
        limits=Limits(step=0.08),
    ),
    "batch of reasoning": Kind(
        steady(0.01),
        history=300,
        prompt=3000,
        answer=24_000,
        scatter=0.3,
        longest=40_000,
        bursts=(30, 1000),
        limits=LONG,
    ),
    "more agents with long answers": Kind(
        steady(0.02), history=300, prompt=3000, answer=16_000, scatter=0.5, longest=40_000, bursts=(9, 200), limits=LONG
    ),
}
"""Each fills its KV cache within the hour."""
LEVEL: dict[str, Kind] = {
    "levels off": Kind(level(11.5), scatter=0.2, limits=Limits(num_gpu_blocks=9600, max_num_seqs=256, step=0.04)),
    "reasoning levels off": replace(REASONING, rate=level(0.42), scatter=0.2, limits=Limits(max_num_seqs=512)),
    "flat and high": replace(
        KINDS["pool often full, no preemption"], limits=Limits(num_gpu_blocks=7000, max_num_seqs=64)
    ),
    "batches that fit": replace(BATCH, answer=4000, bursts=(70, 400), limits=Limits(num_gpu_blocks=18_400)),
    "slow batches that fit": replace(BATCH, bursts=(60, 800), limits=Limits(num_gpu_blocks=27_500, step=0.07)),
    "batches of reasoning that fit": Kind(
        steady(0.005),
        history=300,
        prompt=3000,
        answer=24_000,
        scatter=0.2,
        longest=40_000,
        bursts=(14, 1100),
        limits=LONG,
    ),
    "waves below the brim": Kind(wave(0.5, 7, 1200), scatter=0.3, limits=Limits(num_gpu_blocks=5600, step=0.03)),
}
"""Each is high, or rises and stops before its KV cache is full."""


def filling(folder: Path, incident: Incident) -> Iterator[tuple[Floats, np.ndarray, Floats, np.ndarray]]:
    """Judge a recording every 15 s over the alert's window; yield for each engine four rows.

    Seconds since the first scrape, whether the incident holds, the time until the KV cache is full, whether it is full.
    """
    recording = read(folder)
    queries = QueryCache(recording, Contract())
    window = Window(seconds(incident.window), incident.window)
    at = np.arange(recording.first + window.seconds * 1000, recording.instants[-1], EVERY * 1000).astype(np.int64)
    rows = [queries.ask(condition.signal, incident.per, window, at) for condition in incident.conditions]
    named = queries.ask(time_until_full, incident.per, window, at)
    hole = np.full(len(at), np.nan)
    for subject, full in recording.ask(Formula("", FULL, {}), at).items():
        values = [each.get(subject, hole) for each in rows]
        held = [COMPARE[c.op](value, c.limit) for c, value in zip(incident.conditions, values, strict=True)]
        yield (at - recording.first) / 1000, np.all(held, axis=0), named.get(subject, hole), full > 0
