"""A reading's history as an inline SVG; its colours come from the style sheet of the page."""

import datetime
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from diag.core.formatting import clock, moment, quantity
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.diagnose import Diagnosis, onset
from diag.report import sentences as words
from diag.report.markup import element

Point = tuple[float, float]
"""A time in unix seconds and a value."""
Points = list[tuple[float, float | None]]
"""The same where there may be no value."""
STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
"""Seconds between two marks of time that a reader can count in."""
MARKS = 6
ROOM, LEAST_ROOM = 3, 900
"""What a plot shows around an incident, before and after: so many times its length, at least so many seconds."""
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
    """From seconds and values to pixels; a single instant stands in the middle."""

    box: Box
    start: float
    end: float
    low: float = 0.0
    high: float = 1.0

    def x(self, unix: float) -> float:
        """Pixels from the left."""
        share = (unix - self.start) / (self.end - self.start) if self.end > self.start else 0.5
        return self.box.left + share * (self.right - self.box.left)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        share = (value - self.low) / (self.high - self.low)
        return self.bottom - share * (self.bottom - self.box.top)

    @property
    def right(self) -> int:
        """Where the area ends."""
        return self.box.width - self.box.right

    @property
    def bottom(self) -> int:
        """Where the area ends."""
        return self.box.height - self.box.bottom


def plot(reading: Reading, diagnosis: Diagnosis) -> Markup:
    """The history around the incident, the threshold, the side where the condition holds, and since when it does."""
    points = _around(reading, diagnosis)
    scale = _scale(PLOT, points, reading.limit)
    parts = [
        _shade(reading, scale),
        *_times(scale),
        *_values(points, reading.condition.signal.unit, scale),
        _present(diagnosis, scale),
        *_limit(reading, scale),
        _line(points, scale),
        *_onset(reading, diagnosis, scale),
        _reported(reading, diagnosis, scale),
    ]
    name = f"{reading.condition.signal.name}, {reading.threshold}, over time"
    return whole(PLOT, "plot", *parts, role="img", aria_label=name)


def spark(reading: Reading, diagnosis: Diagnosis) -> Markup:
    """The history and the threshold alone, small enough for a row of a table."""
    points = list(zip(diagnosis.instants, reading.history, strict=True))
    scale = _scale(SPARK, points, reading.limit)
    limit = horizontal(scale.y(reading.limit), scale, "limit")
    return whole(SPARK, "spark", limit, _line(points, scale), aria_hidden="true")


def bar(diagnosis: Diagnosis, start: float, end: float) -> Markup:
    """When an incident was present within the span that was observed."""
    scale = Scale(BAR, start, end)
    track = element("rect", class_="track", width=BAR.width, height=BAR.height, rx=2)
    return whole(BAR, "bar", track, _span(diagnosis, scale, 0, BAR.height), aria_hidden="true")


def thin(points: Points, scale: Scale) -> list[list[Point]]:
    """Strokes without a hole, of each column of pixels the least and the greatest point.

    A hole that begins and ends inside one column is too narrow to be drawn.
    """
    strokes: list[list[Point]] = [[]]
    for _, group in groupby(points, key=lambda point: round(scale.x(point[0]))):
        column = list(group)
        strokes += [[]] if column[0][1] is None else []
        strokes[-1] += _extremes([(unix, value) for unix, value in column if value is not None])
        strokes += [[]] if column[-1][1] is None else []
    return [stroke for stroke in strokes if stroke]


def _extremes(points: list[Point]) -> list[Point]:
    by_value = sorted(points, key=lambda point: point[1])
    return sorted({*by_value[:1], *by_value[-1:]})


def _around(reading: Reading, diagnosis: Diagnosis) -> Points:
    """The history from some time before the incident to some time after it."""
    begin = diagnosis.instants[0] if diagnosis.since is None else diagnosis.since
    end = diagnosis.instants[-1] if diagnosis.until is None else diagnosis.until
    room = max(ROOM * (end - begin), LEAST_ROOM)
    points = zip(diagnosis.instants, reading.history, strict=True)
    return [(unix, value) for unix, value in points if begin - room <= unix <= end + room]


