"""What the doctor and the generated rules cost, and a Prometheus with them; writes bench/prometheus.md.

A fleet is back-filled by promtool, of 1,000 servers for about a minute. A day is a healthy one with a quarter of an
hour of an incident in it.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import live_rules
import rule_costs
import table
from rule_costs import END, Told, members, numbers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import fleet_in_prometheus as fleet  # noqa: E402
from support import healthy_day, prometheus_server, timelines  # noqa: E402

from diag.commands import doctor  # noqa: E402
from diag.commands.observe import ObserveOptions  # noqa: E402
from diag.core.contract import Contract  # noqa: E402
from diag.core.incident import Incident  # noqa: E402
from diag.diagnosis.report import Report  # noqa: E402
from diag.knowledge.catalog import load  # noqa: E402
from diag.knowledge.formulas import formula  # noqa: E402
from diag.promql import Block  # noqa: E402
from diag.sources.prometheus.scope import Scope, TimeSpan  # noqa: E402

ONSET = END - 6 * 3_600_000
SIZES = (10, 100, 1000, 10_000)
RUNS = 5
WHOLE, WHOLE_MEMBERS, SCRAPES = 1000, 100, 45
"""The largest fleet of whole pages; in a larger one, so many healthy servers have them, all with so many scrapes."""
LIMIT = 600
"""Seconds after which a run of the doctor is given up, and after which no further run is begun."""
LAUNCHER = """\
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)])
_, status, used = os.wait4(pid, 0)
print(os.waitstatus_to_exitcode(status), used.ru_maxrss)
"""
"""Start a command from a small process: Linux counts the memory of the one that forks as memory of its child."""
EVERY = ("doctor", "past", "rules", "vmalert", "live")
INTRO = """# Fleets and the past, asked of a Prometheus

`bench/prometheus.py`: a real Prometheus on the same machine ({cores} cores, which both share). Every section names the
measured commit.
"""
FLEET = """## A fleet

The table shows the whole run of `diag doctor --prometheus URL --at TIME` from start to exit, the median of up to
{runs}; of a thousand servers, three have a preemption cascade and forty throttle. With "rules", the Prometheus also
holds the series of the generated rules. For comparison, "the queries alone" is the time for all conditions of all
incidents, queried one after the other at one time from the same Prometheus, with the responses discarded. "asked"
counts the requests that Prometheus answered in one run; "MiB" is the peak resident memory of the doctor. In the fleet
of 10,000 servers, only 100 healthy servers and the unhealthy servers have complete pages; the pages of the others lack
histogram buckets, log, start-up phases and limits of the hardware, and all have {scrapes} scrapes; the recorded series
come from complete pages. This fleet is measured only with rules.

| Prometheus | servers | rules | asked | seconds | MiB | the queries alone | ratio | ms a server |
|---|---|---|---|---|---|---|---|---|
"""
PAST = """## The past

`--at TIME --window 24h` over one server's day, scraped every 15 s and judged every {step} s, in which the incident
begins at a known scrape and lasts for 15 minutes. "found" is the delay from that scrape to the onset that the doctor
reports; "also" lists other warnings or worse of that day that are not reported as consequences of the incident. A
standstill counts only after it has lasted for a minute. Incidents whose series are missing on that day (adapters,
drafts, a log, a second engine or a second server) have no row.

| incident | found after (s) | ended after (s) | also | seconds to judge the day |
|---|---|---|---|---|
"""
RULES = """## The rules

`alerts/diag.rules.yaml` has {records} recording rules and {alerts} alerts, {lines:,} lines of PromQL; the longest
alert, {longest}, has {longest_lines} lines. "all rules" is the CPU time of Prometheus, user and system, to evaluate
every expression of the file once; "raw" is the CPU time to evaluate once each of the {aggregates} distinct innermost
aggregates over a raw range that the alerts need, and each range function outside of an aggregate: the minimum work of
any layout of the rules. Each figure is the median of {rounds} rounds after one warm-up round. Every query is wrapped in
count(), so that no result is written as JSON. The servers are healthy, with a day of samples for the series that long
ranges select and 20 minutes for all others. "in 15 s" is the average CPU time of the rules in 15 s, because rules over
long ranges and infos are evaluated every minute, constants every two. The aim is at most 1.2 times "raw". The last
columns show the series and samples that the recording rules add for each server.

| Prometheus | servers | all rules (s) | in 15 s (s) | raw (s) | all / raw | in 15 s / raw | series | samples a second |
|---|---|---|---|---|---|---|---|---|
"""
VMALERT = """## vmalert

vmalert and VictoriaMetrics of the distribution (1.79) evaluate every group every {cycle} s over samples that keep
arriving; `keep_firing_for` is left out, because that version of vmalert refuses it. The figures are CPU seconds for one
evaluation of all rules, the mean of {cycles}; the idle CPU time of VictoriaMetrics is subtracted. "seconds apart" shows
whether vmalert keeps up: {cycle} if it does. "failed" counts rules that ended with an error.

| servers | VictoriaMetrics (s) | vmalert (s) | both (s) | seconds apart | alerts pending or firing | failed |
|---|---|---|---|---|---|---|
"""
LIVE = """## A live Prometheus

Prometheus (GOMAXPROCS={cores}) scrapes every server every 15 s for {lasting:.0f} s and evaluates the rules; another
process of the same machine serves the pages of vLLM and the exporter. CPU and evaluations are measured once every
target has been scraped. "missed" counts skipped evaluations, "failed" counts rules that ended with an error. Ranges
longer than the run cost less than after a day.

