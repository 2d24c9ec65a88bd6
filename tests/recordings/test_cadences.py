"""Every recording as somebody would have seen it who scrapes more rarely, from its first scrape on or a bit later."""

import re
from functools import lru_cache

import pytest
from support.paths import ALL_RECORDINGS, RECORDINGS
from support.sampling import sampled, some
from support.thinning import CADENCES, offsets, thinned, truth

from diag.commands.observe import judge_observation, site
from diag.diagnosis.report import Report
from diag.sources.observation import Observation
from diag.sources.recording.reader import read

ONE, FEW, ALL = 1, 2, 15
"""How many offsets of a cadence are tried: of every recording, where nothing may be found or something must be, and
where a cascade must be found at each of them."""


@lru_cache(maxsize=1)
def recording(name: str) -> Observation:
    return read(RECORDINGS / name)


def judged(name: str, every: float, most: int) -> list[Report]:
    """A report for each offset, of which a change is tested with one."""
    seen, known = recording(name), site(None, None)
    begun = some(offsets(seen, every, most), 1, (name, every))
    return [judge_observation(thinned(seen, every, offset), *known).report for offset in begun]


def present(report: Report) -> set[str]:
    return {finding.diagnosis.incident.id for finding in report.present}


@pytest.mark.parametrize("name", some(sorted(path.name for path in ALL_RECORDINGS), 12))
def test_no_scrape_interval_reports_an_incident_that_did_not_happen(name: str) -> None:
    actual = truth(RECORDINGS / name)
    slower = some((every for every in CADENCES if every > recording(name).interval * 1.5), 2, name)
    most = FEW if actual["verdict"] == "healthy" else ONE
    reports = [(every, report) for every in slower for report in judged(name, every, most)]
    assert [(every, claimed) for every, report in reports if (claimed := present(report) & set(actual["absent"]))] == []
    if actual["verdict"] == "healthy":
        assert {report.verdict for _, report in reports} <= {"healthy", "unknown"}
    if actual["verdict"] == "ill":
        assert "healthy" not in {report.verdict for every, report in reports if every <= 5}


def test_three_scrapes_are_not_enough_for_healthy() -> None:
    """Gauges need three scrapes, so with one missed scrape nothing would be known of them."""
    report = judge_observation(thinned(recording("healthy"), 30, 1), *site(None, None)).report
    assert report.verdict == "unknown"
    why = report.not_judged[0].sentence
    assert re.fullmatch(r"too little seen: .* do not rule out \d+ incidents; observe for 90 s", why)


@sampled("every", [2, 5, 10, 15], 2)
@pytest.mark.parametrize("name", ["kv_cascade", "kv_cascade_base", "cure_watermark"])
def test_a_cascade_is_found_whenever_the_scrapes_begin(name: str, every: float) -> None:
    assert all("kv_eviction_cascade" in present(report) for report in judged(name, every, ALL))


@sampled("every", [5, 15, 30])
@pytest.mark.parametrize(
    ("name", "incident"),
    [
        ("contention_bigbatch", "prefill_decode_contention"),
        ("contention_long_prefill", "prefill_decode_contention"),
        ("contention_long_steps", "prefill_decode_contention"),
        ("engine_stalled", "engine_stalled"),
    ],
)
def test_long_pauses_are_found_at_every_cadence(name: str, incident: str, every: float) -> None:
    """At 15 s and longer, no two scrapes show a stall of 42 s; the pauses that it leaves do."""
    reports = [report for report in judged(name, every, FEW) if report.observed.scrapes > 3]
    assert all(incident in present(report) for report in reports)
