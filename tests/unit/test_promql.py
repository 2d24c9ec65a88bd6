import importlib
import pkgutil

import numpy as np
import pytest

import diag.promql
from diag.core.errors import QueryFailed, Unsupported
from diag.promql import (
    STALE,
    Block,
    Evaluator,
    Formula,
    Labels,
    Samples,
    Vector,
    evaluate,
    functions,
    instant_selectors,
    is_stale,
    may_have_value,
    metric_names,
    output_labels,
    parse,
    parser,
    pretty,
)
from diag.promql.data import compiled, fully_matches
from diag.promql.evaluator import MOST_INSTANTS

MINUTE = 60_000


def series(name: str, values: list[float], every: int = 10_000, start: int = 0, **labels: str) -> Block:
    times = start + every * np.arange(len(values))
    return Block(({"__name__": name, **labels},), times, np.array([values], dtype=float))


def answers(vector: Vector, place: int = 0) -> list[tuple[Labels, float]]:
    rows = np.flatnonzero(vector.present[:, place])
    return [(vector.labels[row], float(vector.values[row, place])) for row in rows]


def ask(promql: str, *blocks: Block, at: int) -> list[tuple[Labels, float]]:
    return answers(evaluate(promql, Samples(blocks), np.array([at])))


@pytest.mark.parametrize(
    ("promql", "named"),
    [
        ("x @ 5", "the @ modifier"),
        ("rate(x[5m:1m] @ end())", "the @ modifier"),
        ("info(x)", "info()"),
        ("sin(x)", "sin()"),
        ("pi()", "pi()"),
        ("first_over_time(x[5m])", "first_over_time()"),
        ("mad_over_time(x[5m])", "mad_over_time()"),
        ("double_exponential_smoothing(x[5m], 0.5, 0.5)", "double_exponential_smoothing()"),
        ('sort_by_label(x, "a")', "sort_by_label()"),
        ("histogram_count(x)", "histogram_count()"),
        ("histogram_fraction(0, 1, x)", "histogram_fraction()"),
        ("limitk(3, x)", "limitk()"),
        ("limit_ratio(0.5, x)", "limit_ratio()"),
        ("x * on (a) fill(0) y", "fill()"),
        ("x * on (a) fill_left(0) y", "fill()"),
        ('x{a="1" or b="2"}', "`or` between matchers"),
        ("x[5m]", "a range vector or a string as the result"),
        ("x[5m:1m]", "a range vector or a string as the result"),
        ('"text"', "a range vector or a string as the result"),
        ('x{a=~"[[:alpha:]]"}', "a named class"),
        ('x{a=~"a{,3}"}', "a repetition without a lower bound"),
        ('x{a=~"a++"}', "a doubled repetition"),
        ('x{a=~"(?i)é"}', "case folding"),
        ('x{a=~"b(?i)c"}', "the pattern 'b(?i)c'"),
        ('x{a=~"\\\\pL"}', "the pattern"),
        ('label_replace(x, "a", "$1", "b", "(?=c)")', "the pattern '(?=c)'"),
        ('label_replace(x, "a", "$1", "b", "(c")', "the pattern '(c'"),
        ('label_replace(x, "a-b", "$1", "b", "c")', "the label name 'a-b'"),
        ('label_join(x, "a", "", "b", "")', "the label name ''"),
        ('count_values("1", x)', "the label name '1'"),
        ('x{a="\\xff"}', "an escaped byte"),
        ("sum(rate(sin(x)[5m:1m])) + 1", "sin()"),
        ("topk(scalar(info(x)), y)", "info()"),
    ],
)
def test_unsupported_promql_is_refused_by_name(promql: str, named: str) -> None:
    with pytest.raises(Unsupported) as refusal:
        parse(promql)
    assert f"`{promql}` uses " in str(refusal.value)
    assert named in str(refusal.value)


@pytest.mark.parametrize("deep", ["--".join("a" * 300), "(" * 501 + "a" + ")" * 501, " or ".join(["a"] * 502)])
def test_deeply_nested_promql_is_refused_before_parsing(deep: str) -> None:
    """The parser takes time and memory with the square of the depth: gigabytes for some kilobytes."""
    with pytest.raises(Unsupported, match="is nested too deeply"):
        parse(deep)
    wide = ", ".join([f'"{deep}"', *["a"] * 10])
    assert parser.depth(f"f({wide}, a{{b={wide}}})") < 20


