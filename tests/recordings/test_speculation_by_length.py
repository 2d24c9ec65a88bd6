"""Draft acceptance beside context length: a collapse is found where both lengths were seen, and nothing like it is."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from support import rewriting
from support.rewriting import Scrape
from support.sampling import sampled
from support.speculation import BEGUN, HALF, LONG, SHORT, scrapes

from diag.commands import doctor
from diag.commands.observe import ObserveOptions

LOST, LOW = "speculation_lost_at_length", "speculation_ineffective"
SHORTER_DRAFT = 8192.0


def states(folder: Path, pages: Iterable[Scrape]) -> dict[str, str]:
    report = doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", pages))]))
    found = {each.diagnosis.incident.id: each.diagnosis.state for each in report.findings}
    return {name: found[name] for name in (LOST, LOW)}


@sampled("every", [2, 10, 30])
def test_a_collapse_with_context_is_found_at_every_cadence(tmp_path: Path, every: float) -> None:
    """Today's other incident stays silent: over the whole hour, 38 % are accepted."""
    assert states(tmp_path, scrapes(every, SHORTER_DRAFT)) == {LOST: "present", LOW: "absent"}


@sampled("every", [5, 15])
def test_a_collapse_is_dated_by_the_scrape_that_shows_less_than_was_accepted_before(
    tmp_path: Path, every: float
) -> None:
    """The periods of two minutes that are compared end up to two minutes later."""
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", scrapes(every, SHORTER_DRAFT)))]))
    (since,) = (each.diagnosis.since for each in report.present if each.diagnosis.incident.id == LOST)
    assert abs((since or 0) - BEGUN - HALF) <= 30


def test_a_collapse_is_told_by_what_is_left_of_the_servers_own_acceptance(tmp_path: Path) -> None:
    """No token is accepted at length, of 43 % before: a shorter draft is no advice there."""
    pages = scrapes(15, SHORTER_DRAFT, drafted=7, accepted=0.43)
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))]))
    present = {each.diagnosis.incident.id: each for each in report.present}
    assert present[LOST].proposals
    assert LOW not in present or (present[LOW].diagnosis.explained_by, present[LOW].proposals) == (LOST, ())


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        (scrapes(15), "absent"),
        (scrapes(15, drafted=0), "absent"),
        (scrapes(15, SHORTER_DRAFT, (LONG, LONG)), "unknown"),
        (scrapes(15, SHORTER_DRAFT, (SHORT, SHORT)), "unknown"),
    ],
    ids=["accepted at any length", "no speculation", "long contexts only", "short contexts only"],
)
def test_drafts_without_a_collapse_are_no_such_incident(tmp_path: Path, pages: Iterable[Scrape], expected: str) -> None:
    assert states(tmp_path, pages)[LOST] == expected
