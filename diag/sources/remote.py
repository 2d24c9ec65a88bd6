"""What a Prometheus holds of vLLM servers: which there are, when they were scraped, and answers of the same queries."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from diag.asking import Floats, Instants, Subject
from diag.errors import BadUsage, Unreachable, Unsupported
from diag.incident import regroup
from diag.promql import narrowed, parse, pretty
from diag.sources.prometheus import Prometheus, Refused, Series
from diag.sources.scope import Scope, any_of
from diag.sources.text import clock, listed, plural, printable

SERVES = "vllm:num_requests_running|vllm:generation_tokens_total|diag_vllm_up|diag_vllm_info"
RENAMED = "vllm_num_requests_running"
MOST_INSTANTS = 1_500
"""Instants times servers: every minute of a day of one server, two instants of a thousand."""
_BEFORE = 86_400_000
"""How long before the span a server may have answered last and still belong to it."""
_SAMPLED = 3
_FEW = 20
_MOST_REFUSALS = 3


@dataclass(frozen=True)
class Member:
    """One server: the (job, instance) pairs it is scraped as, its models, and which of the telling metrics it has."""

    targets: frozenset[tuple[str, str]]
    models: frozenset[str]
    metrics: frozenset[str]


class Remote:
    """Keeps the protocol `diag.asking.Answers`: every query is evaluated by the server, for all of `members` at once.

    Raises Unreachable where the server cannot be asked or holds nothing of such servers.
    """

    def __init__(self, prometheus: Prometheus, scope: Scope, labels: tuple[str, ...] = ("instance",)) -> None:
        self._prometheus = prometheus
        self._scope, self._labels = scope, labels
        self._refused: dict[str, int] = {}
        for matcher in scope.matchers:
            _check(matcher)
        self.now = prometheus.now()
        self.start, self.end = scope.span.resolved(self.now)
        try:
            self.members = self._members(scope)
            self._matchers = self._narrowing(scope)
            self.instants, self.interval = self._cadence()
        except Refused as error:
            raise Unreachable(f"{prometheus.shown} refuses to be asked: {error}") from error
        self.queries = 0

    @property
    def shown(self) -> str:
        """The server and what was asked for, without credentials."""
        return (
            f"{self._prometheus.shown} {{{self._scope.everywhere}}}"
            if self._scope.everywhere
            else self._prometheus.shown
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What has to be said of the answers: refused queries, and the server's own warnings."""
        refused = [f"the server refused {plural(count, 'query')}: {why}" for why, count in self._refused.items()]
        warnings = self._prometheus.warnings
        partial = [f"the server warns, so this may be partial: {listed(warnings)}"] if warnings else []
        return (*self._pace(), *refused, *partial)

    def _pace(self) -> list[str]:
        step = float(self.instants[1] - self.instants[0]) / 1000 if len(self.instants) > 1 else self.interval
        if step <= self.interval:
            return []
        return [f"judged every {step:g} s: at every scrape ({self.interval:g} s) it would have taken too long"]

    def _members(self, scope: Scope) -> dict[str, Member]:
        found = self._found(scope, self.start - _BEFORE)
        if not found:
            raise Unreachable(self._nobody(scope))
        return found

    def _found(self, scope: Scope, start: int) -> dict[str, Member]:
        more = [any_of(label, these) for label, these in (("job", scope.jobs), ("model_name", scope.models)) if these]
        inside = ",".join([*([scope.everywhere] if scope.everywhere else []), *more])
        names = [f"{SERVES}|{RENAMED}", *(["up"] if scope.names_servers else [])]
        matches = [f'{{__name__=~"{name}"{"," if inside else ""}{inside}}}' for name in names]
        series: dict[str, list[Mapping[str, str]]] = {}
        for labels in self._prometheus.series(matches, start, self.end):
            series.setdefault(self._name(labels), []).append(labels)
        return {name: _member(each) for name, each in sorted(series.items()) if name}

    def _name(self, labels: Mapping[str, str]) -> str:
        return "/".join(labels.get(each, "") for each in self._labels).strip("/")

    def _nobody(self, scope: Scope) -> str:
        span = f"between {clock(self.start, day=True)} and {clock(self.end, day=True)}"
        others = self._found(Scope(scope.span), self.start) if scope != Scope(scope.span) else {}
        if others:
            return f"{self._prometheus.shown} has no vLLM server that fits {span}; it has {listed(list(others), 5)}"
        hint = "are vLLM servers or `diag exporter` among its targets, and is the time right?"
        return f"{self._prometheus.shown} has no metrics of vLLM {span}; {hint}"

    def _narrowing(self, scope: Scope) -> str:
        """Matchers for every selector; a few servers are named, many are picked from the answers."""
        if scope.instances or len(self.members) > _FEW or self._labels != ("instance",):
            return scope.everywhere
        return ",".join([*scope.matchers, any_of("instance", [re.escape(each) for each in self.members])])

    def _cadence(self) -> tuple[Instants, float]:
        """The instants to judge, back from the last scrape, and the usual seconds between two scrapes of a target."""
        span = self.end - self.start
        targets = f"{any_of('instance', self._most_scraped(span))},{self._matchers}"
        raw = f"up{{{targets}}}[{span + 1}ms]"  # with the scrape at its start
        series = [_times(each) for each in self._prometheus.instant(raw, self.end)]
        times = [each for each in series if len(each)]
        if not times:
            raise Unreachable(f"{self._prometheus.shown}: {listed(list(self.members))} {self._not_scraped()}")
        steps = np.concatenate([np.diff(each) for each in times])
        interval = int(np.median(steps)) if len(steps) else 0
        first, last = min(int(each[0]) for each in times), max(int(each[-1]) for each in times)
        self._lag = _lag(times[0], last, interval)
        return self._grid(first, last, interval), interval / 1000 or 15.0

    def _grid(self, first: int, last: int, interval: int) -> Instants:
        scrapes = (last - first) // interval if interval else 0
        step = interval * max(1, math.ceil(scrapes * len(self.members) / MOST_INSTANTS))
        back = (last - first) // step if step else 0
        return last - step * np.arange(back, -1, -1, dtype=np.int64)

    def _most_scraped(self, span: int) -> list[str]:
        """A few targets that were scraped most of the time."""
        query = narrowed(f"sum by (instance) (count_over_time(up[{span}ms]))", self._matchers)
        scraped = self._prometheus.instant(query, self.end)
        counts = {each["metric"].get("instance", ""): float(each["value"][1]) for each in scraped}
        ours = {instance for member in self.members.values() for _, instance in member.targets}
        most = sorted((name for name in counts if name in ours), key=lambda name: (-counts[name], name))
        return [re.escape(name) for name in most[:_SAMPLED]]

    def _not_scraped(self) -> str:
        return (
            f"{'was' if len(self.members) == 1 else 'were'} there within a day, but not scraped between"
            f" {clock(self.start, day=True)} and {clock(self.end, day=True)}; is the time right?"
        )

    def ask(self, promql: str, instants: Instants) -> Mapping[Subject, Floats]:
        """One row per subject, NaN where there is no finite sample; nothing where the server refuses the query."""
        whole = regroup(promql, self._labels)
        name = self._recorded.get(pretty(whole)) if self._recorded else None
        rows = self._rows(name, instants) if name else {}
        if not self._complete(rows):
            rows = self._rows(whole, instants)
        return rows

    def exists(self, metric: str) -> bool:
        """Whether any target at all has the metric at the end of the span."""
        try:
            return bool(self._prometheus.instant(f"count({metric})", self.end))
        except Refused:
            return False

    @cached_property
    def _recorded(self) -> Mapping[str, str]:
        """The very same expressions that rules record here: cheaper to ask. A record may lack a label to match."""
        return {} if self._scope.matchers else self._prometheus.recorded()

    def _complete(self, rows: Mapping[Subject, Floats]) -> bool:
        """Whether what was recorded says something of every server at every instant."""
        named = {dict(subject).get("instance") for subject in rows}
        return named >= self.members.keys() and not any(np.isnan(row).any() for row in rows.values())

    def _rows(self, promql: str, instants: Instants) -> dict[Subject, Floats]:
        self.queries += 1
        rows: dict[Subject, Floats] = {}
        at = instants + self._lag
        for each in self._answered(narrowed(promql, self._matchers_of(promql)), at):
            subject = self._subject(each["metric"])
            if dict(subject).get("instance") in self.members:
                rows[subject] = _laid_out(each, at)
        return rows

    def _matchers_of(self, promql: str) -> str:
        """The matchers for a query; one that compares servers with the peers of their model has to see these."""
        return ",".join(self._scope.matchers) if "model_name" in promql else self._matchers

    def _answered(self, promql: str, instants: Instants) -> list[Series]:
        try:
            if len(instants) == 1:
                return self._prometheus.instant(promql, int(instants[0]))
            first, second, last = (int(instants[at]) for at in (0, 1, -1))
            return self._prometheus.range(promql, first, last, second - first)
        except Refused as error:
            why = str(error)
            self._refused[why] = self._refused.get(why, 0) + 1
            if "time" in why and self._refused[why] >= _MOST_REFUSALS:
                hint = "name fewer servers or a shorter --window"
                raise Unreachable(f"{self._prometheus.shown} does not finish its queries: {why}; {hint}") from error
            return []

    def _subject(self, labels: Mapping[str, str]) -> Subject:
        """The labels without a metric's name, and `instance` for those by which the site tells its servers apart."""
        rest = {name: value for name, value in labels.items() if name not in ("__name__", *self._labels)}
        return tuple(sorted({**rest, "instance": self._name(labels)}.items()))


