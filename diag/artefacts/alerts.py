"""Prometheus rules from the declarations: what the doctor judges by is what is alerted on.

Every incident is an alert; a signal that several rules use is recorded once. Signals and alerts over the same window
for the same kind of subject share a group, whose rules are evaluated in order: an alert never reads what was recorded
an interval ago.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diag.artefacts.names import (
    alert_name,
    claim,
    dashboard_uid,
    expression,
    recording_name,
    runbook_url,
    subject_labels,
    threshold,
)
from diag.artefacts.units import alert_value
from diag.core.contract import Contract, Site
from diag.core.incident import Condition, Incident
from diag.diagnosis.diagnose import RANK
from diag.promql import pretty

INTERVAL = "15s"
KEEP_FIRING = "5m"
"""A missed scrape or a short recovery does not end an alert and start another."""
Rule = dict[str, Any]
Group = dict[str, Any]


@dataclass(frozen=True)
class Alert:
    """One alerting rule: the incident with its threshold here, its windows, and the condition whose value is shown."""

    incident: Incident
    windows: tuple[str, ...]
    first: Condition
    severity: str
    labels: tuple[tuple[str, str], ...] = ()

    def conditions(self) -> Iterator[tuple[str, Condition]]:
        """All that must hold and over which window; the condition whose value is shown comes first."""
        for window in self.windows:
            for condition in dict.fromkeys((self.first, *self.incident.conditions)):
                yield window, condition


def alerts(incident: Incident) -> list[Alert]:
    """The alerts of an incident: one, or one per burn-rate window; and a critical one where the incident escalates."""
    if incident.burns:
        return [_burning(incident.over(burn), (burn.short, burn.long)) for burn in incident.burns]
    alert = Alert(incident, (incident.window,), incident.conditions[0], incident.severity)
    critical = [replace(alert, first=incident.escalates, severity="critical")] if incident.escalates else []
    return [alert, *critical]


def _burning(incident: Incident, windows: tuple[str, str]) -> Alert:
    return Alert(incident, windows, incident.conditions[0], incident.severity, (("burn_window", windows[-1]),))


def groups(incidents: Sequence[Incident], contract: Contract) -> list[Group]:
    """The rule groups of all incidents; those of one kind of subject and one window together."""
    rules = [alert for incident in incidents for alert in alerts(incident)]
    shared = _shared(rules, contract)
    by_group: dict[str, list[Alert]] = {}
    for alert in rules:
        name = "-".join((*alert.incident.per, alert.windows[0]))
        by_group.setdefault(f"diag-{name}", []).append(alert)
    return [_group(name, members, shared, contract) for name, members in by_group.items()]


def _shared(rules: Iterable[Alert], contract: Contract) -> set[str]:
    """The expressions that more than one rule uses."""
    uses = Counter(text for alert in rules for text in set(_expressions(alert, contract)))
    return {text for text, count in uses.items() if count > 1}


def _expressions(alert: Alert, contract: Contract) -> Iterator[str]:
    for window, condition in alert.conditions():
        yield expression(condition.signal, alert.incident, window, contract)


def _group(name: str, members: Sequence[Alert], shared: set[str], contract: Contract) -> Group:
    records = {
        recording_name(condition.signal, alert.incident, window, contract.site): text
        for alert in members
        for window, condition in alert.conditions()
        if (text := expression(condition.signal, alert.incident, window, contract)) in shared
    }
    rules: list[Rule] = [{"record": record, "expr": pretty(text)} for record, text in records.items()]
    rules += [rule(alert, contract, set(records.values())) for alert in members]
    return {"name": name, "interval": INTERVAL, "rules": rules}


def rule(alert: Alert, contract: Contract, shared: set[str]) -> Rule:
    """One alerting rule as Prometheus reads it."""
    incident = alert.incident
    parts = [_condition(window, condition, alert, contract, shared) for window, condition in alert.conditions()]
    return {
        "alert": alert_name(incident.id),
        "expr": pretty(" and ".join(parts)),
        "for": incident.hold,
        "keep_firing_for": KEEP_FIRING,
        "labels": {"incident": incident.id, "severity": alert.severity, **dict(alert.labels)},
        "annotations": _annotations(alert, contract),
    }


def _condition(window: str, condition: Condition, alert: Alert, contract: Contract, shared: set[str]) -> str:
    text = expression(condition.signal, alert.incident, window, contract)
    name = recording_name(condition.signal, alert.incident, window, contract.site) if text in shared else f"({text})"
    return f"{name} {condition.op} {contract.limit(condition.limit):g}"


def _annotations(alert: Alert, contract: Contract) -> dict[str, str]:
    incident, site = alert.incident, contract.site
    return {
        "summary": f"{incident.title} on {subject(incident, site)}",
        "description": _description(alert, contract),
        "impact": incident.impact,
        "runbook_url": runbook_url(site, incident.id),
        "dashboard_url": dashboard_url(incident, site),
        "doctor": doctor_command(site),
    }


def _description(alert: Alert, contract: Contract) -> str:
    """The measured value with its threshold, then the other conditions, which hold as well."""
    signal = alert.first.signal
    measured = signal.sentence.format(value=alert_value(signal.unit))
    others = dict.fromkeys(condition for _, condition in alert.conditions() if condition != alert.first)
    also = "; ".join(claim(condition, contract) for condition in others)
    limit = "" if signal.unit == "bool" else f"threshold {threshold(alert.first, contract)} "
    text = f"{measured} ({limit}over {' and '.join(alert.windows)})"
    return f"{text}; also true: {also}" if also else text


def subject(incident: Incident, site: Site) -> str:
    """The subject in a template: "{{ $labels.instance }} engine {{ $labels.engine }}"."""
    server = "/".join(f"{{{{ $labels.{label} }}}}" for label in site.labels)
    parts = [f"{label} {{{{ $labels.{label} }}}}" for label in subject_labels(incident, site)[len(site.labels) :]]
    return " ".join((server, *parts))


def dashboard_url(incident: Incident, site: Site) -> str:
    """The incident's dashboard at the subject, from an hour before to now, as times that still hold tomorrow."""
    chosen = "".join(f"&var-{label}={{{{ $labels.{label} | urlquery }}}}" for label in subject_labels(incident, site))
    span = f"from={_milliseconds('time() - 3600')}&to={_milliseconds('time()')}"
    return f"{site.grafana_url}/d/{dashboard_uid(incident.id)}?{span}{chosen}"


