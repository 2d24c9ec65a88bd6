"""A kept result of `diag ramp --json`: what was measured, on what, and when.

Results of an older diag lack fields: what they do not tell is None, "" or empty, and is never guessed.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from diag.core.errors import BadUsage
from diag.core.files import read_json
from diag.core.formatting import printable
from diag.vllm.command.command import Command

MOST_BYTES = 2**24
MOST_LAUNCH = 2**16
"""Characters of a launch command."""
_SCHEMA = "diag.ramp/1"
ABSURD = 1e15
"""Numbers from here on are not measurements."""
Kind = Literal["closed", "open", "seen"]
NAMES = ("--host", "--port", "--served-model-name", "--api-key", "--uvicorn-log-level", "--root-path", "--model")
"""Flags that change no performance, and the model, which a result names itself."""


class Latency(NamedTuple):
    """Percentiles in seconds and how many were observed; `late` is the share beyond the SLO, None if unknown.

    `bucket` has the edges of the histogram's bucket in which p99 lies, the upper one None if it has none; None for a
    client's exact percentiles.
    """

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    observed: float = 0.0
    late: float | None = None
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
    itl: Latency
    ttft: Latency
    client_itl: Latency | None
    client_ttft: Latency | None
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
    if document["schema"] != _SCHEMA or len(launch) > MOST_LAUNCH:
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


def _latency(latency: Mapping[str, Any]) -> Latency:
    p50, p90, p99, observed = (_optional(latency.get(name)) for name in ("p50", "p90", "p99", "observed"))
    edges = latency.get("bucket")
    bucket = (_number(edges[0]), _optional(edges[1])) if edges else None
    return Latency(p50, p90, p99, observed or 0.0, bucket=bucket)


def _text(value: object) -> str:
    return printable(str(value)) if value else ""


def _optional(value: object) -> float | None:
    return None if value is None else _number(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < ABSURD:
        raise ValueError
    return float(value)


def settings(command: Command) -> dict[str, str]:
    """Return the flags that may change the performance, with their last values."""
    given = {option.name: " ".join(option.values) or "set" for option in command.given}
    return {name: value for name, value in given.items() if name not in NAMES}