def _member(series: Sequence[Mapping[str, str]]) -> Member:
    return Member(
        targets=frozenset((each.get("job", ""), each.get("instance", "")) for each in series),
        models=frozenset(each[name] for each in series for name in ("model_name", "model") if each.get(name)),
        metrics=frozenset(each["__name__"] for each in series),
    )


def _check(matcher: str) -> None:
    try:
        parse(f"up{{{matcher}}}")
    except Unsupported as error:
        raise BadUsage(f'{printable(matcher)} is no matcher: write cluster="eu" or pod=~"vllm-.*"') from error


def _times(series: Series) -> Instants:
    return np.array([round(float(at) * 1000) for at, _ in series["values"]], np.int64)


def _lag(times: Instants, last: int, interval: int) -> int:
    """By how much scrapes come late on the grid, at most: asked that much later, no instant misses its own scrape."""
    late = (times - last + interval // 2) % interval - interval // 2 if interval else np.zeros(1, np.int64)
    return int(late.max(initial=0))


def _laid_out(series: Series, instants: Instants) -> Floats:
    """The values at the instants; a server may round its times."""
    row = np.full(len(instants), np.nan)
    step = int(instants[1] - instants[0]) if len(instants) > 1 else 1
    for at, text in series.get("values") or [series["value"]]:
        place = round((float(at) * 1000 - int(instants[0])) / step)
        value = float(text)
        if 0 <= place < len(row) and math.isfinite(value):
            row[place] = value
    return row
