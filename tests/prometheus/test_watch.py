"""A watch tells what begins and what ends, once it has lasted, and lasts itself until it is told to end."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from support import alertmanager, rewriting
from support.bad_servers import Answer, Reply, on_metrics
from support.bad_servers import serving as vllm_serving
from support.paths import RECORDINGS, ROOT
from support.prometheus_server import PLACES, Server, program, serving
from support.timelines import BEFORE, TIMES, blocks, timeline
from support.waiting import until

from diag.artefacts.alerts import filled_alerts
from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract
from diag.core.incident import Severity
from diag.diagnosis.report import Finding, Report, Transition, Transitions
from diag.http.prometheus_api import Alertmanager
from diag.knowledge.catalog import load
from diag.promql import Block
from diag.report import terminal

HARM = "kv_eviction_cascade"

# -- what changes -----------------------------------------------------------------------------------------------------

Held = Literal["present", "over", "absent", "unknown"]


@cache
def sick() -> Report:
    return doctor.run(ObserveOptions([str(RECORDINGS / "kv_cascade")]))


def finding(held: Held, severity: Severity = "critical", instance: str = "a:1") -> Finding:
    """The cascade on that server as a look may find it."""
    first = sick().present[0]
    state = "present" if held == "over" else held
    subject = (("engine", "0"), ("instance", instance))
    one = first.diagnosis._replace(
        subject=subject, state=state, ongoing=held == "present", severity=severity, primary=True
    )
    return first._replace(diagnosis=one)


def look(*findings: Finding, gone: tuple[str, ...] = ()) -> Report:
    return sick()._replace(findings=findings, gone=gone)


def told(*reports: Report) -> list[list[Transition]]:
    """The changes that each observation confirms, after a first one in which nothing held."""
    transitions = Transitions()
    transitions.observe(look(finding("absent")))
    return [transitions.observe(report) for report in reports]


def kinds(*reports: Report) -> list[list[str]]:
    return [[each.what for each in changed] for changed in told(*reports)]


def in_turn(*held: Held) -> list[Report]:
    return [seen(one) for one in held]


def seen(held: Held, severity: Severity = "critical") -> Report:
    return look(finding(held, severity))


def test_an_incident_is_reported_once_it_held_in_two_observations_in_a_row() -> None:
    assert kinds(seen("present"), seen("present"), seen("present")) == [[], ["began"], []]


def test_its_end_is_reported_once_it_is_absent_in_two_observations_in_a_row() -> None:
    assert kinds(*in_turn("present", "present", "absent", "absent", "absent"))[2:] == [[], ["ended"], []]


def test_incident_that_held_in_the_window_and_is_over_has_ended() -> None:
    assert kinds(*in_turn("present", "present", "over", "over"))[2:] == [[], ["ended"]]


@pytest.mark.parametrize("held", [("absent", "present", "absent"), ("present", "present", "absent", "present")])
def test_incident_in_a_single_observation_is_not_reported(held: tuple[Held, ...]) -> None:
    assert kinds(*in_turn(*held))[2:] == [[] for _ in held[2:]]


def test_unknown_incident_keeps_its_state() -> None:
    assert kinds(*in_turn("present", "unknown", "present")) == [[], [], ["began"]]
    assert kinds(*in_turn("present", "present", "unknown", "unknown", "unknown"))[2:] == [[], [], []]


def test_incident_in_the_first_observation_is_reported_once_and_then_only_its_end() -> None:
    transitions = Transitions()
    assert [transitions.observe(seen("present")) for _ in range(3)] == [[], [], []]
    transitions.observe(seen("absent"))
    assert [each.what for each in transitions.observe(seen("absent"))] == ["ended"]


def test_change_of_severity_is_reported_in_both_directions() -> None:
    warned, worse = seen("present", "warning"), seen("present", "critical")
    assert kinds(warned, warned, worse, worse, warned, warned) == [[], ["began"], [], ["worse"], [], ["milder"]]


def test_reported_end_has_the_severity_of_the_incident() -> None:
    escalated, calm = seen("present", "critical"), seen("absent", "warning")
    assert told(escalated, escalated, calm, calm)[-1][0].diagnosis.severity == "critical"


def test_info_incident_is_not_reported_by_the_watch() -> None:
    assert kinds(seen("present", "info"), seen("present", "info")) == [[], []]


def test_vanished_server_ends_its_incidents_and_is_reported_as_gone() -> None:
    other = look(finding("absent", instance="b:1"))
    both = look(finding("present"), finding("absent", instance="b:1"))
    assert [[each.gone for each in changed] for changed in told(both, both, other, other)] == [[], [False], [], [True]]


def test_server_that_is_no_longer_scraped_is_reported_as_gone() -> None:
    gone = look(finding("over"), gone=("a:1",))
    change = told(seen("present"), seen("present"), gone, gone)[-1][0]
    assert terminal.watch_changed(change).endswith(f"CRITICAL {HARM} on a:1 engine 0{terminal.GONE}\n")


def test_watch_reports_in_the_order_of_the_diagnoses() -> None:
    many = look(*(finding("present", instance=f"{name}:1") for name in "cab"))
    assert [dict(each.diagnosis.subject)["instance"] for each in told(many, many)[-1]] == ["c:1", "a:1", "b:1"]
    assert [dict(each.diagnosis.subject)["instance"] for each in told(many, many, look(), look())[-1]] == [
        "a:1",
        "b:1",
        "c:1",
    ]


@pytest.mark.parametrize(
    ("held", "calm"),
    [
        (["absent"], True),
        (["absent", "present"], False),
        (["absent", "present", "absent"], True),
        (["present", "absent"], False),
        (["present", "absent", "absent"], True),
    ],
)
def test_watch_is_calm_without_present_or_pending_incidents(held: list[Held], calm: bool) -> None:
    transitions = Transitions()
    for each in held:
        transitions.observe(seen(each))
    assert transitions.is_calm is calm


def test_watch_is_calm_after_a_single_observation_of_a_vanished_server() -> None:
    transitions = Transitions()
    for each in (seen("absent"), seen("present"), look()):
        transitions.observe(each)
    assert transitions.is_calm


# -- the command ------------------------------------------------------------------------------------------------------

HASTY = """
from diag.cli.app import main
from diag.commands import watch
watch.RETRY = watch.PAUSE_SECONDS = 0.3
main()
"""
SPAN = ("--window", "32s")
GENERATED = {name: (ROOT / name).read_text() for name in ("alerts/inhibit_rules.yaml", "alerts/README.md")}
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC  "


def hasty(*words: str) -> subprocess.Popen[str]:
    """`diag doctor --watch` that looks more often."""
    return doctored(*words, "--watch")


def doctored(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HASTY, "doctor", *words]
    env = {**os.environ, "PYTHONUTF8": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)


def interrupted(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Press Ctrl-C: the exit status and what was said since."""
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline()


