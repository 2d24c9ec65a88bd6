"""Prometheus rules from the declarations: the doctor and the alerts judge by the same expressions.

Every incident is an alert: a conjunction of recorded signals and thresholds. The rules of a group are evaluated in
order, so that an alert reads what was recorded at the same instant, and an effect the alerts of its causes; only long
ranges are recorded in a slower group. The same alerts are filled with the values of a diagnosis for a site without a
Prometheus.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from textwrap import indent
from typing import Any, NamedTuple

from diag.artefacts.inhibitions import Known, severities, shared_labels
from diag.artefacts.message import DiagnosisValues, Message, PrometheusTemplates, annotations, place_labels, shown
from diag.artefacts.names import alert_label, alert_name
from diag.core.contract import Contract, Site
from diag.core.declarations import PACKAGE, read
from diag.core.incident import RANK, Condition, Incident, Severity, regroup, seconds
from diag.diagnosis.diagnose import Diagnosis
from diag.knowledge.formulas import (
    INTERVAL,
    LONG,
    OF_A_FORMER_PROCESS,
    SLOW_INTERVAL,
    SUBJECTS,
    TICKET_INTERVAL,
    RecordedSeries,
    RuleSet,
    comparison,
    ending_signals,
    formula,
    generation_series,
    model_series,
    rule_set,
    served_models,
)
from diag.promql import pretty

GONE_AFTER, KEEP_FIRING = 150.0, 30.0
"""Seconds from recovery until an alert ends, and for which it outlasts its conditions at least.

