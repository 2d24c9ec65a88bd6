"""vLLM servers in a Prometheus: which there are, when they were scraped, and the results of queries for them."""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from copy import copy

import numpy as np

from diag.core.contract import Contract
from diag.core.errors import BadUsage, NotAnswered, Unreachable
from diag.core.formatting import listed, moment, printable
from diag.core.incident import Incident, regroup, seconds
from diag.core.metric_prefix import OWN, with_prefix
from diag.core.subjects import Floats, Instants, Subject
from diag.http.prometheus_api import Refused, Unusable
from diag.knowledge.rule_set import INTERVAL, generation_series, rule_set
from diag.promql import Formula, add_matchers
from diag.sources.prometheus.client import Prometheus
from diag.sources.prometheus.containers import ANY, OURS, SET_ASIDE, Containers, mentioned
from diag.sources.prometheus.labelled_config import INFO, Flags, completed, flags
from diag.sources.prometheus.members import SERVES, Member, by_prefix, described, is_among, member
from diag.sources.prometheus.queries import Queries, check, lag, laid_out, times_of
from diag.sources.prometheus.scope import Scope, any_of

RENAMED = "diag_vllm_metrics_renamed"
"""Stands in what asks by which names the metrics are stored."""
CONFIG = "diag_vllm_config"
MOST_INSTANTS = 1_500
"""Instants times servers: every minute of a day of one server, two instants of a thousand."""
DEFAULT = Contract()
_BEFORE = 86_400_000
"""How long before the span a server may have answered last and still belong to it."""
_SAMPLED = 3
_FEW = 20
MOST_NAMED = 2_000
"""Servers that a query names; of more, the results are filtered."""


