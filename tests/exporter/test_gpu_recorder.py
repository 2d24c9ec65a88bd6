"""`python -m tests.gpu`: parts without a card run over the scripted driver; an archive is judged elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.slow


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)


def test_a_scripted_card_is_recorded_and_its_archive_is_judged(tmp_path: Path) -> None:
    recorded = run(str(tmp_path / "card"), "--scripted", "--parts", "ab")
    assert recorded.returncode == 0, recorded.stdout
    assert "power: seconds limited by the power cap, per second" in recorded.stdout
    judged = run(str(tmp_path / "card.tar.gz"), "--judge")
    assert judged.returncode == 0
    rows = [line for line in recorded.stdout.splitlines() if line.startswith(("a  ", "b  "))]
    assert rows == [line for line in judged.stdout.splitlines() if line.startswith(("a  ", "b  "))]
    # the table tells a wrong value: the page under load is not that of an idle card
    (tmp_path / "card" / "idle").rename(tmp_path / "card" / "away")
    (tmp_path / "card" / "power").rename(tmp_path / "card" / "idle")
    wrong = run(str(tmp_path / "card"), "--judge")
    assert wrong.returncode == 1
    assert "idle: utilisation" in next(line for line in wrong.stdout.splitlines() if line.endswith("DIFFERS"))
