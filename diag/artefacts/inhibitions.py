"""Mutings of alerts by alerts: Alertmanager's inhibition rules, and the sentences about them in a runbook.

While a page about a server is open, the tickets about that server wait: the message of the page names the cause. A
page about a cause mutes pages about its effects, and a ticket about a cause mutes tickets about its effects.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from diag.artefacts.names import subject_labels
from diag.core.contract import Site
from diag.core.incident import Incident, Severity

Known = Mapping[str, Incident]
_MUTED: dict[Severity, str] = {"info": "info", "warning": "warning|info", "critical": "critical"}
_PAGES: dict[Severity, str] = {"info": "infos", "warning": "tickets", "critical": "pages"}


class Muting(NamedTuple):
    """The alert of `source` mutes that of `target`, both with this severity."""

    source: str
    target: str
    severity: Severity
    equal: tuple[str, ...]


def severities(incident: Incident) -> tuple[Severity, ...]:
    """Return the severities that alerts of an incident have."""
    return (incident.severity, "critical") if incident.escalates else (incident.severity,)


def shared_labels(one: Incident, other: Incident, site: Site) -> tuple[str, ...]:
    """Return the labels of a subject that both have."""
    return tuple(label for label in subject_labels(one, site) if label in subject_labels(other, site))


def mutings(incidents: Sequence[Incident], site: Site) -> Iterator[Muting]:
    """Yield each pair of alerts of one severity of which the first one mutes the second one."""
    known = {incident.id: incident for incident in incidents}
    for cause in incidents:
        for effect in (known[name] for name in cause.explains if name in known):
            for severity in severities(cause):
                if severity in severities(effect) or (severity == "warning" and effect.severity == "info"):
                    yield Muting(cause.id, effect.id, severity, shared_labels(cause, effect, site))


def inhibitions(incidents: Sequence[Incident], site: Site) -> list[dict[str, Any]]:
    """Return Alertmanager's inhibition rules, as few as the pairs allow: sources with the same targets share a rule."""
    targets: dict[tuple[str, Severity, tuple[str, ...]], list[str]] = {}
    for muting in mutings(incidents, site):
        targets.setdefault((muting.source, muting.severity, muting.equal), []).append(muting.target)
    merged: dict[tuple[tuple[str, ...], Severity, tuple[str, ...]], list[str]] = {}
    for (source, severity, equal), effects in targets.items():
        merged.setdefault((tuple(effects), severity, equal), []).append(source)
    pages = {
        "source_matchers": ['severity="critical"', 'incident=~".+"'],
        "target_matchers": ['severity=~"warning|info"', 'incident=~".+"'],
        "equal": [*site.labels],
    }
    pairs = [
        {
            "source_matchers": [f'severity="{severity}"', f'incident=~"{"|".join(sources)}"'],
            "target_matchers": [f'severity=~"{_MUTED[severity]}"', f'incident=~"{"|".join(effects)}"'],
            "equal": [*equal],
        }
        for (effects, severity, equal), sources in merged.items()
    ]
    return [pages, *pairs]


def of_one_page(incidents: Sequence[Incident]) -> list[str]:
    """Return the incidents whose pages about a model are one: a violated SLO, and causes that page for nothing worse.

    Such a cause is often told minutes after the SLO: it updates the page."""
    pages = {incident.id: incident for incident in incidents if "critical" in severities(incident)}
    slos = {name for name, incident in pages.items() if incident.burns and incident.severity == "critical"}
    effects = {each.id: pages.keys() & {*each.explains} for each in pages.values() if not each.outage}
    return sorted(slos.union(name for name, paging in effects.items() if paging and paging <= slos))


def muting_sentences(incident: Incident, incidents: Sequence[Incident], site: Site) -> list[str]:
    """Return what a runbook says about the alerts that the alert of this incident mutes."""
    pairs = [muting for muting in mutings(incidents, site) if muting.source == incident.id]
    sentences = []
    for severity in severities(incident):
        names = ", ".join(f"[{each.target}]({each.target}.md)" for each in pairs if each.severity == severity)
        alert = f"its {severity} alert" if incident.escalates else "this alert"
        muted = ["warnings and infos about the same server"] if severity == "critical" else []
        muted += [f"{_PAGES[severity]} about {names}"] if names else []
        if muted:
            sentences.append(f"While {alert} fires, Alertmanager mutes {' and '.join(muted)}.")
    return sentences
