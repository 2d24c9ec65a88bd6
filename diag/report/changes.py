"""What a watch tells: how it is at first, then a line for whatever begins or ends."""

from diag.diagnose import says
from diag.judgement import Judgement
from diag.report import words
from diag.transitions import Change

GONE = ": its server is no longer there, which cures nothing"


def first(judgement: Judgement) -> str:
    """How it is at the first look."""
    return "".join(_line(judgement.observed.end, each) for each in words.headline(judgement, words.moment))


def line(change: Change) -> str:
    """One change; of what holds, what shows it and what users notice."""
    one = change.diagnosis
    shown = f": {says(one.symptoms[0])}; {one.incident.harm}"
    rest = shown if change.what != "ended" else GONE if change.gone else ""
    what = f"{one.severity.upper()} {one.incident.id} on {words.where(one)}"
    return _line(change.at, f"{change.what:<6}  {what}{rest}")


def lost(error: str, at: float) -> str:
    """Nothing can be looked at."""
    return _line(at, f"cannot look: {error}")


def found(judgement: Judgement) -> str:
    """It can be looked at again, and how it is by now."""
    return "".join(
        _line(judgement.observed.end, f"looks again: {each}") for each in words.headline(judgement, words.moment)
    )


def _line(at: float, text: str) -> str:
    return f"{words.moment(at)}  {text}\n"
