"""A moment that a pager is about, on a real vLLM: what is said of it is what should be said.

All of them, with the alerts in their own time, are measured by bench/pager.py, which takes twenty minutes.
"""

from pathlib import Path

import pytest
from support.live import outages, server

pytestmark = [pytest.mark.live, server.needed]


def test_a_killed_server_is_dead_at_the_first_look_wherever_one_looks_and_pages(tmp_path: Path) -> None:
    (outcome,) = outages.run(("server_killed",), tmp_path, in_haste=True)
    assert outcome.wrong == set(), outcome.got
