"""Differences between two kept ramps other than their results: model, release, flags, traffic, hardware, SLO, host."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from diag.core.errors import BadUsage
from diag.core.formatting import listed, number, printable, quantity
from diag.normal.baseline import SAME_LENGTHS
from diag.ramp.kept import LoadStep, RampResult
from diag.vllm.command.command import Command
from diag.vllm.command.parse import parse
from diag.vllm.command.shown import shown

Category = Literal["model", "release", "flags", "traffic", "hardware", "SLO", "host"]
NAMES = ("--host", "--port", "--served-model-name", "--api-key", "--uvicorn-log-level", "--root-path", "--model")
"""Flags that change no performance, and the model, which a result names itself."""
OTHERS = 0.05
"""Share of the ceiling from which on traffic of others changes a ramp by as much as two runs differ (judged)."""
WAITS = 0.1
"""Difference in CPU wait from which on a host was clearly busier (judged)."""
NOT_SET = "not set"


class Difference(NamedTuple):
    """A circumstance that changed between two ramps, in words."""

    category: Category
    name: str
    before: str
    after: str

    @property
    def sentence(self) -> str:
        return f"{self.name} {self.before} -> {self.after}"


def settings(command: Command) -> dict[str, str]:
    """Return the flags that may change the performance, with their last values."""
    given = {option.name: " ".join(option.values) or "set" for option in command.given}
    return {name: value for name, value in given.items() if name not in NAMES}


def differences(before: RampResult, after: RampResult) -> tuple[Difference, ...]:
    """Return all known differences; what one of both does not tell is none."""
    pairs: list[tuple[Category, str, str, str]] = [
        ("model", "model", before.model, after.model),
        ("release", "vLLM", before.version, after.version),
        ("traffic", "load by", *_clients(before.load_by, after.load_by)),
        ("hardware", "GPUs", _counted(before.gpus), _counted(after.gpus)),
        ("hardware", "power limits", _limits(before), _limits(after)),
    ]
    found = [Difference(*pair) for pair in pairs if pair[2] and pair[3] and pair[2] != pair[3]]
    return (*found, *_flags(before, after), *_traffic(before, after), *_slo(before, after), *_host(before, after))


def unknown(before: RampResult, after: RampResult) -> tuple[str, ...]:
    """Return the circumstances that one of both results does not tell."""
    told: dict[str, tuple[object, object]] = {
        "release": (before.version, after.version),
        "flags": (_parsed(before.launch), _parsed(after.launch)),
        "GPUs": (before.gpus, after.gpus),
        "GPU power limits": (before.power_limits, after.power_limits),
        "load generator": (before.load_by, after.load_by),
    }
    return tuple(name for name, (then, now) in told.items() if not then or not now)


def _clients(before: str, after: str) -> tuple[str, str]:
    """Return two origins of the load, "" twice if they differ only in a version that one of both does not tell."""
    return ("", "") if before.startswith(after) or after.startswith(before) else (before, after)


def _counted(names: Iterable[str]) -> str:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return listed([f"{count} x {name}" if count > 1 else name for name, count in sorted(counts.items())])


def _limits(ramp: RampResult) -> str:
    return _counted(quantity(limit, "watts") for limit in ramp.power_limits)


def _parsed(launch: str) -> Mapping[str, str]:
    """Return flags and environment of a launch command, {} if it cannot be read; a file may hold secrets as well."""
    try:
        command = parse(shown(launch)) if launch else None
    except BadUsage:
        return {}
    return {"vllm": "", **settings(command), **command.environment} if command else {}


def _flags(before: RampResult, after: RampResult) -> Iterator[Difference]:
    then, now = _parsed(before.launch), _parsed(after.launch)
    for name in sorted({*then, *now}) if then and now else ():
        old, new = (printable(flags.get(name, NOT_SET), 60) for flags in (then, now))
        if old != new:
            yield Difference("flags", name, old, new)


def _traffic(before: RampResult, after: RampResult) -> Iterator[Difference]:
    """Compare the lengths that were set, else those that were measured at the ceiling, and the traffic of others."""
    names = {"prompt_tokens": "prompt tokens", "output_tokens": "output tokens"}
    for field, name in names.items():
        old, new, factor = before.lengths[field], after.lengths[field], 1.0
        if old is None or new is None:
            (old, new), factor = (_mean(ramp.ceiling, field) for ramp in (before, after)), SAME_LENGTHS
        if old and new and max(old, new) > factor * min(old, new):
            yield Difference("traffic", f"{name} a request", number(old), number(new))
    for field, name in {"prefix_tokens": "shared prefix tokens", "length_spread": "spread of the lengths"}.items():
        old, new = before.lengths[field], after.lengths[field]
        unit = "share" if field == "length_spread" else ""
        if old is not None and new is not None and quantity(old, unit) != quantity(new, unit):
            yield Difference("traffic", name, quantity(old, unit), quantity(new, unit))
    then, now = before.others, after.others
    if then is not None and now is not None and before.ceiling and abs(now - then) > OTHERS * before.ceiling.served:
        yield Difference("traffic", "requests/s of others", number(then), number(now))


def _mean(step: LoadStep | None, field: str) -> float | None:
    if step is None or not step.served:
        return None
    return (step.prompt_tokens if field == "prompt_tokens" else step.output_tokens) / step.served


def _slo(before: RampResult, after: RampResult) -> Iterator[Difference]:
    for name in sorted(before.slo.keys() & after.slo.keys()):
        if before.slo[name] != after.slo[name]:
            yield Difference("SLO", name, number(before.slo[name]), number(after.slo[name]))


def _host(before: RampResult, after: RampResult) -> Iterator[Difference]:
    then, now = (ramp.ceiling.cpu_wait if ramp.ceiling else None for ramp in (before, after))
    if then is not None and now is not None and abs(now - then) > WAITS:
        yield Difference("host", "time in which vLLM waited for a CPU", quantity(then, "share"), quantity(now, "share"))
