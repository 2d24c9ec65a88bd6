"""What a user reads is written in the field's terms: tests/data/forbidden_phrases.txt lists what is not."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import GOLDENS, ROOT, TESTS

PHRASES = [
    tuple(line.split("  ", 1))
    for line in (TESTS / "data" / "forbidden_phrases.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
FORBIDDEN = re.compile("|".join(f"(?:{phrase})" for phrase, _ in PHRASES), re.IGNORECASE)
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "runbooks/*.md", "alerts/*.*", "deploy/**/*.*"]
READ_BY_USERS = [file for pattern in PAGES for file in sorted(ROOT.glob(pattern)) if file.is_file()]
TITLES = {"title", "description", "content", "displayName", "legendFormat", "label"}
"""The keys of a dashboard under which people read something."""


def found(text: str) -> list[str]:
    """The forbidden phrases of a text, each with what stands around it; lines are filled, links have no address."""
    filled = re.sub(r"\]\([^)]*\)", "]", " ".join(text.split()))
    return [filled[max(0, match.start() - 40) : match.end() + 30] for match in FORBIDDEN.finditer(filled)]


def titles(node: object) -> Iterator[str]:
    """Every text of a dashboard that people read."""
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key in TITLES and isinstance(value, str))
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from titles(inner)


def literals(file: Path) -> Iterator[str]:
    """The texts that a module may print: its strings without docstrings, an f-string as a whole."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    silent |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in silent:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_phrase_says_what_to_write_instead() -> None:
    assert [phrase for phrase in PHRASES if len(phrase) != 2] == []


@pytest.mark.parametrize(
    "sentence",
    [
        "KV-cache evictions feed on themselves",
        "1 of the scrapes were answered",
        "Users do not get what they were promised",
        "Reckon a server's GPU memory, also before there is one",
        "who waits, waits at the gateway",
        "0 of the prompt tokens that were looked up were found in the cache",
    ],
)
def test_a_sentence_that_has_to_be_read_twice_is_found(sentence: str) -> None:
    assert found(sentence)


@pytest.mark.parametrize("file", READ_BY_USERS, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_page_is_written_in_the_fields_terms(file: Path) -> None:
    assert found(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("file", sorted((ROOT / "dashboards").glob("*.json")), ids=lambda file: file.stem)
def test_a_dashboard_is_written_in_the_fields_terms(file: Path) -> None:
    texts = [*titles(json.loads(file.read_text(encoding="utf-8")))]
    assert texts and found("\n".join(texts)) == []


@pytest.mark.parametrize("file", sorted(filter(Path.is_file, GOLDENS.rglob("*"))), ids=lambda file: file.name)
def test_an_output_is_written_in_the_fields_terms(file: Path) -> None:
    assert found(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("file", sorted((ROOT / "diag").rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_module_prints_the_fields_terms(file: Path) -> None:
    assert [phrase for text in literals(file) for phrase in found(text)] == []