def test_depth_of_arguments_is_that_of_the_deepest_one() -> None:
    assert parser.depth(f"f({'a + b, ' * 600}a){'-a' * 600}") == 601


@pytest.mark.parametrize(
    "promql",
    [
        *("", "sum(", "rate(x)", "x[5m] offset", "1 > 2", "x and 1", "{}", "nothing(x)", f"x offset {9:0<40}"),
        "a)" + "a + a," * 600,
    ],
)
def test_invalid_promql_is_refused_with_the_parser_error(promql: str) -> None:
    with pytest.raises(Unsupported, match=r"is not PromQL: \w"):
        parse(promql)


@pytest.mark.parametrize(
    ("matchers", "found"),
    [
        ('a="1"', {"1"}),
        ('a!="1"', {"", "12", "é"}),
        ('a=~"1"', {"1"}),
        ('a=~"1.*"', {"1", "12"}),
        ('a!~"1.*"', {"", "é"}),
        ('a=""', {""}),
        ('a!=""', {"1", "12", "é"}),
        ('a!="1."', {"", "1", "12", "é"}),
        ('a=~"|12"', {"", "12"}),
        ('a=~"\\\\w+"', {"1", "12"}),
        ('a=~".+",a!="1"', {"12", "é"}),
        ('nothing=""', {"", "1", "12", "é"}),
    ],
)
def test_matchers_are_anchored_and_a_missing_label_is_empty(matchers: str, found: set[str]) -> None:
    labels = [{"__name__": "x", "b": "b"}, *({"__name__": "x", "a": a} for a in ("1", "12", "é"))]
    samples = Samples([Block(tuple(labels), np.array([0]), np.zeros((4, 1)))])
    vector = evaluate(f"x{{{matchers}}}", samples, np.array([0]))
    assert {series.get("a", "") for series in vector.labels} == found


def test_the_name_is_matched_like_a_label() -> None:
    blocks = [series(name, [1.0]) for name in ("ab", "abc", "b")]
    assert [labels["__name__"] for labels, _ in ask('{__name__=~"ab.*", __name__!="abc"}', *blocks, at=0)] == ["ab"]
    assert [labels["__name__"] for labels, _ in ask('{"b"}', *blocks, at=0)] == ["b"]


def test_the_dot_of_a_pattern_matches_a_newline() -> None:
    assert len(ask('x{a=~"b.c"}', series("x", [1.0], a="b\nc"), at=0)) == 1


def test_an_empty_label_is_no_label() -> None:
    assert ask("x", series("x", [1.0], a=""), at=0) == [({"__name__": "x"}, 1.0)]


def test_a_sample_exactly_five_minutes_old_is_too_old() -> None:
    assert ask("x", series("x", [1.0]), at=5 * MINUTE - 1) == [({"__name__": "x"}, 1.0)]
    assert ask("x", series("x", [1.0]), at=5 * MINUTE) == []


def test_a_stale_marker_ends_a_series_and_is_skipped_in_a_range() -> None:
    block = series("x", [1.0, 2.0, float(STALE), 4.0])
    assert [len(ask("x", block, at=at)) for at in (19_999, 20_000, 29_999, 30_000)] == [1, 0, 0, 1]
    assert ask("count_over_time(x[1m])", block, at=30_000) == [({}, 3.0)]


def test_not_a_number_is_a_value_but_the_stale_marker_is_not() -> None:
    values = np.array([[1.0, np.nan], [float(STALE), 2.0]])
    assert is_stale(values).tolist() == [[False, False], [True, False]]
    assert is_stale(values[:, ::-1].T).tolist() == [[False, False], [False, True]]
    assert [np.isnan(value) for _, value in ask("x", series("x", [np.nan]), at=0)] == [True]


def test_a_window_excludes_its_beginning_and_includes_its_end() -> None:
    block = series("x", [1.0, 10.0, 100.0])
    assert ask("sum_over_time(x[10s])", block, at=20_000) == [({}, 100.0)]
    assert ask("sum_over_time(x[10001ms])", block, at=20_000) == [({}, 110.0)]


def test_a_counter_is_extrapolated_to_where_a_sample_was_due_or_by_half_a_gap() -> None:
    block = series("x", [1e6, 1e6 + 10, 1e6 + 20], every=1_000_000, start=2_000_000)
    assert ask("increase(x[3099999ms])", block, at=4_000_000) == [({}, pytest.approx(20 * 3099.999 / 2000))]
    assert ask("increase(x[3100s])", block, at=4_000_000) == [({}, 20 * 2500 / 2000)]  # 1.1 gaps before the first


