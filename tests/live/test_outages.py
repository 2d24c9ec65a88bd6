"""The moments that a pager is about, on a real vLLM: what is said of each is what should be said.

All of them, with the alerts in their own time, are measured by bench/pager.py.
"""

import pytest
from support.live import outages, server
from support.live.stage import Outcome

pytestmark = [pytest.mark.live, server.needed]
SOON = ("bad_flag", "server_killed", "engine_stopped")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """Side by side, with alerts in haste: they take three minutes."""
    return list(outages.run(SOON, tmp_path_factory.mktemp("outages"), in_haste=True))


def test_what_is_said_of_each_is_right(outcomes: list[Outcome]) -> None:
    assert len(outcomes) > len(SOON)
    wrong = [(outcome.name, sorted(outcome.wrong), outcome.got) for outcome in outcomes if outcome.wrong]
    assert not wrong
