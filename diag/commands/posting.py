"""What a watch finds, for an Alertmanager: posted when it begins, repeated while it holds, ended when it is over."""

import os
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from diag.artefacts.alerts import keeps_firing
from diag.artefacts.filled_alerts import FilledAlert, filled_alerts, no_telemetry
from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract, Site
from diag.core.contract_file import find
from diag.core.errors import Unreachable
from diag.core.incident import Incident
from diag.core.subjects import agree
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report
from diag.diagnosis.transitions import Key
from diag.http.address import parse, parse_all
from diag.http.deadline import run_in_thread
from diag.http.prometheus_api import Alertmanager
from diag.report.terminal import posting_failed, posting_resumed

REPEAT, RETRY = 60.0, 15.0
"""Seconds until what holds is posted again, and until what was not taken is."""
LASTS = 4 * REPEAT
"""Seconds for which a post keeps an alert, whatever the Alertmanager's resolve_timeout is: four rounds."""
MOST_AT_ONCE = 64
Labels = frozenset[tuple[str, str]]
Post = Callable[[Sequence[Mapping[str, Any]]], None]


class AlertPosts:
    """Keeps an Alertmanager told from a thread of its own, so that neither of them waits for the other.

    `post` raises Unreachable where alerts are not taken; `say` prints a line for the reader.
    """

    def __init__(self, post: Post, say: Callable[[str], None]) -> None:
        self._post, self._say = post, say
        self._firing: dict[Labels, FilledAlert] = {}
        self._ended: dict[Labels, tuple[FilledAlert, float]] = {}
        self._state, self._sending, self._changed = threading.Lock(), threading.Lock(), threading.Event()
        self._failed = False
        self._thread = run_in_thread(self._run)

    def holds(self, alerts: Iterable[FilledAlert]) -> None:
        """These alerts hold now, and no others; one that held already keeps its begin."""
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
        """Post all that is to be said; whether it was taken. What is not is said once, and kept."""
        with self._sending:
            with self._state:
                firing, ended = [*self._firing.values()], dict(self._ended)
            end = time.time() + LASTS
            told = [*(_document(alert, end) for alert in firing), *(_document(*known) for known in ended.values())]
            try:
                for begin in range(0, len(told), MOST_AT_ONCE):
                    self._post(told[begin : begin + MOST_AT_ONCE])
            except Unreachable as error:
                if not self._failed:
                    self._say(posting_failed(str(error), time.time()))
                self._failed = True
                return False
            if self._failed and told:
                self._say(posting_resumed(time.time()))
            self._failed &= not told
            with self._state:
                self._ended = {key: known for key, known in self._ended.items() if ended.get(key) != known}
            return True

    def _run(self) -> None:
        pause = REPEAT
        while True:
            self._changed.wait(pause)
            self._changed.clear()
            pause = REPEAT if self.send() else RETRY


def _document(alert: FilledAlert, end: float) -> dict[str, Any]:
    """An alert in the form of the API."""
    return {
        "labels": dict(alert.labels),
        "annotations": dict(alert.annotations),
        "startsAt": _written(min(alert.since, end)),
        "endsAt": _written(end),
    }


def _written(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat(timespec="milliseconds")


class WatchAlerts:
    """What a watch finds as the alerts that the generated rules would give; BadUsage where `url` is no address."""

    def __init__(self, options: ObserveOptions, url: str, say: Callable[[str], None]) -> None:
        self._watched, self._contract = _watched(options), _contract(options)
        self._posts = AlertPosts(Alertmanager(url, os.environ).post, say)
        self._holding: list[FilledAlert] = []
        self._known: dict[Key, Diagnosis] = {}
        self._over: dict[Key, tuple[Diagnosis, float]] = {}

    def holds(self, holding: Mapping[Key, Diagnosis], report: Report) -> None:
        """What a watch takes for confirmed, with the values of this report where it has some."""
        now = {(found.diagnosis.incident.id, found.diagnosis.subject): found.diagnosis for found in report.present}
        held = {key: now.get(key, last)._replace(severity=last.severity) for key, last in holding.items()}
        causes = self._causes(held, {each.diagnosis.incident.id: each.diagnosis.incident for each in report.findings})
        self._holding = [alert for diagnosis in (*held.values(), *causes) for alert in self._alerts(diagnosis)]
        self._posts.holds(self._holding)

    def _causes(self, held: Mapping[Key, Diagnosis], incidents: Mapping[str, Incident]) -> list[Diagnosis]:
        """What is over, while its consequences hold still: as long as its rule keeps firing, it mutes their alerts."""
        ended = {key: (last, time.time()) for key, last in self._known.items() if key not in held}
        over = {key: known for key, known in {**ended, **self._over}.items() if key not in held}
        self._known = dict(held)
        self._over = {
            key: (cause, at)
            for key, (cause, at) in over.items()
            if time.time() - at < keeps_firing(cause.incident, incidents)
            and any(
                each.incident.id in cause.incident.explains and agree(each.subject, cause.subject)
                for each in held.values()
            )
        }
        return [cause for cause, _ in self._over.values()]

    def is_lost(self, reason: str) -> None:
        """Nothing can be observed: what held may hold still, and that nobody sees it is an alert of its own."""
        lost = (no_telemetry(name, reason, self._contract.site, time.time()) for name in self._watched)
        self._posts.holds([*self._holding, *lost])

    def at_the_end(self, report: Report) -> Report:
        """Post what has ended before the watch itself ends."""
        self._posts.send()
        return report

    def _alerts(self, diagnosis: Diagnosis) -> Iterator[FilledAlert]:
        anywhere = next(iter(self._watched.values()))
        command = self._watched.get(dict(diagnosis.subject).get("instance", ""), anywhere)
        for alert in filled_alerts(diagnosis, self._contract, time.time()):
            yield alert._replace(annotations={**alert.annotations, "doctor": command or alert.annotations["doctor"]})


def _watched(options: ObserveOptions) -> Mapping[str, str]:
    """What is watched by its name, with the command that diagnoses it; "" where that is the one of the rule."""
    if options.prometheus:
        return {parse(options.prometheus).instance: ""}
    if options.k8s:
        return {options.k8s: f"diag doctor --k8s {shlex.quote(options.k8s)}"}
    return {name: f"diag doctor {shlex.quote(each.shown)}" for name, each in parse_all(options.targets).items()}


def _contract(options: ObserveOptions) -> Contract:
    """The site's, as far as it holds of what is watched: of a scraped server no label but `instance` is known."""
    contract = find(options.contract)
    if not options.prometheus:
        return replace(contract, site=contract.site._replace(labels=("instance",)))
    known = contract.site.prometheus_url
    url = parse(options.prometheus).shown if known == Site().prometheus_url else known  # by default the alert's own
    return replace(contract, site=contract.site._replace(prometheus_url=url))
