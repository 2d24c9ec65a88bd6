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
