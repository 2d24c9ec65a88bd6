"""Tools of an engineer on call: an exporter beside the server, a Prometheus with the shipped alerts, a pager.

And what each of them says of the server, in a few words that can be compared: "critical engine_dead".
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from support import alertmanager, prometheus_server
from support.live import server
from support.paths import ROOT

DIAG = str(Path(sys.executable).parent / "diag")
EXIT = {"healthy": 0, "no_incident": 0, "warning": 1, "critical": 2, "unknown": 3}
SHIPPED = ("alerts/diag.rules.yaml", "alerts/inhibit_rules.yaml", "alerts/README.md")
SCRAPED_EVERY = 5
"""Seconds: a scrape that may take that long succeeds on two busy cores."""
ENDS_WITHIN = 40.0
"""Seconds within which /livez turns: the documented 35, and the probe's own interval."""
GONE = 30.0
"""Seconds without a firing alert after which it has ended; rules are evaluated every 15 s."""
PATIENCE = 420.0
"""Seconds to wait for an alert; the slowest that is expected, of means over five minutes, takes six minutes."""


@dataclass(frozen=True)
class Said:
    """An answer of `diag doctor`, in short, its report where there is one, and the seconds of CPU that it took."""

    short: str
    report: dict[str, Any]
    cpu: float = 0.0

    @property
    def primary(self) -> dict[str, Any]:
        """The incident to act on first; empty where there is none."""
        return next((found for found in self.report.get("diagnoses", ()) if found["primary"]), {})


def doctor(*words: str) -> Said:
    """Ask for a diagnosis."""
    with tempfile.TemporaryFile("w+") as errors:
        asked = subprocess.Popen([DIAG, "doctor", *words, "--json"], stdout=subprocess.PIPE, stderr=errors, text=True)
        assert asked.stdout
        answer = asked.stdout.read()
        _, status, used = os.wait4(asked.pid, 0)
        code = asked.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        refused = re.search(r"\b[45]\d\d\b", errors.read())
    if not answer:
        return Said(f"exit {code}" + (f", HTTP {refused[0]}" if refused else ""), {})
    report = json.loads(answer)
    exited = "" if code == EXIT[report["verdict"]] else f" (exit {code})"
    return Said(in_short(report) + exited, report, used.ru_utime + used.ru_stime)


def in_short(report: dict[str, Any]) -> str:
    """The verdict with its primary incidents; where nothing can be told, what the engines do."""
    primary = [found for found in report["diagnoses"] if found["primary"] and found["severity"] != "info"]
    named = {f"{found['incident']}{'' if found['ongoing'] else ' (ended)'}" for found in primary}
    states = {engine["state"] for engine in report["progress"]} if report["verdict"] == "unknown" else set()
    return " ".join([report["verdict"], ", ".join(sorted(named or states))]).strip()


class Look(NamedTuple):
    """Seconds to an answer: in all, from the first scrape to the last, of CPU; the load average of the minute before.

    Alone on a machine, the answer takes the waits and the CPU.
    """

    seconds: float
    waited: float
    cpu: float
    load: float


