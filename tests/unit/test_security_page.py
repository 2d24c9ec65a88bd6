"""Every guarantee of docs/security.md names a test that there is, and every sentence of them has one."""

import re
import tomllib

import pytest
from support.paths import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
GUARANTEES = PAGE.partition("## What diag guarantees")[2].partition("\n## ")[0].strip().split("\n\n")
TESTS = tomllib.loads((ROOT / "tests" / "data" / "security_sentences.toml").read_text(encoding="utf-8"))


def exists(file: str, function: str) -> bool:
    path = ROOT / file
    return path.exists() and (not function or f"def {function}(" in path.read_text(encoding="utf-8"))


def sentences(guarantee: str) -> list[str]:
    """The sentences without the list of tests, and without the heading if that is a sentence of its own."""
    text = " ".join(guarantee.partition("Tests:")[0].split())
    text = re.sub(r"^\*\*[^*]*\.\*\* ", "", text)
    return re.split(r"(?<=\.) (?=[A-Z`])", text.strip())


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_guarantee_names_the_tests_that_hold_it(guarantee: str) -> None:
    named = re.findall(r"`(tests/[\w/]+(?:\.py)?)(?:::(\w+))?`", guarantee)
    assert named
    for file, function in named:
        assert exists(file, function)


def test_each_sentence_has_its_tests() -> None:
    said = [sentence for guarantee in GUARANTEES for sentence in sentences(guarantee)]
    assert [sentence for sentence in said if not any(map(sentence.startswith, TESTS))] == []
    assert [begin for begin in TESTS if not any(sentence.startswith(begin) for sentence in said)] == []
    named = [test for tests in TESTS.values() for test in tests]
    assert [test for test in named if not exists(*test.partition("::")[::2])] == []
