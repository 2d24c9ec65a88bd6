"""What an incident file imports: the declaration's own words. (The model itself is diag/core/incident.py.)"""

from diag.core.incident import (
    BurnRateWindow,
    Condition,
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
