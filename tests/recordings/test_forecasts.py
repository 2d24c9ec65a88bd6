"""Forecasts of a full KV cache and of a queue that misses the SLO; none where nothing is coming."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import rewriting
from support.filling_loads import FILLING, LEVEL, filling
from support.healthy_loads import KINDS, Kind, scraped_kind, steady
from support.sampling import sampled
from support.simulated_vllm import Limits

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.diagnose import Diagnosis
from diag.knowledge.catalog import load
from diag.report.terminal import render

BEGUN = 1_795_000_000.0
INCIDENT = next(incident for incident in load() if incident.id == "kv_cache_filling")
BATCH = "batch of reasoning"


def recorded(folder: Path, kind: Kind, times: np.ndarray) -> Path:
    scrapes = scraped_kind(kind, "a load", 1, [*times], BEGUN, float(times[-1]) + 5)
    return rewriting.write(folder, ((each.at, each.instance, each.page) for each in scrapes))


def number(page: str, name: str) -> float:
    return float(next(line for line in page.splitlines() if line.startswith(f"{name}{{")).split()[-1])


def judged(folder: Path, incident: str) -> Diagnosis:
    report = doctor.run(ObserveOptions([str(folder)]))
    return next(found.diagnosis for found in report.findings if found.diagnosis.incident.id == incident)


@sampled("every", [2, 10, 30])
def test_full_kv_cache_is_foreseen_before_it_is_full(tmp_path: Path, every: int) -> None:
    ((at, holds, named, full),) = filling(recorded(tmp_path, FILLING[BATCH], np.arange(2, 1500, every)), INCIDENT)
    first, filled = int(np.argmax(holds)), int(np.argmax(full))
    assert holds.any()
    assert 30 <= at[filled] - at[first] <= 300  # 15 % of the KV cache were left
    assert 0.4 <= named[first] / (at[filled] - at[first]) <= 2.5
    assert not holds[filled + 4 :].any()  # preemptions are an incident of their own


@sampled("every", [5, 30])
@pytest.mark.parametrize("name", ["flat and high", "batches that fit", "slow batches that fit", "reasoning levels off"])
def test_a_kv_cache_that_does_not_fill_up_is_not_foretold(tmp_path: Path, name: str, every: int) -> None:
    ((_, holds, _, full),) = filling(recorded(tmp_path, LEVEL[name], np.arange(2, 1800, every)), INCIDENT)
    assert not full.any()
    assert not holds.any()


def test_a_live_look_before_the_cascade_names_the_time(tmp_path: Path) -> None:
    end = 1362
    report = doctor.run(ObserveOptions([str(recorded(tmp_path / "look", FILLING[BATCH], np.arange(end - 32, end, 2)))]))
    assert report.verdict == "healthy"
    text = " ".join(render(report, verbose=True).split())
    named = re.search(r"\(kv_cache_filling\) on .* KV cache full in about ([\d.]+) s at this rate", text)
    assert named, text
    assert 15 <= float(named[1]) <= 60  # half a minute later it is full


OVERLOAD = Kind(steady(3), prompt=300, answer=200, limits=Limits(max_num_seqs=8))


@pytest.mark.parametrize(("kind", "is_told"), [(OVERLOAD, True), (KINDS["chat"], False)])
def test_a_queue_that_outgrows_the_slo_is_foretold(tmp_path: Path, kind: Kind, is_told: bool) -> None:
    found = judged(recorded(tmp_path, kind, np.arange(20, 52, 2)), "queue_saturation")
    readings = {each.condition.signal.name: each for each in found.supports}
    forecast = readings["time until queue time exceeds the TTFT SLO"]
    assert (forecast.holds is True) == is_told
    if is_told:
        at = 50 + forecast.value
        pages = [each.page for each in scraped_kind(kind, "a load", 1, [at - 15, at, at + 15], BEGUN, at + 20)]
        started = [number(page, "vllm:time_to_first_token_seconds_count") for page in pages]
        queue_time = number(pages[1], "vllm:num_requests_waiting") * 30 / (started[2] - started[0])
        assert queue_time == pytest.approx(40, rel=0.25)


def test_a_steady_queue_is_not_said_to_grow(tmp_path: Path) -> None:
    clients = replace(OVERLOAD, rate=steady(0), clients=30)
    found = judged(recorded(tmp_path, clients, np.arange(120, 180, 2)), "queue_saturation")
    assert found.state == "present"
    assert "time until queue time exceeds the TTFT SLO" not in {
        e.condition.signal.name for e in found.supports if e.holds
    }
