"""The page for a post-mortem, read as XML: what a browser is told, not how it looks."""

import math
from collections.abc import Iterator
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from support.reports import judged

from diag.core.formatting import moment
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.progress import NotJudged
from diag.diagnosis.report import Finding, ObservedServer, Report
from diag.report import html, svg

HOSTILE = "<script>alert(1)</script>\"'&\x1b[31mred\u202e"
SHOWN = "<script>alert(1)</script>\"'&\\x1b[31mred\\u202e"
DAY = 10_800
"""The instants of 24 hours, a scrape every 8 seconds."""


def page(report: Report) -> ElementTree.Element:
    return ElementTree.fromstring(html.render(report))


def text(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


def with_class(element: ElementTree.Element, tag: str, name: str) -> list[ElementTree.Element]:
    return [each for each in element.iter(tag) if name in each.get("class", "").split()]


def section(root: ElementTree.Element, one: Diagnosis) -> ElementTree.Element:
    return next(each for each in root.iter("section") if f"{one.incident.id}-" in each.get("id", ""))


def rewritten(report: Report, one: Diagnosis) -> Report:
    """Return the report with another first diagnosis."""
    first, *rest = report.findings
    return report._replace(findings=(first._replace(diagnosis=one), *rest))


def with_history(one: Diagnosis, instants: tuple[float, ...], history: tuple[float | None, ...]) -> Diagnosis:
    """All readings of a diagnosis with this history, their last value being the one that is told."""
    symptoms = tuple(each._replace(history=history, value=history[-1]) for each in one.symptoms)
    supports = tuple(each._replace(history=history, value=history[-1]) for each in one.supports)
    return one._replace(instants=instants, since=None, until=instants[-1], symptoms=symptoms, supports=supports)


# -- what stands in it ------------------------------------------------------------------------------------------------


def evidence(finding: Finding) -> Iterator[Reading]:
    one = finding.diagnosis
    yield from (each for each in one.symptoms if each.condition in one.incident.symptoms)
    yield from (each for each in one.supports if each.holds)


def test_every_row_of_evidence_is_plotted_with_its_limit() -> None:
    root = page(judged("kv_cascade"))
    for finding in judged("kv_cascade").present:
        figures = list(section(root, finding.diagnosis).iter("figure"))
        assert [figure.findtext(".//h3") for figure in figures] == [r.condition.signal.name for r in evidence(finding)]
        for figure, reading in zip(figures, evidence(finding), strict=True):
            assert [text(each) for each in with_class(figure, "text", "limit")] == [reading.threshold]
            assert all(each.get("d") for each in with_class(figure, "path", "line"))


def test_a_plot_shows_when_its_signal_crossed_the_threshold() -> None:
    root = page(judged("tp2_long_stall"))
    stalled = next(e.diagnosis for e in judged("tp2_long_stall").present if e.diagnosis.incident.id == "engine_stalled")
    figure = next(section(root, stalled).iter("figure"))
    assert [text(each) for each in with_class(figure, "text", "onset")] == ["this signal crossed at 02:29:52 UTC"]


def test_the_card_of_a_primary_incident_has_its_first_complete_fix_without_a_restart() -> None:
    root = page(judged("tp2_long_stall"))
    (card,) = with_class(root, "div", "card")
    assert len(judged("tp2_long_stall").present) > 1
    labels = [text(each) for each in card.findall("./dl/dt")]
    now = card.findall("./dl/dd")[labels.index("Next time")]
    assert [each.text for each in now.iter("code")] == [judged("tp2_long_stall").present[0].proposals[0].name]


def test_timeline_is_ordered_by_onset() -> None:
    (table,) = with_class(page(judged("tp2_long_stall")), "table", "timeline")
    assert [text(row[0]).rpartition(" (")[2] for row in table][1:] == [
        "tp_communication_stall)",
        "engine_stalled)",
        "contract_breached)",
    ]


def test_recurring_incident_has_two_rows_in_the_timeline() -> None:
    report = judged("tp2_long_stall")
    stall, begin = report.present[0].diagnosis, report.observed.start
    came_back = rewritten(report, stall._replace(episodes=((begin - 60, begin - 30), *stall.episodes)))
    (table,) = with_class(page(came_back), "table", "timeline")
    assert [text(row[0]) for row in table].count(f"{stall.incident.title} ({stall.incident.id})") == 2


def test_healthy_page_shows_the_deciding_numbers() -> None:
    root = page(judged("healthy"))
    (table,) = with_class(root, "table", "absent")
    rows = {text(row[0]): text(row[2]) for row in table}
    assert text(next(root.iter("h1"))).startswith("HEALTHY")
    assert rows["KV-cache preemption cascade (kv_eviction_cascade)"] == "0 preemptions per finished request"
    assert not list(root.iter("section"))


def test_unknown_verdict_lists_missing_telemetry() -> None:
    root = page(judged("startup_hang"))
    assert text(next(root.iter("h1"))).startswith("CANNOT TELL")
    assert {"Why", "Not seen"} <= {text(e) for level in ("h2", "h3") for e in root.iter(level)}


# -- what it may not do -----------------------------------------------------------------------------------------------


def hostile(report: Report) -> Report:
    """The report with the same harm in every place that telemetry fills."""
    first, *rest = report.findings
    one = first.diagnosis
    subject = (("engine", "0"), ("instance", HOSTILE))
    symptoms = tuple(each._replace(culprits=(HOSTILE,)) for each in one.symptoms)
    proposals = tuple(each._replace(name=HOSTILE) for each in first.proposals)
    bad = first._replace(diagnosis=one._replace(subject=subject, symptoms=symptoms), proposals=proposals)
    return report._replace(
        observed=report.observed._replace(
            target=HOSTILE, notes=(HOSTILE,), servers=(ObservedServer(HOSTILE, HOSTILE, HOSTILE),)
        ),
        progress=tuple(each._replace(subject=subject) for each in report.progress),
        findings=(bad._replace(relaunch=HOSTILE), *rest),
        not_judged=(NotJudged(HOSTILE),),
    )


def test_hostile_label_is_text_in_html() -> None:
    rendered = html.render(hostile(judged("kv_cascade")))
    root = ElementTree.fromstring(rendered)
    assert not list(root.iter("script"))
    assert "<script" not in rendered
    assert "\x1b" not in rendered and "\u202e" not in rendered
    assert text(next(root.iter("pre"))) == SHOWN
    assert SHOWN in text(with_class(root, "div", "card")[0])


@pytest.mark.parametrize("name", ["kv_cascade", "tp2_long_stall", "healthy"])
def test_html_report_loads_no_external_resource(name: str) -> None:
    root = page(judged(name))
    assert {each.tag for each in root.iter()}.isdisjoint({"script", "link", "img", "iframe", "object", "use", "image"})
    for each in root.iter():
        outside = {key for key, value in each.attrib.items() if "//" in value}
        assert outside <= ({"href"} if each.tag == "a" else set())
    style = root.findtext(".//style")
    assert style and "url(" not in style and "@import" not in style


@pytest.mark.parametrize("name", ["kv_cascade", "tp2_long_stall", "healthy", "startup_hang"])
def test_a_browser_closes_every_element_where_xml_does(name: str) -> None:
    """`<p/>` is an element in XML and an opening tag in HTML: but for SVG, only void elements may end themselves."""
    wrong: list[str] = []

    class Parser(HTMLParser):
        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag not in ("meta", "path", "rect", "circle"):
                wrong.append(tag)

    Parser().feed(html.render(judged(name)))
    assert not wrong


def test_same_report_gives_the_same_html_bytes() -> None:
    assert html.render(judged("kv_cascade")) == html.render(judged.__wrapped__("kv_cascade"))


# -- plots ------------------------------------------------------------------------------------------------------------


def test_a_thinned_line_keeps_its_extremes() -> None:
    wave = [math.sin(i / 900) for i in range(DAY)]
    wave[5432], wave[5433] = 9.0, -9.0
    scale = svg.Scale(svg.PLOT, 0, 8 * (DAY - 1), -10, 10)
    (stroke,) = svg.thin([(8.0 * i, value) for i, value in enumerate(wave)], scale)
    assert {(8.0 * 5432, 9.0), (8.0 * 5433, -9.0)} <= set(stroke)
    assert len(stroke) <= 2 * svg.PLOT.width
    assert stroke == sorted(stroke)


def test_plot_line_has_a_gap_without_measurements() -> None:
    points = list(enumerate([1.0, 2.0, None, None, 3.0, None]))
    assert svg.thin(points, svg.Scale(svg.PLOT, 0, 5)) == [[(0, 1.0), (1, 2.0)], [(4, 3.0)]]


def test_gap_within_one_pixel_column_is_drawn_over() -> None:
    scale = svg.Scale(svg.PLOT, 0, svg.PLOT.width - svg.PLOT.left - svg.PLOT.right)
    within = [(0.0, 1.0), (0.1, None), (0.2, 2.0), (1.0, 3.0)]
    at_its_end = [(0.0, 1.0), (0.1, 2.0), (0.2, None), (1.0, 3.0)]
    assert [len(svg.thin(points, scale)) for points in (within, at_its_end)] == [1, 2]


def test_a_page_over_a_day_stays_small() -> None:
    report = judged("kv_cascade")
    one = report.present[0].diagnosis
    instants = tuple(one.instants[0] + 8 * i for i in range(DAY))
    day = with_history(one, instants, tuple(30 + 20 * math.sin(i) for i in range(DAY)))
    rendered = html.render(rewritten(report, day))
    assert "2026-11-22" in rendered
    assert len(rendered.encode()) < 250_000


def test_a_plot_shows_what_is_around_the_incident() -> None:
    """An hour of trouble in a day would be a line."""
    one = judged("kv_cascade").present[0].diagnosis
    instants = tuple(1_790_000_000.0 + 60 * i for i in range(1440))
    day = with_history(one, instants, tuple(float(600 <= i < 660) for i in range(1440)))
    told = day._replace(since=instants[600], until=instants[660])
    plot = ElementTree.fromstring(svg.plot(told.symptoms[0], told, svg.shared_axis([told])))
    drawn = [each.text for each in plot.iter() if each.text]
    assert moment(instants[600 - 180]).removesuffix(" UTC") in drawn
    assert moment(instants[0]).removesuffix(" UTC") not in drawn


@pytest.mark.parametrize("value", [0.0, 0.9, 1e300])
def test_single_scrape_is_a_point_in_the_plot(value: float) -> None:
    report = judged("kv_cascade")
    one = report.present[0].diagnosis
    root = page(rewritten(report, with_history(one, one.instants[-1:], (value,))))
    for plot in with_class(section(root, one), "svg", "plot"):
        (point,) = with_class(plot, "circle", "reported")
        assert svg.PLOT.left < float(point.attrib["cx"]) < svg.PLOT.width - svg.PLOT.right
        assert svg.PLOT.top <= float(point.attrib["cy"]) <= svg.PLOT.height - svg.PLOT.bottom
