"""Posts of a watch to an Alertmanager: firing alerts again and again, ended ones once."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import pytest
from support.bad_servers import Reply, Request, serving

from diag.artefacts.alerts import FilledAlert, filled_alerts, no_telemetry
from diag.commands import watch
from diag.commands.observe import ObserveOptions
from diag.commands.watch import AlertPosts, WatchAlerts
from diag.core.contract import Contract, Site
from diag.core.errors import BadUsage, Unreachable
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Finding, Observed, Report
from diag.http.prometheus_api import Alertmanager
from diag.knowledge.catalog import load

ONE = FilledAlert({"alertname": "VllmOne", "severity": "warning"}, {"summary": "s"}, 1.7e9)
TWO = FilledAlert({"alertname": "VllmTwo", "severity": "critical"}, {}, 1.7e9)
REPORT = Report(Observed("scrape", "http://eu", 1.8e9, 1.8e9, 4, 0), "critical", (), (), (), ())
Posted = list[Mapping[str, Any]]


class Pager:
    """Stands for an Alertmanager: what it was posted, unless it is `down`."""

    def __init__(self) -> None:
        self.posts: list[Posted] = []
        self.lines: list[str] = []
        self.down = False
        self.arrived = threading.Semaphore(0)

    def post(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        self.arrived.release()
        if self.down:
            raise Unreachable("cannot connect to http://am:9093: connection refused")
        self.posts.append([*alerts])

    def last(self) -> dict[str, bool]:
        """Return the alerts of the last post, each with True while it fires."""
        return {each["labels"]["alertname"]: _lasts(each) for each in self.posts[-1]}


def _lasts(alert: Mapping[str, Any]) -> bool:
    return datetime.fromisoformat(alert["endsAt"]).timestamp() > watch.time.time() + 1


@pytest.fixture
def pager(monkeypatch: pytest.MonkeyPatch) -> Pager:
    """Asked at once, and otherwise never: a test sends by itself."""
    monkeypatch.setattr(watch, "REPEAT", 3600.0)
    monkeypatch.setattr(watch, "RETRY", 3600.0)
    monkeypatch.setattr(watch, "LASTS", 240.0)
    return Pager()


def kept(pager: Pager) -> AlertPosts:
    return AlertPosts(pager.post, pager.lines.append)


def test_changes_are_posted_at_once_and_firing_alerts_are_repeated(
    pager: Pager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "REPEAT", 0.05)
    posts = kept(pager)
    posts.update([ONE])
    assert pager.arrived.acquire(timeout=60) and pager.arrived.acquire(timeout=60)
    assert pager.posts[0][0]["startsAt"] == "2023-11-14T22:13:20.000+00:00"
    assert pager.last() == {"VllmOne": True}


def test_ended_alert_is_posted_once_as_resolved_and_firing_alert_keeps_its_start(pager: Pager) -> None:
    posts = kept(pager)
    posts.update([ONE, TWO])
    posts.send()
    posts.update([ONE._replace(since=1.75e9)])
    posts.send()
    assert pager.last() in ({"VllmOne": True, "VllmTwo": False}, {"VllmOne": True})  # the thread may have been faster
    assert any(
        {"VllmTwo": False}.items() <= {a["labels"]["alertname"]: _lasts(a) for a in post}.items()
        for post in pager.posts
    )
    posts.send()
    assert pager.last() == {"VllmOne": True}
    assert pager.posts[-1][0]["startsAt"].startswith("2023-11-14")


def test_alertmanager_outage_is_reported_once_and_all_alerts_follow_after_it(pager: Pager) -> None:
    posts = kept(pager)
    posts.update([ONE])
    posts.send()
    pager.down = True
    posts.update([])
    assert not posts.send() and not posts.send()
    assert [line.partition("  ")[2] for line in pager.lines] == [
        "alerts cannot be posted, which is tried again: cannot connect to http://am:9093: connection refused\n"
    ]
    pager.down = False
    assert posts.send() and pager.last() == {"VllmOne": False}
    assert pager.lines[-1].endswith("alerts are posted again\n")


def test_many_alerts_are_several_requests(pager: Pager) -> None:
    posts = kept(pager)
    posts.update([ONE._replace(labels={**ONE.labels, "instance": f"h:{port}"}) for port in range(150)])
    posts.send()
    assert [len(post) for post in pager.posts[-3:]] == [64, 64, 22]


def test_ended_cause_keeps_muting_its_consequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alert of a cause lasts until its window is clear."""
    known = {each.id: each for each in load()}
    cause, effect = present(known["kv_eviction_cascade"], "critical"), present(known["contract_breached"], "critical")
    report = REPORT._replace(findings=tuple(map(Finding, (cause, effect))))
    with serving(lambda request: Reply()) as server:
        watch = WatchAlerts(ObserveOptions(["http://eu"]), server.url, [].append)

        def told(*holding: Diagnosis) -> dict[str, bool]:
            before = len(server.requests)
            watch.update({(each.incident.id, each.subject): each for each in holding}, report)
            watch.send()
            posts = [json.loads(request.body) for request in server.requests[before:]]  # its own thread's too
            return {each["labels"]["incident"]: _lasts(each) for post in posts for each in post}

        assert told(cause, effect) == {"kv_eviction_cascade": True, "contract_breached": True}
        assert told(effect) == {"kv_eviction_cascade": True, "contract_breached": True}
        late = time.time() + 3600
        monkeypatch.setattr(time, "time", lambda: late)
        assert told(effect) == {"kv_eviction_cascade": False, "contract_breached": True}


