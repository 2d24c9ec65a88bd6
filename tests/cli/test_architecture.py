"""docs/architecture.md names the files of one scrape and of one log line in the order in which they run."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from support import rewriting
from support.bad_servers import Reply, on_metrics, serving
from support.cli import diag
from support.paths import RECORDINGS, ROOT

PACKAGE = str(ROOT / "diag") + "/"
ELSEWHERE = {"diagnosis/fleet.py", "diagnosis/proposals.py"}
"""Files that the page names for a Prometheus, and for a server with an incident."""


def steps(heading: str) -> list[set[str]]:
    """Return the files that each step of a section names."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    files = [
        set(re.findall(r"`([a-z_/]+\.py)`", step)) for step in re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    ]
    assert all((ROOT / "diag" / file).is_file() for step in files for file in step)
    return [step - ELSEWHERE for step in files]


@contextmanager
def first_calls() -> Iterator[dict[str, int]]:
    """Yield the files of diag in the order in which one of their functions was first called."""
    order: dict[str, int] = {}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        works = not frame.f_code.co_name.startswith(("<", "__"))  # objects may be built in any order
        if event == "call" and name.startswith(PACKAGE) and works:
            order.setdefault(name.removeprefix(PACKAGE), len(order))

    before = sys.getprofile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield order
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("heading", ["The way of one scrape", "The way of one log line"])
def test_files_run_in_the_order_of_the_documented_walk(heading: str) -> None:
    page = next(iter(rewriting.scrapes("kv_cascade")))[2]
    with serving(on_metrics(Reply(page.encode()))) as server:
        words = ["doctor", server.url, "--for", "0.5", "--every", "0.25"]
        if heading == "The way of one log line":
            words = ["doctor", str(RECORDINGS / "engine_dead")]
        diag(*words)  # imports apart
        with first_calls() as order:
            diag(*words)
    walk = steps(heading)
    assert [step - order.keys() for step in walk] == [set()] * len(walk)
    reached = [max((order[file], file) for file in step) for step in walk]
    assert reached == sorted(reached)
