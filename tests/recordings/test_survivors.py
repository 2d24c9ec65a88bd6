"""Requests that never finish count too: those that wait, and those whose clients gave up."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from support import rewriting
from support.rewriting import Scrape
from support.sampling import sampled
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


@sampled("every", [5, 15])
@pytest.mark.parametrize("patience", [15, 1000])
def test_adapters_whose_clients_give_up_compete_for_slots(tmp_path: Path, patience: float, every: float) -> None:
    found = judged(tmp_path, scrapes(adapters(10, patience), 600, every), "lora_thrash")
    assert (found.state, found.ongoing) == ("present", True)


def starving(clients: int) -> Engine:
    """A server whose two slots stay with two adapters that always have a request running, and others that wait."""
    draw = random.Random(5)
    engine = Engine(Limits(adapters=2, step=0.03), BEGUN - 3600)
    for number in range(10 + clients):
        adapter = f"adapter{number % 2 if number < 10 else 2 + number % 4}"
        at = BEGUN + (number / 10 if number < 10 else 300 + draw.uniform(0, 5))
        answer = 100_000 if number < 2 else draw.randint(20, 500)
        engine.send(Request(at, 600, answer, adapter=adapter, client=0.5))
    return engine


@sampled("every", [5, 15, 30])
def test_adapters_that_never_get_a_slot_count(tmp_path: Path, every: float) -> None:
    """The page lists those that run: as many as there are slots, and no request that finishes has waited."""
    pages = rewriting.write(tmp_path / "recording", scrapes(starving(12), 1500, every))
    report = doctor.run(ObserveOptions([str(pages)]))
    (found,) = (each for each in report.present if each.diagnosis.incident.id == "lora_thrash")
    assert (found.diagnosis.ongoing, found.diagnosis.primary) == (True, True)
    slots = next(each for each in found.proposals if each.name == "--max-loras")
    assert (slots.before, slots.after, slots.assumed) == (2.0, 4.0, False)


@sampled("every", [5, 15])
def test_as_many_adapters_as_slots_do_not_starve(tmp_path: Path, every: float) -> None:
    assert judged(tmp_path, scrapes(starving(0), 900, every), "lora_thrash").state == "absent"


def test_adapters_with_a_slot_each_do_not(tmp_path: Path) -> None:
    assert judged(tmp_path, scrapes(adapters(4, 15, 4), 600, 15), "lora_thrash").state == "absent"


REASONS = "vllm:num_requests_waiting_by_reason{"


def before_0_20(pages: Iterator[Scrape], cap: int = 0) -> Iterator[Scrape]:
    """Pages without the reasons for which requests wait; the launch command that diag reads names the cap, if any."""
    named = f'diag_vllm_config{{flag="max_num_seqs"}} {cap}\n' if cap else ""
    for time, host, text in pages:
        yield (
            time,
            host,
            "".join(each for each in text.splitlines(keepends=True) if not each.startswith(REASONS)) + named,
        )


@pytest.mark.parametrize(
    ("cap", "slots", "expected"), [(128, 2, "present"), (0, 2, "unknown"), (128, 10, "absent"), (0, 10, "absent")]
)
def test_adapters_compete_for_slots_where_a_release_exports_no_reason_to_wait(
    tmp_path: Path, cap: int, slots: int, expected: str
) -> None:
    """The KV cache and the cap have room, so that requests wait for neither; an unknown cap may be full."""
    pages = before_0_20(scrapes(adapters(10, 1000, slots), 600, 15), cap)
    assert judged(tmp_path, pages, "lora_thrash").state == expected


def test_adapters_of_a_full_batch_do_not_compete_for_slots(tmp_path: Path) -> None:
    """More adapters than slots, but as many requests run as the cap allows: they wait for capacity."""
    engine = adapters(10, 1000)
    engine.limits = replace(engine.limits, max_num_seqs=4)
    report = judged(tmp_path, before_0_20(scrapes(engine, 600, 15), 4), "lora_thrash")
    assert report.state == "absent"


def filling(answer: int, blocks: int, short: int = 0) -> Engine:
    """Thirty requests that come together, of which none has ended when the KV cache is full, and short ones."""
    draw = random.Random(11)
    engine = Engine(Limits(num_gpu_blocks=blocks, step=0.03, max_model_len=65_536), BEGUN - 3600)
    for _ in range(30):
        engine.send(Request(BEGUN + draw.uniform(5, 25), round(draw.gauss(800, 100)), round(draw.gauss(answer, 500))))
    for _ in range(short):
        engine.send(Request(BEGUN + draw.uniform(0, 120), 60, draw.randint(60, 180)))
    return engine


@sampled("every", [2, 5, 15])
@pytest.mark.parametrize("short", [0, 200])
def test_a_kv_cache_that_is_about_to_be_full_is_foretold_before_any_long_request_has_ended(
    tmp_path: Path, every: float, short: int
) -> None:
    pages = list(scrapes(filling(20_000, 6000, short), 120, every))
    usage = [float(line.split()[-1]) for *_, text in pages for line in text.splitlines() if line.startswith(USAGE)]
    full = next(at for at, share in enumerate(usage) if share > 0.95)
    found = judged(tmp_path, iter(pages[: full + (every < 15)]), "kv_cache_filling")
    assert (found.state, found.ongoing) == ("present", True)


def test_nothing_is_foretold_of_a_page_that_is_gone(tmp_path: Path) -> None:
    """A straight line through its last samples would reach 100 % a minute later, whatever became of the requests."""
    pages = list(scrapes(filling(20_000, 9000), 70, 5))
    gone = ((BEGUN + at, pages[0][1], "diag_vllm_up 0\n") for at in range(75, 135, 5))
    found = judged(tmp_path, chain(pages, gone), "kv_cache_filling")
    assert found.state == "unknown"