def test_an_alert_of_a_scraped_server_names_the_command_for_it() -> None:
    incident = next(each for each in load() if each.id == "engine_stalled")
    for how, command in (
        (ObserveOptions(["https://eu/pod-1/m"]), "diag doctor https://eu:443/pod-1/m"),
        (ObserveOptions([], k8s="ns/app=vllm x"), "diag doctor --k8s 'ns/app=vllm x'"),
        (ObserveOptions([], prometheus="http://prom/p"), "diag doctor --prometheus http://prom:80/p --match"),
    ):
        with serving(lambda request: Reply()) as server:
            watch = WatchAlerts(how, server.url, [].append)
            watch.update({("", ()): present(incident, "critical")}, REPORT)
            watch.post_lost("cannot connect")
            watch.send()
        held, lost = json.loads(server.requests[-1].body)
        assert held["annotations"]["doctor"].startswith(command)
        assert lost["labels"]["alertname"] == "VllmTelemetryAbsent" and lost["labels"]["instance"]


# -- what they say ----------------------------------------------------------------------------------------------------


def present(incident: Any, severity: str) -> Diagnosis:
    readings = [Reading(each, 1.5, 1.0, True, (1.5,)) for each in incident.conditions]
    escalation = [Reading(incident.escalates, 9.0, 8.0, True, (9.0,))] if incident.escalates else []
    labels = {"instance": "eu/pod-1", "engine": "0", "gpu": "1"}
    subject = tuple(sorted((name, labels[name]) for name in incident.per))
    held = ("present", severity, 1.8e9, None, ((1.8e9, None),), True, (1.8e9,))
    return Diagnosis(incident, subject, *held, symptoms=readings, supports=(), escalation=escalation)


@pytest.mark.parametrize("labels", [("instance",), ("cluster", "pod")])
def test_every_incident_has_its_alerts_without_a_template_left(labels: tuple[str, ...]) -> None:
    contract = Contract(site=Site(labels=labels, prometheus_url="http://prom:9090"))
    for incident in load():
        worst = "critical" if incident.escalates else incident.severity
        filled = list(filled_alerts(present(incident, worst), contract, 1.8e9))
        assert [each.labels["severity"] for each in filled] == [
            incident.severity,
            *["critical"] * bool(incident.escalates),
        ]
        for alert in filled:
            assert "{{" not in "".join(alert.annotations.values()), incident.id
            expected = {"cluster": "eu", "pod": "pod-1"} if "cluster" in labels else {"instance": "eu/pod-1"}
            assert expected.items() <= alert.labels.items()
            assert alert.labels.keys() - expected.keys() <= {"alertname", "incident", "severity", "engine", "gpu"}
            assert set(expected.values()) <= set(
                alert.annotations["summary"].replace(": ", " : ").replace("/", " / ").split()
            ) | {"eu/pod-1"}


def test_a_warning_that_is_not_critical_has_no_critical_alert() -> None:
    incident = next(each for each in load() if each.escalates and each.severity == "warning")
    assert [each.labels["severity"] for each in filled_alerts(present(incident, "warning"), Contract(), 0.0)] == [
        "warning"
    ]


def test_reason_of_a_failed_observation_has_no_markup() -> None:
    alert = no_telemetry("h:1`<b>", "http://h:1 answered <https://evil|click> `x` @here", Site(), 1.8e9)
    assert not {"<", ">", "`", "@", "|"} & set("".join(alert.annotations.values()))
    assert (alert.labels["alertname"], alert.labels["severity"]) == ("VllmTelemetryAbsent", "warning")


# -- the API ----------------------------------------------------------------------------------------------------------


def test_alertmanager_receives_only_its_own_credentials() -> None:
    with serving(lambda request: Reply(b"{}")) as server:
        environment = {"DIAG_BEARER_TOKEN": "of the servers", "DIAG_ALERTMANAGER_BASIC_AUTH": "me:word"}
        Alertmanager(f"{server.url}/am/", environment).post([{"labels": {}}])
        Alertmanager(server.url, {"DIAG_BEARER_TOKEN": "of the servers"}).post([])
    first, second = server.requests
    assert (first.method, first.path, first.body) == ("POST", "/am/api/v2/alerts", b'[{"labels": {}}]')
    assert first.headers["Authorization"] == "Basic bWU6d29yZA==" and "Authorization" not in second.headers


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (Reply(b'"start time must be before end time"', 400), "answered HTTP 400: start time must be before end time"),
        (Reply(b"<html>", 404), "answered HTTP 404; is this the address of an Alertmanager"),
        (
            Reply(b"", 401),
            "requires credentials (HTTP 401); set DIAG_ALERTMANAGER_BEARER_TOKEN, DIAG_ALERTMANAGER_BASIC",
        ),
    ],
)
def test_refused_post_is_reported_in_one_sentence(reply: Reply, sentence: str) -> None:
    def answer(request: Request) -> Reply:
        return reply

    with serving(answer) as server, pytest.raises(Unreachable) as error:
        Alertmanager(server.url, {}).post([])
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Alertmanager("http://am:9093?token=x", {}), "leave out the question mark"),
        (
            lambda: Alertmanager("http://am", {"DIAG_ALERTMANAGER_BASIC_AUTH": "x"}),
            "DIAG_ALERTMANAGER_BASIC_AUTH must be",
        ),
    ],
)
def test_invalid_alertmanager_address_or_credential_is_refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(BadUsage, match=sentence):
        make()
