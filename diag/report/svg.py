"""Plots as inline SVG: the history of a reading, the span of an incident; colours come from the style sheet."""

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from markupsafe import Markup

from diag.core.formatting import TimeFormat, clock, moment, quantity
from diag.core.subjects import instance_name
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.onset import onset
from diag.diagnosis.vitals import Vitals
from diag.report.templates import pixels, shape

Point = tuple[float, float]
"""A time in unix seconds and a value."""
Points = list[tuple[float, float | None]]
"""Times in unix seconds with values, None for a hole."""
STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
"""Round numbers of seconds between two marks of the time axis."""
MARKS = 6
FEW_SCRAPES = 60
"""The most scrapes that are drawn as dots."""
ROOM, LEAST_ROOM = 3, 900
"""The time that a plot shows before and after an incident: a multiple of its length, at least so many seconds."""
LINE = 13
"""The height of a line of text."""


@dataclass(frozen=True)
class Box:
    """The size of a plot and the room around its area, in pixels."""

    width: int
    height: int
    left: int = 0
    right: int = 0
    top: int = 0
    bottom: int = 0


PLOT = Box(width=680, height=168, left=62, right=64, top=26, bottom=24)
SPARK = Box(width=160, height=28, left=2, right=2, top=2, bottom=2)
BAR = Box(width=240, height=10)


@dataclass(frozen=True)
class Scale:
    """Maps seconds and values to pixels; a single instant stands in the middle."""

    box: Box
    start: float
    end: float
    low: float = 0.0
    high: float = 1.0

    def x(self, unix: float) -> float:
        """Return pixels from the left."""
        share = (unix - self.start) / (self.end - self.start) if self.end > self.start else 0.5
        return self.box.left + share * (self.right - self.box.left)

    def y(self, value: float) -> float:
        """Return pixels from the top."""
        share = (value - self.low) / (self.high - self.low)
        return self.bottom - share * (self.bottom - self.box.top)

    @property
    def right(self) -> int:
        return self.box.width - self.box.right

    @property
    def bottom(self) -> int:
        return self.box.height - self.box.bottom


class Axis(NamedTuple):
    """The time that all plots of a page show, unix seconds, and the restarts of each server in it."""

    start: float
    end: float
    restarts: Mapping[str, tuple[float, ...]] = MappingProxyType({})


def shared_axis(diagnoses: Sequence[Diagnosis], signs: Sequence[Vitals] = ()) -> Axis:
    """Return the time around the primary incidents, and around any other one that lies outside of it."""
    ordered = sorted(diagnoses, key=lambda diagnosis: not diagnosis.primary)
    start, end = _around(ordered[0])
    for diagnosis in ordered[1:]:
        begin, until = _span_of(diagnosis)
        if diagnosis.primary or until < start or begin > end:
            first, last = _around(diagnosis)
            start, end = min(start, first), max(end, last)
    return Axis(start, end, {each.name: each.restarts for each in signs})


def _around(diagnosis: Diagnosis) -> tuple[float, float]:
    begin, end = _span_of(diagnosis)
    room = max(ROOM * (end - begin), LEAST_ROOM)
    return max(begin - room, diagnosis.instants[0]), min(end + room, diagnosis.instants[-1])


def _span_of(diagnosis: Diagnosis) -> tuple[float, float]:
    begin = diagnosis.instants[0] if diagnosis.since is None else diagnosis.since
    return begin, diagnosis.instants[-1] if diagnosis.until is None else diagnosis.until


def plot(reading: Reading, diagnosis: Diagnosis, axis: Axis) -> Markup:
    """Plot the history, the threshold with its healthy and its ill side, onset, restarts and the incident's time."""
    history = zip(diagnosis.instants, reading.history, strict=True)
    points: Points = [(unix, value) for unix, value in history if axis.start <= unix <= axis.end]
    scale = _scale(PLOT, points, reading.limit, axis)
    threshold = scale.y(reading.limit)

    sides = {">": (scale.box.top, threshold), "<": (threshold, scale.bottom), "=": (threshold - 2, threshold + 2)}
    top, bottom = sides[reading.condition.op[0]]
    base = scale.bottom
    healthy = [(scale.box.top, top), (bottom, base)]
    restarts = axis.restarts.get(instance_name(diagnosis.subject), ())
    parts = [
        shape("rect", "holds", scale.box.left, top, scale.right, bottom),
        *(
            shape("rect", "fine", scale.box.left, above, scale.right, below)
            for above, below in healthy
            if below > above
        ),
        *_axes(points, reading.condition.signal.unit, scale),
        *(_span(episode, scale, base - 2, base + 2) for episode in diagnosis.one_by_one),
        *(shape("vertical", scale.x(unix), scale, "restart") for unix in restarts if axis.start <= unix <= axis.end),
        shape("horizontal", threshold, scale, "limit"),
        shape("text", reading.threshold, scale.right + 6, threshold + 4, "limit"),
        _line(points, scale),
    ]
    if len(points) <= FEW_SCRAPES:
        dots = [(unix, value) for unix, value in points if value is not None]
        parts += [shape("circle", "scrape", scale.x(unix), scale.y(value), 1.8) for unix, value in dots]
    began = onset(reading, diagnosis)
    if began is not None:
        x, start = scale.x(max(began, scale.start)), _time_format(scale)(began)
        crossed = "this signal crossed at" if began > diagnosis.instants[0] else "this signal crossed before"
        anchor = "start" if x < PLOT.width / 3 else "end" if x > PLOT.width * 2 / 3 else "middle"
        parts.append(shape("vertical", x, scale, "onset"))
        parts.append(shape("text", f"{crossed} {start}", x, scale.box.top - 8, f"onset {anchor}"))
    if reading.value is not None and diagnosis.until is not None:
        parts.append(shape("circle", "reported", scale.x(diagnosis.until), scale.y(reading.value), 3.5))
    name = f"{reading.condition.signal.name}, {reading.threshold}, over time"
    return shape("whole", PLOT, "plot", parts, name)


