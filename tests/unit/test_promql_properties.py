"""Properties of the evaluator on arbitrary counters: they are reset, begin late, miss scrapes and have holes."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.promql_cases import AT_THE_END, EXPRESSIONS, NEAR_A_BIRTH, SETTLED, blocks

from diag.core.errors import QueryFailed
from diag.promql import STALE, Block, Evaluator, Samples, Vector, evaluate, is_stale

Points = list[tuple[int, float]]  # ms, value


@st.composite
def counters(draw: st.DrawFn) -> Block:
    """Draw up to four counters of one target: resets, holes, irregular scrapes."""
    gaps = draw(st.lists(st.integers(1, 40_000), min_size=1, max_size=25))
    rows = draw(st.integers(1, 4))
    steps = st.lists(st.integers(0, 1000) | st.just(-1) | st.none(), min_size=len(gaps), max_size=len(gaps))
    values = [_values(draw(steps)) for _ in range(rows)]
    labels = tuple({"__name__": "x", "i": str(row), "g": str(row % 2)} for row in range(rows))
    return Block(labels, np.cumsum(gaps), np.array(values))


def _values(steps: list[int | None]) -> list[float]:
    """Turn increments into a counter; None is a hole, a negative one a reset."""
    value, values = 0.0, []
    for step in steps:
        value = 0.0 if step is not None and step < 0 else value + (step or 0)
        values.append(float(STALE) if step is None else value)
    return values


instants = st.lists(st.integers(0, 600_000), min_size=1, max_size=6, unique=True).map(sorted)
spans = st.integers(1, 300_000)


def points(block: Block, row: int, start: int, end: int) -> Points:
    """Return the samples of a row in (start, end]."""
    there = ~is_stale(block.values[row]) & (start < block.times) & (block.times <= end)
    return list(zip(block.times[there].tolist(), block.values[row][there].tolist(), strict=True))


def extrapolated_increase(samples: Points, start: int, end: int) -> float | None:
    """Prometheus' extrapolatedRate, one sample after the other."""
    if len(samples) < 2:
        return None
    increase = samples[-1][1] - samples[0][1]
    for (_, before), (_, now) in pairwise(samples):
        if now < before:
            increase += before
    to_start, to_end = (samples[0][0] - start) / 1000, (end - samples[-1][0]) / 1000
    sampled = (samples[-1][0] - samples[0][0]) / 1000
    gap = sampled / (len(samples) - 1)
    if to_start >= gap * 1.1:
        to_start = gap / 2
    if increase > 0 and samples[0][1] >= 0:
        to_start = min(to_start, sampled * (samples[0][1] / increase))
    if to_end >= gap * 1.1:
        to_end = gap / 2
    return increase * (sampled + to_start + to_end) / sampled


def cell(vector: Vector, row: str, place: int) -> float | None:
    for labels, values, present in zip(vector.labels, vector.values, vector.present, strict=True):
        if labels["i"] == row:
            return float(values[place]) if present[place] else None
    return None


@given(counters(), instants, spans)
def test_increase_is_that_of_a_plain_loop_over_the_samples(block: Block, at: list[int], span: int) -> None:
    vector = evaluate(f"increase(x[{span}ms])", Samples([block]), np.array(at))
    for row in range(len(block.labels)):
        for place, end in enumerate(at):
            wanted = extrapolated_increase(points(block, row, end - span, end), end - span, end)
            got = cell(vector, str(row), place)
            assert (got is None) == (wanted is None)
            assert got is None or math.isclose(got, wanted or 0.0, rel_tol=1e-12)


@given(counters(), instants, spans)
def test_increase_is_never_negative(block: Block, at: list[int], span: int) -> None:
    vector = evaluate(f"increase(x[{span}ms])", Samples([block]), np.array(at))
    assert (vector.values[vector.present] >= 0).all()


@given(counters(), instants, spans)
def test_rate_is_increase_per_second(block: Block, at: list[int], span: int) -> None:
    samples = Samples([block])
    rate, increase = (evaluate(f"{function}(x[{span}ms])", samples, np.array(at)) for function in ("rate", "increase"))
    np.testing.assert_array_equal(rate.present, increase.present)
    np.testing.assert_allclose(rate.values[rate.present] * span / 1000, increase.values[rate.present], rtol=1e-12)


