"""Long prompts among short ones: pauses that come again and again are one incident, rare ones are none."""

import random
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support import rewriting
from support.rewriting import Scrape
from support.sampling import sampled
from support.scenarios import found, present
from support.simulated_vllm import Engine, Limits, Request, page

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report

BEGUN = 1_795_000_000.0
INCIDENT = "prefill_decode_contention"


def by_chance(mean: float, seed: int, first: float = 300, last: float = 1200) -> Iterator[float]:
    """Yield times that come by chance, one every `mean` seconds."""
    draw, at = random.Random(seed), first
    while at < last:
        yield at
        at += draw.expovariate(1 / mean)


def judged(folder: Path, every: float, prompts: Iterable[float], end: float = 1200, **how: float) -> Report:
    """Judge a server of short prompts, to which long ones come at these seconds: each is a step of 3.6 s."""
    scrapes = (scrape for scrape in simulated(tuple(prompts), end, **how) if (scrape[0] - BEGUN) % every == 0)
    return doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", scrapes))]))


@cache
def simulated(
    prompts: tuple[float, ...],
    end: float,
    tokens: int = 30_000,
    rate: float = 1.3,
    token: float = 0.00012,
    budget: int = 32_768,
    answer: int = 100,
) -> list[Scrape]:
    """Return a scrape every five seconds; tests at longer intervals read some of them."""
    draw = random.Random(7)
    limits = Limits(max_num_batched_tokens=budget, token=token, num_gpu_blocks=60_000, max_model_len=40_000)
    engine = Engine(limits, BEGUN - 600)
    at = BEGUN - 600
    while (at := at + draw.expovariate(rate)) < BEGUN + end:
        engine.send(Request(at, max(20, round(draw.gauss(300, 50))), draw.randint(200, 400)))
    for at in prompts:
        engine.send(Request(BEGUN + at, round(tokens * draw.uniform(0.9, 1.05)), answer))
    scrapes = []
    for time in np.arange(5, end, 5):
        engine.run(BEGUN + time)
        scrapes.append((float(BEGUN + time), "vllm-0:8000", page([engine])))
    return scrapes


@sampled("every", [5, 15, 30])
@pytest.mark.parametrize("seed", [4, 9, 12])
def test_prompts_that_come_by_chance_are_dated_by_the_first(tmp_path: Path, every: float, seed: int) -> None:
    """About every 40 s: between two of them, scrapes show no pause, and 12 % of the time are never paused."""
    prompts = [*by_chance(40, seed)]
    report = judged(tmp_path, every, prompts)
    diagnosis = found(report, INCIDENT).diagnosis
    assert (report.verdict, diagnosis.ongoing) == ("warning", True)
    assert diagnosis.since is not None
    assert abs(diagnosis.since - (BEGUN + 300)) <= every + 5


@sampled(("every", "end"), [(5, 1200), (15, 1200), (30, 1200), (15, 720)], 2)
def test_a_pause_of_seconds_in_every_minute_is_no_health(tmp_path: Path, every: float, end: float) -> None:
    report = judged(tmp_path, every, range(200, int(end), 60), end)
    diagnosis = found(report, INCIDENT).diagnosis
    assert (report.verdict, diagnosis.severity, diagnosis.ongoing) == ("warning", "warning", True)
    assert diagnosis.since is not None
    assert abs(diagnosis.since - (BEGUN + 200)) <= every + 5


@sampled("every", [5, 15])
def test_short_pauses_in_every_third_answer_are_no_health(tmp_path: Path, every: float) -> None:
    """Pauses of 1.3 s take 8 % of the time of each stream, and one half of the answers has one."""
    report = judged(tmp_path, every, range(200, 900, 15), 900, tokens=11_000)
    assert (report.verdict, found(report, INCIDENT).diagnosis.severity) == ("warning", "warning")


@pytest.mark.parametrize("every", [5, 15])
def test_long_prompts_of_a_server_that_died_are_over(tmp_path: Path, every: float) -> None:
    pages = [
        (at, host, text if at < BEGUN + 700 else "")
        for at, host, text in simulated(tuple(range(660, 700, 8)), 900)
        if (at - BEGUN) % every == 0
    ]
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))]))
    dead, pauses = (found(report, name).diagnosis for name in ("engine_dead", INCIDENT))
    assert (dead.primary, dead.ongoing, pauses.severity, pauses.end) == (True, True, "info", dead.since)


HEALTHY: dict[str, tuple[list[float], dict[str, float]]] = {
    "one in an hour": ([1000], {"end": 3600}),
    "five at once, every ten minutes": ([at + k / 5 for at in (300, 900, 1500) for k in range(5)], {"end": 2000}),
    "every three minutes": ([*range(300, 1500, 180)], {"end": 1500}),
    "every minute, in chunks": ([*range(300, 1200, 60)], {"budget": 4096}),
    "every minute, pauses of 1.3 s": ([*range(300, 1200, 60)], {"tokens": 11_000}),
    "a full batch of short prompts": ([], {"rate": 6.0}),
}


@pytest.mark.parametrize("load", HEALTHY)
@sampled("every", [5, 15])
def test_rare_or_short_pauses_are_healthy(tmp_path: Path, every: float, load: str) -> None:
    prompts, how = HEALTHY[load]
    report = judged(tmp_path, every, prompts, **how)  # type: ignore[arg-type]
    assert (report.verdict, INCIDENT in present(report)) == ("healthy", False)


def test_long_prompts_that_stall_at_most_one_stream_each_are_healthy(tmp_path: Path) -> None:
    """Retrieval: hardly a short prompt, two long ones a minute, and in every other answer a pause of 1.3 s."""
    report = judged(tmp_path, 15, [*by_chance(28, 4)], tokens=11_000, rate=0.01, answer=700)
    assert (report.verdict, INCIDENT in present(report)) == ("healthy", False)


@sampled("every", [5, 15])
def test_an_incident_ends_with_its_last_pause(tmp_path: Path, every: float) -> None:
    assert not found(judged(tmp_path, every, range(160, 700, 12), 960, tokens=15_000), INCIDENT).diagnosis.ongoing
