"""The properties of the servers in a Prometheus: target labels, model, GPU, driver and flags, in four requests at most.

A server that has no entry under a property is unknown in it; a target without a label has the value "".
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

from diag.core.errors import NotAnswered
from diag.core.subjects import label_value
from diag.sources.prometheus.scope import any_of
from diag.vllm.running_config import FLAGS

if TYPE_CHECKING:  # reports of recordings import this module, too, and must not load the client
    from diag.sources.prometheus.servers import PrometheusSource

Kind = Literal["label", "version", "model", "gpu", "driver", "flag", "hour"]
NOT_SET = ("num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency")
"""Published like flags, but measured by vLLM at start-up."""
MOST_FLAGS = 5
"""Flags whose value is read from each server."""
MOST_JOBS = 50
"""Jobs that a matcher names; with more jobs, the `up` of all targets is read."""
RECENT = "5m"
"""Window for GPUs and flags: they are published at every scrape."""
GPUS = f"count by (instance, name, driver_version) (last_over_time(diag_gpu_info[{RECENT}]))"


class Property(NamedTuple):
    """A property in which servers agree or differ: a label or flag by its name, or one of the other kinds."""

    kind: Kind
    name: str


VERSION = Property("version", "vLLM version")
MODEL = Property("model", "model")
GPU = Property("gpu", "GPU")
DRIVER = Property("driver", "GPU driver")
HOUR = Property("hour", "hour of the day (UTC)")
Values = tuple[str, ...]
Properties = dict[Property, dict[str, Values]]
"""The values by server; most servers have one."""


def properties(remote: "PrometheusSource", least: int, most: int) -> Properties:
    """Return the properties of all members, with flags of which a value occurs on `least` to `most` servers.

    If Prometheus refuses a query, the properties that were read before are returned.
    """
    models = {name: tuple(sorted(member.models)) for name, member in remote.members.items() if member.models}
    by_property: Properties = {MODEL: models}
    targets = {name: member.targets for name, member in remote.members.items()}
    span = remote.end - remote.start + 1
    try:
        rows = [
            (name, labels)
            for name, labels, _ in remote.at_end(f"last_over_time(up{{{_job_matcher(remote)}}}[{span}ms])")
            if (label_value(labels, "job"), label_value(labels, "instance")) in targets.get(name, ())
        ]
        for label in {label for _, labels in rows for label in labels} - {"__name__", "instance"}:
            pairs = ((name, label_value(labels, label)) for name, labels in rows)
            by_property[Property("label", label)] = _by_server(pairs)
        gpus = remote.at_end(GPUS)
        for kind, label in ((GPU, "name"), (DRIVER, "driver_version")):
            pairs = ((name, value) for name, labels, _ in gpus if (value := label_value(labels, label)))
            by_property[kind] = _by_server(pairs)
        by_property |= _flags(remote, least, most)
    except NotAnswered:
        pass
    return by_property


def _flags(remote: "PrometheusSource", least: int, most: int) -> Properties:
    """Count the servers by value first, then read from each server only the flags whose value may separate some."""

    def of_servers(*matchers: str) -> str:
        inside = ",".join(filter(None, (*matchers, _job_matcher(remote))))
        return f"max by (instance, flag) (last_over_time(diag_vllm_config{{{inside}}}[{RECENT}]))"

    counts: dict[str, dict[float, int]] = {
        flag: {value: len(names) for value, names in values.items()} for flag, values in remote.page_flags.items()
    }
    for _, labels, count in remote.at_end(f'count_values by (flag) ("value", {of_servers()})'):
        with suppress(ValueError, OverflowError):  # not a count of values
            values, value = counts.setdefault(label_value(labels, "flag"), {}), float(label_value(labels, "value"))
            values[value] = values.get(value, 0) + round(count)
    near = {
        flag: min((count for count in values.values() if least <= count <= most), default=0)
        for flag, values in counts.items()
        if flag in FLAGS and flag not in NOT_SET
    }
    flags = sorted((flag for flag in near if near[flag]), key=lambda flag: (near[flag], flag))[:MOST_FLAGS]
    if not flags:
        return {}
    rows = [
        (flag, name, value)
        for flag in flags
        for value, names in remote.page_flags.get(flag, {}).items()
        for name in names
    ]
    published = remote.at_end(of_servers(any_of("flag", flags)))
    rows += [(label_value(labels, "flag"), name, value) for name, labels, value in published]
    pairs: dict[str, list[tuple[str, str]]] = {flag: [] for flag in flags}
    for flag, name, value in rows:
        text = f"{value:.0f}" if value.is_integer() else f"{value:g}"
        if flag in pairs:
            pairs[flag].append((name, str(bool(value)).lower() if FLAGS[flag] == "switch" else text))
    return {Property("flag", flag): _by_server(of_flag) for flag, of_flag in pairs.items()}


def _job_matcher(remote: "PrometheusSource") -> str:
    jobs = {job for member in remote.members.values() for job, _ in member.targets}
    return any_of("job", [re.escape(job) for job in sorted(jobs)]) if len(jobs) <= MOST_JOBS else ""


def _by_server(pairs: Iterable[tuple[str, str]]) -> dict[str, Values]:
    """Return the distinct values of each server; equal values share their memory."""
    shared: dict[Values, Values] = {}
    by_server: dict[str, Values] = {}
    for name, value in pairs:
        values = tuple(sorted({*by_server.get(name, ()), value}))
        by_server[name] = shared.setdefault(values, values)
    return by_server
