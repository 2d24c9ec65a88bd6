"""Names that an incident file imports to declare an incident; the model is diag/core/incident.py."""

from diag.core.incident import (
    BurnRateWindow,
    Condition,
    Effect,
    Fix,
    Incident,
    LookAlike,
    Signal,
    Source,
    documented,
    judged,
    measured,
    reported,
)

__all__ = [
    "BurnRateWindow",
    "Condition",
    "Effect",
    "Fix",
    "Incident",
    "LookAlike",
    "Signal",
    "Source",
    "documented",
    "judged",
    "measured",
    "reported",
]