def test_a_reset_counts_in_the_windows_that_hold_both_of_its_samples_and_in_no_other() -> None:
    counter = Samples([series("x", [1.0, 2.0, 3.0, 0.0, 2.0, 3.0], start=10_000)])
    vector = evaluate("resets(x[25s]) + increase(x[25s]) * 100", counter, np.arange(30_000, 61_000, 10_000))
    assert vector.values.tolist() == [[250.0, 126.0, 251.0, 300.0]]


def test_the_slope_of_a_constant_is_exactly_zero() -> None:
    times = np.array([991, 2458, 4514, 10515, 16185, 18467, 30664, 38211, 38964, 48795])  # the formula gives 7e-16
    block = Block(({"__name__": "x"},), times, np.full((1, 10), 81.59))
    assert ask("deriv(x[1m])", block, at=50_000) == [({}, 0.0)]


def test_buckets_that_differ_by_a_rounding_error_are_equal() -> None:
    buckets = [series("x", [count], le=le) for le, count in (("1", 0.3), ("2", 0.1 + 0.2), ("+Inf", 0.1 + 0.2))]
    assert ask("histogram_quantile(1, x)", *buckets, at=0) == [({}, 1.0)]


@pytest.mark.parametrize(
    ("first", "quantile", "value"),
    [(0.5, 1 / 6, 0.25), (0.5, 0.5, 1.25), (0.5, 0.75, 3.0), (0.5, 0.95, 4.0), (-1.0, 0.1, -1.0), (0.0, 0.1, 0.0)],
    ids=["lowest bucket", "second bucket", "third bucket", "above all bounds", "below a negative bound", "up to zero"],
)
def test_quantile_is_interpolated_in_the_bucket_that_holds_its_rank(
    first: float, quantile: float, value: float
) -> None:
    counts = {str(first): 4.0, "2": 8.0, "4": 10.0, "+Inf": 12.0}
    buckets = [series("x", [count], le=bound) for bound, count in counts.items()]
    assert ask(f"histogram_quantile({quantile}, x)", *buckets, at=0) == [({}, pytest.approx(value))]


def test_mean_of_values_whose_sum_overflows_is_exact() -> None:
    block = series("x", [1.5e308, 1.7e308, 1.6e308], every=10_000)
    assert ask("avg_over_time(x[30s])", block, at=20_000) == [({}, pytest.approx(1.6e308))]


@pytest.mark.parametrize(
    ("promql", "values"),
    [
        ("x and on (a) y", [2.0]),
        ("x unless on (a) y", [1.0]),
        ("x or on (a) y", [1.0, 2.0, 9.0]),
        ("x and on (b) y", [1.0, 2.0]),
    ],
)
def test_set_operation_keeps_series_by_the_labels_that_match(promql: str, values: list[float]) -> None:
    left = [series("x", [value], a=label) for value, label in ((1.0, "1"), (2.0, "2"))]
    right = [series("y", [value], a=label, c=label) for value, label in ((8.0, "2"), (9.0, "3"))]
    assert [value for _, value in ask(promql, *left, *right, at=0)] == values


@pytest.mark.parametrize(
    ("sources", "labels"), [('"b", "c"', {"a": "2-3", "b": "2", "c": "3"}), ('"missing"', {"b": "2", "c": "3"})]
)
def test_label_join_sets_a_label_and_removes_it_if_the_text_is_empty(sources: str, labels: Labels) -> None:
    block = series("x", [7.0], a="1", b="2", c="3")
    assert ask(f'label_join(sum by (a, b, c) (x), "a", "-", {sources})', block, at=0) == [(labels, 7.0)]


def test_long_expression_is_broken_before_its_outermost_operator() -> None:
    left, right = (f"sum by (instance) (rate({name}[5m]))" for name in ("first_total", "second_total"))
    assert pretty(f"({left} + {right}) / {left}") == f"({left} + {right})\n/ {left}"


def test_broken_expression_loses_nothing_but_spaces() -> None:
    sums = ", ".join(f'"label_{at}"' for at in range(20))
    text = f'label_join(sum by (instance) (rate(requests_total{{a="1", b="2"}}[5m])) / 60, "joined", "-", {sums})'
    lines = pretty(text)
    assert all(len(line) <= 100 for line in lines.splitlines())
    assert "".join(lines.split()) == "".join(text.split())