def _milliseconds(promql: str) -> str:
    return f'{{{{ printf "%.0f" (query "vector(({promql}) * 1000)" | first | value) }}}}'


def doctor_command(site: Site) -> str:
    """The command that diagnoses the server of the alert."""
    if "instance" in site.labels:
        return "diag doctor http://{{ $labels.instance }}"
    return f"diag doctor http://<address of {' '.join(f'{{{{ $labels.{label} }}}}' for label in site.labels)}>"


def inhibitions(incidents: Sequence[Incident], site: Site) -> list[dict[str, Any]]:
    """Alertmanager's inhibition rules: a cause mutes what follows from it, a critical alert its own warning.

    A warning never mutes a critical alert.
    """
    known = {incident.id: incident for incident in incidents}
    explained = [(cause, known[name]) for cause in incidents for name in cause.explains]
    rules = [
        _inhibit(f'incident="{cause.id}"', f'incident="{effect.id}"', _common(cause, effect, site))
        for cause, effect in explained
        if RANK[cause.severity] >= RANK[effect.severity]
    ]
    return rules + [
        _inhibit(
            f'incident="{incident.id}",severity="critical"',
            f'incident="{incident.id}",severity="warning"',
            subject_labels(incident, site),
        )
        for incident in incidents
        if incident.escalates
    ]


def _inhibit(source: str, target: str, equal: Sequence[str]) -> dict[str, Any]:
    return {"source_matchers": source.split(","), "target_matchers": target.split(","), "equal": list(equal)}


def _common(cause: Incident, effect: Incident, site: Site) -> list[str]:
    return [label for label in subject_labels(cause, site) if label in subject_labels(effect, site)]