def _scale(box: Box, points: Points, limit: float) -> Scale:
    """All that is drawn lies within, with some room above and below."""
    drawn = (*(value for _, value in points), limit)
    known = [value for value in drawn if value is not None and math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    room = (high - low) * 0.1 or abs(high) * 0.1 or 1.0
    return Scale(box, points[0][0], points[-1][0], low - room, high + room)


# -- the parts of a plot ----------------------------------------------------------------------------------------------


def _shade(reading: Reading, scale: Scale) -> Markup:
    """The side of the threshold where the condition holds."""
    limit = scale.y(reading.limit)
    sides = {">": (scale.box.top, limit), "<": (limit, scale.bottom), "=": (limit - 2, limit + 2)}
    top, bottom = sides[reading.condition.op[0]]
    return _rect("holds", scale.box.left, top, scale.right, bottom)


def _limit(reading: Reading, scale: Scale) -> Iterator[Markup]:
    y = scale.y(reading.limit)
    yield horizontal(y, scale, "limit")
    yield text(reading.threshold, scale.right + 6, y + 4, "limit")


def _values(points: Points, unit: str, scale: Scale) -> Iterator[Markup]:
    """The least and the most value at their heights, or one below the other where these are too close."""
    known = [value for _, value in points if value is not None]
    if not known:
        return
    most = scale.y(max(known)) + 4
    yield text(quantity(max(known), unit), scale.box.left - 6, most, "end")
    if min(known) < max(known):
        yield text(quantity(min(known), unit), scale.box.left - 6, max(scale.y(min(known)) + 4, most + LINE), "end")


def _times(scale: Scale) -> Iterator[Markup]:
    """The first and the last instant in full, and round times between them where there is room."""
    base = scale.box.height - 8
    yield horizontal(scale.bottom, scale, "axis")
    if scale.start == scale.end:
        yield text(moment(scale.start), scale.x(scale.start), base, "middle")
        return
    first = moment(scale.start).removesuffix(" UTC")
    same_day = _time_format(scale) is clock
    yield text(first, scale.box.left, base, "start")
    yield text(_time_format(scale)(scale.end), scale.right, base, "end")
    step = next((step for step in STEPS if scale.end - scale.start <= step * MARKS), STEPS[-1])
    for unix in range(math.ceil(scale.start / step) * step, math.ceil(scale.end), step):
        yield from _mark(unix, step, scale, 80 if same_day else 140)


def _time_format(scale: Scale) -> words.TimeFormat:
    """How a time on this axis is written: the date goes without saying within one day."""
    one_day = moment(scale.start).split()[0] == moment(scale.end).split()[0]
    return clock if one_day else moment


def _mark(unix: int, step: int, scale: Scale, room: int) -> Iterator[Markup]:
    """A round time; its label only where those of the first and the last instant leave room for it."""
    x = scale.x(unix)
    yield vertical(x, scale, "grid")
    if scale.box.left + 146 < x < scale.right - room - 24:
        form = "%H:%M:%S" if step < 60 else "%H:%M" if step < 86400 else "%m-%d"
        label = datetime.datetime.fromtimestamp(unix, datetime.UTC).strftime(form)
        yield text(label, x, scale.box.height - 8, "middle")


def _present(diagnosis: Diagnosis, scale: Scale) -> Markup:
    """On the axis: from when to when the incident as a whole was present."""
    spans = (_span(episode, scale, scale.bottom - 2, scale.bottom + 2) for episode in diagnosis.one_by_one)
    return Markup("").join(spans)


def _line(points: Points, scale: Scale) -> Markup:
    return element("path", class_="line", d="".join(_stroke(stroke, scale) for stroke in thin(points, scale)))


def _stroke(points: list[Point], scale: Scale) -> str:
    """One unbroken line; a single point becomes a dot by its round ends."""
    pairs = " ".join(f"{pixels(scale.x(unix))} {pixels(scale.y(value))}" for unix, value in points)
    return f"M{pairs}" if len(points) > 1 else f"M{pairs}h0"


def _onset(reading: Reading, diagnosis: Diagnosis, scale: Scale) -> Iterator[Markup]:
    began = onset(reading, diagnosis)
    if began is None:
        return
    x = scale.x(max(began, scale.start))
    start = _time_format(scale)(began)
    label = f"since {start}" if began > diagnosis.instants[0] else f"since before {start}"
    anchor = "start" if x < scale.box.width / 3 else "end" if x > scale.box.width * 2 / 3 else "middle"
    yield vertical(x, scale, "onset")
    yield text(label, x, scale.box.top - 8, f"onset {anchor}")


def _reported(reading: Reading, diagnosis: Diagnosis, scale: Scale) -> Markup:
    """A dot at the value that is printed."""
    if reading.value is None or diagnosis.until is None:
        return Markup()
    x, y = pixels(scale.x(diagnosis.until)), pixels(scale.y(reading.value))
    return element("circle", class_="reported", cx=x, cy=y, r=3.5)


# -- shapes -----------------------------------------------------------------------------------------------------------


def whole(box: Box, class_: str, *parts: str, **attributes: object) -> Markup:
    """A plot of that size with these parts."""
    return element("svg", *parts, class_=class_, viewBox=f"0 0 {box.width} {box.height}", **attributes)


def _span(diagnosis: Diagnosis, scale: Scale, top: float, bottom: float) -> Markup:
    """From `since` to `until`; an incident of one instant can be seen as well."""
    left = scale.x(scale.start if diagnosis.since is None else diagnosis.since)
    right = scale.x(scale.end if diagnosis.until is None else diagnosis.until)
    left = min(left, right - 3)
    return _rect("present", max(left, scale.box.left), top, right, bottom)


def _rect(class_: str, left: float, top: float, right: float, bottom: float) -> Markup:
    width, height = pixels(right - left), pixels(bottom - top)
    return element("rect", class_=class_, x=pixels(left), y=pixels(top), width=width, height=height)


def horizontal(y: float, scale: Scale, class_: str) -> Markup:
    """A line from side to side."""
    return element("path", class_=class_, d=f"M{scale.box.left} {pixels(y)}H{scale.right}")


def vertical(x: float, scale: Scale, class_: str) -> Markup:
    """A line from top to bottom."""
    return element("path", class_=class_, d=f"M{pixels(x)} {scale.box.top}V{scale.bottom}")


def text(label: str, x: float, y: float, class_: str) -> Markup:
    """A label; nothing for an empty one."""
    return element("text", label, class_=class_, x=pixels(x), y=pixels(y)) if label else Markup()


def pixels(length: float) -> str:
    """As it is written."""
    return f"{length:.4g}"
