"""A ramp as one HTML page that needs no network and no script: what the terminal says, and its curves."""

from collections.abc import Callable, Iterator

from diag import __version__
from diag.ramp.analysis import Ramp
from diag.ramp.step import Step
from diag.report import curves
from diag.report.curves import Curve
from diag.report.html import page
from diag.report.ramp import HEAD, headline, row, summary

TEMPLATE = "ramp.xhtml.j2"


def render(ramp: Ramp) -> str:
    """The page, which is XML as well."""
    return page(
        TEMPLATE,
        title=headline(ramp),
        summary=[(label, texts) for label, texts in summary(ramp) if texts],
        curves=[(curve, curves.plot(curve)) for curve in _curves(ramp)],
        head=HEAD,
        rows=[row(ramp, step) for step in ramp.steps],
        version=__version__,
    )


def _curves(ramp: Ramp) -> Iterator[Curve]:
    contract = ramp.limits.contract
    yield _curve(ramp, "requests per second", "1/s", lambda step: step.requests_per_second)
    yield _curve(ramp, "output tokens per second", "1/s", lambda step: step.output_tokens_per_second)
    yield _curve(ramp, "TTFT (p50)", "seconds", lambda step: step.ttft.p50, contract.ttft_seconds)
    yield _curve(ramp, "TTFT (p99)", "seconds", lambda step: step.ttft.p99, contract.ttft_seconds)
    yield _curve(ramp, "inter-token latency (p50)", "seconds", lambda step: step.itl.p50, contract.itl_seconds)
    yield _curve(ramp, "inter-token latency (p99)", "seconds", lambda step: step.itl.p99, contract.itl_seconds)


def _curve(
    ramp: Ramp, name: str, unit: str, value: Callable[[Step], float | None], limit: float | None = None
) -> Curve:
    points = sorted(
        (step.in_flight, found, step.offer.rate is None)
        for step in ramp.steps
        if step.in_flight is not None and (found := value(step)) is not None
    )
    knee = ramp.ceiling.knee.in_flight if ramp.ceiling and ramp.ceiling.knee else None
    closed, opened = ([(load, at) for load, at, line in points if line is wanted] for wanted in (True, False))
    return Curve(name, unit, closed, opened, limit, knee)
