"""How long a Prometheus and the doctor take for fleets and for the past; writes bench/prometheus.md.

A fleet is back-filled by promtool, of 1,000 servers for about a minute. A day is a healthy one with a quarter of an
hour of an incident in it.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import fleet_in_prometheus as fleet  # noqa: E402
from support import healthy_day, prometheus_server, timelines  # noqa: E402

from diag.commands import doctor  # noqa: E402
from diag.commands.observe import ObserveOptions  # noqa: E402
from diag.core.contract import Contract  # noqa: E402
from diag.core.incident import Incident  # noqa: E402
from diag.diagnosis.report import Report  # noqa: E402
from diag.http.client import Client  # noqa: E402
from diag.knowledge.catalog import load  # noqa: E402
from diag.knowledge.formulas import formula  # noqa: E402
from diag.promql import Block  # noqa: E402
from diag.sources.prometheus.scope import Scope, TimeSpan  # noqa: E402

DIAG = str(Path(sys.executable).parent / "diag")
END = 1_790_000_000_000
ONSET = END - 6 * 3_600_000
SIZES = (10, 100, 1000)
RUNS = 5
HEAD = """# Fleets and the past, asked of a Prometheus

`bench/prometheus.py`: a real Prometheus on the same machine ({cores} cores, which both share).

## A fleet

The whole run of `diag doctor --prometheus URL --at TIME` from start to exit, the median of {runs}; three servers of a
thousand evict each other's requests, forty throttle. Beside it, the same Prometheus asked for all conditions of all
incidents one after the other at one instant, by somebody who throws the answers away. "asked" counts the requests.

| Prometheus | servers | asked | seconds | the queries alone | ratio | ms a server |
|---|---|---|---|---|---|---|
"""
PAST = """
## The past

`--at TIME --window 24h` over one server's day, scraped every 15 s and judged every {step} s, in which the incident sets
in at a known scrape and lasts for 15 minutes. "found" is how much later than that scrape the doctor dates it, "also"
whatever else of that day it calls a warning or worse that it does not explain by the incident. A standstill is one only
once it has lasted for a minute. An incident has no row where that day lacks the series that show it: those of adapters,
drafts, a log, a second engine or a second server.

| incident | found after (s) | ended after (s) | also | seconds to judge the day |
|---|---|---|---|---|
"""


def fleet_rows(folder: Path, servers: int) -> list[str]:
    """Both Prometheus over a fleet of that size."""
    ill = {"kv_eviction_cascade": -(-3 * servers // 1000), "gpu_thermal_throttling": -(-40 * servers // 1000)}
    folder.mkdir()
    fleet.write(folder, {"healthy": servers - sum(ill.values()), **ill}, END / 1000)
    rows = []
    for place in prometheus_server.PLACES:
        with fleet.serving(prometheus_server.program(place), folder) as server:
            runs = [(seconds(server.url), alone(server.url)) for _ in range(RUNS)]
            whole, queries = (statistics.median(run[at] for run in runs) for at in (0, 1))
            version = ".".join(map(str, server.version))
            told = f"{whole:.2f} | {queries:.2f} | {whole / queries:.2f} | {1000 * whole / servers:.1f}"
            rows.append(f"| {version} | {servers:,} | {requests(server.url)} | {told} |\n")
    return rows


def seconds(url: str) -> float:
    """One run of the doctor as a process of its own."""
    start = time.perf_counter()
    subprocess.run([DIAG, "doctor", "--prometheus", url, "--at", f"{END / 1000}"], capture_output=True, check=False)
    return time.perf_counter() - start


def alone(url: str) -> float:
    """Every condition's expression once, at one instant."""
    asked = {
        formula(condition.signal, incident.per, incident.window, Contract()).written_out()
        for incident in load()
        for condition in incident.every_condition
    }
    server = prometheus_server.Server(url, ())
    start = time.perf_counter()
    for promql in sorted(asked):
        server.query(promql, END)
    return time.perf_counter() - start


def requests(url: str) -> int:
    """How many requests a run of the doctor sends."""
    sent: list[object] = []
    really = Client.send

    def counted(*args: Any, **how: Any) -> Any:
        sent.append(args)
        return really(*args, **how)

    with patch.object(Client, "send", counted):
        judge(url, TimeSpan(at=f"{END / 1000}"))
    return len(sent)


def judge(url: str, span: TimeSpan) -> Report:
    """The doctor's report, in this process."""
    return doctor.run(ObserveOptions([], prometheus=url, scope=Scope(span)))


def past_row(incident: Incident, day: list[Block]) -> str:
    """A day with the incident in it; empty where a server's day cannot show it."""
    series, late = timelines.faulty(incident.id)
    blocks = healthy_day.with_fault(day, series, ONSET)
    with prometheus_server.serving(prometheus_server.program("PATH"), blocks) as server:
        start = time.perf_counter()
        report = judge(server.url, TimeSpan(at=f"{END / 1000}", window="24h"))
        took = time.perf_counter() - start
    present = {finding.diagnosis.incident.id: finding.diagnosis for finding in report.present}
    found = present.pop(incident.id, None)
    if not found or found.since is None:
        return ""
    began, ended = (moment - ONSET / 1000 - late for moment in (found.since, found.until))
    others = [name for name, other in present.items() if other.severity != "info" and not other.explained_by]
    return f"| {incident.id} | {began:g} | {ended:g} | {', '.join(others) or '-'} | {took:.1f} |\n"


def main() -> None:
    """Measure everything and write the page."""
    with tempfile.TemporaryDirectory() as name:
        rows = [row for servers in SIZES for row in fleet_rows(Path(name) / str(servers), servers)]
    day = healthy_day.day(END)
    shown = {**timelines.RECORDED, **timelines.HOSTS}
    past = [past_row(incident, day) for incident in load() if incident.id in shown]
    head = HEAD.format(cores=os.cpu_count(), runs=RUNS)
    page = head + "".join(rows) + PAST.format(step=60) + "".join(past)
    table.write("prometheus.md", page)


if __name__ == "__main__":
    main()