An alert over a minute has the most left to outlast its conditions: there, one missed scrape leaves too few samples.
"""
PAGED_LATELY = "15m"
"""The time for which a page about an effect keeps the escalated alert of its cause from being a second page."""
LONGEST_REASON = 300
"""Characters of a reason why a server has no telemetry."""
SLOW, TICKETS = "diag-slow", "diag-tickets"
EVERY = {SLOW: SLOW_INTERVAL, TICKETS: TICKET_INTERVAL}
"""Groups that are evaluated more rarely than pages, and how often."""
UNHURRIED = 300.0
"""Seconds: a ticket over such a window is evaluated every half minute, an alert with such a `for` every minute."""
TELEMETRY_RUNBOOK = "telemetry"
"""The runbook of all alerts about missing telemetry."""
Rule = dict[str, Any]
Group = dict[str, Any]


@dataclass(frozen=True)
class AlertCase:
    """A case in which an alert fires: all conditions hold over each of the windows; the value of `first` is shown."""

    incident: Incident
    windows: tuple[str, ...]
    first: Condition

    def conditions(self) -> Iterator[tuple[str, Condition]]:
        """Yield each window and a condition over it; the condition whose value is shown comes first."""
        for window in self.windows:
            for condition in dict.fromkeys((self.first, *self.incident.alerting)):
                yield window, condition


@dataclass(frozen=True)
class Alert:
    """One alerting rule: it fires if any of its cases holds.

    The burn-rate windows of an SLO are the cases of one alert, so that a spent budget pages once: as separate
    alerts, the slow window would page again after the fast one.
    """

    incident: Incident
    severity: Severity
    cases: tuple[AlertCase, ...]

    def conditions(self) -> Iterator[tuple[str, Condition]]:
        for case in self.cases:
            yield from case.conditions()


def alerts(incident: Incident) -> list[Alert]:
    """Return the alerts of an incident: one, and a critical one if the incident escalates."""
    burning = [(burn, incident.over(burn)) for burn in incident.burns]
    by_burn_rate = tuple(AlertCase(over, (burn.short, burn.long), over.alerting[0]) for burn, over in burning)
    suddenly = tuple(AlertCase(rising, (rising.window,), rising.alerting[0]) for rising in incident.rising)
    own = (*by_burn_rate, *suddenly) or (AlertCase(incident, (incident.window,), incident.alerting[0]),)
    found = [Alert(incident, incident.severity, own)]
    if incident.escalates:
        found.append(Alert(incident, "critical", (AlertCase(incident, (incident.window,), incident.escalates),)))
    return found


def groups(incidents: Sequence[Incident], contract: Contract) -> list[Group]:
    """Return the rule groups of all incidents: those that depend on each other together, records before alerts."""
    known = {incident.id: incident for incident in incidents}
    causes = {name: [cause.id for cause in incidents if name in cause.explains] for name in known}
    found = [alert for name in TopologicalSorter(causes).static_order() for alert in alerts(known[name])]
    recorded = rule_set(incidents, contract)
    reads = {
        alert: [
            *(recorded.series[_signal(window, condition, alert, contract)] for window, condition in alert.conditions()),
            *(recorded.series[name] for name in ending_signals(alert.incident, contract)),
        ]
        for alert in found
    }
    placed = _groups_of(recorded.rules, reads)
    by_group: dict[str, list[Rule]] = {name: [] for name in placed.values()}
    for series, record in recorded.rules.items():
        by_group[placed[series]].append({"record": series, "expr": pretty(record.promql)})
    for alert in found:
        if alert.incident.id in contract.site.disabled_incidents:
            continue
        by_group[placed[alert]].append(rule(alert, contract, recorded.series, known))

    # a group that shows which rules are evaluated, for which servers, engines and GPUs
    labels = contract.site.labels
    server, ours = generation_series(("instance",), ("instance",)), generation_series(("instance",), labels)
    generation: list[Rule] = [
        {
            "record": generation_series(per, labels),
            "expr": pretty(regroup(promql, labels).replace(server, ours)),
            "labels": {"generation": recorded.generation},
        }
        for per, promql in SUBJECTS.items()
    ]
    generation.append({"record": model_series(labels), "expr": served_models(labels)})
    return [
        {"name": "diag-generation", "interval": SLOW_INTERVAL, "rules": generation},
        *(
            {"name": name, "interval": EVERY.get(name, INTERVAL), "rules": rules}
            for name, rules in sorted(by_group.items(), key=lambda group: (group[0] != SLOW, group[0]))
        ),
    ]


def _groups_of(rules: Mapping[str, RecordedSeries], reads: Mapping[Alert, Sequence[str]]) -> dict[str | Alert, str]:
    """Return the group of every record and alert.

    A record is evaluated as often as the rules that read it, but every minute if its range is long. Of those that are
    evaluated as often as pages, those that are connected share a group, named by the subjects of its alerts.
    """
    rare: dict[str | Alert, str] = {}
    for alert in reads:
        incident, windows = alert.incident, [*map(seconds, dict(alert.conditions()))]
        alone = not incident.explains and not incident.escalates  # else it is read at the instant of its page
        if seconds(incident.hold) >= UNHURRIED or (alert.severity == "info" and alone) or min(windows) >= LONG:
            rare[alert] = SLOW
        elif alert.severity == "warning" and alone and seconds(incident.window) >= UNHURRIED:
            rare[alert] = TICKETS
    readers: dict[str, list[str | Alert]] = {name: [] for name in rules}
    for alert, series in reads.items():
        for name in dict.fromkeys(series):
            readers[name].append(alert)
    for name, record in reversed([*rules.items()]):
        for other in record.reads:
            readers[other].append(name)
        read_in = {rare.get(reader) for reader in readers[name]}
        if record.longest_range > LONG or read_in <= {SLOW}:
            rare[name] = SLOW
        elif None not in read_in:
            rare[name] = TICKETS
    component: dict[str | Alert, set[str | Alert]] = {}
    for name in rules:
        if name not in rare:
            near = [name, *(other for other in readers[name] if other not in rare)]
            joined: set[str | Alert] = set().union(*(component.get(other, {other}) for other in near))
            component |= dict.fromkeys(joined, joined)
    placed: dict[str | Alert, str] = {}
    members: list[str | Alert] = [*rules, *reads]
    for member in members:
        connected = component.get(member, {member})
        kinds = {alert.incident.per[-1] for alert in connected if isinstance(alert, Alert)}
        kind = kinds.pop() if len(kinds) == 1 else "engine"
        placed[member] = rare.get(member, f"diag-{kind}")
    return placed


def rule(alert: Alert, contract: Contract, series: Mapping[str, str], known: Known) -> Rule:
    """Return one alerting rule as Prometheus reads it; `series` are the recorded series by the names of formulas."""
    incident, first = alert.incident, alert.cases[0]
    conditions = tuple(condition for _, condition in first.conditions())
    windows = tuple((case.first, case.windows) for case in alert.cases)
    of_it = (cause for cause in known.values() if incident.id in cause.explains)
    causes = tuple(cause for cause in of_it if RANK[cause.severity] < RANK[alert.severity])  # its message names them
    message = Message(incident, contract, first.first, conditions, windows, series, causes)
    cases = [
        [
            comparison(series[_signal(window, condition, alert, contract)], condition, contract)
            for window, condition in case.conditions()
        ]
        for case in alert.cases
    ]
    holds = "\nand ".join(cases[0])
    if len(cases) > 1:  # `unless` binds more tightly than `or`: without the outer brackets, it ends the last case only
        either = "\nor ".join(f"({' and '.join(case)})" for case in cases)
        holds = f"(\n{indent(either, '  ')}\n)"
    return {
        "alert": alert_name(incident.id),
        "expr": "\nunless ".join([holds, *_over(incident, contract, series), *_muted_by(alert, contract.site, known)]),
        "for": incident.hold,
        "keep_firing_for": f"{keeps_firing(incident):.0f}s",
        "labels": {
            **contract.site.extra_labels,
            "incident": incident.id,
            "severity": alert.severity,
            **place_labels(contract.site),
        },
        "annotations": annotations(message, PrometheusTemplates(message)),
    }


def alert_expressions(
    incident: Incident, incidents: Sequence[Incident], contract: Contract, recorded: RuleSet
) -> list[str]:
    """Return the expressions of the alerts of an incident, as `rule` writes them."""
    known = {other.id: other for other in incidents}
    return [str(rule(alert, contract, recorded.series, known)["expr"]) for alert in alerts(incident)]


def _over(incident: Incident, contract: Contract, series: Mapping[str, str]) -> list[str]:
    """Return the expressions that end an alert before its window is clear: refuted lately, or of a former process.

    A signal without a value ends nothing: after a few events in a short window it has none. What was refuted stays so
    until a new value confirms it, for as long as an older window may hold the samples that it was about: neither a
    server that is gone nor a series that ends may revive an alert.
    """
    if not incident.ends_over:
        return []
    refuted, server = incident.ending, f"on ({', '.join(contract.site.labels)})"
    recent = series[formula(refuted.signal, incident.per, incident.ends_over, contract).name]
    former = series[formula(OF_A_FORMER_PROCESS, ("instance",), "5m", contract).name]
    # what a new process spends by itself is to be worth a page
    confirming = incident.over(incident.burns[-1]).symptoms[0] if incident.burns else refuted.opposite
    confirmed = comparison(recent, confirming, contract)
    # a window of half an hour outlives the second series, which is gone five minutes after its server
    last = f"last_over_time({recent}[{incident.remembers}])"
    lasting = f"last_over_time({former}[{incident.remembers}])" if incident.burns else former
    return [comparison(last, refuted, contract), f"{server} ({lasting} unless {server} {confirmed})"]


def _muted_by(alert: Alert, site: Site, known: Known) -> Iterator[str]:
    """Yield what mutes an alert: firing alerts of causes, by the labels that both have, and late pages about effects.

    The window of a cause is clear when its alert ends, so that an effect that still holds then is another fault. Only
    latencies are counted when a request ends: until the window that ends an SLO's alert is free of the cause, they are
    those of requests that waited for it. A warning never mutes a critical alert.
    """
    effect = alert.incident
    limit = ',severity="critical"' if alert.severity == "critical" else ""
    causes: dict[str, list[str]] = {}
    for cause in known.values():
        worst = [each for each in severities(cause) if RANK[each] >= RANK[alert.severity]]
        if effect.id in cause.explains and worst:
            causes.setdefault(", ".join(shared_labels(cause, effect, site)), []).append(cause.id)
    for labels, names in causes.items():
        firing = f'ALERTS{{alertstate="firing"{limit},incident=~"{"|".join(names)}"}}'
        yield f"on ({labels}) " + (f"last_over_time({firing}[{effect.ends_over}])" if effect.burns else firing)
    if alert.severity != effect.severity:  # an escalated alert is a ticket beside the pages about its effects
        paging = [name for name in effect.explains if name in known and "critical" in severities(known[name])]
        paged = f'ALERTS{{alertstate="firing",severity="critical",incident=~"{"|".join(paging)}"}}[{PAGED_LATELY}]'
        if paging:
            yield f"on ({', '.join(site.labels)}) last_over_time({paged})"


def keeps_firing(incident: Incident) -> float:
    """Return the seconds for which an alert outlasts its conditions.

    An info pages no person: it ends once its condition has not held for a whole window, so that a value at the
    threshold does not make it come and go.
    """
    if incident.severity == "info":
        return max(KEEP_FIRING, seconds(incident.window))
    return max(KEEP_FIRING, GONE_AFTER - seconds(incident.ends_over or incident.window))


def _signal(window: str, condition: Condition, alert: Alert, contract: Contract) -> str:
    """Return the name of a condition's signal in formulas."""
    return formula(condition.signal, alert.incident.per, window, contract).name