def played(recording: str, lead: str, since: float, until: float = 60.0) -> Block:
    """A timeline at a scrape each second: its second half began so many seconds ago, and goes on for some to come."""
    (block,) = blocks(timeline(recording, lead=lead), 0.0)
    times = round((time.time() - since) * 1000) + 1000 * np.arange(1 - BEFORE.size, 1 + TIMES.size - BEFORE.size)
    kept = times < (time.time() + until) * 1000
    return Block(block.labels, times[kept].astype(np.int64), block.values[:, kept])


@contextmanager
def holding(*blocks: Block) -> Iterator[Server]:
    with serving(program(PLACES[1]), blocks) as server:
        yield server


@pytest.mark.prometheus
def test_watch_until_resolved_reports_the_end_on_standard_output_and_to_alertmanager(tmp_path: Path) -> None:
    """Although what is over is still in the window."""
    with (
        alertmanager.pager() as (webhook, arrived),
        alertmanager.running(tmp_path, GENERATED, at_once(webhook)) as address,
        holding(played("healthy", "kv_cascade", since=8.0)) as server,
    ):
        told = ("--alertmanager", f"http://{address}")
        process = hasty("--prometheus", server.url, "--window", "150s", "--until", "resolved", *told)
        out, error = process.communicate(timeout=120)
        until(lambda: len(arrived) > 1)
    assert (process.returncode, error) == (0, "")
    first, *rest = out.splitlines()
    since = r"ongoing (?:for at least [^(]+ \()?since before [0-9 :-]+ UTC\)?: "
    assert re.match(rf"{STAMP}CRITICAL KV-cache preemption cascade \({HARM}\) on h:1 engine 0, {since}", first)
    assert [each for each in rest if HARM in each] == [rest[0]]
    assert re.fullmatch(rf"{STAMP}ended   CRITICAL {HARM} on h:1 engine 0", rest[0])
    assert [alert["status"] for alert in arrived] == ["firing", "resolved"]
    labels, annotations = arrived[0]["labels"], arrived[0]["annotations"]
    severity = {"severity": "critical", "incident": HARM, "alertname": "VllmKvEvictionCascade"}
    assert labels == {**severity, "instance": "h:1", "engine": "0"}
    assert annotations["summary"].startswith("KV-cache preemption cascade on h:1 engine 0: ")
    assert annotations["do_now"].startswith("Lower the concurrency limit at the gateway")
    assert f"diag doctor --prometheus {server.url} --match 'instance=\"h:1\"'" in annotations["doctor"]


