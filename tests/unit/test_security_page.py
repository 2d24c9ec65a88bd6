"""Every guarantee of docs/security.md names a test that there is."""

import re

import pytest
from support.paths import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
GUARANTEES = PAGE.partition("## What diag guarantees")[2].partition("\n## ")[0].strip().split("\n\n")


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_guarantee_names_the_tests_that_hold_it(guarantee: str) -> None:
    named = re.findall(r"`(tests/[\w/]+(?:\.py)?)(?:::(\w+))?`", guarantee)
    assert named
    for file, function in named:
        assert (ROOT / file).exists()
        assert not function or f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")
