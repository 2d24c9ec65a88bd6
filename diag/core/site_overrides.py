"""Limits of a site's own, put in the place of those that an incident declares."""

from collections.abc import Sequence
from dataclasses import replace

from diag.core.contract import Contract
from diag.core.errors import BadContract
from diag.core.incident import Condition, Incident, LookAlike, judged

ESCALATES = "escalates"
"""The name of the limit from which on a warning is critical: its signal may support the incident at another limit."""


def apply_overrides(incidents: Sequence[Incident], contract: Contract) -> tuple[Incident, ...]:
    """The incidents under the contract's limits; raises BadContract for one that sets nothing."""
    known = [each.id for each in incidents]
    for name in contract.limits:
        if name not in known:
            raise BadContract(f"{contract.origin}: [limits.{name}]: no incident is called '{name}'")
    return tuple(_limited(each, contract) for each in incidents)


def names(incident: Incident) -> list[str]:
    """What of an incident a site may set a limit of its own for."""
    escalates = [ESCALATES] if incident.escalates else []
    return [each.signal.name for each in (*incident.conditions, *incident.supports)] + escalates


def _limited(incident: Incident, contract: Contract) -> Incident:
    limits = contract.limits.get(incident.id, {})
    for name in limits:
        if name not in names(incident):
            there = ", ".join(f"'{each}'" for each in names(incident))
            raise BadContract(f"{contract.origin}: [limits.{incident.id}] has no '{name}'; it may have {there}")

    def own(condition: Condition, name: str = "") -> Condition:
        name = name or condition.signal.name
        if name not in limits:
            return condition
        why = judged(f"set in {contract.origin}, instead of {condition.limit} because of: {condition.why.says}")
        return replace(condition, limit=limits[name], why=why)

    def look(each: LookAlike) -> LookAlike:
        return replace(
            each,
            requires=own(each.requires) if each.requires else None,
            refuted_by=own(each.refuted_by) if each.refuted_by else None,
        )

    return replace(
        incident,
        symptoms=tuple(map(own, incident.symptoms)),
        supports=tuple(map(own, incident.supports)),
        looks_like=tuple(map(look, incident.looks_like)),
        escalates=own(incident.escalates, ESCALATES) if incident.escalates else None,
    )
