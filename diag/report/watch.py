"""What a watch tells: how it is at first, then a line for whatever begins or ends."""

from diag.diagnosis.diagnose import says
from diag.diagnosis.report import Report
from diag.diagnosis.transitions import Transition
from diag.report import sentences as words

GONE = ": its server is no longer there, which cures nothing"


def first(report: Report) -> str:
    """How it is at the first look."""
    return "".join(_line(report.observed.end, each) for each in words.headline(report, words.moment))


def line(change: Transition) -> str:
    """One change; of what holds, what shows it and what users notice."""
    one = change.diagnosis
    shown = f": {says(one.symptoms[0])}; {one.incident.impact}"
    rest = shown if change.what != "ended" else GONE if change.gone else ""
    what = f"{one.severity.upper()} {one.incident.id} on {words.where(one)}"
    return _line(change.at, f"{change.what:<6}  {what}{rest}")


def lost(error: str, at: float) -> str:
    """Nothing can be looked at."""
    return _line(at, f"cannot look: {error}")


def found(report: Report) -> str:
    """It can be looked at again, and how it is by now."""
    return "".join(_line(report.observed.end, f"looks again: {each}") for each in words.headline(report, words.moment))


def _line(at: float, text: str) -> str:
    return f"{words.moment(at)}  {text}\n"