class PrometheusSource:
    """Keeps the protocol `TelemetrySource`: every query is evaluated by the server, for all of `members` at once.

    `queries` counts them. Raises Unreachable where Prometheus cannot be queried or has no such servers.
    """

    def __init__(
        self, prometheus: Prometheus, scope: Scope, contract: Contract = DEFAULT, incidents: Iterable[Incident] = ()
    ) -> None:
        self._prometheus = prometheus
        self._scope, self._labels, self.prefix = scope, contract.site.labels, contract.site.prefix
        self._asking = Queries(prometheus)
        for matcher in scope.matchers:
            check(matcher)
        try:
            self.now = prometheus.now()
            self.start, self.end = scope.span.resolved(self.now)
            self.members = self._members(scope)
            self._matchers = self._narrowing(scope)
            self.instants, self.interval = self._cadence()
            self._flags = self._known_flags()
            self._in_containers = self._measured_by_others()
            self.recorded = self._recorded_series(incidents, contract)
        except Refused as error:
            raise Unreachable(f"{prometheus.shown} rejects queries: {error}") from error

    @property
    def queries(self) -> int:
        """How many were asked for rows."""
        return self._asking.count

    @property
    def shown(self) -> str:
        """The address of Prometheus and the scope, without credentials."""
        return (
            f"{self._prometheus.shown} {{{printable(self._scope.everywhere)}}}"
            if self._scope.everywhere
            else self._prometheus.shown
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the results: queries that Prometheus rejected, and its own warnings."""
        warnings = self._prometheus.warnings
        partial = [f"Prometheus warns that results may be partial: {listed(warnings)}"] if warnings else []
        return (*self._pace(), *self._asking.notes, *partial)

    def _pace(self) -> list[str]:
        step = float(self.instants[1] - self.instants[0]) / 1000 if len(self.instants) > 1 else self.interval
        if step <= self.interval:
            return []
        return [
            f"evaluated every {step:g} s, not at every scrape ({self.interval:g} s), to limit the load on Prometheus"
        ]

    def _members(self, scope: Scope) -> dict[str, Member]:
        try:
            found = self._found(scope, self.start - _BEFORE)
        except Refused as error:
            if not error.unparsable or scope == Scope(scope.span):
                raise
            these = "this --instance, --model, --job or --match"
            raise BadUsage(f"{self._prometheus.shown} cannot parse {these}: {error}") from error
        if not found:
            raise Unreachable(self._nobody(scope))
        return found

    def _found(self, scope: Scope, start: int) -> dict[str, Member]:
        more = [any_of(label, these) for label, these in (("job", scope.jobs), ("model_name", scope.models)) if these]
        inside = ",".join([*([scope.everywhere] if scope.everywhere else []), *more])
        names = [SERVES, *(["up"] if scope.names_servers else [])]
        matches = [f'{{__name__=~"{name}"{"," if inside else ""}{inside}}}' for name in names]
        series: dict[str, list[Mapping[str, str]]] = {}
        for labels in self._prometheus.series(matches, start, self.end):
            series.setdefault(self._name(labels), []).append(labels)
        return {name: member(found, self.prefix) for name, found in sorted(series.items()) if name}

    def _name(self, labels: Mapping[str, str]) -> str:
        return "/".join(labels.get(label, "") for label in self._labels).strip("/")

    def _nobody(self, scope: Scope) -> str:
        span = f"between {moment(self.start / 1000)} and {moment(self.end / 1000)}"
        others = self._found(Scope(scope.span), self.start) if scope != Scope(scope.span) else {}
        if others:
            some = listed([described(*server) for server in others.items()])
            return f"{self._prometheus.shown} has no matching vLLM server {span}; it has {some}"
        hint = "are vLLM servers or `diag exporter` among its targets, and is the time range right?"
        return f"{self._prometheus.shown} has no vLLM metrics {span}; {hint}"

    def _narrowing(self, scope: Scope) -> str:
        """Matchers for every selector; a few servers are named, of many the results are filtered."""
        if scope.instances or len(self.members) > _FEW or self._labels != ("instance",):
            return scope.everywhere
        return ",".join([*scope.matchers, any_of("instance", [re.escape(instance) for instance in self.members])])

    def _cadence(self) -> tuple[Instants, float]:
        """The instants to judge, back from the last scrape, and the usual seconds between two scrapes of a target."""
        span = self.end - self.start
        counts, still = self._counted(f"count_over_time(up[{span}ms])"), self._counted("up")
        targets = f"{any_of('instance', [*_most(counts, counts), *_most(still, counts)])},{self._matchers}"
        raw = f"up{{{targets}}}[{span + 1}ms]"  # with the scrape at its start
        series = [times_of(samples) for samples in self._prometheus.instant(raw, self.end)]
        times = [scraped for scraped in series if len(scraped)]
        if not times:
            raise Unreachable(self._not_scraped())
        self.members = {name: member for name, member in self.members.items() if is_among(counts, member)}
        steps = np.concatenate([np.diff(scraped) for scraped in times])
        interval = int(np.median(steps)) if len(steps) else 0
        first, last = min(int(scraped[0]) for scraped in times), max(int(scraped[-1]) for scraped in times)
        self.first, self._scraped = first, counts
        self._lag = lag(times[0], last, interval)
        return self._grid(first, last, interval), interval / 1000 or 15.0

    def _grid(self, first: int, last: int, interval: int) -> Instants:
        scrapes = (last - first) // interval if interval else 0
        step = interval * max(1, math.ceil(scrapes * len(self.members) / MOST_INSTANTS))
        back = (last - first) // step if step and 2 * len(self.members) <= MOST_INSTANTS else 0
        return last - step * np.arange(back, -1, -1, dtype=np.int64)

    def _counted(self, promql: str) -> dict[str, float]:
        """A number for each of our targets, by its label `instance`."""
        found = self._prometheus.instant(add_matchers(f"sum by (instance) ({promql})", self._matchers), self.end)
        ours = {instance for member in self.members.values() for _, instance in member.targets}
        counts = {series["metric"].get("instance", ""): float(series["value"][1]) for series in found}
        return {name: count for name, count in counts.items() if name in ours}

    def _not_scraped(self) -> str:
        who = f"{listed(list(map(printable, self.members)))} {'was' if len(self.members) == 1 else 'were'}"
        span = f"between {moment(self.start / 1000)} and {moment(self.end / 1000)}"
        hint = "is the time range right?"
        return f"{self._prometheus.shown}: {who} scraped on the day before, but not {span}; {hint}"

    @property
    def renamed(self) -> Mapping[str, frozenset[str]]:
        """The servers whose metrics are stored under other names than this site's, by their prefix."""
        return {prefix: names for prefix, names in by_prefix(self.members).items() if prefix != self.prefix}

    def ask(self, asked: Formula | str, instants: Instants) -> Mapping[Subject, Floats]:
        """One row per subject, NaN where there is no finite sample; NotAnswered where the server refuses the query."""
        formula = asked if isinstance(asked, Formula) else Formula("", asked, {})
        raw = formula.written_out()
        rows = self._by_name(formula, raw, instants)
        if self._in_containers.servers and mentioned(raw):
            rows = {**rows, **self._by_container(formula, raw, instants)}
        return rows

    def _by_name(self, formula: Formula, raw: str, instants: Instants) -> Mapping[Subject, Floats]:
        """Where servers differ in the names of their metrics, each is asked for its own."""
        matchers = self._matchers_of(raw)
        # rules know no flags that only the labels of a page show
        recorded = {} if CONFIG in raw and self._flags else self.recorded
        if OWN not in raw or RENAMED in raw:
            return self._read(self._written(formula, recorded, self.prefix, matchers), instants)
        rows: dict[Subject, Floats] = {}
        for prefix, names in by_prefix(self.members).items():
            series = recorded if prefix == self.prefix else {}
            found = self._read(self._written(formula, series, prefix, matchers), instants)
            rows |= {subject: row for subject, row in found.items() if dict(subject).get("instance") in names}
        return rows

    def _written(self, formula: Formula, series: Mapping[str, str], prefix: str, matchers: str) -> str:
        """Return the query for a formula: over recorded series, and over raw ones of this prefix."""

        def change(text: str, parts: Collection[str]) -> str:
            text = regroup(text, self._labels)
            text = completed(text, self._flags) if CONFIG in text else text
            return add_matchers(with_prefix(text, prefix), matchers, parts)

        return (
            add_matchers(series[formula.name], matchers)
            if formula.name in series
            else formula.text_over(series, change)
        )

    def _by_container(self, formula: Formula, raw: str, instants: Instants) -> Mapping[Subject, Floats]:
        """Of the servers whose containers other exporters measure, by the metrics of those."""
        rows: dict[Subject, Floats] = {}
        matchers = self._matchers_of(raw)
        for prefix, names in by_prefix({name: self.members[name] for name in self._in_containers.servers}).items():
            plain = self._written(formula, {}, prefix, matchers)
            with suppress(NotAnswered):
                found = self._read(self._in_containers.completed(plain, matchers, self.interval), instants)
                rows |= {subject: row for subject, row in found.items() if dict(subject).get("instance") in names}
        return rows

    def matching(self, formula: Formula) -> frozenset[str]:
        """Return the servers for which a formula over recorded series has a sample at one of the instants."""
        promql = self._written(formula, self.recorded, self.prefix, self._matchers)
        found = self._asking.answered(promql, self.instants + self._lag)
        return frozenset(self._name(series["metric"]) for series in found).intersection(self.members)

    def count(self, formula: Formula) -> int:
        """Return for how many subjects a formula over recorded series has a sample at the last instant."""
        promql = self._written(formula, self.recorded, self.prefix, self._matchers)
        found = self._asking.answered(f"count({promql})", self.instants[-1:] + self._lag)
        return int(float(found[0]["value"][1])) if found else 0

    def narrowed(self, names: Collection[str]) -> "PrometheusSource":
        """Return the same source for these of its servers alone."""
        few = copy(self)
        few.members = {name: member for name, member in self.members.items() if name in names}
        if len(names) <= MOST_NAMED and self._labels == ("instance",):
            few._matchers = ",".join([*self._scope.matchers, any_of("instance", list(map(re.escape, sorted(names))))])
        return few

    def _recorded_series(self, incidents: Iterable[Incident], contract: Contract) -> Mapping[str, str]:
        """Return what rules of this generation record, if they did so for every server throughout the span.

        None with matchers, since a recorded series may lack the label to match.
        """
        if self._scope.matchers:
            return {}
        generation = generation_series(("instance",), self._labels)
        try:
            shown = self._prometheus.instant(f"count_over_time({generation}[{self.end - self.start}ms])", self.end)
        except (Refused, Unusable):
            return {}
        rules = rule_set(incidents, contract) if shown else None
        if rules is None or not rules.rules:
            return {}
        current = rules.generation
        counts = {
            self._name(series["metric"]): float(series["value"][1])
            for series in shown
            if series["metric"].get("generation") == current
        }
        covered = all(counts.get(name, 0.0) >= self._expected_records(member) for name, member in self.members.items())
        return rules.series if covered else {}

    def _expected_records(self, server: Member) -> float:
        """Return how many samples rules record of a server in the time that it was scraped, less a few: 1 at least."""
        scrapes = max(self._scraped.get(instance, 0.0) for _, instance in server.targets)
        return max(1.0, 0.9 * scrapes * self.interval / seconds(INTERVAL) - 2)

    def _measured_by_others(self) -> Containers:
        """The servers whose containers no exporter of ours measures, where there is another one that may."""
        try:
            if not self._prometheus.instant(ANY, self.end):
                return Containers()
            ours, pods = self._labels_of(OURS), self._labels_of('__name__="up",pod!=""')
            aside = bool(self._prometheus.instant(SET_ASIDE, self.end))
        except (Refused, Unusable):
            return Containers()
        others = self.members.keys() - {self._name(labels) for labels in ours}
        found = [labels for labels in pods if self._name(labels) in others]
        return Containers(
            servers=frozenset(map(self._name, found)),
            pods=sorted({re.escape(labels["pod"]) for labels in found}),
            labels=self._labels,
            all_named=all(labels.get("container") for labels in found),
            aside=aside,
        )

    def _labels_of(self, matchers: str) -> list[Mapping[str, str]]:
        """The labels of the series of our servers that the span may have."""
        whole = ",".join(filter(None, [matchers, self._matchers]))
        return self._prometheus.series([f"{{{whole}}}"], self.start, self.end)

    def exists(self, metric: str) -> bool:
        """Whether any target at all has the metric at the end of the span."""
        try:
            return bool(self._prometheus.instant(f"count({metric})", self.end))
        except (Refused, Unusable):
            return False

    def _known_flags(self) -> Flags:
        """How those run whose configuration no exporter publishes; not where a site has labels of its own."""
        if self._labels != ("instance",):
            return {}
        try:
            published = self._last(f"count by (instance) ({CONFIG})")
            infos = [info for prefix in by_prefix(self.members) for info in self._last(with_prefix(INFO, prefix))]
        except (Refused, Unusable):
            return {}
        published_by = {labels.get("instance") for labels in published}
        return flags(info for info in infos if info.get("instance") not in published_by)

    def _last(self, promql: str) -> list[Mapping[str, str]]:
        """The labels of what there is at the last instant."""
        at = int(self.instants[-1]) + self._lag
        return [series["metric"] for series in self._prometheus.instant(add_matchers(promql, self._matchers), at)]

    @property
    def page_flags(self) -> Flags:
        """The flags of servers without an exporter of ours, out of the labels of their own page."""
        return self._flags

    def at_end(self, promql: str) -> list[tuple[str, Mapping[str, str], float]]:
        """Return server, labels and value of each series at the end of the span; "" where a series is of no server.

        Raises NotAnswered if Prometheus refuses the query or fails.
        """
        at = int(self.instants[-1]) + self._lag
        try:
            found = self._prometheus.instant(add_matchers(regroup(promql, self._labels), self._matchers), at)
        except (Refused, Unreachable) as error:
            raise NotAnswered from error
        named = ((self._name(series["metric"]), series) for series in found)
        return [
            (name, series["metric"], float(series["value"][1]))
            for name, series in named
            if not name or name in self.members
        ]

    def _read(self, promql: str, instants: Instants) -> dict[Subject, Floats]:
        rows: dict[Subject, Floats] = {}
        at = instants + self._lag
        for series in self._asking.answered(promql, at):
            subject = self._subject(series["metric"])
            if dict(subject).get("instance") in self.members:
                rows[subject] = laid_out(series, at)
        return rows

    def _matchers_of(self, promql: str) -> str:
        """The matchers for a query; one that compares servers with the peers of their model has to see these."""
        return ",".join(self._scope.matchers) if "model_name" in promql else self._matchers

    def _subject(self, labels: Mapping[str, str]) -> Subject:
        """The labels without a metric's name, and `instance` for those by which the site tells its servers apart."""
        named = {name: value for name, value in labels.items() if name != "__name__"}
        if self._labels != ("instance",):
            named = {name: value for name, value in named.items() if name not in self._labels}
            named["instance"] = self._name(labels)
        return tuple(sorted(named.items()))


def _most(there: Iterable[str], counts: Mapping[str, float]) -> list[str]:
    """A few of the targets that were scraped most of the time, as regular expressions."""
    most = sorted(there, key=lambda name: (-counts.get(name, 0.0), name))
    return [re.escape(name) for name in most[:_SAMPLED]]
