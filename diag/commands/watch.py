"""`diag doctor --watch`: diagnose again and again, and print what begins and what ends."""

import re
import sys
import time
from typing import TYPE_CHECKING

from diag.commands.doctor import run
from diag.commands.observe import ObserveOptions
from diag.core.errors import BadUsage, Unreachable
from diag.core.files import exists
from diag.diagnosis.report import Report
from diag.diagnosis.transitions import Transitions
from diag.report.terminal import watch_changed, watch_lost, watch_regained, watch_started

if TYPE_CHECKING:
    from diag.commands.posting import WatchAlerts

PAUSE_SECONDS = 15.0
"""Between two diagnoses through a Prometheus, which has nothing new before its next scrape, or of a lost server."""


def watch(options: ObserveOptions, until_resolved: bool, alertmanager: str = "") -> Report:
    """Print what begins and what ends, and post it to an Alertmanager where there is one; returns the last report.

    Ends by Ctrl-C or, where `until_resolved`, once no incident is left. A server lost after the first diagnosis may
    come back.
    """
    refuse_the_past(options, "--watch")
    told = _told(options, alertmanager) if alertmanager else None
    transitions = Transitions()
    report = _diagnose(options)
    _print(watch_started(report))
    while True:
        _print("".join(map(watch_changed, transitions.observe(report))))
        if told:
            told.holds(transitions.holding, report)
        if until_resolved and transitions.is_calm and not report.not_judged:  # what is over may still be in the window
            return told.at_the_end(report) if told else report
        report = _diagnose_again(options, told)


def _told(options: ObserveOptions, alertmanager: str) -> "WatchAlerts":
    from diag.commands.posting import WatchAlerts

    return WatchAlerts(options, alertmanager, _print)


def refuse_the_past(options: ObserveOptions, what: str) -> None:
    """BadUsage for a recording, and for a time that is over; `what` diagnoses the present."""
    if not options.prometheus and any(map(exists, options.targets)):
        raise BadUsage(f"{what} needs live servers or a Prometheus: a recording does not change")
    if options.scope.span.at or options.scope.span.until:
        raise BadUsage(f"{what} diagnoses the present: leave out --at and --to")


def _diagnose(options: ObserveOptions) -> Report:
    """One report; KeyboardInterrupt also where the scrapes were interrupted and could be judged all the same."""
    report = run(options, only_suspects=True)
    if any(note.startswith("interrupted") for note in report.observed.notes):
        raise KeyboardInterrupt
    return report


def _diagnose_again(options: ObserveOptions, told: "WatchAlerts | None") -> Report:
    """The next report that there is; scraping takes its time, and a Prometheus is left alone for a while."""
    last_error = ""
    while True:
        time.sleep(max(options.every, PAUSE_SECONDS) if options.prometheus or last_error else 0)
        try:
            report = _diagnose(options)
        except Unreachable as error:
            reason = re.sub(r"\d+", "", str(error))  # the same error with another time in it is not printed again
            if reason != last_error:
                _print(watch_lost(str(error), time.time()))
            if told and last_error:  # twice in a row: once may be a blip
                told.is_lost(str(error))
            last_error = reason
        else:
            _print(watch_regained(report) if last_error else "")
            return report


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
