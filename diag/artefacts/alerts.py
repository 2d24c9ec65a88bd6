"""Prometheus rules from the declarations: the doctor and the alerts judge by the same expressions.

Every incident is an alert: a conjunction of recorded signals and thresholds. The rules of a group are evaluated in
order, so that an alert reads what was recorded at the same instant; only long ranges are recorded in a slower group.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any, NamedTuple
from urllib.parse import quote_plus

from diag.artefacts.names import (
    alert_label,
    alert_name,
    alert_value,
    claim,
    dashboard_uid,
    subject_labels,
    threshold,
)
from diag.artefacts.telemetry_alerts import RUNBOOK_PAGE, TELEMETRY_ALERTS
from diag.core.contract import Contract, Site
from diag.core.incident import RANK, Condition, Incident, Severity, regroup, seconds
from diag.diagnosis.diagnose import Diagnosis
from diag.knowledge.formulas import (
    INTERVAL,
    LONG,
    SLOW_INTERVAL,
    SUBJECTS,
    RecordedSeries,
    RuleSet,
    comparison,
    ending_signals,
    formula,
    generation_series,
    rule_set,
)
from diag.knowledge.signals.startup import OF_A_FORMER_PROCESS
from diag.promql import pretty

GONE_AFTER, KEEP_FIRING = 150.0, 30.0
"""Seconds from recovery until an alert ends, and for which it outlasts its conditions at least.

An alert over a minute has the most left to outlast its conditions: there, one missed scrape leaves too few samples.
"""
SLOW_GROUP = "diag-slow"
Rule = dict[str, Any]
Group = dict[str, Any]
Known = Mapping[str, Incident]


@dataclass(frozen=True)
class AlertCase:
    """A case in which an alert fires: all conditions hold over each of the windows; the value of `first` is shown."""

    incident: Incident
    windows: tuple[str, ...]
    first: Condition

    def conditions(self) -> Iterator[tuple[str, Condition]]:
        """Yield each window and a condition over it; the condition whose value is shown comes first."""
        for window in self.windows:
            for condition in dict.fromkeys((self.first, *self.incident.conditions)):
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
    by_burn_rate = tuple(AlertCase(over, (burn.short, burn.long), over.conditions[0]) for burn, over in burning)
    own = by_burn_rate or (AlertCase(incident, (incident.window,), incident.conditions[0]),)
    found = [Alert(incident, incident.severity, own)]
    if incident.escalates:
        found.append(Alert(incident, "critical", (AlertCase(incident, (incident.window,), incident.escalates),)))
    return found


def groups(incidents: Sequence[Incident], contract: Contract) -> list[Group]:
    """Return the rule groups of all incidents: those that depend on each other together, records before alerts."""
    found = [alert for incident in incidents for alert in alerts(incident)]
    known = {incident.id: incident for incident in incidents}
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
        by_group[placed[alert]].append(rule(alert, contract, recorded.series, known))

    # a group that shows which rules are evaluated, for which servers, engines and GPUs
    labels = contract.site.labels
    server, ours = generation_series(("instance",), ("instance",)), generation_series(("instance",), labels)
    generation = [
        {
            "record": generation_series(per, labels),
            "expr": pretty(regroup(promql, labels).replace(server, ours)),
            "labels": {"generation": recorded.generation},
        }
        for per, promql in SUBJECTS.items()
    ]
    return [
        {"name": "diag-generation", "interval": SLOW_INTERVAL, "rules": generation},
        *(
            {"name": name, "interval": SLOW_INTERVAL if name == SLOW_GROUP else INTERVAL, "rules": rules}
            for name, rules in sorted(by_group.items(), key=lambda group: (group[0] != SLOW_GROUP, group[0]))
        ),
    ]


def _groups_of(rules: Mapping[str, RecordedSeries], reads: Mapping[Alert, Sequence[str]]) -> dict[str | Alert, str]:
    """Return the group of every record and alert.

    A record whose range is long, or which only slow rules read, is evaluated every minute. Of the others, those that
    are connected share a group, named by the subjects of its alerts.
    """
    slow: set[str | Alert] = {
        alert for alert in reads if all(seconds(window) >= LONG for window, _ in alert.conditions())
    }
    readers: dict[str, list[str | Alert]] = {name: [] for name in rules}
    for alert, names in reads.items():
        for name in names:
            readers[name].append(alert)
    for name, record in reversed([*rules.items()]):
        for other in record.reads:
            readers[other].append(name)
        if record.longest_range > LONG or slow.issuperset(readers[name]):
            slow.add(name)
    component: dict[str | Alert, set[str | Alert]] = {}
    for name in rules:
        if name not in slow:
            near = [name, *(other for other in readers[name] if other not in slow)]
            joined: set[str | Alert] = set().union(*(component.get(other, {other}) for other in near))
            component |= dict.fromkeys(joined, joined)
    placed: dict[str | Alert, str] = {}
    members: list[str | Alert] = [*rules, *reads]
    for member in members:
        connected = component.get(member, {member})
        kinds = {alert.incident.per[-1] for alert in connected if isinstance(alert, Alert)}
        kind = kinds.pop() if len(kinds) == 1 else "engine"
        placed[member] = SLOW_GROUP if member in slow else f"diag-{kind}"
    return placed


def rule(alert: Alert, contract: Contract, series: Mapping[str, str], known: Known) -> Rule:
    """Return one alerting rule as Prometheus reads it; `series` are the recorded series by the names of formulas."""
    incident = alert.incident
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
        "expr": "\nunless ".join([holds, *_over(incident, contract, series), *_caused(incident, contract.site, known)]),
        "for": incident.hold,
        "keep_firing_for": f"{keeps_firing(incident):.0f}s",
        "labels": {"incident": incident.id, "severity": alert.severity},
        "annotations": annotations(alert, contract),
    }


def alert_expressions(
    incident: Incident, incidents: Sequence[Incident], contract: Contract, recorded: RuleSet
) -> list[str]:
    """Return the expressions of the alerts of an incident, as `rule` writes them."""
    known = {other.id: other for other in incidents}
    return [str(rule(alert, contract, recorded.series, known)["expr"]) for alert in alerts(incident)]


def _over(incident: Incident, contract: Contract, series: Mapping[str, str]) -> list[str]:
    """Return the expressions that end an alert before its window is clear: refuted lately, or of a former process.

    A signal without a value ends nothing: after a few events in a short window it has none.
    """
    if not incident.ends_over:
        return []
    refuted, server = incident.ending, f"on ({', '.join(contract.site.labels)})"
    recent = series[formula(refuted.signal, incident.per, incident.ends_over, contract).name]
    former = series[formula(OF_A_FORMER_PROCESS, ("instance",), "5m", contract).name]
    confirmed = comparison(recent, refuted.opposite, contract)
    return [comparison(recent, refuted, contract), f"{server} ({former} unless {server} {confirmed})"]


def _caused(incident: Incident, site: Site, known: Known) -> Iterator[str]:
    """Yield the firing alerts of causes by the labels that both have: what they explain is no alert of its own.

    The window of a cause is clear when its alert ends, so that an effect that still holds then is another fault.
    """
    causes: dict[str, list[str]] = {}
    for cause in known.values():
        if incident.id in cause.explains and _mutes(cause, incident):
            causes.setdefault(", ".join(_shared(cause, incident, site)), []).append(cause.id)
    for labels, names in causes.items():
        yield f'on ({labels}) ALERTS{{alertstate="firing",incident=~"{"|".join(names)}"}}'


def _shared(cause: Incident, effect: Incident, site: Site) -> list[str]:
    return [*filter(subject_labels(effect, site).__contains__, subject_labels(cause, site))]


def keeps_firing(incident: Incident) -> float:
    """Return the seconds for which an alert outlasts its conditions.

    An info pages no person: it ends once its condition has not held for a whole window, so that a value at the
    threshold does not make it come and go.
    """
    if incident.severity == "info":
        return max(KEEP_FIRING, seconds(incident.window))
    return max(KEEP_FIRING, GONE_AFTER - seconds(incident.ends_over or incident.window))


def _mutes(cause: Incident, effect: Incident) -> bool:
    """Return True if the alert of a cause mutes that of an effect; a warning never mutes a critical alert."""
    return RANK[cause.severity] >= RANK[effect.severity]


def _signal(window: str, condition: Condition, alert: Alert, contract: Contract) -> str:
    """Return the name of a condition's signal in formulas."""
    return formula(condition.signal, alert.incident.per, window, contract).name


