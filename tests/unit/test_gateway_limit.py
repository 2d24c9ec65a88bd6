"""Requests that a gateway limit queues at the gateway, where no page of the server shows them."""

import pytest

from diag.verify.changes import gateway_queue
from diag.verify.load import Lengths, Load


def load(in_flight: float, variance: float, arrivals: float) -> Load:
    return Load(in_flight, variance, arrivals, 200.0, Lengths(), Lengths(), 60.0)


@pytest.mark.parametrize(
    ("before", "arrivals", "sentence"),
    [
        pytest.param(load(28.0, 0.1, 4.0), 2.2, "22 of them wait at the gateway now, 10 s each", id="closed loop"),
        pytest.param(
            load(28.0, 30.0, 4.0), 2.2, "4 requests / s arrived before, 2.2 / s are served at the limit", id="open loop"
        ),
        pytest.param(load(28.0, 30.0, 4.0), 3.9, "", id="open loop, and the limit lets all of them through"),
    ],
)
def test_requests_queued_at_the_gateway_are_estimated(before: Load, arrivals: float, sentence: str) -> None:
    told = list(gateway_queue(6.0, before, load(6.0, 0.1, arrivals)))
    assert len(told) == bool(sentence)
    assert sentence in "".join(told)
