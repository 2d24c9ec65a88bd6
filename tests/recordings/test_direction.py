"""Cause and effect by time and by peers: what began first, and whether peers had room."""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
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
from diag.diagnosis.report import Report

BEGUN = 1_795_000_000.0
RANK = Limits(num_gpu_blocks=2000, max_num_seqs=64, step=0.03)
CASCADE, UNBALANCED, HEAT = "kv_eviction_cascade", "replicas_unbalanced", "gpu_thermal_throttling"


def ranks(
    rates: list[float],
    limits: Sequence[Limits] = (),
    slower: tuple[float, float] = (np.inf, 1.0),
    beside: Iterable[Beside] = (),
    seconds: float = 900,
    every: float = 15,
) -> Iterator[Scrape]:
    """Scrape a server with a data-parallel rank for each of these rates, in requests per second.

    `slower`: from that second on, a step takes so many times as long.
    """
    draw = random.Random(5)
    limits = limits or [RANK] * len(rates)
    engines = [Engine(own, BEGUN - 3600, index) for index, own in enumerate(limits)]
    for engine, rate in zip(engines, rates, strict=True):
        engine.now = at = BEGUN
        while rate and (at := at + draw.expovariate(rate)) < BEGUN + seconds:
            engine.send(Request(at, round(draw.gauss(900, 150)), draw.randint(400, 900)))
    for time in np.arange(every, seconds, every):
        for engine in engines:
            engine.run(BEGUN + min(time, slower[0]))
            if time > slower[0]:
                engine.limits = replace(limits[engine.index], step=limits[engine.index].step * slower[1])
            engine.run(BEGUN + time)
        shown = page(engines)
        yield BEGUN + time, "vllm-0:8000", shown + (text(time, shown, beside) if beside else "")


def judged(folder: Path, scrapes: Iterable[Scrape]) -> Report:
    return doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", scrapes))]))


def causes(report: Report) -> dict[str, str | None]:
    """Return each present incident, except infos, with the one that explains it."""
    present = (each.diagnosis for each in report.present if each.diagnosis.severity != "info")
    return {each.incident.id: each.explained_by for each in present}


def texts(report: Report) -> str:
    return " ".join(proposal.text for each in report.present for proposal in each.proposals)


@pytest.mark.parametrize("idle", [0, 0.05])
def test_ranks_that_get_all_requests_are_unbalanced_rather_than_too_small(tmp_path: Path, idle: float) -> None:
    report = judged(tmp_path, ranks([1.5, 1.5, *[idle] * 6]))
    first = report.present[0].diagnosis
    assert (first.incident.id, first.primary, first.severity) == (UNBALANCED, True, "critical")
    assert causes(report)[CASCADE] == UNBALANCED
    assert "replicas" not in texts(report).replace("several replicas", "")


def test_a_fleet_whose_ranks_all_evict_is_too_small(tmp_path: Path) -> None:
    report = judged(tmp_path, ranks([1.3, 1.3]))
    assert report.present[0].diagnosis.incident.id == CASCADE
    assert UNBALANCED not in causes(report)
    assert re.search(r"Run \d+ replicas", texts(report))


def test_a_rank_with_a_small_kv_cache_is_slow_rather_than_unbalanced(tmp_path: Path) -> None:
    """It gets as many requests as its peers, and generates fewer tokens."""
    small = (replace(RANK, num_gpu_blocks=700), *[RANK] * 3)
    report = judged(tmp_path, ranks([0.6] * 4, small))
    assert report.present[0].diagnosis.incident.id == CASCADE
    assert causes(report)[UNBALANCED] == CASCADE
    assert not re.search(r"Run \d+ replicas", texts(report))


def heat(begin: float) -> Beside:
    """A GPU that lowers its clock to a half from that second on."""
    return gpu(
        throttle_seconds_total__sw_thermal=lambda t: 0.6 * max(0.0, t - begin),
        clock_hertz__sm=lambda t: 1980e6 if t < begin else 1000e6,
        temperature_margin_celsius=lambda t: 20 if t < begin else 1,
    )


LARGE = Limits(num_gpu_blocks=3000, max_num_seqs=128, step=0.03)


@sampled("every", [5, 15])
def test_heat_that_began_before_the_evictions_leads(tmp_path: Path, every: float) -> None:
    slower = (400.0, 1.9)
    report = judged(tmp_path, ranks([0.9], (LARGE,), slower, [heat(400), config(tensor_parallel_size=1)], every=every))
    began = {each.diagnosis.incident.id: each.diagnosis.since for each in report.present}
    assert began[HEAT] < began[CASCADE]
    assert report.present[0].diagnosis.incident.id == HEAT
    assert causes(report)[CASCADE] == HEAT
    assert not {"--kv-cache-dtype", "--max-num-seqs"} & {
        each.name for found in report.present for each in found.proposals
    }


def test_heat_that_came_after_the_evictions_explains_none_of_them(tmp_path: Path) -> None:
    """More requests arrive than the KV cache holds; five minutes later the GPU is hot too."""
    report = judged(tmp_path, ranks([1.6], (LARGE,), beside=[heat(500), config(tensor_parallel_size=1)]))
    assert report.present[0].diagnosis.incident.id == CASCADE
    assert causes(report)[CASCADE] is None and HEAT in causes(report)


def test_a_sequence_cap_is_no_lack_of_kv_cache(tmp_path: Path) -> None:
    """Two requests run, as the cap says, and fill 60 % of a KV cache that holds three."""
    capped = Limits(max_num_seqs=2, num_gpu_blocks=290, step=0.03)
    launch = [config(max_num_seqs=2, kv_cache_size_tokens=290 * 16)]
    report = judged(tmp_path, ranks([0.6], (capped,), beside=launch, seconds=600))
    assert "kv_pool_undersized" not in causes(report)
    assert report.present[0].diagnosis.incident.id == "queue_saturation"
    assert "--kv-cache-dtype" not in {proposal.name for each in report.present for proposal in each.proposals}
