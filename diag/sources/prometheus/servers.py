"""vLLM servers in a Prometheus: finding them, the times of their scrapes, and the results of queries for them."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy

import numpy as np

from diag.core.contract import Contract
from diag.core.errors import BadUsage, NotAnswered, Unreachable
from diag.core.formatting import listed, moment, printable
from diag.core.incident import Incident, regroup, seconds
from diag.core.metric_prefix import CACHE_INFO, OWN, with_prefix
from diag.core.subjects import Floats, Instants, Subject, label_value
from diag.http.prometheus_api import Refused, Unusable
from diag.knowledge.formulas import SLOW_INTERVAL, generation_series, rule_set
from diag.promql import Formula, add_matchers
from diag.promql.data import Matcher
from diag.sources.prometheus.client import (
    Prometheus,
    Queries,
    Series,
    check_matcher,
    label_matchers,
    sample_times,
    scrape_lag,
    values_at,
)
from diag.sources.prometheus.missing_metrics import (
    ANY,
    OURS,
    SET_ASIDE,
    Containers,
    Flags,
    mentioned,
    read_page_flags,
    with_page_flags,
)
from diag.sources.prometheus.scope import SERVES, Member, Scope, any_of, by_prefix, described, member

RENAMED = "diag_vllm_metrics_renamed"
"""Part of queries about the names under which the metrics are stored."""
CONFIG = "diag_vllm_config"
MOST_INSTANTS = 1_500
"""Instants times servers: every minute of a day of one server, two instants of a thousand."""
DEFAULT = Contract()
_BEFORE = 86_400_000
"""Milliseconds before the time range in which a server is still found by its last samples."""
_SAMPLED = 3
_FEW = 20
"""Servers that every selector names; for more servers, the results are filtered."""
MOST_NAMED = 2_000
"""Servers that a query names; for more servers, the results are filtered."""


class PrometheusSource:
    """A `TelemetrySource` whose queries Prometheus evaluates, for all of `members` at once.

    Raises Unreachable if Prometheus cannot be queried or has no matching servers.
    """

    def __init__(
        self, prometheus: Prometheus, scope: Scope, contract: Contract = DEFAULT, incidents: Iterable[Incident] = ()
    ) -> None:
        self._prometheus = prometheus
        self._scope, self._labels, self.prefix = scope, contract.site.labels, contract.site.prefix
        self._queries = Queries(prometheus)
        for matcher in scope.matchers:
            check_matcher(matcher)
        try:
            self.now = prometheus.now()
            self.start, self.end = scope.span.resolved(self.now)
            self.members = self._find_members(scope)
            self._matchers = scope.everywhere
            if not scope.instances and len(self.members) <= _FEW and self._labels == ("instance",):
                named = any_of("instance", [re.escape(instance) for instance in self.members])
                self._matchers = ",".join([*scope.matchers, named])
            self._asked = tuple(matcher for matcher in label_matchers(self._matchers) if matcher.label == "instance")
            self.instants, self.interval = self._cadence()
            self.page_flags = self._read_flags()
            """The flags of servers without an exporter, from the labels of their own page."""
            self._containers = self._find_containers()
            self.recorded = self._recorded_series(incidents, contract)
        except Refused as error:
            raise Unreachable(f"{prometheus.shown} rejects queries: {error}") from error

    @property
    def queries(self) -> int:
        """The number of queries for rows."""
        return self._queries.count

    @property
    def shown(self) -> str:
        """The address of Prometheus and the scope, without credentials."""
        everywhere = self._scope.everywhere
        return self._prometheus.shown + (f" {{{printable(everywhere)}}}" if everywhere else "")

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the results: queries that Prometheus rejected, and its own warnings."""
        notes = list(self._queries.notes)
        if len(self.instants) > 1 and (step := float(self.instants[1] - self.instants[0]) / 1000) > self.interval:
            scrapes = f"not at every scrape ({self.interval:g} s)"
            notes.insert(0, f"evaluated every {step:g} s, {scrapes}, to limit the load on Prometheus")
        if warnings := self._prometheus.warnings:
            notes.append(f"Prometheus warns that results may be partial: {listed(warnings)}")
        return tuple(notes)

    def _find_members(self, scope: Scope) -> dict[str, Member]:
        """Return the selected servers by name; Unreachable, with the others, if there are none."""
        try:
            members = self._members(scope, self.start - _BEFORE)
        except Refused as error:
            if not error.unparsable or scope == Scope(scope.span):
                raise
            these = "this --instance, --model, --job or --match"
            raise BadUsage(f"{self._prometheus.shown} cannot parse {these}: {error}") from error
        if members:
            return members
        span = f"between {moment(self.start / 1000)} and {moment(self.end / 1000)}"
        others = self._members(Scope(scope.span), self.start) if scope != Scope(scope.span) else {}
        if others:
            some = listed([described(*server) for server in others.items()])
            raise Unreachable(f"{self._prometheus.shown} has no matching vLLM server {span}; it has {some}")
        hint = "are vLLM servers or `diag exporter` among its targets, and is the time range right?"
        raise Unreachable(f"{self._prometheus.shown} has no vLLM metrics {span}; {hint}")

    def _members(self, scope: Scope, start: int) -> dict[str, Member]:
        more = [any_of(label, these) for label, these in (("job", scope.jobs), ("model_name", scope.models)) if these]
        inside = ",".join(filter(None, [scope.everywhere, *more]))
        names = [SERVES, *(["up"] if scope.names_servers else [])]
        matches = [f'{{__name__=~"{name}"{"," if inside else ""}{inside}}}' for name in names]
        series: dict[str, list[Mapping[str, str]]] = {}
        asked = label_matchers(inside)
        for labels in self._prometheus.series(matches, start, self.end):
            _refuse_foreign(self.shown, labels, asked)
            series.setdefault(self._name(labels), []).append(labels)
        return {name: member(labels, self.prefix) for name, labels in sorted(series.items()) if name}

    def _of_servers(self, answer: Sequence[Series]) -> Sequence[Series]:
        """Return the series of a query with the matchers of all servers; Unreachable if one is of another server."""
        for series in answer:
            if label_value(series["metric"], "instance"):
                _refuse_foreign(self.shown, series["metric"], self._asked)
        return answer

    def _name(self, labels: Mapping[str, str]) -> str:
        return "/".join(label_value(labels, name) for name in self._labels).strip("/")

    def _cadence(self) -> tuple[Instants, float]:
        """Return the instants to judge, back from the last scrape, and a target's usual scrape interval in seconds."""
        span = self.end - self.start
        counts, still = self._counted(f"count_over_time(up[{span}ms])"), self._counted("up")
        sampled = [*_most_scraped(counts, counts), *_most_scraped(still, counts)]
        raw = f"up{{{any_of('instance', sampled)},{self._matchers}}}[{span + 1}ms]"  # with the scrape at its start
        series = self._of_servers(self._prometheus.instant(raw, self.end))
        # a time that was not asked for, in 1970 say, would make billions of instants
        sampled_at = [at[(self.start <= at) & (at <= self.end)] for at in map(sample_times, series)]
        times = [scraped for scraped in sampled_at if len(scraped)]
        if not times:
            who = f"{listed(list(map(printable, self.members)))} {'was' if len(self.members) == 1 else 'were'}"
            when = f"between {moment(self.start / 1000)} and {moment(self.end / 1000)}"
            raise Unreachable(
                f"{self._prometheus.shown}: {who} scraped on the day before, but not {when}; is the time range right?"
            )
        self.members = {name: member for name, member in self.members.items() if member.is_among(counts)}
        steps = np.concatenate([np.diff(scraped) for scraped in times])
        interval = int(np.median(steps)) if len(steps) else 0
        first, last = min(int(scraped[0]) for scraped in times), max(int(scraped[-1]) for scraped in times)
        self.first, self._scraped = first, counts
        self._lag = scrape_lag(times[0], last, interval)

        scrapes = (last - first) // interval if interval else 0
        step = interval * max(1, math.ceil(scrapes * len(self.members) / MOST_INSTANTS))
        back = (last - first) // step if step and 2 * len(self.members) <= MOST_INSTANTS else 0
        return last - step * np.arange(back, -1, -1, dtype=np.int64), interval / 1000 or 15.0

    def _counted(self, promql: str) -> dict[str, float]:
        """Evaluate a sum for each target of the members, by its label `instance`."""
        answer = self._prometheus.instant(add_matchers(f"sum by (instance) ({promql})", self._matchers), self.end)
        ours = {instance for member in self.members.values() for _, instance in member.targets}
        counts = ((label_value(row["metric"], "instance"), row["value"][1]) for row in self._of_servers(answer))
        return {name: float(count) for name, count in counts if name in ours}

    @property
    def renamed(self) -> Mapping[str, frozenset[str]]:
        """The servers whose metrics have another prefix than this site's, by their prefix."""
        return {prefix: names for prefix, names in by_prefix(self.members).items() if prefix != self.prefix}

    def ask(self, asked: Formula | str, instants: Instants) -> Mapping[Subject, Floats]:
        """Evaluate a query: one row per subject, NaN without a finite sample; NotAnswered if the server refuses it."""
        formula = asked if isinstance(asked, Formula) else Formula("", asked, {})
        raw = formula.written_out()
        # a query that compares the servers of a model has to include all of them
        is_wider = "model_name" in raw
        matchers = ",".join(self._scope.matchers) if is_wider else self._matchers
        # rules do not record the flags that only the labels of a page show
        recorded = {} if CONFIG in raw and self.page_flags else self.recorded
        rows: dict[Subject, Floats] = {}
        is_one_query = OWN not in raw or RENAMED in raw
        for prefix, names in ({self.prefix: self.members} if is_one_query else by_prefix(self.members)).items():
            query = self._query(formula, recorded if prefix == self.prefix else {}, prefix, matchers)
            rows |= self._read(query, instants, names, is_wider)

        if self._containers.servers and mentioned(raw):
            measured = {name: self.members[name] for name in self._containers.servers}
            for prefix, names in by_prefix(measured).items():
                query = self._containers.completed(self._query(formula, {}, prefix, matchers), matchers, self.interval)
                with suppress(NotAnswered):
                    rows |= self._read(query, instants, names, is_wider)
        return rows

    def _query(self, formula: Formula, series: Mapping[str, str], prefix: str, matchers: str) -> str:
        """Return the query for a formula: over recorded series, and over raw series with the prefix."""

        def change(text: str, parts: Collection[str]) -> str:
            text = regroup(text, self._labels)
            text = with_page_flags(text, self.page_flags) if CONFIG in text else text
            return add_matchers(with_prefix(text, prefix), matchers, parts)

        if formula.name in series:
            return add_matchers(series[formula.name], matchers)
        return formula.text_over(series, change)

    def matching(self, formula: Formula) -> frozenset[str]:
        """Return the servers for which a formula over recorded series has a sample at one of the instants."""
        promql = self._query(formula, self.recorded, self.prefix, self._matchers)
        answer = self._of_servers(self._queries.answered(promql, self.instants + self._lag))
        return frozenset(self._name(series["metric"]) for series in answer).intersection(self.members)

    def count(self, formula: Formula) -> int:
        """Return the number of subjects for which a formula over recorded series has a sample at the last instant."""
        promql = self._query(formula, self.recorded, self.prefix, self._matchers)
        answer = self._queries.answered(f"count({promql})", self.instants[-1:] + self._lag)
        return int(float(answer[0]["value"][1])) if answer else 0

    def narrowed(self, names: Collection[str]) -> "PrometheusSource":
        """Return a copy of the source for the named servers alone."""
        few = copy(self)
        few.members = {name: member for name, member in self.members.items() if name in names}
        if len(names) <= MOST_NAMED and self._labels == ("instance",):
            few._matchers = ",".join([*self._scope.matchers, any_of("instance", list(map(re.escape, sorted(names))))])
        return few

    def _recorded_series(self, incidents: Iterable[Incident], contract: Contract) -> Mapping[str, str]:
        """Return the series that rules of this generation record, if they cover every server in the whole time range.

        With matchers no series is used, since a recorded series may lack the label to match.
        """
        if self._scope.matchers:
            return {}
        generation = generation_series(("instance",), self._labels)
        try:
            recorded = self._prometheus.instant(f"count_over_time({generation}[{self.end - self.start}ms])", self.end)
        except (Refused, Unusable):
            return {}
        rules = rule_set(incidents, contract) if recorded else None
        if rules is None or not rules.rules:
            return {}
        counts = {
            self._name(series["metric"]): float(series["value"][1])
            for series in recorded
            if series["metric"].get("generation") == rules.generation
        }
        for name, server in self.members.items():
            scrapes = max(self._scraped.get(instance, 0.0) for _, instance in server.targets)
            # a few samples may be missing
            if counts.get(name, 0.0) < max(1.0, 0.9 * scrapes * self.interval / seconds(SLOW_INTERVAL) - 2):
                return {}
        return rules.series

    def _find_containers(self) -> Containers:
        """Return the servers whose containers are measured by other exporters, but not by `diag exporter`."""
        try:
            if not self._prometheus.instant(ANY, self.end):
                return Containers()
            ours, pods = self._labels_of(OURS), self._labels_of('__name__="up",pod!=""')
            aside = bool(self._prometheus.instant(SET_ASIDE, self.end))
        except (Refused, Unusable):
            return Containers()
        others = self.members.keys() - {self._name(labels) for labels in ours}
        targets = [labels for labels in pods if self._name(labels) in others and label_value(labels, "pod")]
        return Containers(
            servers=frozenset(map(self._name, targets)),
            pods=sorted({re.escape(labels["pod"]) for labels in targets}),
            labels=self._labels,
            all_named=all(label_value(labels, "container") for labels in targets),
            aside=aside,
        )

    def _labels_of(self, matchers: str) -> list[Mapping[str, str]]:
        """Return the labels of the members' series in the time range."""
        whole = ",".join(filter(None, [matchers, self._matchers]))
        series = self._prometheus.series([f"{{{whole}}}"], self.start, self.end)
        for labels in series:
            _refuse_foreign(self.shown, labels, self._asked)
        return series

    def exists(self, metric: str) -> bool:
        """Return True if any target has the metric at the end of the time range."""
        try:
            return bool(self._prometheus.instant(f"count({metric})", self.end))
        except (Refused, Unusable):
            return False

    def _read_flags(self) -> Flags:
        """Read the flags of servers without an exporter; none if the site identifies servers by other labels."""
        if self._labels != ("instance",):
            return {}
        try:
            published = self._last_labels(f"count by (instance) ({CONFIG})")
            prefixes = by_prefix(self.members)
            infos = [info for prefix in prefixes for info in self._last_labels(with_prefix(CACHE_INFO, prefix))]
        except (Refused, Unusable):
            return {}
        published_by = {label_value(labels, "instance") for labels in published}
        return read_page_flags(info for info in infos if label_value(info, "instance") not in published_by)

    def _last_labels(self, promql: str) -> list[Mapping[str, str]]:
        """Return the labels of a query's series at the last instant."""
        answer = self._prometheus.instant(add_matchers(promql, self._matchers), int(self.instants[-1]) + self._lag)
        return [series["metric"] for series in self._of_servers(answer)]

    def at_end(self, promql: str) -> list[tuple[str, Mapping[str, str], float]]:
        """Return server, labels and value of each series at the end of the time range; "" is a series of no server.

        Raises NotAnswered if Prometheus refuses the query or fails.
        """
        at = int(self.instants[-1]) + self._lag
        try:
            answer = self._prometheus.instant(add_matchers(regroup(promql, self._labels), self._matchers), at)
        except (Refused, Unreachable) as error:
            raise NotAnswered from error
        rows = [(self._name(row["metric"]), row["metric"], float(row["value"][1])) for row in self._of_servers(answer)]
        return [row for row in rows if not row[0] or row[0] in self.members]

    def _read(self, promql: str, instants: Instants, names: Collection[str], is_wider: bool) -> dict[Subject, Floats]:
        """Return the rows of the named servers; `is_wider`: the query has no matcher of the servers.

        A comparison keeps the name of a recorded series, and an alternative of it (`or`) has none: at some instants the
        row of a subject is in one of them, at some in the other.
        """
        rows: dict[Subject, Floats] = {}
        at = instants + self._lag
        answer = self._queries.answered(promql, at)
        for series in answer if is_wider else self._of_servers(answer):
            labels = {name: value for name, value in series["metric"].items() if value and name != "__name__"}
            if self._labels != ("instance",):  # `instance` then names the server by the site's own labels
                labels = {name: value for name, value in labels.items() if name not in self._labels}
                labels["instance"] = self._name(series["metric"])
            if label_value(labels, "instance") in names:
                subject, row = tuple(sorted(labels.items())), values_at(series, at)
                rows[subject] = np.where(np.isnan(row), rows.get(subject, row), row)
        return rows


def _most_scraped(targets: Iterable[str], counts: Mapping[str, float]) -> list[str]:
    """Return a few targets with the most scrapes, as regular expressions."""
    most = sorted(targets, key=lambda name: (-counts.get(name, 0.0), name))
    return [re.escape(name) for name in most[:_SAMPLED]]


def _refuse_foreign(shown: str, labels: Mapping[str, str], asked: Iterable[Matcher]) -> None:
    """Raise Unreachable if a series has labels that the selectors of the query exclude."""
    if not all(matcher.accepts(label_value(labels, matcher.label)) for matcher in asked):
        target = printable(label_value(labels, "instance")) or "a server without a name"
        raise Unreachable(
            f"{shown} answers about {target}, which the query excludes: no answer of it can be trusted;"
            " does a proxy in front of it drop the matchers of queries?"
        )
