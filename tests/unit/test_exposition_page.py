"""Parsing one page: what is kept, what is left out, and what is said about it."""

import gzip
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from support.paths import RECORDINGS

from diag.exposition import CUT, NotMetrics
from diag.exposition.scrapes import Parser

KV_CASCADE = RECORDINGS / "kv_cascade" / "metrics.prom.gz"


def parsed(page: bytes, instance: str = "h:1") -> dict[tuple[tuple[str, str], ...], float]:
    parser = Parser(instance)
    result = parser.parse(page)
    keys = (tuple(sorted(parser.labels[row].items())) for row in result.layout.rows)
    return dict(zip(keys, result.values.tolist(), strict=True))


def series(name: str, **labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({"__name__": name, "instance": "h:1", **labels}.items()))


def faults(page: bytes) -> dict[str, str]:
    return dict(Parser("h:1").parse(page).faults)


def real_pages() -> list[bytes]:
    sections = gzip.decompress(KV_CASCADE.read_bytes()).split(b"# scrape ")[1:]
    return [each.partition(b"\n")[2] for each in sections]


def test_real_page_is_parsed_as_by_prometheus_client() -> None:
    page = real_pages()[20]
    theirs = {
        series(sample.name, **sample.labels): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }
    assert parsed(page) == theirs


lines = st.sampled_from(
    [
        b"a 1",
        b"a 2",
        b"b 1",
        b'b{x="1"} 3',
        b'b{x="1"} 4',
        b"c NaN",
        b"c 1_0",
        b"c x",
        b"# HELP a",
        b"",
        b"d 1 17",
        b"e 1 # {} 2",
        CUT,
    ]
)


@given(st.lists(st.lists(lines, min_size=1, max_size=6), min_size=2, max_size=5))
def test_page_is_parsed_the_same_after_any_other_page(pages: list[list[bytes]]) -> None:
    parser = Parser("h:1")
    for page in (b"\n".join(each) + b"\n" for each in pages):
        assert read(parser, page) == read(Parser("h:1"), page)


def read(parser: Parser, page: bytes) -> object:
    try:
        result = parser.parse(page)
    except NotMetrics as error:
        return str(error)
    names = [tuple(sorted(parser.labels[row].items())) for row in result.layout.rows]
    return list(zip(names, map(repr, result.values.tolist()), strict=True)), result.faults


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        (b"x 1\n", series("x"), 1.0),
        (b"x{} 1\n", series("x"), 1.0),
        (b'x{a="b",} 1\n', series("x", a="b"), 1.0),
        (b'x { a = "b" , c = "d" }\t1\n', series("x", a="b", c="d"), 1.0),
        (b'x{a="b"}1\n', series("x", a="b"), 1.0),
        (b'x{a="{b} c=\\"d\\",e"} 1\n', series("x", a='{b} c="d",e'), 1.0),
        (b'x{a="one\\ntwo\\\\n"} 1\n', series("x", a="one\ntwo\\n"), 1.0),
        (b'x{a="\\d"} 1\n', series("x", a="\\d"), 1.0),
        (b'x{a="\xff"} 1\n', series("x", a="\ufffd"), 1.0),
        (b'x{a="\x1b[31m"} 1\n', series("x", a="\x1b[31m"), 1.0),
        (b'x{a="",b="c"} 1\n', series("x", b="c"), 1.0),
        (b"x +Inf\n", series("x"), math.inf),
        (b"x -Inf\n", series("x"), -math.inf),
        (b"x 1e-3\n", series("x"), 0.001),
        (b"x 1\r\n", series("x"), 1.0),
        (b"x 1 1795227337480\n", series("x"), 1.0),
        (b'x 1 # {trace_id="a b"} 7 1795227337.48\n', series("x"), 1.0),
        (b'x{instance="mine"} 1\n', series("x", exported_instance="mine"), 1.0),
        (
            b'x{instance="a",exported_instance="b"} 1\n',
            series("x", exported_instance="b", exported_exported_instance="a"),
            1.0,
        ),
    ],
)  # fmt: skip
def test_a_line_is_read(line: bytes, key: tuple[tuple[str, str], ...], value: float) -> None:
    assert parsed(line) == {key: value}


def test_nan_is_a_value() -> None:
    assert math.isnan(parsed(b"x NaN\n")[series("x")])


def test_the_second_page_reads_as_the_first() -> None:
    parser = Parser("h:1")
    for number in (1.0, 2.0):
        page = parser.parse(b'x{a="b c"} %d\nx{a="d"} 9 # {e="f"} 9\ny 5 1234\n' % number)
        assert page.values.tolist() == [number, 9.0, 5.0]


def test_an_exemplar_is_not_taken_for_the_value_on_the_next_page() -> None:
    parser = Parser("h:1")
    parser.parse(b'x 5 # {a="b"} 5\n')
    assert parser.parse(b'x 5 # {a="b"} 7\n').values.tolist() == [5.0]