@given(counters(), instants, spans, st.sampled_from([1.0, 0.1]))
def test_sums_of_overlapping_windows_are_those_of_their_samples(
    block: Block, at: list[int], span: int, unit: float
) -> None:
    """Whole numbers are summed once for all windows, others in each."""
    values = np.where(is_stale(block.values), STALE, np.nan_to_num(block.values) * unit)
    scaled = Block(block.labels, block.times, values)
    for function in ("sum", "avg"):
        vector = evaluate(f"{function}_over_time(x[{span}ms])", Samples([scaled]), np.array(at))
        for row in range(len(block.labels)):
            for place, end in enumerate(at):
                values = [value for _, value in points(scaled, row, end - span, end)]
                total = math.fsum(values) / (len(values) if function == "avg" else 1) if values else None
                assert cell(vector, str(row), place) == (total if unit == 1 or not total else pytest.approx(total))


@given(counters(), instants, spans, st.integers(1, 10**6))
def test_a_shift_changes_deltas_of_gauges_in_no_way(block: Block, at: list[int], span: int, shift: int) -> None:
    values = np.where(is_stale(block.values), STALE, np.nan_to_num(block.values) + shift)
    shifted = Block(block.labels, block.times, values)
    for function in ("delta", "idelta", "deriv", "changes", "resets", "stddev_over_time"):
        a, b = (evaluate(f"{function}(x[{span}ms])", Samples([each]), np.array(at)) for each in (block, shifted))
        np.testing.assert_array_equal(a.present, b.present)
        np.testing.assert_allclose(a.values[a.present], b.values[b.present], rtol=1e-6, atol=1e-6)


@given(counters(), instants)
def test_sum_by_is_the_sum_of_the_members(block: Block, at: list[int]) -> None:
    samples = Samples([block])
    vector, total = evaluate("x", samples, np.array(at)), evaluate("sum by (g) (x)", samples, np.array(at))
    for labels, values, present in zip(total.labels, total.values, total.present, strict=True):
        rows = [row for row, series in enumerate(vector.labels) if series["g"] == labels["g"]]
        np.testing.assert_array_equal(present, vector.present[rows].any(axis=0))
        np.testing.assert_allclose(
            values[present], np.where(vector.present, vector.values, 0)[rows].sum(axis=0)[present]
        )


@given(counters(), instants)
def test_a_comparison_and_its_opposite_divide_a_vector(block: Block, at: list[int]) -> None:
    samples = Samples([block])
    both, either = (evaluate(f"(x > 100) {op} (x <= 100)", samples, np.array(at)) for op in ("and", "or"))
    plain = evaluate("x", samples, np.array(at))
    assert not both.present.any()
    assert either.present.sum() == plain.present.sum()


@given(counters(), instants, spans, st.floats(0, 1))
def test_a_quantile_lies_between_the_extremes(block: Block, at: list[int], span: int, q: float) -> None:
    samples = Samples([block])
    low, middle, high = (
        evaluate(f"{function}x[{span}ms])", samples, np.array(at))
        for function in ("min_over_time(", f"quantile_over_time({q:.6f}, ", "max_over_time(")
    )
    there = middle.present
    assert (low.values[there] <= middle.values[there] + 1e-9).all()
    assert (middle.values[there] <= high.values[there] + 1e-9).all()


@pytest.mark.slow
def test_many_instants_at_once_are_the_same_as_one_at_a_time() -> None:
    samples, at = Samples(blocks()), sorted(NEAR_A_BIRTH + SETTLED + AT_THE_END)
    for promql in EXPRESSIONS:
        together = _answers(promql, samples, at)
        apart = [answer for instant in at for answer in _answers(promql, samples, [instant])]
        assert together == apart or ("failure" in together and "failure" in apart), promql


def _answers(promql: str, samples: Samples, at: list[int]) -> list[object]:
    """Return for each instant its values by labels, as text: NaN equals NaN there."""
    try:
        vector = evaluate(promql, samples, np.array(at))
    except QueryFailed:
        return ["failure"]
    return [
        {
            str(sorted(labels.items())): repr(float(values[place]))
            for labels, values, present in zip(vector.labels, vector.values, vector.present, strict=True)
            if present[place]
        }
        for place in range(len(at))
    ]


def test_an_evaluator_answers_as_if_each_expression_were_its_first() -> None:
    samples, at = Samples(blocks()), np.array(SETTLED)
    evaluator = Evaluator(samples)
    for promql in [*EXPRESSIONS, *reversed(EXPRESSIONS)]:
        try:
            alone = evaluate(promql, samples, at)
        except QueryFailed:
            continue
        shared = evaluator.evaluate(promql, at)
        assert shared.labels == alone.labels, promql
        np.testing.assert_array_equal(shared.present, alone.present, promql)
        np.testing.assert_array_equal(shared.values[shared.present], alone.values[alone.present], promql)