def annotations(alert: Alert, contract: Contract) -> dict[str, str]:
    """Return the annotations of an alert, with templates of Prometheus for values and labels."""
    incident, site, first = alert.incident, contract.site, alert.cases[0].first
    server = "/".join(map(alert_label, site.labels))
    parts = [f"{label} {alert_label(label)}" for label in subject_labels(incident, site)[len(site.labels) :]]
    measured = first.signal.sentence.format(value=alert_value(first.signal.unit))
    others = dict.fromkeys(condition for _, condition in alert.cases[0].conditions() if condition != first)
    also = "; ".join(claim(condition, contract) for condition in others)
    limits = []
    for case in alert.cases:
        limit = "" if case.first.signal.unit == "bool" else f"threshold {threshold(case.first, contract)} "
        limits.append(f"{limit}over {' and '.join(case.windows)}")
    text = f"{measured} ({', or '.join(limits)})"
    return {
        "summary": f"{incident.title} on {' '.join((server, *parts))}",
        "description": f"{text}; also true: {also}" if also else text,
        "impact": incident.impact,
        "runbook_url": site.runbook_url(incident.id),
        "dashboard_url": dashboard_url(incident, site),
        "doctor": doctor_command(site),
    }


def dashboard_url(incident: Incident, site: Site) -> str:
    """Return the address of Server with the incident's signals at the subject, from an hour ago to now."""
    chosen = "".join(f"&var-{label}={{{{ $labels.{label} | urlquery }}}}" for label in subject_labels(incident, site))
    span = f"from={_time('(time() - 3600) * 1000')}&to={_time('time() * 1000')}"
    return f"{site.grafana_url}/d/{dashboard_uid('server')}?{span}&var-incident={incident.id}{chosen}"