def test_pages_with_the_same_lines_share_their_layout() -> None:
    parser = Parser("h:1")
    assert parser.parse(b"x 1\ny 2\n").layout is parser.parse(b"x 3\ny 4\n").layout


@pytest.mark.parametrize(
    "line",
    [
        b"x",
        b"x y",
        b"x 1_000",
        b"x 0x10",
        b"x{a=b} 1",
        b'x{a="b} 1',
        b'x{a="b" c="d"} 1',
        b'x{a="b",a="c"} 1',
        b'x{__name__="y"} 1',
        b"1x 1",
        b"x 1 2 3",
        b"Traceback (most recent call last):",
        "x ١".encode(),
    ],
)
def test_a_line_that_is_no_metric_is_noted_and_left_out(line: bytes) -> None:
    page = b"first 1\n" + line + b"\nlast 2\n"
    assert parsed(page) == {series("first"): 1.0, series("last"): 2.0}
    assert faults(page)["malformed"].startswith("line 2 is not a metric: ")


def test_a_known_series_with_a_bad_value_is_noted() -> None:
    parser = Parser("h:1")
    parser.parse(b"x 1\ny 1\n")
    page = parser.parse(b"x 1_0\ny 2\n")
    assert (page.values.tolist(), page.faults) == ([2.0], {"malformed": "line 1 is not a metric: x 1_0"})


def test_a_note_about_a_line_is_fit_to_print() -> None:
    said = faults(b"x 1\n\x1b[31mred" + b"y" * 500 + b"\n")["malformed"]
    assert said.startswith("line 2 is not a metric: \\x1b[31mredyyy")
    assert len(said) < 120


def test_a_repeated_series_is_kept_once_if_its_values_are_equal() -> None:
    page = b'x{a="1",b="2"} 1\nx{b="2",a="1"} 1\nx{a="1",b="2",c=""} 1\n'
    assert parsed(page) == {series("x", a="1", b="2"): 1.0}
    assert faults(page) == {"duplicate": "x"}


def test_a_repeated_series_is_unknown_if_its_values_differ() -> None:
    page = b'y 1\nx{a="1",b="2"} 1\nx{b="2",a="1"} 2\n'
    assert parsed(page) == {series("y"): 1.0}
    assert faults(page) == {"duplicate": "x"}


def test_timestamps_are_noted() -> None:
    assert faults(b"x 1 1795227337480\n") == {"timestamp": "x"}


def test_an_incomplete_last_line_is_dropped_and_noted() -> None:
    assert parsed(b"x 1\ny 12") == {series("x"): 1.0}
    assert "truncated" in faults(b"x 1\ny 12")


def test_a_mark_of_a_cut_page_counts_as_cut() -> None:
    assert "truncated" in faults(b"x 1\n" + CUT + b"\n")


@pytest.mark.parametrize("page", [b"x 1\n", b"x 1\n# EOF", b"x 1\n# EOF\n", b"x 1\n  "])
def test_a_whole_page_is_not_noted_as_cut(page: bytes) -> None:
    assert not faults(page)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (b"", "answered an empty page"),
        (b" \n\n", "answered an empty page"),
        (b"\n <!DOCTYPE html><html>\nx 1\n</html>\n", "answered an HTML page, not metrics"),
        (b'{"detail": "Not Found"}', "answered JSON, not metrics"),
        (b"[1, 2]\n", "answered JSON, not metrics"),
        (b"# HELP x y\n", "answered a page without any metric"),
        (b"not found!\n", "answered no metrics: line 1 is not a metric: not found!"),
        (b"hello", "answered a page without any metric"),
        (bytes(range(256)) * 4, "answered no metrics: line 1 is not a metric: "),
    ],
)
def test_a_page_without_metrics_is_a_failed_scrape(page: bytes, reason: str) -> None:
    with pytest.raises(NotMetrics) as error:
        Parser("h:1").parse(page)
    assert str(error.value).startswith(reason)


def test_too_many_series_are_left_out_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diag.exposition.scrapes.MOST_SERIES", 2)
    page = Parser("h:1").parse(b"a 1\nb 2\nc 3\nd 4\n")
    assert (page.values.tolist(), page.faults) == ([1.0, 2.0], {"crowded": ""})


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
LABELS = st.dictionaries(st.from_regex("[a-z]{1,3}", fullmatch=True), TEXT, max_size=3)


@given(LABELS)
def test_any_label_value_survives_escaping(labels: dict[str, str]) -> None:
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name, value in labels.items()
    }
    line = "x{%s} 1\n" % ",".join(f'{name}="{value}"' for name, value in escaped.items())  # noqa: UP031
    assert parsed(line.encode()) == {series("x", **labels): 1.0}


@given(st.binary())
def test_no_bytes_break_the_parser(page: bytes) -> None:
    try:
        result = Parser("h:1").parse(page)
    except NotMetrics:
        return
    assert len(result.values) == len(result.layout.rows)