@pytest.mark.prometheus
def test_consequences_are_inhibited_as_with_alerts_of_a_prometheus(tmp_path: Path) -> None:
    breached = next(each for each in load() if each.id == "contract_breached")
    effect = sick().present[0].diagnosis._replace(incident=breached)
    alerts = [each for one in (sick().present[0].diagnosis, effect) for each in filled_alerts(one, Contract(), 0.0)]
    lasting = {"endsAt": "2100-01-01T00:00:00Z"}
    with (
        alertmanager.pager() as (webhook, arrived),
        alertmanager.running(tmp_path, GENERATED, at_once(webhook)) as address,
    ):
        until(lambda: inhibited(address) is not None)
        sent = [{"labels": alert.labels, "annotations": alert.annotations, **lasting} for alert in alerts]
        Alertmanager(f"http://{address}", {}).post(sent)
        assert until(lambda: inhibited(address)) == {"contract_breached"}
        until(lambda: arrived)
    assert [alert["labels"]["incident"] for alert in arrived] == [HARM]


def at_once(webhook: str) -> str:
    """The documented routes, all of them to this pager, without waiting for more alerts."""
    config = alertmanager.snippet(GENERATED, "alertmanager.yml")
    for place in ("pager", "tickets"):
        config = config.replace(f"http://{place}.example/", webhook)
    return alertmanager.hasty(config, "1s", "1s").replace("group_wait: 1s", "group_wait: 1s\n  group_interval: 1s", 1)


def inhibited(address: str) -> set[str] | None:
    """The incidents that the Alertmanager holds back; None before it answers."""
    try:
        with urllib.request.urlopen(f"http://{address}/api/v2/alerts", timeout=10) as response:
            alerts = json.load(response)
    except OSError:
        return None
    return {alert["labels"]["incident"] for alert in alerts if alert["status"]["inhibitedBy"]}


@pytest.mark.prometheus
def test_watch_until_resolved_ends_at_once_if_all_servers_are_healthy() -> None:
    with holding(played("healthy", "healthy", since=8.0)) as server:
        process = hasty("--prometheus", server.url, *SPAN, "--until", "resolved")
        out, error = process.communicate(timeout=120)
    assert (process.returncode, error, out.count("\n")) == (0, "", 1)
    assert re.match(f"{STAMP}HEALTHY ", out)


@pytest.mark.prometheus
def test_watch_reports_new_incidents_with_evidence_and_ends_on_ctrl_c() -> None:
    with holding(played("kv_cascade", "healthy", since=-12.0)) as server:
        process = hasty("--prometheus", server.url, *SPAN)
        assert "HEALTHY" in line(process)
        began = next(each for each in iter(lambda: line(process), "") if HARM in each)
        status, _, error = interrupted(process)
    assert re.match(rf"{STAMP}began   CRITICAL {HARM} on h:1 engine 0: .* preemptions per finished request", began)
    assert (status, error) == (130, "")


@pytest.mark.prometheus
def test_servers_lost_after_the_first_observation_are_reported_once_and_watched_for() -> None:
    """The sentence has the time in it, and so is another one each time."""
    with holding(played("healthy", "healthy", since=10.0, until=8.0)) as server:
        process = hasty("--prometheus", server.url, "--window", "3s")
        lines = [line(process) for _ in range(2)]
        time.sleep(1.2)
        status, rest, error = interrupted(process)
    assert re.match(f"{STAMP}(HEALTHY|CANNOT TELL) ", lines[0])
    assert re.match(f"{STAMP}cannot be observed: .* h:1 was scraped on the day before, but not between", lines[1])
    assert (status, rest, error) == (130, "", "")