def test_a_subquery_asks_at_multiples_of_its_step() -> None:
    block = series("x", [1.0] * 100, every=1000)
    assert ask("count_over_time(x[10s:3s])", block, at=21_000) == [({}, 4.0)]  # 12, 15, 18, 21
    assert ask("max_over_time((time() + 0 * x)[10s:3s])", block, at=22_999) == [({}, 21.0)]
    assert ask("min_over_time((time() + 0 * x)[9s:3s])", block, at=21_000) == [({}, 15.0)]


def test_instants_may_have_any_spacing() -> None:
    samples = Samples([series("x", [float(i) for i in range(100)])])
    instants = np.array([5, 10_000, 10_001, 333_333, 5_000_000])
    vector = evaluate("x", samples, instants)
    assert vector.values[0, :4].tolist() == [0, 1, 1, 33]
    assert vector.present.tolist() == [[True, True, True, True, False]]


def test_no_instants_and_no_samples_give_an_empty_answer() -> None:
    for promql in ("x", "sum(x)", "rate(x[5m])", "histogram_quantile(0.9, x)", "x + y", "max_over_time(x[5m:1m])"):
        assert evaluate(promql, Samples([]), np.array([0, 1000])).values.shape == (0, 2)
        assert evaluate(promql, Samples([series("x", [1.0])]), np.array([], dtype=np.int64)).values.shape == (0, 0)


def test_scalar_is_one_series_without_labels_marked_as_scalar() -> None:
    vector = evaluate("1 + time()", Samples([]), np.array([0, 2000]))
    assert (vector.labels, vector.values.tolist(), vector.scalar) == (({},), [[1.0, 3.0]], True)
    assert not evaluate("vector(1)", Samples([]), np.array([0])).scalar


def test_series_without_any_value_are_left_out() -> None:
    vector = evaluate("x > 5", Samples([series("x", [1.0], a="1"), series("x", [9.0], a="2")]), np.array([0, 1]))
    assert vector.labels == ({"__name__": "x", "a": "2"},)


@pytest.mark.parametrize(
    ("promql", "complaint"),
    [
        ("y + on () x", "Many-to-many"),
        ("x + on (a) y", "More than one series without group_left"),
        ('{__name__=~"x|y"} * 2', "have the same labels"),
        ('rate({__name__=~"x|y"}[1m])', "have the same labels"),
        ('label_replace(x, "b", "", "b", ".*")', "have the same labels"),
        ("x * on (a) group_left (b) y", "have the same labels"),
        ("topk(NaN, x)", "not an integer"),
    ],
)
def test_ambiguous_match_fails_and_names_the_labels(promql: str, complaint: str) -> None:
    blocks = [series(name, [1.0, 2.0], a="1", b=b) for name, b in (("x", "1"), ("x", "2"), ("y", "1"))]
    with pytest.raises(QueryFailed, match=complaint):
        ask(promql, *blocks, at=10_000)


def test_equal_labels_at_different_instants_are_one_series() -> None:
    samples = Samples([series("old", [1.0, 1.0], i="a"), series("new", [2.0, 2.0], i="a", start=600_000)])
    vector = evaluate("max_over_time(new[1m]) or max_over_time(old[1m])", samples, np.array([10_000, 610_000]))
    assert (vector.labels, vector.values.tolist()) == (({"i": "a"},), [[1.0, 2.0]])


@pytest.mark.parametrize("pattern", ["", "a|", "a|ab", "|", "a||b", "a_1"])
@pytest.mark.parametrize("text", ["", "a", "ab", "b", "a|", "a|ab", "|", "a_1", "a\n"])
def test_plain_alternatives_match_as_the_compiled_pattern_does(pattern: str, text: str) -> None:
    assert fully_matches(pattern, text) == bool(compiled(pattern).fullmatch(text))


def test_evaluator_distinguishes_instants_and_signed_zeros() -> None:
    evaluator = Evaluator(Samples([series("x", [1.0, 2.0])]))
    assert [evaluator.evaluate("x", np.array([at])).values.tolist() for at in (0, 10_000)] == [[[1.0]], [[2.0]]]
    zeros = [evaluator.evaluate(f"1 / {zero}", np.array([0])).values.tolist() for zero in ("0", "-0")]
    assert zeros == [[[np.inf]], [[-np.inf]]]


