"""Prometheus' own PromQL test scripts; they are not part of this repository."""

import os
from pathlib import Path

import pytest
from support.paths import DATA, ROOT
from support.promqltest import NATIVE, outcomes, refused

FOLDER = Path(os.environ.get("DIAG_PROMQLTEST", ROOT.parent / "shared" / "promqltest"))

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"Prometheus' test scripts are not at {FOLDER} (DIAG_PROMQLTEST)"
)


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    return outcomes(FOLDER)


def test_no_promqltest_case_has_a_different_result(results: dict[str, str]) -> None:
    assert {place: result for place, result in results.items() if result.startswith("differs")} == {}


def test_most_cases_without_native_histograms_agree(results: dict[str, str]) -> None:
    assert sum(result == "agrees" for result in results.values()) >= 641


def test_only_the_listed_cases_are_refused(results: dict[str, str]) -> None:
    assert refused(results) == (DATA / "promqltest_unsupported.txt").read_text().splitlines()


def test_number_of_cases_skipped_for_native_histograms_is_bounded(results: dict[str, str]) -> None:
    assert sum(result == NATIVE for result in results.values()) <= 300
