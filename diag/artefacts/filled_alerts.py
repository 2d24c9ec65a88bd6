"""The alerts of a diagnosis, for a site without a Prometheus: the same names, labels and texts as the rules give."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote_plus

from diag.artefacts.alerts import TELEMETRY_RUNBOOK, alerts, telemetry_alerts
from diag.artefacts.message import Message, annotations
from diag.artefacts.names import alert_name
from diag.core.contract import Contract, Site
from diag.core.formatting import printable
from diag.core.incident import RANK, Condition
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.diagnose import Diagnosis

_UNNAMED = re.compile(r"//+|[^\w.:/[\] -]", re.ASCII)
_LONGEST = 100
_LONGEST_REASON = 300


class FilledAlert(NamedTuple):
    """One alert: its labels with `alertname`, its annotations, and the unix seconds since which it holds."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    since: float


class DiagnosisValues(NamedTuple):
    """Writes the values of a diagnosis into a message (diag.artefacts.message.Writer)."""

    labels: Mapping[str, str]
    readings: Sequence[Reading]
    site: Site
    model: str
    actions: str
    now: float

    def label(self, name: str) -> str:
        return shown(self.labels.get(name, ""))

    def in_url(self, name: str) -> str:
        return quote_plus(self.labels.get(name, ""))

    def place(self) -> str:
        server = "/".join(map(self.label, self.site.labels))
        return f"{shown(self.model)} at {server}" if self.model else server

    def reading(self, condition: Condition) -> str:
        return next((reading.shown for reading in self.readings if reading.condition == condition), "?")

    def culprits(self, otherwise: str) -> str:
        found = [culprit for reading in self.readings for culprit in reading.culprits]
        return ", ".join(map(printable, found)) or otherwise

    def causes(self) -> str:
        return ""

    def do_now(self) -> str:
        return self.actions

    def unix(self, seconds_ago: int, scale: int) -> str:
        return f"{(self.now - seconds_ago) * scale:.0f}"


def filled_alerts(
    diagnosis: Diagnosis, contract: Contract, now: float, *, model: str = "", do_now: Sequence[str] = ()
) -> Iterator[FilledAlert]:
    """Yield the alerts that fire for a diagnosis: the one of its incident, and the critical one if it is critical."""
    own = dict(diagnosis.subject)
    site_values = own.get("instance", "").split("/")  # a site's own labels are parts of the name of its server
    if contract.site.labels != ("instance",) and len(site_values) == len(contract.site.labels):
        del own["instance"]
        own = {**dict(zip(contract.site.labels, site_values, strict=True)), **own}
    since = diagnosis.watched_since if diagnosis.since is None else diagnosis.since
    readings = [*diagnosis.symptoms, *diagnosis.escalation]
    conditions = [reading.condition for reading in readings]
    symptoms = conditions[: len(diagnosis.symptoms)]
    actions = " ".join(do_now or diagnosis.incident.mitigate) or "Follow the runbook."
    values = DiagnosisValues(own, readings, contract.site, model, actions, now)
    for alert in alerts(diagnosis.incident):
        if RANK[alert.severity] <= RANK[diagnosis.severity]:
            named = {"alertname": alert_name(alert.incident.id), "incident": alert.incident.id}
            named |= {"severity": alert.severity, **({"model": model} if model else {})}
            first = alert.cases[0].first if alert.cases[0].first in conditions else conditions[0]
            message = Message(diagnosis.incident, contract, first, tuple(symptoms), ((first, ()),), {})
            texts = annotations(message, values)
            yield FilledAlert({**contract.site.extra_labels, **named, **own}, texts, since)


def no_telemetry(instance: str, reason: str, site: Site, now: float) -> FilledAlert:
    """Return the alert about a server that has no telemetry."""
    absent = telemetry_alerts()[0]
    labels = {**site.extra_labels, "alertname": absent.name, "severity": absent.severity, "instance": instance}
    texts = {
        "title": absent.title,
        "summary": f"diag has no metrics from {shown(instance)}",
        "do_now": "Check that the server runs and that diag reaches it.",
        "description": re.sub(r"[^\w.,:;/()?' -]", "?", reason, flags=re.ASCII)[:_LONGEST_REASON],
        "impact": absent.impact,
        "runbook_url": site.runbook_url(TELEMETRY_RUNBOOK),
    }
    return FilledAlert(labels, texts, now)


def shown(label: str) -> str:
    """Write a label's value as Prometheus writes the template of `alert_label`."""
    return _UNNAMED.sub("?", label)[:_LONGEST]