def spark(instants: Sequence[float], history: Sequence[float | None], limit: float | None = None) -> Markup:
    """Plot a history alone, small enough for a row of a table: with its threshold, or from zero on."""
    points = list(zip(instants, history, strict=True))
    scale = _scale(SPARK, points, limit or 0.0)
    threshold = [] if limit is None else [shape("horizontal", scale.y(limit), scale, "limit")]
    return shape("whole", SPARK, "spark", [*threshold, _line(points, scale)])


def bar(diagnosis: Diagnosis, start: float, end: float) -> Markup:
    """Mark the time in which an incident was present within the observed span."""
    scale = Scale(BAR, start, end)
    return shape("whole", BAR, "bar", [shape("track", BAR), _span(diagnosis, scale, 0, BAR.height)])


def thin(points: Points, scale: Scale) -> list[list[Point]]:
    """Reduce the points to strokes without a hole, with the least and the greatest point of each column of pixels.

    A hole that begins and ends inside one column is too narrow to be drawn.
    """
    strokes: list[list[Point]] = [[]]
    for _, group in groupby(points, key=lambda point: round(scale.x(point[0]))):
        column = list(group)
        by_value = sorted(((unix, value) for unix, value in column if value is not None), key=lambda point: point[1])
        strokes += [[]] if column[0][1] is None else []
        strokes[-1] += sorted({*by_value[:1], *by_value[-1:]})
        strokes += [[]] if column[-1][1] is None else []
    return [stroke for stroke in strokes if stroke]


def _scale(box: Box, points: Points, limit: float, axis: Axis | None = None) -> Scale:
    """Return a scale that holds all points and the threshold, with some room above and below."""
    start, end = axis[:2] if axis else (points[0][0], points[-1][0])
    drawn = (*(value for _, value in points), limit)
    known = [value for value in drawn if value is not None and math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    room = (high - low) * 0.1 or abs(high) * 0.1 or 1.0
    return Scale(box, start, end, low - room, high + room)


# -- the parts of a plot ----------------------------------------------------------------------------------------------


def _axes(points: Points, unit: str, scale: Scale) -> Iterator[Markup]:
    """Label the first and the last instant in full, round times where there is room, the least and greatest value."""
    base = scale.box.height - 8
    yield shape("horizontal", scale.bottom, scale, "axis")
    if scale.start == scale.end:
        yield shape("text", moment(scale.start), scale.x(scale.start), base, "middle")
    else:
        start = datetime.datetime.fromtimestamp(scale.start, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        yield shape("text", start, scale.box.left, base, "start")
        yield shape("text", _time_format(scale)(scale.end), scale.right, base, "end")
        step = next((step for step in STEPS if scale.end - scale.start <= step * MARKS), STEPS[-1])
        form = "%H:%M:%S" if step < 60 else "%H:%M" if step < 86400 else "%m-%d"
        last_label = 80 if _time_format(scale) is clock else 140
        for unix in range(math.ceil(scale.start / step) * step, math.ceil(scale.end), step):
            x = scale.x(unix)
            yield shape("vertical", x, scale, "grid")
            if scale.box.left + 146 < x < scale.right - last_label - 24:
                yield shape(
                    "text", datetime.datetime.fromtimestamp(unix, datetime.UTC).strftime(form), x, base, "middle"
                )

    known = [value for _, value in points if value is not None]
    if known:
        most, left = scale.y(max(known)) + 4, scale.box.left - 6
        yield shape("text", quantity(max(known), unit), left, most, "end")
        if min(known) < max(known):  # one below the other if the values are too close
            yield shape("text", quantity(min(known), unit), left, max(scale.y(min(known)) + 4, most + LINE), "end")


def _time_format(scale: Scale) -> TimeFormat:
    """Return the time of day if the axis lies within one day, else date and time."""
    one_day = moment(scale.start).split()[0] == moment(scale.end).split()[0]
    return clock if one_day else moment


def _line(points: Points, scale: Scale) -> Markup:
    """Draw the strokes of the points; a single point becomes a dot by its round ends."""
    path = ""
    for stroke in thin(points, scale):
        pairs = " ".join(f"{pixels(scale.x(unix))} {pixels(scale.y(value))}" for unix, value in stroke)
        path += f"M{pairs}" if len(stroke) > 1 else f"M{pairs}h0"
    return shape("path", "line", path)


def _span(diagnosis: Diagnosis, scale: Scale, top: float, bottom: float) -> Markup:
    """Draw a bar from `since` to `until`, at least three pixels wide."""
    left = scale.x(scale.start if diagnosis.since is None else diagnosis.since)
    right = scale.x(scale.end if diagnosis.until is None else diagnosis.until)
    left = min(left, right - 3)
    return shape("rect", "present", max(left, scale.box.left), top, right, bottom)