def replayed(recording: str) -> Answer:
    return on_metrics(*(Reply(page.encode()) for _, _, page in rewriting.scrapes(recording)))


def test_incidents_of_a_returned_server_are_reported_again() -> None:
    down, pages = threading.Event(), replayed("healthy")
    with vllm_serving(lambda request: None if down.is_set() else pages(request)) as server:
        process = hasty(server.url, "--every", "0.1", "--for", "0.5")
        before = line(process)
        down.set()
        lost = line(process)
        down.clear()
        found = line(process)
        status, _, error = interrupted(process)
    assert re.match(f"{STAMP}(HEALTHY|CANNOT TELL) ", before)
    assert re.match(f"{STAMP}cannot be observed: ", lost)
    assert re.match(f"{STAMP}observed again: (HEALTHY|CANNOT TELL) ", found)
    assert (status, error) == (130, "")


def test_watch_with_a_log_reports_a_server_that_is_lost_and_its_recovery(tmp_path: Path) -> None:
    """The log is a part of the page that still answers, so the server can be observed all the time."""
    (tmp_path / "server.log").write_text("INFO 11-21 02:00:00 [api_server.py:1] Starting vLLM server\n")
    down, pages = threading.Event(), replayed("idle")
    down.set()
    with vllm_serving(lambda request: None if down.is_set() else pages(request)) as server:
        process = hasty(server.url, "--every", "0.1", "--for", "2", "--log", str(tmp_path / "server.log"))
        first, _ = line(process), line(process)
        down.clear()
        found = next(each for each in iter(lambda: line(process), "") if "too little seen" in each)
        status, _, error = interrupted(process)
    assert "/metrics never answered" in first
    assert "its log does not show which. Its log ends at " in first
    assert re.match(f"{STAMP}CANNOT TELL ", found)
    assert (status, error) == (130, "")


def test_ctrl_c_in_the_middle_of_an_observation_ends_the_watch() -> None:
    """A look alone would be judged on what it saw until then."""
    with vllm_serving(replayed("healthy")) as server:
        process = hasty(server.url, "--every", "0.1", "--for", "60")
        while len(server.asked("/metrics")) < 10:
            time.sleep(0.05)
        assert interrupted(process) == (130, "", "")


def test_observation_leaves_no_thread_behind(tmp_path: Path) -> None:
    """Each observation starts new threads for GPUs, Xid errors, processes and the log."""
    (tmp_path / "server.log").write_text("INFO 11-21 02:00:00 [api_server.py:1] Starting vLLM server\n")

    before = set(threading.enumerate())  # an exporter's live as long as its process, which may be that of these tests

    def ours() -> list[str]:
        return [each.name for each in set(threading.enumerate()) - before if each.name.startswith("diag-")]

    with vllm_serving(replayed("healthy")) as server:
        settings = ObserveOptions([server.url], every=0.1, duration=0.3, log=str(tmp_path / "server.log"))
        for _ in range(3):
            doctor.run(settings)
    gc.collect()  # once: among all tests of a worker, it takes seconds
    until = time.monotonic() + 60  # a request that nobody waits for ends by its own deadline, 10 s
    while left := ours():
        assert time.monotonic() < until, left
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--alertmanager", "http://a"], "--alertmanager needs --watch: it receives alerts as they fire and resolve"),
        (["--until", "resolved"], "--until needs --watch: it sets the end of the watch"),
        (["--watch", "--json"], "--watch prints lines as incidents begin and end: leave out --json and --markdown"),
        (["--watch", "--markdown"], "--watch prints lines as incidents begin and end: leave out --json and --markdown"),
        (["--watch"], "--watch needs live servers or a Prometheus: a recording does not change"),
    ],
)
def test_invalid_watch_option_is_refused_in_one_sentence(words: list[str], sentence: str) -> None:
    process = doctored("tests/recordings/healthy", *words)
    assert process.communicate(timeout=120) == ("", f"diag: {sentence}\n")
    assert process.returncode == 64


@pytest.mark.parametrize("words", [("--at", "-1h"), ("--from", "-2h", "--to", "-1h")])
def test_the_past_cannot_be_watched(words: tuple[str, ...]) -> None:
    process = doctored("--prometheus", "http://127.0.0.1:1", "--watch", *words)
    sentence = "--watch diagnoses the present: leave out --at and --to"
    assert process.communicate(timeout=120) == ("", f"diag: {sentence}\n")
    assert process.returncode == 64
