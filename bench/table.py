"""Writes a page of results with the commit that they were measured at."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def write(name: str, page: str) -> None:
    """Write bench/NAME; below the page's title stands the commit."""
    title, _, rest = page.partition("\n")
    text = f"{title}\n\nMeasured at {commit()}.\n{rest}"
    (ROOT / "bench" / name).write_text(text, encoding="utf-8")
    print(text, end="")


def write_section(name: str, section: str) -> None:
    """Write the last section of bench/NAME, in which the commit stands below its title."""
    title, _, rest = section.partition("\n")
    text = f"{title}\n\nMeasured at {commit()}.\n{rest}"
    page = ROOT / "bench" / name
    page.write_text(page.read_text(encoding="utf-8").partition(f"{title}\n")[0] + text, encoding="utf-8")
    print(text, end="")


def put_section(name: str, section: str) -> None:
    """Put a section into bench/NAME in place of that of its title, at the end where there is none yet."""
    title, _, rest = section.partition("\n")
    text = f"{title}\n\nMeasured at {commit()}.\n{rest}"
    page = ROOT / "bench" / name
    head, *sections = re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    places = [at for at, other in enumerate(sections) if other.startswith(f"{title}\n")] or [len(sections)]
    sections[places[0] : places[0] + 1] = [text]
    page.write_text("\n\n".join(part.strip() for part in (head, *sections)) + "\n", encoding="utf-8")


def put_intro(name: str, intro: str) -> None:
    """Put another text before the first section of bench/NAME."""
    page = ROOT / "bench" / name
    _, *sections = re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    page.write_text("\n".join((intro, "".join(sections))).rstrip() + "\n", encoding="utf-8")


def kept(name: str, title: str) -> str:
    """The last section of bench/NAME as it is, "" where there is none."""
    _, found, rest = (ROOT / "bench" / name).read_text(encoding="utf-8").partition(f"{title}\n")
    return f"\n{found}{rest}" if found else ""


def commit() -> str:
    """The short hash of what was measured."""
    changed = _git("status", "--porcelain", "--", "diag", "pyproject.toml")
    return _git("rev-parse", "--short", "HEAD") + (", with changes that are not committed" if changed else "")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()
