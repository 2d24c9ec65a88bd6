"""`diag doctor --watch`: diagnose repeatedly, print incidents as they begin and end, post them to an Alertmanager."""

import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import starmap
from typing import Any

from diag.artefacts.alerts import GONE_AFTER, FilledAlert, filled_alerts, no_telemetry
from diag.commands.doctor import run
from diag.commands.observe import ObserveOptions
from diag.core.contract import Site, find
from diag.core.errors import Unreachable
from diag.core.subjects import agree, instance_name
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Key, Report, Transitions
from diag.http.address import parse, parse_all
from diag.http.client import run_in_thread
from diag.http.prometheus_api import Alertmanager
from diag.report.terminal import watch_changed, watch_line, watch_regained, watch_started
from diag.sources.source import refuse_the_past

PAUSE_SECONDS = 15.0
"""Seconds between two diagnoses through a Prometheus, which has no new samples before its next scrape, or of a lost
server.
"""


def watch(options: ObserveOptions, until_resolved: bool, alertmanager: str = "") -> Report:
    """Print incidents as they begin and end, and post them to an Alertmanager if one is named; return the last report.

    Ends by Ctrl-C or, if `until_resolved`, once no incident is left. A server lost after the first diagnosis may come
    back. If two diagnoses in a row find no incident, but another verdict or the first or last engine that answers, that
    is printed as at the start.
    """
    refuse_the_past(options, "--watch")
    alerts = WatchAlerts(options, alertmanager, _print) if alertmanager else None
    transitions = Transitions()
    report = _diagnose(options)
    _print(watch_started(report))
    printed = last = (report.verdict, bool(report.progress))
    while True:
        _print("".join(map(watch_changed, transitions.observe(report))))
        state = (report.verdict, bool(report.progress))
        if printed != state == last:
            _print(watch_started(report) if not report.is_alarming else "")
            printed = state
        last = state
        if alerts:
            alerts.update(transitions.holding, report)
        if (
            until_resolved and transitions.is_calm and not report.not_judged and not report.health.suspects
        ):  # what is over may still be in the window
            if alerts:
                alerts.send()
            return report
        report = _next_report(options, alerts)


def _diagnose(options: ObserveOptions) -> Report:
    """Return one report; KeyboardInterrupt also if scraping was interrupted after enough scrapes for a report."""
    report = run(options, only_suspects=True)
    if any(note.startswith("interrupted") for note in report.observed.notes):
        raise KeyboardInterrupt
    return report


def _next_report(options: ObserveOptions, alerts: "WatchAlerts | None") -> Report:
    """Return the next report, after a pause if it comes from a Prometheus; a lost server is retried."""
    last_error = ""
    while True:
        time.sleep(max(options.every, PAUSE_SECONDS) if options.prometheus or last_error else 0)
        try:
            report = _diagnose(options)
        except Unreachable as error:
            reason = re.sub(r"\d+", "", str(error))  # an error that differs only in a time is not printed again
            if reason != last_error:
                _print(watch_line(time.time(), f"cannot be observed: {error}"))
            if alerts and last_error:  # twice in a row: once may be a blip
                alerts.post_lost(str(error))
            last_error = reason
        else:
            _print(watch_regained(report) if last_error else "")
            return report


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


# -- alerts ------------------------------------------------------------------------------------------------------------

REPEAT, RETRY = 60.0, 15.0
"""Seconds until firing alerts are posted again, and until a failed post is repeated."""
LASTS = 4 * REPEAT
"""Seconds until an alert ends without another post, whatever the Alertmanager's resolve_timeout is: four rounds."""
MOST_AT_ONCE = 64
Labels = frozenset[tuple[str, str]]
Post = Callable[[Sequence[Mapping[str, Any]]], None]


