"""Thresholds of a site, in place of those that an incident declares."""

from collections.abc import Iterator, Sequence

from diag.core.contract import Contract
from diag.core.errors import BadContract
from diag.core.formatting import quantity
from diag.core.incident import Condition, Incident, LookAlike, judged

ESCALATES = "escalates"
"""The key of the threshold from which a warning is critical: its signal may support the incident at another one."""


def apply_overrides(incidents: Sequence[Incident], contract: Contract) -> tuple[Incident, ...]:
    """The incidents with the site's thresholds; BadContract for a threshold of no incident."""
    known = [incident.id for incident in incidents]
    for name in contract.limits:
        if name not in known:
            raise BadContract(
                f"{contract.origin}: [limits.{name}]: there is no incident '{name}'; diag incidents lists them"
            )
    return tuple(_overridden(incident, contract) for incident in incidents)


def renamed(incidents: Sequence[Incident], contract: Contract) -> Iterator[str]:
    """A sentence for each threshold that the site calls by a former name."""
    for incident in incidents:
        for old, new in _former_names(incident).items():
            if old in contract.limits.get(incident.id, {}):
                yield f"{contract.origin}: [limits.{incident.id}]: '{old}' is now called '{new}'; rename it"


def _former_names(incident: Incident) -> dict[str, str]:
    """The name of today for each former one."""
    today = names(incident)
    signals = [condition.signal for condition in (*incident.conditions, *incident.supports)]
    return {old: signal.name for signal in signals for old in signal.formerly if old not in today}


def names(incident: Incident) -> list[str]:
    """The signals of an incident whose threshold a site may set."""
    escalates = [ESCALATES] if incident.escalates else []
    return [condition.signal.name for condition in (*incident.conditions, *incident.supports)] + escalates


def _overridden(incident: Incident, contract: Contract) -> Incident:
    former, given = _former_names(incident), contract.limits.get(incident.id, {})
    limits = {former.get(name, name): limit for name, limit in given.items() if former.get(name) not in given}
    for name in limits:
        if name not in names(incident):
            known = ", ".join(f"'{signal}'" for signal in names(incident))
            raise BadContract(f"{contract.origin}: [limits.{incident.id}] has no threshold '{name}'; it has {known}")

    def own(condition: Condition, key: str = "") -> Condition:
        key = key or condition.signal.name
        if key not in limits:
            return condition
        default = quantity(contract.limit(condition.limit), condition.signal.unit)
        why = judged(f"set in {contract.origin}; the default is {default}: {condition.why.says}")
        return condition._replace(limit=limits[key], why=why)

    def own_look_alike(look_alike: LookAlike) -> LookAlike:
        return look_alike._replace(
            requires=own(look_alike.requires) if look_alike.requires else None,
            refuted_by=own(look_alike.refuted_by) if look_alike.refuted_by else None,
        )

    return incident._replace(
        symptoms=tuple(map(own, incident.symptoms)),
        supports=tuple(map(own, incident.supports)),
        looks_like=tuple(map(own_look_alike, incident.looks_like)),
        escalates=own(incident.escalates, ESCALATES) if incident.escalates else None,
    )
