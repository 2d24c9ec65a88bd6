"""The flag data and the spelling rules of lint, against the real parsers of 26 releases (tests/data/parsers.json)."""

import ast
import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from support.paths import TESTS

from diag.lint.rule import LintTarget
from diag.lint.rules import lint
from diag.vllm.command.parse import read
from diag.vllm.flags.registry import UNSET, WORD_DEFAULTS, Flag, default, is_described, known, release

DATA = json.loads((TESTS / "data" / "parsers.json").read_text(encoding="utf-8"))
RELEASES: list[str] = DATA["releases"]
Form = dict[str, Any]
OF_SERVE = {("--config", "0.8.5"), ("--grpc", "0.18.1"), ("--grpc", "0.19.1")}
"""`vllm serve` adds these to the parser that was asked."""
AT_START = {"--disable-custom-all-reduce", "--enable-chunked-prefill"}
"""Their default is decided after the parser, by the hardware and the model."""
VALUES = {"integer": "1", "size": "1", "number": "0.5", "json": "{}", "object": "{}", "text": "x"}
SPELLING = {
    *("unknown_flag", "ambiguous_flag", "removed_flag", "flag_of_a_later_release", "taken_for_another"),
    *("value_missing", "value_of_wrong_type", "switch_with_a_value", "word_too_many", "not_a_choice"),
    *("no_such_negation", "given_twice"),
}


def forms(version: str) -> dict[str, Form]:
    """Every flag that the parser of a release accepts, with its form there."""
    at = release(version)
    found = {
        name: next((form for first, last, form in runs if release(first) <= at <= release(last)), None)
        for name, runs in DATA["flags"].items()
    }
    return {name: form for name, form in found.items() if form is not None}


def ours(flag: Flag) -> Form:
    held = {name: getattr(flag, name) for name in ("takes", "no", "short", "value", "null", "choices", "alias")}
    written = {name: list(value) if isinstance(value, tuple) else value for name, value in held.items()}
    usual = {"takes": "one", "value": "text"}
    return {name: value for name, value in written.items() if value and usual.get(name) != value}


def refused(words: list[str], version: str) -> Iterator[str]:
    """Return lint's errors for these words."""
    command = " ".join(map(shlex.quote, ["vllm", "serve", "m", *words]))
    for finding in lint(LintTarget(read(command, version=version), version)):
        if finding.rule in SPELLING and finding.severity == "error":
            yield finding.message


@pytest.mark.parametrize("version", RELEASES)
def test_every_flag_has_the_form_that_the_release_gives_it(version: str) -> None:
    real = {
        name: {key: value for key, value in form.items() if key != "default"} for name, form in forms(version).items()
    }
    accepted = {name: flag for name, flag in known().items() if flag.in_release(version)}
    assert is_described(version)
    assert {(name, version) for name in accepted.keys() ^ real.keys()} <= OF_SERVE
    assert {name: ours(accepted[name].at(version)) for name in real} == real


@pytest.mark.parametrize("version", RELEASES)
def test_every_default_is_the_releases_own(version: str) -> None:
    for name, form in forms(version).items():
        mine = WORD_DEFAULTS.get(name) or (default(name, version) if name not in AT_START else None)
        if mine is not None:
            assert mine == ast.literal_eval(form["default"]), name
        elif name in UNSET:
            assert form["default"] == "None", name


def accepted_words(version: str) -> Iterator[list[str]]:
    """Each flag with a value that its parser takes, each switch, each --no- form and each short name."""
    for name, form in forms(version).items():
        takes = form.get("takes", "one")
        choice = next((choice for choice in form.get("choices", ()) if choice != "None"), "")
        value = [] if takes == "none" else [choice or VALUES[form.get("value", "text")]]
        for spelled in (name, *form.get("short", ())):
            if spelled not in ("-O", "--config"):  # --config needs a file
                yield [spelled, *value * (2 if takes == "many" else 1)]
        if form.get("no"):
            yield [f"--no-{name[2:]}"]


@pytest.mark.slow
@pytest.mark.parametrize("version", RELEASES)
def test_lint_refuses_nothing_that_the_parser_accepts(version: str) -> None:
    words = [word for words in accepted_words(version) for word in words]
    assert list(refused(words, version)) == []


def refused_words(version: str) -> Iterator[tuple[str, list[str]]]:
    """Yield words that the parser refuses: other releases' flags, forms and values, surplus words."""
    here = forms(version)
    for name in DATA["flags"]:
        form = here.get(name)
        if form is None:
            is_beginning = any(other.startswith(name) for other in here)
            if not is_beginning and (name, version) not in OF_SERVE:
                yield name, [name]
            continue
        takes = form.get("takes", "one")
        if takes == "none" and not form.get("no"):
            yield f"--no-{name[2:]}", [f"--no-{name[2:]}"]
        if takes in ("one", "many"):
            yield name, [name]
        if form.get("choices") and form.get("value", "text") == "text":
            yield name, [name, "never-heard-of"]
        if form.get("value") in ("integer", "number", "json") and name != "--limit-mm-per-prompt":
            yield name, [name, "many"]
    for short in {short for runs in DATA["flags"].values() for *_, form in runs for short in form.get("short", ())}:
        if not any(short in form.get("short", ()) for form in here.values()) and short != "-O":
            yield short, [short, "1"]


@pytest.mark.slow
@pytest.mark.parametrize("version", RELEASES)
def test_lint_is_silent_on_nothing_that_the_parser_refuses(version: str) -> None:
    cases = list(refused_words(version))
    told = list(refused([word for _, words in cases for word in words], version))
    assert [spelled for spelled, _ in cases if not any(spelled in message for message in told)] == []
