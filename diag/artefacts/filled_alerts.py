"""The alerts of a diagnosis as a Prometheus with the generated rules would send them, for a site that has none.

Names and labels are those of the rules; the templates of their annotations are filled here as Prometheus fills them.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import quote_plus

from diag.artefacts.alerts import Alert, alerts, annotations
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
    """The alerts that fire for a diagnosis: that of its incident, and the critical one where it is critical."""
    own = _labels(diagnosis, contract.site)
    since = diagnosis.watched_since if diagnosis.since is None else diagnosis.since
    for alert in alerts(diagnosis.incident):
        if RANK[alert.severity] <= RANK[diagnosis.severity]:
            named = {"alertname": alert_name(alert.incident.id), "incident": alert.incident.id}
            templates = {**annotations(alert, contract), "description": _description(diagnosis, alert, contract)}
            texts = {name: _filled(text, own, now) for name, text in templates.items()}
            yield FilledAlert({**named, "severity": alert.severity, **own}, texts, since)


def no_telemetry(instance: str, reason: str, site: Site, now: float) -> FilledAlert:
    """The alert about a server of which nothing can be read."""
    labels = {"alertname": ABSENT.name, "severity": ABSENT.severity, "instance": instance}
    texts = {
        "summary": f"diag has no metrics from {shown(instance)}",
        "description": re.sub(r"[^\w.,:;/()?' -]", "?", reason, flags=re.ASCII)[:_LONGEST_REASON],
        "impact": ABSENT.impact,
        "runbook_url": runbook_url(site, RUNBOOK_PAGE),
    }
    return FilledAlert(labels, texts, now)


def shown(label: str) -> str:
    """A label as `alert_label` has Prometheus write it."""
    return _UNNAMED.sub("?", label)[:_LONGEST]


def _labels(diagnosis: Diagnosis, site: Site) -> dict[str, str]:
    """The labels of the subject; a site's own ones are parts of the name that diag gives its server."""
    labels = dict(diagnosis.subject)
    parts = labels.get("instance", "").split("/")
    if site.labels == ("instance",) or len(parts) != len(site.labels):
        return labels
    del labels["instance"]
    return {**dict(zip(site.labels, parts, strict=True)), **labels}


def _description(diagnosis: Diagnosis, alert: Alert, contract: Contract) -> str:
    """The measured value with its threshold, then the other conditions, which hold as well."""
    readings = [*diagnosis.symptoms, *diagnosis.escalation]
    first = next((each for each in readings if each.condition == alert.cases[0].first), readings[0])
    signal = first.condition.signal
    limit = "" if signal.unit == "bool" else f" (threshold {first.threshold})"
    others = [claim(each.condition, contract) for each in diagnosis.symptoms if each.condition != first.condition]
    also = f"; also true: {'; '.join(dict.fromkeys(others))}" if others else ""
    return f"{signal.sentence.format(value=first.shown)}{limit}{also}"


def _filled(template: str, labels: Mapping[str, str], now: float) -> str:
    times = {"time() - 3600": now - 3600, "(time() - 3600) * 1000": (now - 3600) * 1000, "time() * 1000": now * 1000}
    text = _TIME.sub(lambda found: f"{times[found[1]]:.0f}", template)
    for name in re.findall(r"\$labels\.(\w+)", text):
        value = labels.get(name, "")
        text = text.replace(alert_label(name), shown(value))
        text = text.replace(f"{{{{ $labels.{name} | urlquery }}}}", quote_plus(value))
    return text
