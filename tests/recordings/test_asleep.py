"""A sleeping engine is said to be asleep, with its level: it is no idle one, and none that hangs."""

from pathlib import Path

import pytest
from support import rewriting

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report
from diag.report import terminal

STATES = {0: (), 1: ("weights_offloaded",), 2: ("discard_all",)}


def asleep(page: str, level: int) -> str:
    """The page of an engine that was put to sleep; its gauges stay as they were."""
    series = 'vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state='
    page = rewriting.with_value(page, f'{series}"awake"', "0.0")
    for state in STATES[level]:
        page = rewriting.with_value(page, f'{series}"{state}"', "1.0")
    return page


def look(folder: Path, recording: str, level: int, seconds: tuple[float, float] = (0, 1e9)) -> Report:
    """A stretch of a recording, as if the engine had slept."""
    pages = list(rewriting.scrapes(recording))
    begin, end = (pages[0][0] + each for each in seconds)
    stretch = [scrape for scrape in pages if begin <= scrape[0] <= end]
    folder = rewriting.write(folder, rewriting.changed(stretch, lambda page: asleep(page, level)))
    return doctor.run(ObserveOptions([str(folder)]))


@pytest.mark.parametrize(("level", "lacks"), [(0, "in place"), (1, "weights in host memory"), (2, "discarded")])
def test_a_sleeping_engine_is_not_called_idle(tmp_path: Path, level: int, lacks: str) -> None:
    report = look(tmp_path, "idle", level)
    (progress,) = report.progress
    assert (progress.state, report.verdict) == ("asleep", "healthy")
    assert f"sleep level {level}" in progress.reason
    assert lacks in progress.reason
    assert "1 engine asleep" in terminal.render(report)


def test_an_engine_that_was_put_to_sleep_at_work_is_not_called_stalled(tmp_path: Path) -> None:
    """Its gauges stay at what they were: five requests that run."""
    frozen = (24, 60)
    report = look(tmp_path, "engine_stalled", 1, frozen)
    assert [progress.state for progress in report.progress] == ["asleep"]
    assert "engine_stalled" not in {finding.diagnosis.incident.id for finding in report.present}
