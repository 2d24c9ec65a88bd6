"""The README says what the program prints and takes no more than one screen."""

from pathlib import Path

from support.paths import GOLDENS, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def test_readme_output_is_real() -> None:
    shown = [line[4:] for line in README if line.startswith("    ") and not line.startswith("    $ ")]
    printed = (GOLDENS / "doctor" / "kv_cascade.txt").read_text(encoding="utf-8").splitlines()
    assert [
        line for line in shown if line.rstrip(". ") and not any(p.startswith(line.rstrip(". ")) for p in printed)
    ] == []
    assert len(shown) > 5


def test_readme_has_two_setup_commands_and_one_for_live_use() -> None:
    commands = [line for line in README if line.startswith("    $ ")]
    assert len(commands) == 3
    assert "tests/recordings/kv_cascade" in commands[0]
    assert commands[1].endswith(".ci/tests")
    assert "http://" in commands[2]


def test_readme_links_have_targets() -> None:
    links = [part.partition(")")[0] for line in README for part in line.split("](")[1:]]
    assert [link for link in links if not link.startswith("http") and not Path(ROOT, link).exists()] == []


def test_readme_fits_on_one_screen() -> None:
    """50 lines of at most 120 characters."""
    assert len(README) <= 50
    assert [line for line in README if len(line) > 120] == []
