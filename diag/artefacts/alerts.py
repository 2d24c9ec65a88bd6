"""Prometheus rules from the declarations: what the doctor judges by is what is alerted on.

Every incident is an alert; a signal that several rules use is recorded once. Signals and alerts that look over the same
window for the same kind of subject share a group, whose rules are evaluated in their order: an alert never reads what
was recorded an interval ago.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diag.artefacts.names import alert_name, comparison, expression, per, recorded, runbook_url, uid
from diag.core.contract import Contract, Site
from diag.core.incident import Condition, Incident
from diag.diagnosis.diagnose import RANK
from diag.promql import pretty

INTERVAL = "15s"
KEEP_FIRING = "5m"
"""A missed scrape or a moment of calm does not end an alert and begin another."""
Rule = dict[str, Any]
Group = dict[str, Any]


@dataclass(frozen=True)
class Alert:
    """One alerting rule: the incident (with the limit it has here), which windows, what value the reader is told."""

    incident: Incident
    windows: tuple[str, ...]
    first: Condition
    severity: str
    labels: tuple[tuple[str, str], ...] = ()

    def conditions(self) -> Iterator[tuple[str, Condition]]:
        """All that must hold and over which window, what is told first."""
        for window in self.windows:
            for condition in dict.fromkeys((self.first, *self.incident.conditions)):
                yield window, condition


def alerts(incident: Incident) -> list[Alert]:
    """The alerts of an incident: one; one for each pair of windows that a budget burns over; a worse one beside it."""
    if incident.burns:
        return [_burning(incident.over(burn), (burn.short, burn.long)) for burn in incident.burns]
    own = Alert(incident, (incident.window,), incident.conditions[0], incident.severity)
    worse = [replace(own, first=incident.escalates, severity="critical")] if incident.escalates else []
    return [own, *worse]


def _burning(incident: Incident, windows: tuple[str, str]) -> Alert:
    return Alert(incident, windows, incident.conditions[0], incident.severity, (("burn_window", windows[-1]),))


def groups(incidents: Sequence[Incident], contract: Contract) -> list[Group]:
    """The rule groups of all incidents; those of one kind of subject and one window together."""
    rules = [alert for each in incidents for alert in alerts(each)]
    shared = _shared(rules, contract)
    together: dict[str, list[Alert]] = {}
    for alert in rules:
        name = "-".join((*alert.incident.per, alert.windows[0]))
        together.setdefault(f"diag-{name}", []).append(alert)
    return [_group(name, members, shared, contract) for name, members in together.items()]


def _shared(rules: Iterable[Alert], contract: Contract) -> set[str]:
    """The expressions that more than one rule asks for."""
    asked = Counter(
        text
        for alert in rules
        for text in {expression(each.signal, alert.incident, window, contract) for window, each in alert.conditions()}
    )
    return {text for text, times in asked.items() if times > 1}


def _group(name: str, members: Sequence[Alert], shared: set[str], contract: Contract) -> Group:
    records = {
        recorded(each.signal, alert.incident, window, contract.site): text
        for alert in members
        for window, each in alert.conditions()
        if (text := expression(each.signal, alert.incident, window, contract)) in shared
    }
    rules: list[Rule] = [{"record": record, "expr": pretty(text)} for record, text in records.items()]
    rules += [rule(alert, contract, set(records.values())) for alert in members]
    return {"name": name, "interval": INTERVAL, "rules": rules}


def rule(alert: Alert, contract: Contract, shared: set[str]) -> Rule:
    """One alerting rule as Prometheus reads it."""
    incident = alert.incident
    return {
        "alert": alert_name(incident.id),
        "expr": pretty(" and ".join(_condition(*each, alert, contract, shared) for each in alert.conditions())),
        "for": incident.hold,
        "keep_firing_for": KEEP_FIRING,
        "labels": {"incident": incident.id, "severity": alert.severity, **dict(alert.labels)},
        "annotations": _annotations(alert, contract),
    }


def _condition(window: str, condition: Condition, alert: Alert, contract: Contract, shared: set[str]) -> str:
    text = expression(condition.signal, alert.incident, window, contract)
    name = recorded(condition.signal, alert.incident, window, contract.site) if text in shared else f"({text})"
    return f"{name} {comparison(condition, contract)}"


def _annotations(alert: Alert, contract: Contract) -> dict[str, str]:
    incident, site = alert.incident, contract.site
    told = alert.first.signal.sentence.format(value="{{ $value | humanize }}")
    others = [each for _, each in alert.conditions() if each != alert.first]
    limits = "; ".join(f"{each.signal.name} {comparison(each, contract)}" for each in dict.fromkeys(others))
    return {
        "summary": f"{incident.title} on {subject(incident, site)}",
        "description": f"{told} (limit {comparison(alert.first, contract)}, over {' and '.join(alert.windows)})"
        + (f"; also: {limits}" if limits else ""),
        "impact": incident.impact,
        "runbook_url": runbook_url(site, incident.id),
        "dashboard_url": dashboard_url(incident, site),
        "doctor": doctor(site),
    }


def subject(incident: Incident, site: Site) -> str:
    """The subject in a template: "{{ $labels.instance }} engine {{ $labels.engine }}"."""
    server = "/".join(f"{{{{ $labels.{label} }}}}" for label in site.labels)
    parts = [f"{label} {{{{ $labels.{label} }}}}" for label in per(incident, site)[len(site.labels) :]]
    return " ".join((server, *parts))


def dashboard_url(incident: Incident, site: Site) -> str:
    """The incident's dashboard at the subject, from an hour before to now, as times that still hold tomorrow."""
    chosen = "".join(f"&var-{label}={{{{ $labels.{label} | urlquery }}}}" for label in per(incident, site))
    span = f"from={_milliseconds('time() - 3600')}&to={_milliseconds('time()')}"
    return f"{site.grafana_url}/d/{uid(incident.id)}?{span}{chosen}"


def _milliseconds(promql: str) -> str:
    return f'{{{{ printf "%.0f" (query "vector(({promql}) * 1000)" | first | value) }}}}'


def doctor(site: Site) -> str:
    """What to type."""
    if "instance" in site.labels:
        return "diag doctor http://{{ $labels.instance }}"
    return f"diag doctor http://<address of {' '.join(f'{{{{ $labels.{label} }}}}' for label in site.labels)}>"


def inhibitions(incidents: Sequence[Incident], site: Site) -> list[dict[str, Any]]:
    """What Alertmanager need not say: what follows from a cause that is being said, and a warning that became critical.

    A ticket never silences a page.
    """
    known = {each.id: each for each in incidents}
    explained = [(cause, known[name]) for cause in incidents for name in cause.explains]
    rules = [
        _inhibit(f'incident="{cause.id}"', f'incident="{effect.id}"', _common(cause, effect, site))
        for cause, effect in explained
        if RANK[cause.severity] >= RANK[effect.severity]
    ]
    return rules + [
        _inhibit(
            f'incident="{each.id}",severity="critical"', f'incident="{each.id}",severity="warning"', per(each, site)
        )
        for each in incidents
        if each.escalates
    ]


def _inhibit(source: str, target: str, equal: Sequence[str]) -> dict[str, Any]:
    return {"source_matchers": source.split(","), "target_matchers": target.split(","), "equal": list(equal)}


def _common(cause: Incident, effect: Incident, site: Site) -> list[str]:
    return [label for label in per(cause, site) if label in per(effect, site)]