def test_evaluator_with_a_full_cache_still_answers() -> None:
    evaluator = Evaluator(Samples([series("x", [1.0, 2.0])]), most_cells=0)
    assert [answers(evaluator.evaluate("x + 1", np.array([0]))) for _ in range(2)] == [[({}, 2.0)]] * 2


def test_evaluator_caches_only_the_latest_instants_and_answers_at_all() -> None:
    evaluator = Evaluator(Samples([series("x", [float(value) for value in range(300)])]), most_cells=300)
    for _ in range(2):
        assert [answers(evaluator.evaluate("x * 2", np.array([at * 10_000]))) for at in range(300)] == [
            [({}, 2.0 * at)] for at in range(300)
        ]
    assert len(evaluator._kept) == MOST_INSTANTS
    assert sum(vector.values.size for kept in evaluator._kept.values() for vector in kept.values()) == 3 * MOST_INSTANTS


def test_every_cache_of_functions_has_a_bound() -> None:
    names = [each.name for each in pkgutil.iter_modules(diag.promql.__path__, "diag.promql.")]
    caches = {
        value.__wrapped__.__name__: value.cache_parameters()["maxsize"]
        for module in map(importlib.import_module, names)
        for value in vars(module).values()
        if hasattr(value, "cache_parameters")
    }
    assert {"parse", "compiled"} <= caches.keys()
    assert [name for name, most in caches.items() if most is None] == []


def test_the_memory_of_an_evaluator_has_a_bound_over_many_windows_and_queries() -> None:
    """Subqueries have as many instants as steps, and a query without a result has no cell; both take memory."""
    evaluator, most = Evaluator(Samples([series("x", [1.0] * 100)]), most_cells=20_000), 0
    for window in range(300):
        evaluator.evaluate(f"sum(gone{window})", np.array([0]))
        evaluator.evaluate("max_over_time((x + gone)[10m:1s])", np.array([window * 10_000]))
        keys = sum(len(instants) // 8 for instants in evaluator._kept)
        vectors = sum(max(vector.values.size, 1) for kept in evaluator._kept.values() for vector in kept.values())
        assert evaluator._room == 20_000 - keys - vectors
        most = max(most, keys + vectors)
    assert most <= 20_000 + 600 * MOST_INSTANTS
    assert len(evaluator._kept) <= MOST_INSTANTS


def test_a_series_in_two_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="two series of x have the same labels"):
        Samples([series("x", [1.0]), series("x", [2.0], start=1_000_000)])


@pytest.mark.parametrize(("times", "values"), [([1, 0], [[1.0, 2.0]]), ([0, 0], [[1.0, 2.0]]), ([0, 1], [[1.0]])])
def test_inconsistent_block_is_refused(times: list[int], values: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="times that ascend"):
        Samples([Block(({"__name__": "x"},), np.array(times), np.array(values))])


def test_windows_too_large_for_memory_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    labels = tuple({"__name__": "x", "i": str(i)} for i in range(7))
    samples = Samples([Block(labels, 1000 * np.arange(200), random.random((7, 200)))])
    instants = np.arange(0, 200_000, 3_333)
    for promql in ("rate(x[30s])", "quantile_over_time(scalar(count(x)) / 8, x[1m])", "predict_linear(x[20s], time())"):
        whole = evaluate(promql, samples, instants)
        for cells in (1, 150):
            monkeypatch.setattr(functions, "_MOST_CELLS", cells)
            parts = evaluate(promql, samples, instants)
            np.testing.assert_array_equal(whole.present, parts.present)
            np.testing.assert_array_equal(whole.values[whole.present], parts.values[whole.present])
        monkeypatch.undo()


def test_ties_of_topk_keep_the_first_and_an_instant_is_ordered() -> None:
    blocks = [series("x", [value], i=str(i)) for i, value in enumerate([3.0, 5.0, 5.0, 5.0])]
    assert [labels["i"] for labels, _ in ask("topk(2, x)", *blocks, at=0)] == ["1", "2"]
    assert [labels["i"] for labels, _ in ask("bottomk(2, x)", *blocks, at=0)] == ["0", "1"]
    assert [value for _, value in ask("sort_desc(x)", *blocks, at=0)] == [5.0, 5.0, 5.0, 3.0]


