"""A kept result of `diag ramp --json`: what was measured, on what, when, and what else differs between two of them.

Results of an older diag lack fields: what they do not tell is None, "" or empty, and is never guessed.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from diag.core.errors import BadUsage
from diag.core.files import read_json
from diag.core.formatting import listed, number, printable, quantity
from diag.normal.baseline import SAME_LENGTHS
from diag.vllm.command.command import Command
from diag.vllm.command.parse import parse as parse_command
from diag.vllm.command.shown import shown

MOST_BYTES = 2**24
MOST_LAUNCH = 2**16
"""Characters of a launch command."""
SCHEMA = "diag.ramp/1"
_ABSURD = 1e15
"""Numbers from here on are not measurements."""
Kind = Literal["closed", "open", "seen"]
Category = Literal["model", "release", "flags", "traffic", "hardware", "SLO", "host"]
NAMES = ("--host", "--port", "--served-model-name", "--api-key", "--uvicorn-log-level", "--root-path", "--model")
"""Flags that change no performance, and the model, which a result names itself."""
OTHERS = 0.05
"""Share of the ceiling from which on traffic of others changes a ramp by as much as two runs differ (judged)."""
WAITS = 0.1
"""Difference in CPU wait from which on a host was clearly busier (judged)."""
NOT_SET = "not set"


class KeptLatency(NamedTuple):
    """Percentiles in seconds and how many were observed; `bucket` as in `step.Latency`."""

    p50: float | None
    p90: float | None
    p99: float | None
    observed: float
    bucket: tuple[float, float | None] | None = None


class LoadStep(NamedTuple):
    """One step: its load, what was served, and how late. `in_flight` are requests at a time, as offered or measured.

    `holds` is true if the load was served inside the SLO. `client_*` are the load generator's own, exact percentiles.
    """

    kind: Kind
    in_flight: float
    served: float
    output_tokens: float
    prompt_tokens: float
    seconds: float
    requests: float
    preemptions: float
    holds: bool
    itl: KeptLatency
    ttft: KeptLatency
    client_itl: KeptLatency | None
    client_ttft: KeptLatency | None
    quarters: tuple[float, ...]
    cpu_wait: float | None


class RampResult(NamedTuple):
    """A ramp; `ceiling` is the step with the highest rate inside the SLO, None without one.

    `steps` are those that count. `launch`, `load_by` and `binds` are "" and `gpus` and `power_limits` empty if the
    result does not tell. `measured` is the file's own time if the result has none (`is_dated`).
    """

    file: str
    target: str
    model: str
    version: str
    launch: str
    gpus: tuple[str, ...]
    power_limits: tuple[float, ...]
    measured: datetime
    is_dated: bool
    lengths: Mapping[str, float | None]
    load_by: str
    others: float | None
    slo: Mapping[str, float]
    ceiling: LoadStep | None
    binds: str
    bound_by: str
    next: str
    steps: tuple[LoadStep, ...]


def read(file: Path) -> RampResult:
    """Read a file that `diag ramp --json` wrote; BadUsage if it is none."""
    shown = printable(str(file))
    try:
        return parse(read_json(file, MOST_BYTES), shown, file.stat().st_mtime)
    except OSError as error:
        raise BadUsage(f"{shown} cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise BadUsage(f"{shown} is no result of diag ramp --json") from error


def parse(document: Any, file: str, written: float) -> RampResult:
    """Parse a document; a wrong one raises one of the errors that `read` turns into BadUsage."""
    launch = str(document.get("launch") or "")
    if document["schema"] != SCHEMA or len(launch) > MOST_LAUNCH:
        raise ValueError
    moment = document.get("measured_at")
    measured = datetime.fromisoformat(moment) if moment else datetime.fromtimestamp(written, UTC)
    top = document["ceiling"]
    # an open-loop step of an older diag does not tell if the server kept up with it: those up to such a ceiling did
    kept_up = _optional(top.get("rate")) if top else None
    binds, lengths = document.get("binds") or {}, ("prompt_tokens", "output_tokens", "prefix_tokens", "length_spread")
    traffic = document.get("traffic") or {}
    return RampResult(
        file=file,
        target=_text(document.get("target")),
        model=_text(document["model"]),
        version=_text(document["vllm"]),
        launch=launch,
        gpus=tuple(map(_text, document.get("gpus") or ())),
        power_limits=tuple(map(_number, document.get("gpu_power_limits") or ())),
        measured=measured.astimezone(UTC) if measured.tzinfo else measured.replace(tzinfo=UTC),
        is_dated=bool(moment),
        lengths={name: _optional(document.get(name)) for name in lengths},
        load_by=_text(document.get("load_by")),
        others=_optional(traffic.get("requests_per_second")),
        slo={_text(name): _number(limit) for name, limit in (document.get("slo") or {}).items()},
        ceiling=_step(top, kept_up) if top else None,
        binds=_text(binds.get("id")),
        bound_by=_text(binds.get("name")),
        next=_text(document.get("next")),
        steps=tuple(step for each in document["steps"] if (step := _step(each, kept_up))),
    )


def _step(step: Mapping[str, Any], kept_up: float | None) -> LoadStep | None:
    """Return a step; None if it does not count, or tells nothing about its load."""
    concurrency, rate, flight = (_optional(step.get(name)) for name in ("concurrency", "rate", "in_flight"))
    load = concurrency or flight
    if not step["counts"] or not load:
        return None
    holds = bool(step["within_slo"]) and (rate is None or (kept_up is not None and rate <= kept_up))
    client = step.get("client") or {}
    quarters = tuple(map(_number, step.get("quarters") or ()))
    return LoadStep(
        kind="closed" if concurrency else "open" if rate else "seen",
        in_flight=load,
        served=_optional(step.get("requests_per_second")) or 0.0,
        output_tokens=_optional(step.get("output_tokens_per_second")) or 0.0,
        prompt_tokens=_optional(step.get("prompt_tokens_per_second")) or 0.0,
        seconds=_optional(step.get("seconds")) or 0.0,
        requests=_optional(step.get("requests")) or 0.0,
        preemptions=_optional(step.get("preemptions")) or 0.0,
        holds=bool(step.get("holds", holds)),
        itl=_latency(step["itl"]),
        ttft=_latency(step.get("ttft") or {}),
        client_itl=_latency(client["itl"]) if client.get("itl") else None,
        client_ttft=_latency(client["ttft"]) if client.get("ttft") else None,
        quarters=quarters if len(quarters) == 4 else (),
        cpu_wait=_optional(step.get("cpu_wait")),
    )


def _latency(latency: Mapping[str, Any]) -> KeptLatency:
    p50, p90, p99, observed = (_optional(latency.get(name)) for name in ("p50", "p90", "p99", "observed"))
    edges = latency.get("bucket")
    bucket = (_number(edges[0]), _optional(edges[1])) if edges else None
    return KeptLatency(p50, p90, p99, observed or 0.0, bucket)


def _text(value: object) -> str:
    return printable(str(value)) if value else ""


def _optional(value: object) -> float | None:
    return None if value is None else _number(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _ABSURD:
        raise ValueError
    return float(value)


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
        ("traffic", "load by", before.load_by, after.load_by),
        ("hardware", "GPUs", _counted(before.gpus), _counted(after.gpus)),
        ("hardware", "power limits", _limits(before), _limits(after)),
    ]
    if before.load_by.startswith(after.load_by) or after.load_by.startswith(before.load_by):
        del pairs[2]  # they differ at most in a version that one of both does not tell
    found = [Difference(*pair) for pair in pairs if pair[2] and pair[3] and pair[2] != pair[3]]

    old_flags, new_flags = _parsed(before.launch), _parsed(after.launch)
    for name in sorted({*old_flags, *new_flags}) if old_flags and new_flags else ():
        old, new = (printable(flags.get(name, NOT_SET), 60) for flags in (old_flags, new_flags))
        if old != new:
            found.append(Difference("flags", name, old, new))

    found += _traffic(before, after)
    for name in sorted(before.slo.keys() & after.slo.keys()):
        if before.slo[name] != after.slo[name]:
            found.append(Difference("SLO", name, number(before.slo[name]), number(after.slo[name])))

    then, now = (ramp.ceiling.cpu_wait if ramp.ceiling else None for ramp in (before, after))
    if then is not None and now is not None and abs(now - then) > WAITS:
        name = "time in which vLLM waited for a CPU"
        found.append(Difference("host", name, quantity(then, "share"), quantity(now, "share")))
    return tuple(found)


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
        command = parse_command(shown(launch)) if launch else None
    except BadUsage:
        return {}
    return {"vllm": "", **settings(command), **command.environment} if command else {}


def _traffic(before: RampResult, after: RampResult) -> Iterator[Difference]:
    """Compare the lengths that were set, else those that were measured at the ceiling, and the traffic of others."""
    names = {"prompt_tokens": "prompt tokens", "output_tokens": "output tokens"}
    for field, name in names.items():
        old, new, factor = before.lengths[field], after.lengths[field], 1.0
        if old is None or new is None:
            ceilings, factor = (before.ceiling, after.ceiling), SAME_LENGTHS
            old, new = (getattr(step, field) / step.served if step and step.served else None for step in ceilings)
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
