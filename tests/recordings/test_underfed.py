"""An engine is called idle between requests where it is, and not where it hung, hangs, or answers in a single step."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support import rewriting
from support.rewriting import Scrape
from support.scenarios import Beside, text
from support.simulated_vllm import Engine, Limits, Request, page

from diag.commands import doctor
from diag.commands.observe import ObserveOptions

BEGUN = 1_795_000_000.0


def scrapes(
    rate: float, answer: int, stall: tuple[float, float] = (0, 0), beside: Iterable[Beside] = ()
) -> Iterator[Scrape]:
    """Scrape an engine every 2 s, which makes no step between these seconds."""
    draw = random.Random(9)
    engine = Engine(Limits(step=0.03), BEGUN - 3600)
    engine.now = at = BEGUN
    while (at := at + draw.expovariate(rate)) < BEGUN + 120:
        engine.send(Request(at, round(draw.gauss(300, 50)), answer))
    begin, end = stall
    for time in range(2, 120, 2):
        if begin and begin <= time < end:
            engine.run(BEGUN + begin)
            shown = page([engine])
        else:
            engine.now = max(engine.now, BEGUN + end)
            engine.run(BEGUN + time)
            shown = page([engine])
        yield BEGUN + time, "vllm-0:8000", shown + (text(time, shown, beside) if beside else "")


def is_underfed(folder: Path, pages: Iterable[Scrape]) -> bool:
    report = doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", pages))]))
    return "engine_underfed" in {each.diagnosis.incident.id for each in report.present}


def test_an_engine_with_little_to_do_is_underfed(tmp_path: Path) -> None:
    assert is_underfed(tmp_path, scrapes(0.4, 20))


def test_an_engine_that_hung_meanwhile_is_not(tmp_path: Path) -> None:
    assert not is_underfed(tmp_path, scrapes(0.4, 20, (60, 85)))


def test_an_engine_whose_probe_fails_is_not(tmp_path: Path) -> None:
    probe: Beside = lambda t: [("diag_probe_success", (), float(t < 80))]  # noqa: E731
    assert not is_underfed(tmp_path, scrapes(0.4, 20, beside=[probe]))


@pytest.mark.parametrize("rate", [30.0])
def test_an_engine_that_answers_in_one_step_is_not(tmp_path: Path, rate: float) -> None:
    """No request runs after any step, and yet the engine is at work for most of the time."""
    assert not is_underfed(tmp_path, scrapes(rate, 1))
