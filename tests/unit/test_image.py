"""The recipe of the image: pinned, not root, and locked to versions that diag takes."""

import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from support.helm import CHART
from support.paths import ROOT

RECIPE = (ROOT / "deploy" / "Containerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def locked(name: str) -> dict[str, str]:
    """The version of each package; one without a hash is missing."""
    lines = re.findall(
        r"^(\S+)==(\S+)(?: ;.*)? \\\n    --hash=sha256:", (ROOT / "deploy" / name).read_text(), re.MULTILINE
    )
    return dict(lines)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "requirements.txt",
            [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["web"]],
        ),
        ("build-requirements.txt", PROJECT["build-system"]["requires"]),
    ],
    ids=["runtime", "build"],
)
def test_the_locked_versions_are_those_that_diag_takes(name: str, wanted: list[str]) -> None:
    versions = locked(name)
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(versions[requirement.name]), requirement


def test_the_base_is_pinned_and_every_file_that_is_copied_exists() -> None:
    assert re.findall(r"^ARG BASE=\S+@sha256:[0-9a-f]{64}$", RECIPE, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", RECIPE, re.MULTILINE)) == {"${BASE}"}
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?!--from)(.*)$", RECIPE, re.MULTILINE)]
    assert [name for names in copied for name in names if not (ROOT / name).exists()] == []


def test_image_user_is_the_user_of_the_chart() -> None:
    context = yaml.safe_load((CHART / "values.yaml").read_text())["containerSecurityContext"]
    assert re.findall(r"^USER (.*)$", RECIPE, re.MULTILINE) == [f"{context['runAsUser']}:{context['runAsGroup']}"]