def _time(promql: str) -> str:
    return f'{{{{ printf "%.0f" (query "vector({promql})" | first | value) }}}}'


def doctor_command(site: Site) -> str:
    """Return the command that judges the server by the samples of the alert, from an hour ago until now."""
    server = " ".join(f"--match '{label}=\"{alert_label(label)}\"'" for label in site.labels)
    return f"diag doctor --prometheus {site.prometheus_url} {server} --from {_time('time() - 3600')}"


def inhibitions(incidents: Sequence[Incident], site: Site) -> list[dict[str, Any]]:
    """Return Alertmanager's inhibition rules: a cause mutes its effects, a critical alert its own warning."""
    known = {incident.id: incident for incident in incidents}
    rules: list[dict[str, Any]] = []
    for cause in incidents:
        for effect in (known[name] for name in cause.explains if name in known):
            if _mutes(cause, effect):
                rules.append(
                    {
                        "source_matchers": [f'incident="{cause.id}"'],
                        "target_matchers": [f'incident="{effect.id}"'],
                        "equal": _shared(cause, effect, site),
                    }
                )
    for incident in (incident for incident in incidents if incident.escalates):
        own = f'incident="{incident.id}"'
        rules.append(
            {
                "source_matchers": [own, 'severity="critical"'],
                "target_matchers": [own, 'severity="warning"'],
                "equal": [*subject_labels(incident, site)],
            }
        )
    return rules


# -- the alerts of a diagnosis, for a site without Prometheus

_UNNAMED = re.compile(r"//+|[^\w.:/[\] -]", re.ASCII)
_TIME = re.compile(r'\{\{ printf "%\.0f" \(query "vector\(([^"]*)\)" \| first \| value\) \}\}')
_LONGEST = 100
_LONGEST_REASON = 300
ABSENT = TELEMETRY_ALERTS[0]


class FilledAlert(NamedTuple):
    """One alert: its labels with `alertname`, its annotations, and the unix seconds since which it holds."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    since: float


def filled_alerts(diagnosis: Diagnosis, contract: Contract, now: float) -> Iterator[FilledAlert]:
    """Yield the alerts that fire for a diagnosis: the one of its incident, and the critical one if it is critical."""
    own = dict(diagnosis.subject)
    site_values = own.get("instance", "").split("/")  # a site's own labels are parts of the name of its server
    if contract.site.labels != ("instance",) and len(site_values) == len(contract.site.labels):
        del own["instance"]
        own = {**dict(zip(contract.site.labels, site_values, strict=True)), **own}
    since = diagnosis.watched_since if diagnosis.since is None else diagnosis.since
    symptoms = [reading.condition for reading in diagnosis.symptoms]
    readings = [*diagnosis.symptoms, *diagnosis.escalation]
    times = {"time() - 3600": now - 3600, "(time() - 3600) * 1000": (now - 3600) * 1000, "time() * 1000": now * 1000}
    for alert in alerts(diagnosis.incident):
        if RANK[alert.severity] > RANK[diagnosis.severity]:
            continue
        first = next((reading for reading in readings if reading.condition == alert.cases[0].first), readings[0])
        signal = first.condition.signal
        limit = "" if signal.unit == "bool" else f" (threshold {first.threshold})"
        others = dict.fromkeys(claim(condition, contract) for condition in symptoms if condition != first.condition)
        also = f"; also true: {'; '.join(others)}" if others else ""
        description = f"{signal.sentence.format(value=first.shown)}{limit}{also}"
        texts = {**annotations(alert, contract), "description": description}
        for annotation, template in texts.items():
            text = _TIME.sub(lambda found: f"{times[found[1]]:.0f}", template)
            for label in re.findall(r"\$labels\.(\w+)", text):
                value = own.get(label, "")
                text = text.replace(alert_label(label), shown(value))
                text = text.replace(f"{{{{ $labels.{label} | urlquery }}}}", quote_plus(value))
            texts[annotation] = text
        named = {"alertname": alert_name(alert.incident.id), "incident": alert.incident.id}
        yield FilledAlert({**named, "severity": alert.severity, **own}, texts, since)


def no_telemetry(instance: str, reason: str, site: Site, now: float) -> FilledAlert:
    """Return the alert about a server that has no telemetry."""
    labels = {"alertname": ABSENT.name, "severity": ABSENT.severity, "instance": instance}
    texts = {
        "summary": f"diag has no metrics from {shown(instance)}",
        "description": re.sub(r"[^\w.,:;/()?' -]", "?", reason, flags=re.ASCII)[:_LONGEST_REASON],
        "impact": ABSENT.impact,
        "runbook_url": site.runbook_url(RUNBOOK_PAGE),
    }
    return FilledAlert(labels, texts, now)


def shown(label: str) -> str:
    """Write a label's value as Prometheus writes the template of `alert_label`."""
    return _UNNAMED.sub("?", label)[:_LONGEST]
