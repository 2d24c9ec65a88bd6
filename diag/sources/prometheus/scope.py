"""The servers and the time range that the command line selects, and the servers found in a Prometheus."""

import math
import re
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, time
from typing import NamedTuple

from diag.core.errors import BadUsage
from diag.core.formatting import moment, printable
from diag.core.incident import seconds
from diag.core.metric_prefix import ANY, PROBE
from diag.core.subjects import label_value

_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhdw])+")
_LATEST = 1e11
_TIME_FORMATS = "2026-11-20T03:12:00Z, 12:00, noon, yesterday 18:00 (all UTC by default), unix seconds, or -2h"
_CLOCKS = {"noon": "12:00", "midnight": "00:00"}
_DAYS = {"today": 0, "yesterday": 86_400}
SERVES = f"{ANY}({PROBE}|generation_tokens_total)|diag_vllm_up|diag_vllm_info"
"""Regular expression of the metrics that only a vLLM server or its exporter has."""
_VLLM_NAME = re.compile(rf"(?!diag_){ANY}")


class TimeSpan(NamedTuple):
    """The time range: the `window` that ends at `at` or `until`, or the range from `since`; "" is now."""

    at: str = ""
    window: str = "15m"
    since: str = ""
    until: str = ""

    def resolved(self, now: int) -> tuple[int, int]:
        """Return the first and the last millisecond; BadUsage if the range is empty."""
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
    """The selected servers and time range; `instances`, `models` and `jobs` are regular expressions."""

    span: TimeSpan = TimeSpan()
    instances: Sequence[str] = ()
    models: Sequence[str] = ()
    jobs: Sequence[str] = ()
    matchers: Sequence[str] = ()

    @property
    def everywhere(self) -> str:
        """The matchers that apply to every series of the selected servers."""
        return ",".join([*self.matchers, *([any_of("instance", self.instances)] if self.instances else [])])

    @property
    def names_servers(self) -> bool:
        """Return True if a selected target counts as a server even without any vLLM metric."""
        return bool(self.instances or self.jobs) and not self.models


def parse_time(text: str, now: int) -> int:
    """Parse unix seconds, an ISO 8601 time, a time of day or a duration before `now` into unix milliseconds."""
    if text.startswith("-"):
        return max(0, now - round(duration(text[1:]) * 1000))
    at = math.nan
    try:
        at = float(text)
    except ValueError:
        with suppress(ValueError):  # "12:00", "noon" or "yesterday 18:00"; a time of day alone is the last one
            day, _, clock = text.lower().strip().rpartition(" ")
            of_day = time.fromisoformat(_CLOCKS.get(clock, clock.upper()))
            if day in _DAYS or not day:
                zone = of_day.tzinfo or UTC
                date = datetime.fromtimestamp(now / 1000 - _DAYS.get(day, 0), zone)
                at = datetime.combine(date, of_day, zone).timestamp()
                at -= 0 if day or at <= now / 1000 else _DAYS["yesterday"]
        with suppress(ValueError):
            read = datetime.fromisoformat(text)
            at = (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    if not 0 <= at < _LATEST:
        raise BadUsage(f"'{printable(text, 40)}' is not a time: write {_TIME_FORMATS}")
    return round(at * 1000)


def duration(text: str) -> float:
    """Parse "90s", "15m", "1h30m" or "2d" into seconds."""
    parts = re.findall(r"[\d.]+[smhdw]", text) if _DURATION.fullmatch(text) else []
    total = sum(map(seconds, parts))
    if not parts or total >= _LATEST:
        raise BadUsage(f"'{printable(text, 40)}' is not a duration: write 90s, 15m, 24h or 7d")
    return total


def any_of(label: str, patterns: Sequence[str]) -> str:
    """Return the matcher of a label for any of the regular expressions."""
    inside = "|".join(patterns).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{label}=~"{inside}"'


@dataclass(frozen=True)
class Member:
    """One server: the (job, instance) pairs of its targets, its models, and the prefix of its metrics' names."""

    targets: frozenset[tuple[str, str]]
    models: frozenset[str]
    prefix: str

    def is_among(self, instances: Container[str]) -> bool:
        """Return True if one of its targets is: it was scraped within the time range, not only on the day before."""
        return any(instance in instances for _, instance in self.targets)


def member(series: Sequence[Mapping[str, str]], usual: str) -> Member:
    """Build a server from its series; if they have several prefixes, `usual` is preferred."""
    names = (_VLLM_NAME.match(label_value(labels, "__name__")) for labels in series)
    prefixes = sorted({name[0] for name in names if name})
    return Member(
        prefix=usual if usual in prefixes or not prefixes else prefixes[0],
        targets=frozenset((label_value(labels, "job"), label_value(labels, "instance")) for labels in series),
        models=frozenset(
            model for labels in series for name in ("model_name", "model") if (model := label_value(labels, name))
        ),
    )


def described(name: str, member: Member) -> str:
    """Format a server with the jobs and models that select it."""
    jobs, models = {f"job {job}" for job, _ in member.targets}, {f"model {model}" for model in member.models}
    return printable(f"{name} ({', '.join([*sorted(jobs), *sorted(models)])})")


def by_prefix(members: Mapping[str, Member]) -> dict[str, frozenset[str]]:
    """Group the servers by the prefix of their metrics."""
    names = defaultdict(set)
    for name, member in members.items():
        names[member.prefix].add(name)
    return {prefix: frozenset(names[prefix]) for prefix in sorted(names)}