@pytest.mark.parametrize(
    ("promql", "selected"),
    [
        ("x", ("x",)),
        ("rate(x[5m])", ()),
        ("max_over_time(x[5m:1m])", ()),
        ("sum by (a) (increase(x[5m])) / sum(y)", ("y",)),
        ("topk(scalar(k), x)", ("x", "k")),
        ('label_replace(timestamp(x{a="1"}), "a", "b", "c", "d") or -y offset 5m', ("x", "y")),
        ('{__name__=~"x|y"}', ('{__name__=~"x|y"}',)),
        ('{"x", a="1"}', ("x",)),
        ("time() - 1", ()),
        ("absent(x) and absent_over_time(y[1m])", ("x",)),
    ],
)
def test_instant_selectors_are_those_outside_of_any_range(promql: str, selected: tuple[str, ...]) -> None:
    assert instant_selectors(parse(promql)) == selected


def test_metric_names_of_an_expression_are_all_selected_names() -> None:
    promql = 'rate(a[5m]) + on () (b or max_over_time(c[5m:1m])) > scalar(d) and {"e"} unless quantile(scalar(f), g)'
    assert metric_names(parse(promql)) == frozenset("abcdefg")
    assert metric_names(parse("1")) == frozenset()


@pytest.mark.parametrize(
    ("promql", "labels"),
    [
        ("x", None),
        ("rate(x[5m])", None),
        ("1", ""),
        ("time()", ""),
        ("scalar(x)", ""),
        ("vector(1)", ""),
        ("hour()", ""),
        ("-time() + 1", ""),
        ("sum(x)", ""),
        ("sum by (a, b) (x)", "a b"),
        ("sum without (a) (x)", None),
        ("sum without (a) (sum by (a, b) (x))", "b"),
        ("topk by (a) (1, sum by (a, b) (x))", "a b"),
        ('count_values by (a) ("v", x)', "a v"),
        ('count_values without (a) ("v", sum by (a, b) (x))', "b v"),
        ("max_over_time(sum by (a, b) (x)[5m:1m])", "a b"),
        ("abs(sum by (a) (x))", "a"),
        ("clamp_min(sum by (a) (x), 0)", "a"),
        ("abs(sum by (__name__, a) (x))", "a"),
        ("sort(sum by (__name__, a) (x))", "__name__ a"),
        ("-sum by (__name__, a) (x)", "a"),
        ("hour(sum by (a) (x))", "a"),
        ("quantile_over_time(0.5, sum by (a) (x)[5m:])", "a"),
        ("histogram_quantile(0.9, sum by (le, a) (rate(x[5m])))", "a"),
        ("histogram_quantile(0.9, rate(x[5m]))", None),
        ('label_replace(sum by (a) (x), "b", "$1", "a", "(.*)")', "a b"),
        ('label_join(sum by (a) (x), "b", "-", "a")', "a b"),
        ('label_join(x, "b", "-", "a")', None),
        ('absent(x{a="1", b=~"2", c!="3"})', "a"),
        ('absent_over_time(x{a="1"}[5m])', "a"),
        ("sum by (a) (x) > 1", "a"),
        ("1 < sum by (a) (x)", "a"),
        ("2 * sum by (__name__) (x)", ""),
        ("2 < sum by (__name__) (x)", "__name__"),
        ("sum by (a, b) (x) / sum by (a, b) (y)", "a b"),
        ("sum by (a, b) (x) / on (a) sum by (a) (y)", "a"),
        ("x / on (a) y", "a"),
        ("x / y", None),
        ("sum by (a, b) (x) / ignoring (b) sum by (a) (y)", "a"),
        ("sum by (a, b) (x) * on (a) group_left (c) y", "a b c"),
        ("y * on (a) group_right (c) sum by (a, b) (x)", "a b c"),
        ("x * on (a) group_left (c) sum by (a, c) (y)", None),
        ("sum by (a) (x) and y", "a"),
        ("sum by (a) (x) unless y", "a"),
        ("sum by (a) (x) or sum by (a) (y)", "a"),
        ("sum by (a) (x) or sum by (b) (y)", None),
    ],
)
def test_output_labels_bound_the_labels_of_every_result(promql: str, labels: str | None) -> None:
    assert output_labels(parse(promql)) == (None if labels is None else frozenset(labels.split()))


RATE = Formula("instance:tokens:rate5m", "sum by (instance) (rate(tokens[5m]))", {})
SHARE = Formula("instance:share:5m", f"{RATE.name} / ({RATE.name} > 0)", {RATE.name: RATE})


