"""Instant vector selectors."""

import numpy as np

from diag.promql.nodes import Node, Range, Selector
from diag.promql.samples import NAME, Block, Labels, Millis, Samples, is_stale
from diag.promql.vector import Vector, nameless, stack

LOOKBACK = 5 * 60 * 1000  # ms; a sample exactly this old is too old


def instant_vector(selector: Selector, samples: Samples, instants: Millis) -> Vector:
    """Take the last sample of each series; a stale marker ends it."""
    return _last_samples(selector, samples, instants, of_time=False)


def timestamps(selector: Selector, samples: Samples, instants: Millis) -> Vector:
    """Take the time of the last sample of each series, in unix seconds."""
    return nameless(_last_samples(selector, samples, instants, of_time=True))


def _last_samples(selector: Selector, samples: Samples, instants: Millis, of_time: bool) -> Vector:
    parts = [_last(block, instants - selector.offset, of_time) for block in samples.select(selector.matchers)]
    return stack(parts, instants.size)


def _last(block: Block, at: Millis, of_time: bool) -> Vector:
    place = np.searchsorted(block.times, at, side="right") - 1
    times = block.times[np.maximum(place, 0)]
    recent = (place >= 0) & (times > at - LOOKBACK)
    values = block.values[:, np.maximum(place, 0)]
    present = recent & ~is_stale(values)
    return Vector(block.labels, np.broadcast_to(times / 1000, values.shape) if of_time else values, present)


def pinned_labels(node: Node) -> Labels:
    """Return the labels that absent() gives its result: those that a selector pins to one value.

    Of a label with several matchers the last decides (Prometheus' createLabelsForAbsentFunction); those that an absent
    label passes count as last, because the storage has reordered them by then.
    """
    selector = node.selector if isinstance(node, Range) else node
    matchers = selector.matchers if isinstance(selector, Selector) else ()
    labels: Labels = {}
    pinned: set[str] = set()
    for matcher in sorted(matchers, key=lambda matcher: matcher.op in ("!=", "!~") and matcher.accepts("")):
        if matcher.op == "=" and matcher.label not in {NAME, *pinned}:
            labels[matcher.label] = matcher.value
            pinned.add(matcher.label)
        else:
            labels.pop(matcher.label, None)
    return {name: value for name, value in labels.items() if value}
