"""diag.promql and a real Prometheus give the same answers."""

from collections.abc import Iterator

import pytest
from support.prometheus_server import PLACES, Server, assert_same, program, serving
from support.promql_cases import (
    AT_THE_END,
    EXPRESSIONS,
    NEAR_A_BIRTH,
    SETTLED,
    blocks,
)

from diag.promql import Samples

# Samples lie 1 ms past a multiple of 10 ms and these instants 7 ms: with ranges, offsets and steps of whole 10 ms no
# window begins or ends at a sample. Prometheus 2 extrapolates to the birth of a counter otherwise and is spared those.


ONLY_IN_3 = [
    "waiting atan2 running",
    "3 atan2 waiting",
    'absent(nothing{a!="1", a="2"})',
    'absent(nothing{a=~"1.+", a="2"})',
    "-typed",
    "typed + 1",
    "rate(typed[2m])",
    "typed > bool 0.5",
    "sum without (instance) (typed)",
    "typed * on (instance) group_left () up",
]


@pytest.fixture(scope="module")
def samples() -> Samples:
    return Samples(blocks())


@pytest.fixture(scope="module", params=PLACES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving(program(request.param), blocks()) as running:
        yield running


@pytest.fixture(scope="module")
def server3() -> Iterator[Server]:
    with serving(program("DIAG_PROMETHEUS3"), blocks()) as running:
        assert running.version >= (3, 0)
        yield running


@pytest.mark.prometheus
def test_agrees_with_a_real_prometheus(samples: Samples, server: Server) -> None:
    instants = SETTLED + AT_THE_END
    if server.version >= (3, 0):
        assert_same(samples, ONLY_IN_3, instants, server)
        instants = sorted(NEAR_A_BIRTH + instants)
    assert_same(samples, EXPRESSIONS, instants, server)


@pytest.mark.prometheus
@pytest.mark.parametrize(
    "expression", ["rate(up[30s])", "count_over_time(kv_usage[1m])", "waiting", "sum_over_time(up[1m:10s])"]
)
def test_agrees_with_prometheus_3_where_a_window_begins_at_a_sample(
    samples: Samples, server3: Server, expression: str
) -> None:
    times = blocks()[0].times
    edges = [int(times[100]), int(times[100]) + 30_000, int(times[100]) + 60_000, int(times[-1]) + 300_000]
    assert_same(samples, [expression], edges, server3)
