"""What a watch tells: how it is at first, then a line for whatever begins or ends."""

from diag.diagnose import says
from diag.judgement import Judgement
from diag.report import words
from diag.transitions import Change


def first(judgement: Judgement) -> str:
    """How it is at the first look."""
    lines = words.headline(judgement, words.moment)
    return "".join(f"{words.moment(judgement.observed.end)}  {line}\n" for line in lines)


def line(change: Change) -> str:
    """One change."""
    one = change.diagnosis
    what = f"{one.severity.upper()} {one.incident.id} on {words.where(one)}"
    if change.began:
        return f"{words.moment(change.at)}  began  {what}: {says(one.symptoms[0])}; {one.incident.harm}\n"
    return f"{words.moment(change.at)}  ended  {what}\n"


def lost(error: str) -> str:
    """Nothing could be looked at."""
    return f"cannot look: {error}\n"
