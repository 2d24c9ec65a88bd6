"""Requests that never finish count too: those that wait, and those whose clients gave up."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import rewriting
from support.rewriting import Scrape
from support.simulated_vllm import Engine, Limits, Request, page

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.diagnose import Diagnosis

BEGUN = 1_795_000_000.0
USAGE = "vllm:kv_cache_usage_perc{"


def scrapes(engine: Engine, seconds: float, every: float) -> Iterator[Scrape]:
    engine.now = BEGUN
    for time in np.arange(every, seconds, every):
        engine.run(BEGUN + time)
        yield BEGUN + time, "vllm-0:8000", page([engine])


def judged(folder: Path, pages: Iterator[Scrape], incident: str) -> Diagnosis:
    report = doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", pages))]))
    return next(each.diagnosis for each in report.findings if each.diagnosis.incident.id == incident)


def adapters(number: int, patience: float, slots: int = 2) -> Engine:
    """A server with so many adapters, whose clients wait for a first token for so many seconds."""
    draw = random.Random(7)
    engine = Engine(Limits(adapters=slots, step=0.03), BEGUN - 3600)
    at = BEGUN
    while (at := at + draw.expovariate(2.0)) < BEGUN + 600:
        request = Request(at, round(draw.gauss(600, 100)), draw.randint(100, 500))
        request.adapter, request.until = f"adapter{draw.randrange(number)}", at + patience
        engine.send(request)
    return engine


@pytest.mark.parametrize("every", [5, 15])
@pytest.mark.parametrize("patience", [15, 1000])
def test_adapters_whose_clients_give_up_compete_for_slots(tmp_path: Path, patience: float, every: float) -> None:
    found = judged(tmp_path, scrapes(adapters(10, patience), 600, every), "lora_thrash")
    assert (found.state, found.ongoing) == ("present", True)


def test_adapters_with_a_slot_each_do_not(tmp_path: Path) -> None:
    assert judged(tmp_path, scrapes(adapters(4, 15, 4), 600, 15), "lora_thrash").state == "absent"


def filling(answer: int, blocks: int) -> Engine:
    """Thirty requests that come together, of which none has ended when the KV cache is full."""
    draw = random.Random(11)
    engine = Engine(Limits(num_gpu_blocks=blocks, step=0.03, max_model_len=65_536), BEGUN - 3600)
    for _ in range(30):
        engine.send(Request(BEGUN + draw.uniform(5, 25), round(draw.gauss(800, 100)), round(draw.gauss(answer, 500))))
    return engine


@pytest.mark.parametrize("every", [2, 5, 15])
def test_a_kv_cache_that_is_about_to_be_full_is_foretold_before_any_request_has_ended(
    tmp_path: Path, every: float
) -> None:
    pages = list(scrapes(filling(20_000, 6000), 120, every))
    usage = [float(line.split()[-1]) for *_, text in pages for line in text.splitlines() if line.startswith(USAGE)]
    full = next(at for at, share in enumerate(usage) if share > 0.95)
    found = judged(tmp_path, iter(pages[: full + (every < 15)]), "kv_cache_filling")
    assert (found.state, found.ongoing) == ("present", True)