def test_a_formula_is_the_expression_with_its_parts_written_out() -> None:
    """The node of a part is made once, and stands wherever the part is selected."""
    rate = "sum by (instance) (rate(tokens[5m]))"
    assert SHARE.written_out() == f"({rate}) / (({rate}) > 0)"
    assert parse(SHARE).node is parse(SHARE.written_out()).node


def test_a_formula_reads_recorded_series_where_there_are_any() -> None:
    whole = Formula("", f"{SHARE.name} > 0.5 or {RATE.name}", {SHARE.name: SHARE, RATE.name: RATE})
    assert whole.written_out({RATE.name: "site:rate"}) == "(site:rate / (site:rate > 0)) > 0.5 or site:rate"
    assert SHARE.written_out({SHARE.name: "site:share"}) == "site:share"
    assert SHARE.text_over({SHARE.name: "site:share"}) == SHARE.written_out()


@pytest.mark.parametrize(
    ("part", "text", "expected"),
    [
        ("rate(refused[5m] @ 0)", "tokens or {}", 1),  # no sample has its metric: it is not even parsed
        ("tokens", "timestamp({})", 10.0),  # of a selector: the time of the sample, not of the evaluation
        ("tokens", "absent({} > 5)", 1),
        ('missing{a="b"}', "absent({})", 1),
        ("absent(missing)", "{} or tokens", 1),
        ("hour() unless rate(missing[5m])", "{} or tokens", 0),
        ("tokens > 0", "{0} + {0}", 2),
    ],
)
def test_a_part_is_evaluated_where_its_value_is_asked_for(part: str, text: str, expected: float) -> None:
    whole = Formula("", text.format("part"), {"part": Formula("part", part, {})})
    samples = Samples([series("tokens", [1.0, 1.0])])
    by_parts = evaluate(whole, samples, np.array([15_000]))
    assert by_parts.values.tolist() == [[expected]]
    if "refused" not in part:
        assert answers(by_parts) == answers(evaluate(whole.written_out(), samples, np.array([15_000])))


@pytest.mark.parametrize(
    ("text", "is_needed"),
    [
        ("tokens_now * missing_now", False),
        ("tokens_now and on (a) missing_now", False),
        ("tokens_now OR missing_now", True),
        ("tokens_now unless missing_now", True),
        ("tokens_now + scalar(missing_now)", True),
    ],
)
def test_nothing_is_parsed_where_a_part_is_missing_that_any_result_needs(text: str, is_needed: bool) -> None:
    refused, missing = Formula("tokens_now", "tokens @ 0", {}), Formula("missing_now", "rate(missing[5m])", {})
    whole = Formula("", text, {"tokens_now": refused, "missing_now": missing})
    evaluator = Evaluator(Samples([series("tokens", [1.0, 1.0])]))
    assert evaluator.may_hold(whole) == is_needed
    longer = Formula("", "sum(whole) / 2", {"whole": whole})
    assert evaluator.may_hold(longer) == is_needed


def test_the_name_of_a_part_in_a_string_stays() -> None:
    quoted = Formula("", f'label_replace({RATE.name}, "a", "{RATE.name}", "", "")', {RATE.name: RATE})
    assert f'"{RATE.name}"' in quoted.written_out({RATE.name: "other"})


def test_error_in_a_part_names_the_part() -> None:
    broken = Formula("", "x + a:b", {"a:b": Formula("a:b", "up @ 5", {})})
    with pytest.raises(Unsupported, match=r"`up @ 5` uses the @ modifier"):
        parse(broken)


@pytest.mark.parametrize(
    ("promql", "expected"),
    [
        ("max(a) + max(away)", True),
        ("max(b) + max(away)", False),
        ("max(b) or max(away)", True),
        ("rate(away[5m]) unless b", True),
        ("b unless rate(away[5m])", False),
        ("max(b and on (x) away) or 0 * b", False),
        ("absent(b) * away", True),
        ("max_over_time(away[5m:1m]) > a", True),
    ],
)
def test_what_an_expression_lacks_is_told_from_what_it_could_do_without(promql: str, expected: bool) -> None:
    """`a` has samples, `b` has none, and those of `away` are not collected."""
    assert may_have_value(parse(promql).node, lambda selector: selector.text in ("a", "away")) == expected
