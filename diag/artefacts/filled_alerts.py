"""Alerts of a diagnosis as a Prometheus with the generated rules would send them, for a site without Prometheus.

Names and labels are those of the rules; the templates of their annotations are filled here as Prometheus fills them.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import quote_plus

from diag.artefacts.alerts import alerts, annotations
from diag.artefacts.names import alert_label, alert_name, claim, runbook_url
from diag.artefacts.telemetry_alerts import RUNBOOK_PAGE, TELEMETRY_ALERTS
from diag.core.contract import Contract, Site
from diag.core.incident import RANK
from diag.diagnosis.diagnose import Diagnosis

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
    for alert in alerts(diagnosis.incident):
        if RANK[alert.severity] > RANK[diagnosis.severity]:
            continue
        first = next((reading for reading in readings if reading.condition == alert.cases[0].first), readings[0])
        signal = first.condition.signal
        limit = "" if signal.unit == "bool" else f" (threshold {first.threshold})"
        others = dict.fromkeys(claim(condition, contract) for condition in symptoms if condition != first.condition)
        also = f"; also true: {'; '.join(others)}" if others else ""
        description = f"{signal.sentence.format(value=first.shown)}{limit}{also}"
        templates = {**annotations(alert, contract), "description": description}
        texts = {name: _filled(template, own, now) for name, template in templates.items()}
        named = {"alertname": alert_name(alert.incident.id), "incident": alert.incident.id}
        yield FilledAlert({**named, "severity": alert.severity, **own}, texts, since)


def no_telemetry(instance: str, reason: str, site: Site, now: float) -> FilledAlert:
    """Return the alert about a server that has no telemetry."""
    labels = {"alertname": ABSENT.name, "severity": ABSENT.severity, "instance": instance}
    texts = {
        "summary": f"diag has no metrics from {shown(instance)}",
        "description": re.sub(r"[^\w.,:;/()?' -]", "?", reason, flags=re.ASCII)[:_LONGEST_REASON],
        "impact": ABSENT.impact,
        "runbook_url": runbook_url(site, RUNBOOK_PAGE),
    }
    return FilledAlert(labels, texts, now)


def shown(label: str) -> str:
    """Write a label's value as Prometheus writes the template of `alert_label`."""
    return _UNNAMED.sub("?", label)[:_LONGEST]


def _filled(template: str, labels: Mapping[str, str], now: float) -> str:
    times = {"time() - 3600": now - 3600, "(time() - 3600) * 1000": (now - 3600) * 1000, "time() * 1000": now * 1000}
    text = _TIME.sub(lambda found: f"{times[found[1]]:.0f}", template)
    for name in re.findall(r"\$labels\.(\w+)", text):
        value = labels.get(name, "")
        text = text.replace(alert_label(name), shown(value))
        text = text.replace(f"{{{{ $labels.{name} | urlquery }}}}", quote_plus(value))
    return text
