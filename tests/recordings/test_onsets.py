"""Onsets: an incident is dated by its first sign, whatever the window that proves it."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import rewriting
from support.rewriting import Scrape
from support.sampling import sampled
from support.scenarios import Beside, config, gpu, text
from support.simulated_vllm import Engine, Limits, Request, page

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.metric_families import Sample
from diag.diagnosis.diagnose import Diagnosis

BEGUN = 1_795_000_000.0
AT = 247.0
"""Seconds after the first scrape at which the fault sets in."""


def stalled(every: float, seconds: float, beside: Iterable[Beside], at_work: float = AT) -> Iterator[Scrape]:
    """Scrape a busy server that makes no more step after some time."""
    draw = random.Random(3)
    engine = Engine(Limits(step=0.03), BEGUN - 3600)
    engine.now = at = BEGUN
    while (at := at + draw.expovariate(1.0)) < BEGUN + seconds:
        engine.send(Request(at, round(draw.gauss(600, 100)), draw.randint(100, 500)))
    for time in np.arange(every, seconds, every):
        engine.run(BEGUN + min(time, at_work))
        shown = page([engine])
        yield BEGUN + time, "vllm-0:8000", shown + (text(time, shown, beside) if beside else "")


def ranks(t: float) -> Iterable[Sample]:
    """Two workers at work; from AT on the second stands still, and the first busy-waits for it."""
    seconds = {"100": 0.9 * t, "101": 0.9 * min(t, AT)}
    for rank, (pid, spent) in enumerate(seconds.items()):
        yield "diag_vllm_process_cpu_seconds_total", (pid, "worker", str(rank)), 30 + spent


def judged(folder: Path, scrapes: Iterable[Scrape], incident: str) -> Diagnosis:
    report = doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", scrapes))]))
    return next(each.diagnosis for each in report.present if each.diagnosis.incident.id == incident)


@sampled(("every", "seconds"), [(5, 400), (15, 450), (15, 1200), (30, 1200)], 2)
def test_an_engine_that_died_behind_a_page_is_dated_by_its_first_503(
    tmp_path: Path, every: float, seconds: float
) -> None:
    """Three answers of 503 prove it."""

    def scrapes() -> Iterator[Scrape]:
        for time, host, shown in stalled(every, seconds, []):
            yield time, host, f"{shown}diag_vllm_health_status {200 if time < BEGUN + AT else 503}\n"

    found = judged(tmp_path, scrapes(), "engine_dead")
    assert found.since is not None
    assert 0 <= found.since - (BEGUN + AT) <= every


@pytest.mark.parametrize("incident", ["tp_communication_stall", "engine_stalled"])
@sampled(("every", "seconds"), [(2, 330), (5, 400), (15, 450), (15, 1200), (30, 1200), (60, 1800)], 3)
def test_a_stall_is_dated_by_the_last_token(tmp_path: Path, incident: str, every: float, seconds: float) -> None:
    found = judged(tmp_path, stalled(every, seconds, [ranks, config(tensor_parallel_size=2)]), incident)
    assert found.since is not None
    assert abs(found.since - (BEGUN + AT)) <= max(5, 1.25 * every)


@sampled(("every", "latest"), [(5, 10), (15, 25)])
def test_a_rate_is_dated_by_the_first_interval_that_is_full_of_it(tmp_path: Path, every: float, latest: float) -> None:
    """Over two intervals the first one would be diluted by the one before."""
    counted = {"pcie_bytes_total__rx": lambda t: 1e9 * t + 5.0e9 * max(0.0, t - AT)}
    links = (gpu(k, pcie_link_generation__current=3, pcie_link_width__current=8, **counted) for k in (0, 1))
    beside = [config(tensor_parallel_size=2), *links]
    draw = random.Random(2)  # real scrapes come a bit sooner or later
    late = (at + draw.uniform(0, 0.4) for at in np.arange(every, 900, every))
    pages = (page for _, _, page in stalled(every, 900, [], 900))
    scrapes = ((BEGUN + at, "h:1", shown + text(at, shown, beside)) for at, shown in zip(late, pages, strict=True))
    found = judged(tmp_path, scrapes, "tp_interconnect_bound")
    assert found.since is not None
    assert 0 <= found.since - (BEGUN + AT) <= latest


def test_pauses_whose_share_hovers_at_the_limit_are_dated_by_the_first_of_their_row(tmp_path: Path) -> None:
    """A long prompt every 9 to 17 s: their share of a window passes 12 % much later."""
    draw = random.Random(10)
    engine = Engine(Limits(max_num_batched_tokens=32_768, token=0.00008, num_gpu_blocks=60_000), BEGUN - 200)
    at = BEGUN - 200
    while (at := at + draw.expovariate(1.3)) < BEGUN + 420:
        engine.send(Request(at, round(draw.gauss(300, 50)), draw.randint(200, 400)))
    at = BEGUN + 160
    while at < BEGUN + 420:
        engine.send(Request(at, draw.randint(15_000, 26_000), 100))
        at += draw.uniform(9, 17)
    pages = []
    for time in np.arange(10, 420, 10):
        engine.run(BEGUN + time)
        pages.append((BEGUN + time, "vllm-0:8000", page([engine])))
    found = judged(tmp_path, pages, "prefill_decode_contention")
    (since, _), *_ = found.episodes
    assert since is not None
    assert abs(since - (BEGUN + 160)) <= 20