# -- alerts about missing telemetry


class TelemetryAlert(NamedTuple):
    """One alert of telemetry_alerts.toml, beside this file; `summary` has the place `{server}`."""

    name: str
    title: str
    promql: str
    hold: str
    severity: Severity
    summary: str
    impact: str
    action: str

    def expression(self, contract: Contract) -> str:
        """Return the expression as this site's Prometheus evaluates it."""
        return regroup(formula(self.promql, (), "", contract).text, contract.site.labels)


@cache
def telemetry_alerts() -> tuple[TelemetryAlert, ...]:
    """Return the alerts about telemetry without which others cannot fire; the first one: no server has metrics."""
    return read(PACKAGE / "artefacts" / "telemetry_alerts.toml", tuple[TelemetryAlert, ...], "alert")


def telemetry_group(contract: Contract) -> Group:
    """Return the telemetry alerts as one rule group."""
    site = contract.site
    server = "/".join(map(alert_label, site.labels))
    rules = [
        {
            "alert": alert.name,
            "expr": pretty(alert.expression(contract)),
            "for": alert.hold,
            "labels": {**site.extra_labels, "severity": alert.severity},
            "annotations": {
                "title": alert.title,
                "summary": alert.summary.format(server=server, collector=alert_label("collector")),
                "do_now": alert.action,
                "impact": alert.impact,
                "runbook_url": site.runbook_url(TELEMETRY_RUNBOOK),
            },
        }
        for alert in telemetry_alerts()
    ]
    return {"name": "diag-telemetry", "interval": "1m", "rules": rules}