class AlertPosts:
    """Posts alerts to an Alertmanager from a thread, so that the watch does not wait for it.

    `post` raises Unreachable if the Alertmanager does not accept alerts; `say` prints a line for the user.
    """

    def __init__(self, post: Post, say: Callable[[str], None]) -> None:
        self._post, self._say = post, say
        self._firing: dict[Labels, FilledAlert] = {}
        self._ended: dict[Labels, tuple[FilledAlert, float]] = {}
        self._state, self._sending, self._changed = threading.Lock(), threading.Lock(), threading.Event()
        self._failed = False
        self._thread = run_in_thread(self._run)

    def update(self, alerts: Iterable[FilledAlert]) -> None:
        """Replace the firing alerts; one that fired already keeps its start."""
        if self._thread.done():  # by a defect: a watch that posts nothing must not look like one that does
            self._thread.result()
        now = {frozenset(alert.labels.items()): alert for alert in alerts}
        with self._state:
            before, self._firing = self._firing, {}
            for key, alert in now.items():
                self._firing[key] = alert._replace(since=before[key].since) if key in before else alert
                self._ended.pop(key, None)
            self._ended |= {key: (alert, time.time()) for key, alert in before.items() if key not in now}
            has_changed = before.keys() != now.keys()
        if has_changed:
            self._changed.set()

    def send(self) -> bool:
        """Post all alerts; return False, keep them, and print that once, if they are not accepted."""
        with self._sending:
            with self._state:
                firing, ended = [*self._firing.values()], dict(self._ended)
            end = time.time() + LASTS
            posts = [*(_document(alert, end) for alert in firing), *starmap(_document, ended.values())]
            try:
                for begin in range(0, len(posts), MOST_AT_ONCE):
                    self._post(posts[begin : begin + MOST_AT_ONCE])
            except Unreachable as error:
                if not self._failed:
                    self._say(watch_line(time.time(), f"alerts cannot be posted, which is tried again: {error}"))
                self._failed = True
                return False
            if self._failed and posts:
                self._say(watch_line(time.time(), "alerts are posted again"))
            self._failed &= not posts
            with self._state:
                self._ended = {key: alert for key, alert in self._ended.items() if ended.get(key) != alert}
            return True

    def _run(self) -> None:
        pause = REPEAT
        while True:
            self._changed.wait(pause)
            self._changed.clear()
            pause = REPEAT if self.send() else RETRY


def _document(alert: FilledAlert, end: float) -> dict[str, Any]:
    """Return an alert as the Alertmanager's API takes it."""
    start, stop = (
        datetime.fromtimestamp(unix, UTC).isoformat(timespec="milliseconds") for unix in (min(alert.since, end), end)
    )
    texts = {"labels": dict(alert.labels), "annotations": dict(alert.annotations)}
    return {**texts, "startsAt": start, "endsAt": stop}


class WatchAlerts:
    """Turns the incidents of a watch into the alerts of the generated rules; BadUsage if `url` is no address."""

    def __init__(self, options: ObserveOptions, url: str, say: Callable[[str], None]) -> None:
        contract = find(options.contract)
        site = contract.site if options.prometheus else contract.site._replace(labels=("instance",))
        # names of what is watched, each with the command that diagnoses it; "" for the command in the rule
        self._watched: dict[str, str]
        if options.prometheus:
            watched = parse(options.prometheus)
            self._watched = {watched.instance: ""}
            if site.prometheus_url == Site().prometheus_url:
                site = site._replace(prometheus_url=watched.shown)
        elif options.k8s:
            self._watched = {options.k8s: f"diag doctor --k8s {shlex.quote(options.k8s)}"}
        else:
            addresses = parse_all(options.targets)
            self._watched = {name: f"diag doctor {shlex.quote(address.shown)}" for name, address in addresses.items()}
        self._contract = replace(contract, site=site)
        self._posts = AlertPosts(Alertmanager(url, os.environ).post, say)
        self._holding: list[FilledAlert] = []
        self._known: dict[Key, Diagnosis] = {}
        self._over: dict[Key, tuple[Diagnosis, float]] = {}

    def update(self, holding: Mapping[Key, Diagnosis], report: Report) -> None:
        """Post confirmed incidents, with the values of this report if it has them."""
        diagnoses = (finding.diagnosis for finding in report.present)
        now = {(diagnosis.incident.id, diagnosis.subject): diagnosis for diagnosis in diagnoses}
        held = {key: now.get(key, last)._replace(severity=last.severity) for key, last in holding.items()}

        # ended causes whose effects still hold: until the windows of both are clear, the cause mutes their alerts
        ended = {key: (last, time.time()) for key, last in self._known.items()} | self._over
        self._known = held
        self._over = {
            key: (cause, at)
            for key, (cause, at) in ended.items()
            if key not in held
            and time.time() - at < GONE_AFTER
            and any(
                effect.incident.id in cause.incident.explains and agree(effect.subject, cause.subject)
                for effect in held.values()
            )
        }

        self._holding = []
        any_command = next(iter(self._watched.values()))
        for diagnosis in (*held.values(), *(cause for cause, _ in self._over.values())):
            command = self._watched.get(instance_name(diagnosis.subject), any_command)
            for alert in filled_alerts(diagnosis, self._contract, time.time()):
                doctor = command or alert.annotations["doctor"]
                self._holding.append(alert._replace(annotations={**alert.annotations, "doctor": doctor}))
        self._posts.update(self._holding)

    def post_lost(self, reason: str) -> None:
        """Post that the servers are lost, as an alert of its own; earlier alerts may still hold and stay."""
        lost = (no_telemetry(name, reason, self._contract.site, time.time()) for name in self._watched)
        self._posts.update([*self._holding, *lost])

    def send(self) -> None:
        """Post now what has changed."""
        self._posts.send()