@dataclass(frozen=True)
class OnCall:
    """The URLs of a server, of its exporter and of the Prometheus that scrapes it; the alerts that arrived so far.

    `looks` are the live ones.
    """

    url: str
    log: Path
    exporter: str
    prometheus: str
    arrived: list[dict[str, Any]]
    looks: list[Look] = field(default_factory=list)

    def livez(self, expected: str = "") -> str:
        """The status that the exporter's liveness probe is answered with; that which is expected in time."""
        end = time.monotonic() + (ENDS_WITHIN if expected else 0)
        while (status := self._livez()) != expected and time.monotonic() < end:
            time.sleep(2)
        return status

    def _livez(self) -> str:
        try:
            with urllib.request.urlopen(f"{self.exporter}/livez", timeout=10) as answer:
                return str(answer.status)
        except urllib.error.HTTPError as refused:
            return str(refused.code)

    def first_look(self) -> tuple[Said, Said]:
        """The doctor's live answer and the one by the exporter, asked at once."""
        with ThreadPoolExecutor(2) as both:
            live = both.submit(self._live)
            return doctor(self.exporter), live.result()

    def _live(self) -> Said:
        load, began = os.getloadavg()[0], time.monotonic()
        said = doctor(self.url, "--log", str(self.log))
        took, seen = time.monotonic() - began, said.report.get("observed", {"start": 0.0, "end": 0.0})
        self.looks.append(Look(took, seen["end"] - seen["start"], said.cpu, load))
        return said

    def by_prometheus(self, incident: str) -> Said:
        """The doctor's answer from what was scraped: to the command in the alert of that incident, if it has come."""
        for alert in self.arrived:
            if _name(alert["labels"]) == incident:
                return doctor(*shlex.split(alert["annotations"]["doctor"])[2:])
        return doctor("--prometheus", self.prometheus)

    def notified(self) -> dict[str, float]:
        """The incidents of the alerts that somebody was sent, with the unix time of their arrival."""
        names: dict[str, float] = {}
        for alert in list(self.arrived):
            names.setdefault(_name(alert["labels"]), alert["arrived"])
        return names

    def fired(self) -> set[str]:
        """The incidents of all alerts that fired so far, sent or not; infos are for nobody."""
        asked = 'group by (alertname, incident) (max_over_time(ALERTS{alertstate="firing",severity!="info"}[1h]))'
        answer = prometheus_server.Server(self.prometheus, ()).query(asked, round(time.time() * 1000)) or {}
        return {_name(dict(labels)) for labels in answer}

    def last_fired(self) -> float:
        """The unix time at which an alert fired last, once none has for a while; infos are for nobody."""
        asked = f'max(max_over_time(timestamp(ALERTS{{alertstate="firing",severity!="info"}})[1h:{SCRAPED_EVERY}s]))'
        end = time.time() + PATIENCE + GONE
        while True:
            answer = prometheus_server.Server(self.prometheus, ()).query(asked, round(time.time() * 1000)) or {}
            last = max(answer.values(), default=0.0)
            if time.time() - last > GONE or time.time() > end:
                return last
            time.sleep(SCRAPED_EVERY)

    def wait_for(self, incident: str) -> None:
        """Until its alert has arrived, or for too long."""
        end = time.monotonic() + PATIENCE
        while incident not in self.notified() and time.monotonic() < end:
            time.sleep(0.5)


def _name(labels: dict[str, str]) -> str:
    return labels.get("incident") or labels["alertname"]


@contextmanager
def on_call(folder: Path, watched: server.Server, in_haste: bool) -> Iterator[OnCall]:
    """All of it for one server; `in_haste` a minute of an alert's `for` lasts 5 s."""
    shipped = {file: (ROOT / file).read_text(encoding="utf-8") for file in SHIPPED}
    rules = shipped["alerts/diag.rules.yaml"]
    (folder / "diag.rules.yaml").write_text(prometheus_server.hasty(rules) if in_haste else rules)
    with alertmanager.pager() as (webhook, arrived):
        routes = re.sub(r"http://\w+\.example/", webhook, alertmanager.snippet(shipped, "alertmanager.yml"))
        wait = "5s" if in_haste else "30s"  # measured is the alert, not how long a ticket waits for a page
        routes = alertmanager.hasty(routes, wait, wait)
        with exporter(watched) as address, alertmanager.running(folder, shipped, routes) as manager:
            config = scraping(alertmanager.snippet(shipped, "prometheus.yml"), folder, manager, address)
            program = prometheus_server.program(prometheus_server.PLACES[0])
            with prometheus_server.serving(program, (), config) as prometheus:
                who = OnCall(watched.url, watched.log, f"http://{address}", prometheus.url, arrived)
                who.livez()  # the exporter judges liveness from the first question on
                yield who


def scraping(documented: str, folder: Path, manager: str, exporter: str) -> str:
    """The documented configuration of Prometheus with these addresses and a quick scrape."""
    often = f"scrape_interval: {SCRAPED_EVERY}s\n    scrape_timeout: {SCRAPED_EVERY}s"
    placed = documented.replace("/etc/prometheus/diag", str(folder)).replace("scrape_interval: 15s", often)
    return placed.replace("alertmanager:9093", manager).replace("vllm-host:9400", exporter)


@contextmanager
def exporter(watched: server.Server) -> Iterator[str]:
    """`diag exporter` in front of a server; its host and port."""
    address = f"127.0.0.1:{server.free_port()}"
    command = [DIAG, "exporter", "--vllm", watched.url, "--log", str(watched.log), "--listen", address]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        _until_it_answers(address)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def _until_it_answers(address: str) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"http://{address}/metrics", timeout=10).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"diag exporter does not answer at {address}")
