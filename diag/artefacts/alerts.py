"""Prometheus rules from the declarations: what the doctor judges by is what is alerted on.

Every incident is an alert; a signal that several rules use is recorded once. Signals and alerts over the same window
for the same kind of subject share a group, whose rules are evaluated in order: an alert never reads what was recorded
an interval ago.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diag.artefacts.names import (
    alert_label,
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
from diag.core.incident import RANK, Condition, Incident, Severity, seconds
from diag.promql import pretty

INTERVAL, SLOW_INTERVAL = "15s", "1m"
SLOW = 900.0
"""Seconds of a window from which a rule is evaluated every minute: nothing in it changes faster."""
KEEP_FIRING = 300.0
"""Seconds for which an alert outlasts its conditions: a missed scrape or a short recovery does not start another."""
MARGIN = 60.0
"""Seconds by which a cause outlasts its consequences at least: its group is evaluated at another moment."""
Rule = dict[str, Any]
Group = dict[str, Any]
Known = Mapping[str, Incident]


@dataclass(frozen=True)
class AlertCase:
    """What makes an alert fire: all conditions over each of these windows; the value of `first` is shown."""

    incident: Incident
    windows: tuple[str, ...]
    first: Condition

    def conditions(self) -> Iterator[tuple[str, Condition]]:
        """All that must hold and over which window; the condition whose value is shown comes first."""
        for window in self.windows:
            for condition in dict.fromkeys((self.first, *self.incident.conditions)):
                yield window, condition


@dataclass(frozen=True)
class Alert:
    """One alerting rule: it fires where any of its cases holds.

    The burn-rate windows of an SLO are the cases of one alert, so that a budget that is spent pages once: were each an
    alert, the slow one would page again when the fast one has done so already.
    """

    incident: Incident
    severity: Severity
    cases: tuple[AlertCase, ...]

    def conditions(self) -> Iterator[tuple[str, Condition]]:
        """The conditions of all cases."""
        for case in self.cases:
            yield from case.conditions()


def alerts(incident: Incident) -> list[Alert]:
    """The alerts of an incident: one, and a critical one where the incident escalates."""
    conditions = (incident.conditions[0], *((incident.escalates,) if incident.escalates else ()))
    severities: tuple[Severity, ...] = (incident.severity, "critical")
    return [
        Alert(incident, severity, tuple(_cases(incident, condition)))
        for severity, condition in zip(severities, conditions, strict=False)
    ]


def _cases(incident: Incident, first: Condition) -> Iterator[AlertCase]:
    if not incident.burns:
        yield AlertCase(incident, (incident.window,), first)
    for burn in incident.burns:
        burning = incident.over(burn)
        yield AlertCase(burning, (burn.short, burn.long), burning.conditions[0])


def groups(incidents: Sequence[Incident], contract: Contract) -> list[Group]:
    """The rule groups of all incidents; those of one kind of subject and one window together."""
    rules = [alert for incident in incidents for alert in alerts(incident)]
    shared = _shared(rules, contract)
    known = {incident.id: incident for incident in incidents}
    by_group: dict[str, list[Alert]] = {}
    for alert in rules:
        name = "-".join((*alert.incident.per, alert.cases[0].windows[0]))
        by_group.setdefault(f"diag-{name}", []).append(alert)
    return [_group(name, members, shared, contract, known) for name, members in by_group.items()]


def _shared(rules: Iterable[Alert], contract: Contract) -> set[str]:
    """The expressions that more than one rule uses."""
    uses = Counter(text for alert in rules for text in set(_expressions(alert, contract)))
    return {text for text, count in uses.items() if count > 1}


def _expressions(alert: Alert, contract: Contract) -> Iterator[str]:
    for window, condition in alert.conditions():
        yield expression(condition.signal, alert.incident, window, contract)


def _group(name: str, members: Sequence[Alert], shared: set[str], contract: Contract, known: Known) -> Group:
    records = {
        recording_name(condition.signal, alert.incident, window, contract.site): text
        for alert in members
        for window, condition in alert.conditions()
        if (text := expression(condition.signal, alert.incident, window, contract)) in shared
    }
    rules: list[Rule] = [{"record": record, "expr": pretty(text)} for record, text in records.items()]
    rules += [rule(alert, contract, set(records.values()), known) for alert in members]
    slow = all(seconds(window) >= SLOW for alert in members for window, _ in alert.conditions())
    return {"name": name, "interval": SLOW_INTERVAL if slow else INTERVAL, "rules": rules}


def rule(alert: Alert, contract: Contract, shared: set[str], known: Known) -> Rule:
    """One alerting rule as Prometheus reads it."""
    incident = alert.incident
    cases = [_case(case, contract, shared, known) for case in alert.cases]
    return {
        "alert": alert_name(incident.id),
        "expr": pretty(cases[0] if len(cases) == 1 else " or ".join(f"({case})" for case in cases)),
        "for": incident.hold,
        "keep_firing_for": f"{keeps_firing(incident, known) / 60:.0f}m",
        "labels": {"incident": incident.id, "severity": alert.severity},
        "annotations": annotations(alert, contract),
    }


def keeps_firing(cause: Incident, known: Known) -> float:
    """Seconds for which an alert stays when it is over: until the pages that it mutes have cleared their windows."""
    muted = (known[name] for name in cause.explains if name in known and _mutes(cause, known[name]))
    effects = [effect for effect in muted if effect.severity == "critical"]
    return max([KEEP_FIRING, *(seconds(each.window) + keeps_firing(each, known) + MARGIN for each in effects)])


def _mutes(cause: Incident, effect: Incident) -> bool:
    """A warning never mutes a critical alert."""
    return RANK[cause.severity] >= RANK[effect.severity]


def _case(case: AlertCase, contract: Contract, shared: set[str], known: Known) -> str:
    parts = [_condition(window, condition, case.incident, contract, shared) for window, condition in case.conditions()]
    return " and ".join(parts) + _unless_paged(case, contract.site, known)


def _unless_paged(case: AlertCase, site: Site, known: Known) -> str:
    """What a window that outlasts the alert of a cause still holds of it has paged already, and pages nobody again."""
    effect, window = case.incident, case.windows[0]
    causes = [each.id for each in known.values() if effect.id in each.explains and _mutes(each, effect)]
    if not causes or seconds(window) <= KEEP_FIRING:
        return ""
    paged = f'ALERTS{{alertstate="firing",severity="{effect.severity}",incident=~"{"|".join(causes)}"}}'
    return f" unless on ({', '.join(site.labels)}) max_over_time({paged}[{window}])"


def _condition(window: str, condition: Condition, incident: Incident, contract: Contract, shared: set[str]) -> str:
    text = expression(condition.signal, incident, window, contract)
    name = recording_name(condition.signal, incident, window, contract.site) if text in shared else f"({text})"
    return f"{name} {condition.op} {contract.limit(condition.limit):g}"


def annotations(alert: Alert, contract: Contract) -> dict[str, str]:
    """What an alert tells its reader, with templates of Prometheus for what only it knows."""
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
    first = alert.cases[0].first
    measured = first.signal.sentence.format(value=alert_value(first.signal.unit))
    others = dict.fromkeys(condition for _, condition in alert.cases[0].conditions() if condition != first)
    also = "; ".join(claim(condition, contract) for condition in others)
    text = f"{measured} ({', or '.join(_limit(case, contract) for case in alert.cases)})"
    return f"{text}; also true: {also}" if also else text


def _limit(case: AlertCase, contract: Contract) -> str:
    limit = "" if case.first.signal.unit == "bool" else f"threshold {threshold(case.first, contract)} "
    return f"{limit}over {' and '.join(case.windows)}"


def subject(incident: Incident, site: Site) -> str:
    """The subject in a template: its server, then "engine" or "gpu" and which."""
    server = "/".join(map(alert_label, site.labels))
    parts = [f"{label} {alert_label(label)}" for label in subject_labels(incident, site)[len(site.labels) :]]
    return " ".join((server, *parts))


def dashboard_url(incident: Incident, site: Site) -> str:
    """The incident's dashboard at the subject, from an hour before to now, as times that still hold tomorrow."""
    chosen = "".join(f"&var-{label}={{{{ $labels.{label} | urlquery }}}}" for label in subject_labels(incident, site))
    span = f"from={_time('(time() - 3600) * 1000')}&to={_time('time() * 1000')}"
    return f"{site.grafana_url}/d/{dashboard_uid(incident.id)}?{span}{chosen}"


def _time(promql: str) -> str:
    return f'{{{{ printf "%.0f" (query "vector({promql})" | first | value) }}}}'


def doctor_command(site: Site) -> str:
    """The command that judges the server of the alert by the alert's own samples, from an hour before it until now."""
    server = " ".join(f"--match '{label}=\"{alert_label(label)}\"'" for label in site.labels)
    return f"diag doctor --prometheus {site.prometheus_url} {server} --from {_time('time() - 3600')}"


def inhibitions(incidents: Sequence[Incident], site: Site) -> list[dict[str, Any]]:
    """Alertmanager's inhibition rules: a cause mutes what follows from it, a critical alert its own warning."""
    known = {incident.id: incident for incident in incidents}
    explained = [(cause, known[name]) for cause in incidents for name in cause.explains]
    rules = [
        _inhibit(f'incident="{cause.id}"', f'incident="{effect.id}"', _common(cause, effect, site))
        for cause, effect in explained
        if _mutes(cause, effect)
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
