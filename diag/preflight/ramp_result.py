"""A kept result of `diag ramp --json`: what was measured, on what, and when."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from diag.core.errors import BadUsage
from diag.core.files import read_text
from diag.core.formatting import printable

MOST_BYTES = 2**24
SCHEMA = "diag.ramp/1"


class LoadStep(NamedTuple):
    """One step: requests at a time, the 99th percentile of the inter-token latency in seconds, and if the SLO held."""

    concurrency: float
    itl: float | None
    within_slo: bool


class RampResult(NamedTuple):
    """A ramp; `ceiling` is the number of requests at a time with the highest rate inside the SLO, None without one.

    `launch` is "" and `gpus` are empty in a result of a diag that did not keep them.
    """

    file: str
    model: str
    version: str
    launch: str
    gpus: tuple[str, ...]
    measured: datetime
    ceiling: float | None
    steps: tuple[LoadStep, ...]


def read(file: Path) -> RampResult:
    """Read a file that `diag ramp --json` wrote, dated by the file if it has no date; BadUsage if it is none."""
    shown = printable(str(file))
    try:
        document = json.loads(read_text(file, MOST_BYTES))
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise BadUsage(f"{shown} is no result of diag ramp --json")
        ceiling = _step(document["ceiling"]) if document["ceiling"] else None
        written = document.get("measured_at")
        measured = datetime.fromisoformat(written) if written else datetime.fromtimestamp(file.stat().st_mtime, UTC)
        return RampResult(
            file=shown,
            model=str(document["model"]),
            version=str(document["vllm"]),
            launch=str(document.get("launch") or ""),
            gpus=tuple(map(str, document.get("gpus") or ())),
            measured=measured if measured.tzinfo else measured.replace(tzinfo=UTC),
            ceiling=ceiling.concurrency if ceiling else None,
            steps=tuple(step for each in document["steps"] if (step := _step(each))),
        )
    except OSError as error:
        raise BadUsage(f"{shown} cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadUsage(f"{shown} is no result of diag ramp --json") from error


def _step(step: Mapping[str, Any]) -> LoadStep | None:
    """Return the load of a step, None if it says nothing about a number of requests at a time."""
    load = step["concurrency"] or step["in_flight"]
    itl = step["itl"]["p99"]
    if not load or not step["counts"]:
        return None
    return LoadStep(float(load), None if itl is None else float(itl), bool(step["within_slo"]))
