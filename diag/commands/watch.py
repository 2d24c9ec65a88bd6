"""A watch: look again and again, and tell what begins and what ends."""

import re
import sys
import time
from pathlib import Path

from diag.commands.doctor import run
from diag.commands.observe import ObserveOptions
from diag.core.errors import BadUsage, Unreachable
from diag.diagnosis.report import Report
from diag.diagnosis.transitions import Transitions
from diag.report import watch as changes

LOOK_SECONDS = 15.0
"""Between two looks through a Prometheus, which has nothing new before its next scrape."""


def watch(settings: ObserveOptions, until_resolved: bool) -> Report:
    """Look again and again, and tell what begins and what ends; returns the last look.

    Ends by Ctrl-C, or once nothing is wrong any more where `until_resolved`. Who is lost after the first look may come
    back.
    """
    if not settings.prometheus and any(Path(each).exists() for each in settings.targets):
        raise BadUsage("--watch needs live servers or a Prometheus: a recording does not change")
    if settings.scope.span.at or settings.scope.span.until:
        raise BadUsage("--watch diagnoses the present: leave out --at and --to")
    transitions = Transitions()
    report = _look(settings)
    _tell(changes.first(report))
    while True:
        _tell("".join(map(changes.line, transitions.look(report))))
        if until_resolved and transitions.is_calm and not report.blind:  # what is over may still be in the window
            return report
        report = _look_again(settings)


def _look(settings: ObserveOptions) -> Report:
    """One look of a watch; KeyboardInterrupt also where it was cut short and could be judged nevertheless."""
    report = run(settings)
    if any(each.startswith("interrupted") for each in report.observed.notes):
        raise KeyboardInterrupt
    return report


def _look_again(settings: ObserveOptions) -> Report:
    """The next look that sees anything; a watch of live servers takes its time, a Prometheus is let alone a while."""
    lost = ""
    while True:
        time.sleep(max(settings.every, LOOK_SECONDS) if settings.prometheus or lost else 0)
        try:
            report = _look(settings)
        except Unreachable as error:
            why = re.sub(r"\d+", "", str(error))  # a sentence that tells the time is no other one
            if why != lost:
                _tell(changes.lost(str(error), time.time()))
            lost = why
        else:
            _tell(changes.found(report) if lost else "")
            return report


def _tell(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
