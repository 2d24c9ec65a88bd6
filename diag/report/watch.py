"""What a watch prints: the state at first, then a line for whatever begins or ends."""

from diag.core.formatting import escaped, moment
from diag.diagnosis.report import Report
from diag.diagnosis.transitions import Transition
from diag.report import sentences as words

GONE = ": its server is no longer there, so this does not mean that it was fixed"


def first(report: Report) -> str:
    """The state at the first observation."""
    return "".join(_line(report.observed.end, head) for head in words.headline(report, moment))


def line(change: Transition) -> str:
    """One change; of what holds, the evidence and the impact."""
    diagnosis = change.diagnosis
    holds = f": {diagnosis.symptoms[0].sentence}; {diagnosis.incident.impact}"
    rest = holds if change.what != "ended" else GONE if change.gone else ""
    what = f"{diagnosis.severity.upper()} {diagnosis.incident.id} on {words.where(diagnosis)}"
    return _line(change.at, f"{change.what:<6}  {what}{rest}")


def lost(error: str, at: float) -> str:
    """Nothing can be observed."""
    return _line(at, f"cannot be observed: {error}")


def found(report: Report) -> str:
    """It can be observed again, and its state by now."""
    return "".join(_line(report.observed.end, f"observed again: {head}") for head in words.headline(report, moment))


def not_posted(error: str, at: float) -> str:
    """The Alertmanager does not take the alerts."""
    return _line(at, f"alerts cannot be posted, which is tried again: {error}")


def posted_again(at: float) -> str:
    """It takes them again."""
    return _line(at, "alerts are posted again")


def _line(at: float, text: str) -> str:
    return f"{moment(at)}  {escaped(text)}\n"