| Prometheus | servers | rules | CPU seconds a second | GiB | series | missed | failed |
|---|---|---|---|---|---|---|---|
"""


@dataclass
class Section:
    """A section of the page, written again with every row: what was measured outlasts an abort."""

    text: str

    def tell(self, row: str) -> None:
        """Add a row."""
        self.text += f"{row}\n"
        table.put_section("prometheus.md", self.text)
        print(row, flush=True)


class Run(NamedTuple):
    """One run of the doctor."""

    seconds: float
    mebibytes: float
    asked: int


def ask_doctor(folder: Path, servers: int, tell: Told) -> None:
    """Both Prometheus over a fleet of that size, with recorded rules and, unless it is very large, without them."""
    fleet_of, scrapes = members(servers), fleet.TIMES.size
    if servers > WHOLE:
        thinned = fleet_of["healthy"] - WHOLE_MEMBERS
        fleet_of, scrapes = {**fleet_of, "healthy": WHOLE_MEMBERS, fleet.THINNED: thinned}, SCRAPES
    for rules in (False, True) if servers <= WHOLE else (True,):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            fleet.write(Path(name), fleet_of, END / 1000, scrapes, rules=rules)
            for place in prometheus_server.PLACES:
                with fleet.serving(prometheus_server.program(place), Path(name)) as server:
                    tell(_fleet_row(server, servers, rules="yes" if rules else "no"))


def _fleet_row(server: prometheus_server.Server, servers: int, rules: str) -> str:
    began = time.monotonic()
    runs: list[Run] = []
    alone: list[float] = []
    while len(runs) < RUNS and time.monotonic() < began + LIMIT / 2:
        runs.append(run_doctor(server.url))
        if servers <= WHOLE:
            alone.append(ask_conditions(server))
    whole = statistics.median(run.seconds for run in runs)
    queries = f"{statistics.median(alone):.2f} | {whole / statistics.median(alone):.2f}" if alone else "- | -"
    told = f"{whole:.2f} | {max(run.mebibytes for run in runs):.0f} | {queries} | {1000 * whole / servers:.1f}"
    return f"| {'.'.join(map(str, server.version))} | {servers:,} | {rules} | {runs[0].asked} | {told} |"


def run_doctor(url: str) -> Run:
    """Run the doctor as a process of its own."""
    command = [sys.executable, "-m", "diag", "doctor", "--prometheus", url, "--at", f"{END / 1000}"]
    before, start = answered(url), time.perf_counter()
    with tempfile.TemporaryFile() as said:
        launched = [sys.executable, "-c", LAUNCHER, *command]
        process = subprocess.Popen(
            launched, cwd=ROOT, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True
        )
        timer = threading.Timer(LIMIT, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        answer = process.communicate()[0].split()
        timer.cancel()
        took = time.perf_counter() - start
        if len(answer) != 2 or int(answer[0]) not in range(4):
            said.seek(0)
            raise ValueError(f"the doctor ends with {answer}: {said.read().decode()[-2000:]}")
    return Run(took, int(answer[1]) / 1024, round(answered(url) - before))


def answered(url: str) -> float:
    """Requests to the API that this Prometheus has answered."""
    asked = "prometheus_http_requests_total{"
    return sum(count for name, count in numbers(url).items() if name.startswith(asked) and "/api/v1/" in name)


def ask_conditions(server: prometheus_server.Server) -> float:
    """Ask for every condition's expression once, at one instant; the seconds that it takes."""
    asked = {
        formula(condition.signal, incident.per, incident.window, Contract()).written_out()
        for incident in load()
        for condition in incident.every_condition
    }
    start = time.perf_counter()
    for promql in sorted(asked):
        server.query(promql, END)
    return time.perf_counter() - start


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
    return f"| {incident.id} | {began:g} | {ended:g} | {', '.join(others) or '-'} | {took:.1f} |"


def look_back(tell: Told) -> None:
    """Tell a row for each incident in a day."""
    day = healthy_day.day(END)
    shown = {**timelines.RECORDED, **timelines.HOSTS}
    for incident in load():
        row = past_row(incident, day) if incident.id in shown else ""
        if row:
            tell(row)


def measure(section: str, folder: Path, servers: Sequence[int], lasting: float) -> None:
    """Measure one section, at sizes of its own unless given."""
    if section == "doctor":
        told = Section(FLEET.format(runs=RUNS, scrapes=SCRAPES))
        for size in servers or SIZES:
            ask_doctor(folder, size, told.tell)
    elif section == "past":
        look_back(Section(PAST.format(step=60)).tell)
    elif section == "rules":
        told = Section(RULES.format(**rule_costs.facts()._asdict(), rounds=rule_costs.ROUNDS))
        for size in servers or (200,):
            rule_costs.evaluate_in_prometheus(folder / f"rules-{size}", size, told.tell)
    elif section == "vmalert":
        told = Section(VMALERT.format(cycle=rule_costs.CYCLE, cycles=rule_costs.CYCLES))
        for size in servers or (200,):
            rule_costs.evaluate_in_vmalert(size, told.tell)
    else:
        told = Section(LIVE.format(cores=live_rules.CORES, lasting=lasting))
        for size in servers or (1000,):
            live_rules.evaluate_live(size, lasting, told.tell)


def main() -> None:
    """Measure the sections and write each into the page as it comes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--sections", nargs="+", choices=EVERY, default=EVERY)
    parser.add_argument("--servers", nargs="+", type=int, default=(), help="sizes of the fleets")
    parser.add_argument("--seconds", type=float, default=300, help="how long the live Prometheus runs with rules")
    options = parser.parse_args()
    table.put_intro("prometheus.md", INTRO.format(cores=os.cpu_count()))
    with tempfile.TemporaryDirectory() as name:
        for section in options.sections:
            measure(section, Path(name), options.servers, options.seconds)


if __name__ == "__main__":
    main()
