"""Real launches in every notation (tests/data/launches): each is read to the flags that a person reads in it."""

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from support.live import server
from support.paths import TESTS

from diag.core.errors import BadUsage
from diag.lint.rule import LintTarget, is_open
from diag.lint.rules import lint
from diag.vllm.command.command import Command, Given
from diag.vllm.command.parse import parse, read
from diag.vllm.flags.installed_parser import check
from diag.vllm.flags.registry import described

NOT_A_FLAG = {"unknown_flag", "removed_flag", "flag_of_a_later_release", "ambiguous_flag"}
"""Rules for flags that the parser of a release does not have."""
NO_FLAG = re.compile(r"unrecognized arguments|ambiguous option")


class Launch(NamedTuple):
    """An entry of the corpus; `version` is the release that the launch was written for."""

    name: str
    source: str
    text: str
    file: str = "launch.sh"
    writing: str = ""
    version: str = ""
    model: str = ""
    image: str = ""
    more: int = 0
    flags: tuple[str, ...] = ()
    not_shown: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    environment: dict[str, str] | None = None
    refused: str = ""


def corpus() -> list[Launch]:
    files = sorted((TESTS / "data" / "launches").glob("*.yaml"))
    entries: list[dict[str, Any]] = [entry for file in files for entry in yaml.safe_load(file.read_text())]
    return [Launch(**entry) for entry in entries]


CORPUS = corpus()
EACH = pytest.mark.parametrize("launch", CORPUS, ids=[launch.name for launch in CORPUS])
READ = [launch for launch in CORPUS if not launch.refused]


def written(given: Given) -> str:
    """Write an option with the whole name of its flag."""
    option = given.option
    name = given.name
    if option:
        name = f"{name}.{option.key}" if option.key else name if option.on else f"--no-{name[2:]}"
    return " ".join([name, *given.values])


def launched(launch: Launch, folder: Path) -> Command:
    file = folder / launch.file
    file.write_text(launch.text)
    return read(str(file), folder, launch.version)


@EACH
def test_a_real_launch_is_read_to_its_flags_or_refused(launch: Launch, tmp_path: Path) -> None:
    if launch.refused:
        with pytest.raises(BadUsage, match=r"\A[^\n]*\Z") as error:
            launched(launch, tmp_path)
        assert launch.refused in str(error.value)
        return
    command = launched(launch, tmp_path)
    open_words = [command.words[at] for at in command.strays if is_open(command.words[at])]
    options = [option for option in command.given if option.name != "--config"]
    given = [option for option in options if option.name not in launch.not_shown]
    assert sorted(map(written, given)) == sorted(launch.flags)
    assert {*launch.not_shown} == {*(option.name for option in options if option not in given), *open_words}
    assert command.strays == () or open_words or launch.writing == ""
    assert (command.model, command.writing, command.more) == (launch.model, launch.writing, launch.more)
    assert command.image == launch.image or not launch.image
    assert [option.spelled for option in command.given if not option.option] == list(launch.unknown)
    assert {*(launch.environment or {}).items()} <= {*command.environment.items()}


@pytest.mark.parametrize("launch", READ, ids=[launch.name for launch in READ])
def test_a_pasted_launch_is_read_like_its_file(launch: Launch, tmp_path: Path) -> None:
    if launch.file not in ("config.yaml", "qwen3_8b.yaml"):  # keys of a --config file alone are no launch
        assert parse(launch.text, launch.version).given == launched(launch, tmp_path).given


@pytest.mark.live
@server.needed
def test_the_real_parser_has_each_flag_that_lint_takes_for_one(tmp_path: Path) -> None:
    """The parser has no flag exactly where lint calls one unknown or removed, and refuses no more than lint does."""
    version, cases = described(), dict[str, list[str]]()
    for launch in READ:
        for given in launched(launch._replace(version=version), tmp_path).given:
            if given.name != "--config" and not any(map(is_open, given.values)):
                words = [given.spelled, *given.values]
                cases[shlex.join(words)] = words
    told, refusals = check(server.PYTHON, [["m", *words] for words in cases.values()])
    assert told.startswith(version)
    errors = {case: error for case, error in zip(cases, refusals, strict=True) if error}
    found = {case: lint(LintTarget(parse(f"vllm serve m {case}", version), version)) for case in cases}
    no_flag = {case for case, error in errors.items() if NO_FLAG.search(error)}
    assert no_flag == {case for case, findings in found.items() if NOT_A_FLAG & {each.rule for each in findings}}
    assert {case for case in errors if all(finding.severity != "error" for finding in found[case])} == set()
    assert len(cases) > 100
