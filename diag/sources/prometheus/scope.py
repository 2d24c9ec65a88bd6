"""The servers and the time range to query a Prometheus for, as typed on the command line."""

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from diag.core.errors import BadUsage
from diag.core.formatting import moment, printable
from diag.core.lazy_regex import lazy

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = lazy(r"(?:\d+(?:\.\d+)?[smhdw])+")
_LATEST = 1e11
_WAYS = "2026-11-20T03:12:00Z (UTC by default), unix seconds, or -2h"


class TimeSpan(NamedTuple):
    """The time range: the `window` up to `at` or to `until`, or from `since` on; "" for now."""

    at: str = ""
    window: str = "15m"
    since: str = ""
    until: str = ""

    def resolved(self, now: int) -> tuple[int, int]:
        """First and last millisecond; BadUsage where the range is empty."""
        if self.at and (self.since or self.until):
            raise BadUsage("--at (with --window) and --from/--to are alternatives: choose one")
        end = parse_time(self.at or self.until, now) if self.at or self.until else now
        start = parse_time(self.since, now) if self.since else max(0, end - round(duration(self.window) * 1000))
        if start > now:
            raise BadUsage(f"{moment(start / 1000)} is in the future: the Prometheus clock says {moment(now / 1000)}")
        if start >= end:
            raise BadUsage(f"the time range is empty: from {moment(start / 1000)} to {moment(end / 1000)}")
        return start, min(end, now)


class Scope(NamedTuple):
    """Which servers, and when. `instances`, `models` and `jobs` are regular expressions, `matchers` are PromQL's."""

    span: TimeSpan = TimeSpan()
    instances: Sequence[str] = ()
    models: Sequence[str] = ()
    jobs: Sequence[str] = ()
    matchers: Sequence[str] = ()

    @property
    def everywhere(self) -> str:
        """The matchers that every series of these servers fulfils."""
        return ",".join([*self.matchers, *([any_of("instance", self.instances)] if self.instances else [])])

    @property
    def names_servers(self) -> bool:
        """Whether a target counts as a server although nothing of vLLM's was ever seen on it."""
        return bool(self.instances or self.jobs) and not self.models


def parse_time(text: str, now: int) -> int:
    """Unix milliseconds; a duration with a minus counts back from `now`."""
    if text.startswith("-"):
        return max(0, now - round(duration(text[1:]) * 1000))
    seconds = _unix(text)
    if not 0 <= seconds < _LATEST:
        raise BadUsage(f"'{printable(text, 40)}' is not a time: write {_WAYS}")
    return round(seconds * 1000)


def _unix(text: str) -> float:
    """Seconds of a number or of an ISO 8601 time; NaN for anything else."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        return math.nan
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()


def duration(text: str) -> float:
    """Seconds of "90s", "15m", "1h30m" or "2d"."""
    parts = re.findall(r"[\d.]+[smhdw]", text) if _DURATION.fullmatch(text) else []
    seconds = sum(float(part[:-1]) * _UNITS[part[-1]] for part in parts)
    if not parts or seconds >= _LATEST:
        raise BadUsage(f"'{printable(text, 40)}' is not a duration: write 90s, 15m, 24h or 7d")
    return seconds


def any_of(label: str, patterns: Sequence[str]) -> str:
    """A matcher for one of these regular expressions."""
    inside = "|".join(patterns).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{label}=~"{inside}"'
