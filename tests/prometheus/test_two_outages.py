"""Two outages with health between them, in a real Prometheus: each report tells of two."""

from collections.abc import Iterator

import numpy as np
import pytest
from support.prometheus_server import EACH, program, serving
from support.timelines import TIMES, Series, blocks, timeline

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report
from diag.report import html, markdown
from diag.report import json as as_json
from diag.sources.prometheus.scope import Scope, TimeSpan

pytestmark = pytest.mark.prometheus
START = 1_700_000_000.0
OUTAGES = ((300, 480), (900, 1140))
"""Seconds in which nothing answered."""


def twice_dead() -> Series:
    """A healthy server that is killed twice."""
    dead = np.any([(begin < TIMES) & (end >= TIMES) for begin, end in OUTAGES], axis=0)
    series = timeline("healthy")
    return {
        key: np.where(dead, 0.0 if dict(key)["__name__"] == "up" else np.nan, values) for key, values in series.items()
    }


@pytest.fixture(scope="module", params=EACH)
def report(request: pytest.FixtureRequest) -> Iterator[Report]:
    span = TimeSpan(since=f"{START + 30}", until=f"{START + TIMES[-1]}")
    with serving(program(request.param), blocks(twice_dead(), START)) as server:
        yield doctor.run(ObserveOptions([], prometheus=server.url, scope=Scope(span)))


def test_diagnosis_lists_both_outages_as_episodes(report: Report) -> None:
    (dead,) = (each for each in as_json.DOCTOR.of(report)["diagnoses"] if each["state"] == "present")
    assert dead["incident"] == "engine_dead"
    assert (dead["since"], dead["until"], dead["ongoing"]) == (
        dead["episodes"][0]["since"],
        dead["episodes"][-1]["until"],
        False,
    )
    for episode, (begin, end) in zip(dead["episodes"], OUTAGES, strict=True):
        assert 0 < episode["since"] - START - begin <= 75, "it is dead once a minute of scrapes has failed"
        assert abs(episode["until"] - START - end) <= 15


def test_each_outage_is_a_row_of_the_timeline(report: Report) -> None:
    page = html.render(report)
    assert page.count("ended") >= 1
    assert page.split("<h2>Timeline</h2>")[1].split("</table>")[0].count("<tr>") == 1 + len(OUTAGES)
    assert "2 times since" in page
    assert "2 times since" in markdown.render(report)