# -- the alerts of a diagnosis, for a site without a Prometheus: names, labels and texts as the rules give them


class FilledAlert(NamedTuple):
    """One alert: its labels with `alertname`, its annotations, and the unix seconds since which it holds."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    since: float


def filled_alerts(
    diagnosis: Diagnosis, contract: Contract, now: float, *, model: str = "", do_now: Sequence[str] = ()
) -> Iterator[FilledAlert]:
    """Yield the alerts that fire for a diagnosis: the one of its incident, and the critical one if it is critical."""
    labels = dict(diagnosis.subject)
    site_values = labels.get("instance", "").split("/")  # a site's own labels are parts of the name of its server
    if contract.site.labels != ("instance",) and len(site_values) == len(contract.site.labels):
        del labels["instance"]
        labels = {**dict(zip(contract.site.labels, site_values, strict=True)), **labels}
    since = diagnosis.watched_since if diagnosis.since is None else diagnosis.since
    readings = [*diagnosis.symptoms, *diagnosis.escalation]
    conditions = [reading.condition for reading in readings]
    symptoms = conditions[: len(diagnosis.symptoms)]
    actions = " ".join(do_now or diagnosis.incident.mitigate) or "Follow the runbook."
    values = DiagnosisValues(labels, readings, contract.site, model, actions, now)
    for alert in alerts(diagnosis.incident):
        if RANK[alert.severity] <= RANK[diagnosis.severity]:
            named = {"alertname": alert_name(alert.incident.id), "incident": alert.incident.id}
            named |= {"severity": alert.severity, **({"model": model} if model else {})}
            first = alert.cases[0].first if alert.cases[0].first in conditions else conditions[0]
            message = Message(diagnosis.incident, contract, first, tuple(symptoms), ((first, ()),), {})
            texts = annotations(message, values)
            yield FilledAlert({**contract.site.extra_labels, **named, **labels}, texts, since)


def no_telemetry(instance: str, reason: str, site: Site, now: float) -> FilledAlert:
    """Return the alert about a server that has no telemetry."""
    absent = telemetry_alerts()[0]
    labels = {**site.extra_labels, "alertname": absent.name, "severity": absent.severity, "instance": instance}
    texts = {
        "title": absent.title,
        "summary": f"diag has no metrics from {shown(instance)}",
        "do_now": "Check that the server runs and that diag reaches it.",
        "description": re.sub(r"[^\w.,:;/()?' -]", "?", reason, flags=re.ASCII)[:LONGEST_REASON],
        "impact": absent.impact,
        "runbook_url": site.runbook_url(TELEMETRY_RUNBOOK),
    }
    return FilledAlert(labels, texts, now)
