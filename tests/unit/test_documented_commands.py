"""Every command line that a page, a runbook or a help text shows is one that diag accepts."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from support.cli import diag
from support.paths import ROOT
from support.rows import each_row
from typer.exceptions import TyperException
from typer.main import get_command

from diag.cli.app import app
from diag.cli.options import missing_argument, notes
from diag.core.contract import read
from diag.knowledge.catalog import load

PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "deploy/**/*.md", "alerts/*.md", "runbooks/*.md")
TYPED = re.compile(r"^ *(?:\$ )?(?:\.venv/bin/)?diag ((?:.*\\\n)*.*)$", re.MULTILINE)
INLINE = re.compile(r"`diag ([a-z]+ [^`]*)`")
FENCE = re.compile(r"^```(\w*).*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
COMMANDS = get_command(app).commands


def texts() -> Iterator[str]:
    for path in chain.from_iterable(ROOT.glob(pattern) for pattern in PAGES):
        yield path.read_text(encoding="utf-8")


def typed() -> Iterator[str]:
    """Yield the commands in console blocks and in the examples of help texts."""
    for text in texts():
        for language, block in FENCE.findall(text):
            if language in ("console", "bash"):
                yield from TYPED.findall(block)
        for block in INDENTED.findall(text):
            yield from TYPED.findall(block)
    for each in notes().values():
        yield from TYPED.findall(each.text())


def accept(words: list[str]) -> None:
    """Parse them as `diag` does, without running anything; UsageError where it would refuse them."""
    COMMANDS[words[0]].make_context(words[0], words[1:])


@each_row("line", sorted(set(typed())))
def test_documented_command_is_accepted(line: str) -> None:
    accept(shlex.split(line.removesuffix("&"), comments=True))


def test_every_command_has_notes() -> None:
    assert notes().keys() == COMMANDS.keys()


def test_options_in_documentation_text_exist() -> None:
    """A sentence may leave out the server, or the value of an option."""
    for line in {found for text in texts() for found in INLINE.findall(text)}:
        words = shlex.split(line)
        known = {option for parameter in COMMANDS[words[0]].params for option in parameter.opts} | {"--help"}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, line


def outputs() -> Iterator[tuple[str, list[str]]]:
    """Yield each command of the tutorial that has its output below it, with the lines of that output."""
    for _, block in FENCE.findall((ROOT / "docs/sick-server.md").read_text(encoding="utf-8")):
        command, *lines = block.splitlines()
        if lines and not lines[0].startswith("$ "):
            yield command.removeprefix("$ diag "), lines


@pytest.mark.slow
@pytest.mark.parametrize(("command", "lines"), list(outputs()))
def test_the_output_in_the_tutorial_is_real(command: str, lines: list[str]) -> None:
    printed = iter(diag(*shlex.split(command)).stdout.splitlines())
    missing = [line for line in lines if line != "..." and line not in printed]
    assert len(lines) > 2
    assert not missing, "not printed, or not in this order"


def test_the_configuration_of_an_mcp_client_starts_the_tools() -> None:
    (block,) = (block for language, block in FENCE.findall((ROOT / "docs/mcp.md").read_text()) if language == "json")
    accept(json.loads(block)["mcpServers"]["diag"]["args"])


def test_documented_diag_toml_is_valid(tmp_path: Path) -> None:
    for text in texts():
        for language, block in FENCE.findall(text):
            if language == "toml":
                (tmp_path / "diag.toml").write_text(block)
                read(tmp_path / "diag.toml")


def test_every_incident_has_a_place_in_what_one_sees() -> None:
    symptoms = tomllib.loads((ROOT / "docs" / "symptoms.toml").read_text(encoding="utf-8"))["symptom"]
    assert {name for each in symptoms for name in each["incidents"]} == {incident.id for incident in load()}


@pytest.mark.parametrize("command", ["replay", "lint", "record", "verify"])
def test_a_command_without_its_argument_says_what_it_takes_with_two_examples(command: str) -> None:
    with pytest.raises(TyperException) as error:
        accept([command])
    text = missing_argument(error.value, error.value.ctx)  # type: ignore[attr-defined]
    assert text.startswith("diag: Missing argument '")
    assert text.count(f"\n  diag {command} ") == 2
