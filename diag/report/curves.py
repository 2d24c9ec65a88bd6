"""Curves of a ramp as inline SVG: throughput and latency against load, the SLO and the knee marked."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup

from diag.core.formatting import number, quantity
from diag.report.markup import element
from diag.report.svg import PLOT, Scale, horizontal, pixels, text, vertical, whole

Dots = Sequence[tuple[float, float]]
"""Load and value, ascending by load."""


class Curve(NamedTuple):
    """What one plot shows: closed-loop steps as a line, open-loop ones as dots, the SLO as a dashed line."""

    name: str
    unit: str
    line: Dots
    dots: Dots = ()
    limit: float | None = None
    knee: float | None = None


def plot(curve: Curve) -> Markup:
    """The curve, from no load on; nothing where there is no point."""
    points = [*curve.line, *curve.dots]
    if not points:
        return Markup()
    top = max(value for _, value in points)
    shown = curve.limit if curve.limit is not None and curve.limit <= 4 * top else None
    scale = Scale(PLOT, 0.0, max(load for load, _ in points) * 1.05 or 1.0, 0.0, max(top, shown or 0.0) * 1.15 or 1.0)
    parts = [*_axes(scale, top, curve.unit), *_marks(curve, shown, scale), _line(curve.line, scale)]
    parts += [_dot(point, scale, "reported") for point in curve.line]
    parts += [_dot(point, scale, "opened") for point in curve.dots]
    return whole(PLOT, "plot", *parts, role="img", aria_label=f"{curve.name} against requests in flight")


def _axes(scale: Scale, top: float, unit: str) -> Iterator[Markup]:
    yield horizontal(scale.bottom, scale, "axis")
    yield text(quantity(top, unit), scale.box.left - 6, scale.y(top) + 4, "end")
    yield text("0", scale.box.left - 6, scale.bottom + 4, "end")
    step = _round(scale.end / 4)
    for at in range(int(scale.end / step) + 1):
        yield text(number(at * step), scale.x(at * step), scale.box.height - 8, "middle")


def _round(least: float) -> float:
    """The next of 1, 2, 5, 10, 20 ... from there on."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def _marks(curve: Curve, limit: float | None, scale: Scale) -> Iterator[Markup]:
    if limit is not None:
        yield horizontal(scale.y(limit), scale, "limit")
        yield text(f"SLO {quantity(limit, curve.unit)}", scale.right + 6, scale.y(limit) + 4, "limit")
    if curve.knee is not None:
        yield vertical(scale.x(curve.knee), scale, "onset")
        yield text("knee", scale.x(curve.knee), scale.box.top - 8, "onset middle")


def _line(points: Dots, scale: Scale) -> Markup:
    pairs = " ".join(f"{pixels(scale.x(load))} {pixels(scale.y(value))}" for load, value in points)
    return element("path", class_="line", d=f"M{pairs}") if len(points) > 1 else Markup()


def _dot(point: tuple[float, float], scale: Scale, class_: str) -> Markup:
    load, value = point
    return element("circle", class_=class_, cx=pixels(scale.x(load)), cy=pixels(scale.y(value)), r=3.5)
