"""CPU time of evaluating the generated rules once over a fleet, by Prometheus and by vmalert with VictoriaMetrics."""

import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import promql_parser as ast

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import fleet_in_prometheus as fleet  # noqa: E402
from support import healthy_day, prometheus_server, timelines, victoria_metrics  # noqa: E402
from support.firing import alerts_alone  # noqa: E402
from support.recorded_series import recorded  # noqa: E402
from support.rule_files import groups_of  # noqa: E402

from diag.core.incident import seconds  # noqa: E402
from diag.promql import STALE, Block, Samples, metric_names, parse  # noqa: E402

RULES = ROOT / "alerts" / "diag.rules.yaml"
END = 1_790_000_000_000
ROUNDS = 5
CYCLE, CYCLES, WARM = 15, 5, 2
"""Seconds between two evaluations of a group by vmalert, how many are measured, and how many come before."""
RECENT = 80
_LONG = re.compile(r"\[(?:30m|\d+[hd])\]|offset \d+[hd]")
Numbers = dict[str, float]
Told = Callable[[str], None]
"""Writes one row of a table."""


class Facts(NamedTuple):
    """Size of the rule file, and what its records add to a Prometheus for each server."""

    records: int
    alerts: int
    lines: int
    longest: str
    longest_lines: int
    aggregates: int


def members(servers: int) -> dict[str, int]:
    """A fleet of that size: three servers of a thousand evict each other's requests, forty throttle."""
    ill = {"kv_eviction_cascade": -(-3 * servers // 1000), "gpu_thermal_throttling": -(-40 * servers // 1000)}
    return {"healthy": servers - sum(ill.values()), **ill}


def numbers(url: str) -> Numbers:
    """The samples of a program's own /metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def cpu_seconds(url: str) -> float:
    """CPU seconds, user and system, that the process at this address has used: the same as in /proc/PID/stat."""
    return numbers(url)["process_cpu_seconds_total"]


def rules() -> list[dict[str, Any]]:
    """Every rule of the file, with the interval of its group in seconds."""
    return [{**rule, "interval": seconds(group["interval"])} for group in groups_of(RULES) for rule in group["rules"]]


@cache
def raw_aggregates() -> tuple[str, ...]:
    """Distinct innermost aggregates over a raw range in the alerts, and range functions outside of any aggregate."""
    alerts = (rule["expr"] for group in alerts_alone(RULES) for rule in group["rules"])
    return tuple(sorted({str(node) for expr in alerts for node in _over_ranges(ast.parse(expr))}))


def _over_ranges(node: ast.Expr) -> list[ast.Expr]:
    match node:
        case ast.Call() if any(isinstance(arg, ast.MatrixSelector | ast.SubqueryExpr) for arg in node.args):
            return [node]
        case ast.Call():
            inner = list(node.args)
        case ast.BinaryExpr():
            inner = [node.lhs, node.rhs]
        case ast.AggregateExpr() | ast.ParenExpr() | ast.UnaryExpr():
            inner = [node.expr]
        case _:
            return []
    found = [each for child in inner for each in _over_ranges(child)]
    innermost = isinstance(node, ast.AggregateExpr) and not any(isinstance(each, ast.AggregateExpr) for each in found)
    return [node] if found and innermost else found


def facts() -> Facts:
    """Count what the rule file holds."""
    every = rules()
    alerts = {rule["alert"]: rule["expr"].count("\n") + 1 for rule in every if "alert" in rule}
    longest = max(alerts, key=lambda name: alerts[name])
    lines = sum(rule["expr"].count("\n") + 1 for rule in every)
    records = sum("record" in rule for rule in every)
    return Facts(records, len(every) - records, lines, longest, alerts[longest], len(raw_aggregates()))


def added(server: prometheus_server.Server, servers: int) -> tuple[float, float]:
    """Recorded series for each server at the end of the fleet, and the samples a second that they are."""
    every = {rule["record"]: rule["interval"] for rule in rules() if "record" in rule}
    names = "|".join(map(re.escape, every)).replace("\\", "\\\\")
    found = server.query(f'count by (__name__) ({{__name__=~"{names}"}})', END) or {}
    counts = {dict(labels)["__name__"]: count / servers for labels, count in found.items()}
    return sum(counts.values()), sum(count / every[name] for name, count in counts.items())


def evaluate_in_prometheus(folder: Path, servers: int, tell: Told) -> None:
    """Tell a row for each Prometheus: the CPU of all rules, of the distinct aggregates over raw ranges, the ratio."""
    folder.mkdir()
    blocks = list(_day_of_long_ranges())
    fleet.write_blocks(folder, {"healthy": blocks}, {"healthy": servers}, np.arange(blocks[0].times.size), lambda _: {})
    intervals: dict[float, list[str]] = {}
    for rule in rules():
        intervals.setdefault(rule["interval"], []).append(rule["expr"])
    for place in prometheus_server.PLACES:
        with fleet.serving(prometheus_server.program(place), folder) as server:
            costs = {interval: _median_cpu(server, asked) for interval, asked in intervals.items()}
            aggregates = _median_cpu(server, raw_aggregates())
            series, samples = added(server, servers)
            version = ".".join(map(str, server.version))
        once = sum(costs.values())
        deployed = sum(cost * CYCLE / interval for interval, cost in costs.items())
        tell(
            f"| {version} | {servers:,} | {once:.2f} | {deployed:.2f} | {aggregates:.2f} | {once / aggregates:.2f} "
            f"| {deployed / aggregates:.2f} | {series:.0f} | {samples:.1f} |"
        )


def _day_of_long_ranges() -> Iterator[Block]:
    """A server's day up to END and what the rules record at its last scrapes; a day of every metric that the rules
    select over more than RECENT scrapes or at an earlier time, and RECENT scrapes of the others."""
    asked = [promql for promql in raw_aggregates() if _LONG.search(promql)]
    long = {name for promql in asked for name in metric_names(parse(promql))}
    edges = re.compile("|".join(edge for promql in asked for edge in re.findall(r'le=~?"([^"]+)"', promql)))
    page = healthy_day.day(END)
    for block in page:
        for labels, values in zip(block.labels, block.values, strict=True):
            labels["instance"] = fleet.PLACEHOLDER
            if labels["__name__"] not in long or ("le" in labels and not edges.fullmatch(labels["le"])):
                values[:-RECENT] = STALE
        yield block
    times = page[0].times
    for block in recorded(Samples(page), times[-fleet.LAST :]):
        if "instance" in block.labels[0]:
            values = np.full((len(block.labels), times.size), STALE)
            values[:, np.searchsorted(times, block.times)] = block.values
            yield Block(block.labels, times, values)


def _median_cpu(server: prometheus_server.Server, asked: Sequence[str]) -> float:
    """CPU seconds of one evaluation of every expression; the count alone is sent back."""
    rounds = []
    for _ in range(ROUNDS + 1):
        before = cpu_seconds(server.url)
        for promql in asked:
            if server.query(f"count(({promql}))", END) is None:
                raise ValueError(f"{promql} cannot be evaluated")
        rounds.append(cpu_seconds(server.url) - before)
    return statistics.median(rounds[1:])


def evaluate_in_vmalert(servers: int, tell: Told) -> None:
    """Tell a row: CPU seconds of VictoriaMetrics and of vmalert for one evaluation of all rules."""
    last = time.time() + (WARM + CYCLES + 2) * CYCLE + servers * 0.1  # the samples last until the evaluations end
    with ExitStack() as running:
        database = running.enter_context(victoria_metrics.serving(list(_instances(servers, last))))
        idle = _cpu_over(CYCLE, database.url)
        vmalert = running.enter_context(_vmalert(database.url))
        _wait_for(vmalert, WARM)
        before, begin = numbers(vmalert), cpu_seconds(database.url)
        started = time.monotonic()
        _wait_for(vmalert, WARM + CYCLES)
        after, end = numbers(vmalert), cpu_seconds(database.url)
        took = time.monotonic() - started
        found = sum(
            count
            for name, count in after.items()
            if name.startswith(("vmalert_alerts_firing", "vmalert_alerts_pending"))
        )
        failed = sum(count for name, count in after.items() if name.startswith("vmalert_execution_errors_total"))
    of_vmalert = (after["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]) / CYCLES
    of_database = (end - begin - idle * took / CYCLE) / CYCLES
    late = took / CYCLES
    tell(
        f"| {servers:,} | {of_database:.2f} | {of_vmalert:.2f} | {of_database + of_vmalert:.2f} | {late:.1f} "
        f"| {found:.0f} | {failed:.0f} |"
    )


def _cpu_over(span: float, url: str) -> float:
    before = cpu_seconds(url)
    time.sleep(span)
    return cpu_seconds(url) - before


def _instances(servers: int, last: float) -> Iterator[Block]:
    for kind, count in members(servers).items():
        for block in timelines.blocks(whole_page(kind), last - float(timelines.TIMES[-1])):
            for name in fleet.instances(kind, count):
                yield Block(tuple({**labels, "instance": name} for labels in block.labels), block.times, block.values)


def whole_page(kind: str) -> timelines.Series:
    """The page of vLLM and of the exporter: "healthy", or an incident that sets in after the lead-in."""
    if kind in timelines.HOSTS:
        return timelines.faulty(kind)[0]
    return timelines.timeline(timelines.RECORDED.get(kind, kind), *timelines.CALM, before=timelines.CALM)


@contextmanager
def _vmalert(database: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="vmalert-") as name, _sink() as notifier, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*free.getsockname())
        free.close()
        file = Path(name, "rules.yaml")
        file.write_text(json.dumps({"groups": list(map(_for_vmalert, groups_of(RULES)))}), encoding="utf-8")
        urls = (f"-{role}.url={database}" for role in ("datasource", "remoteWrite"))
        options = (f"-rule={file}", *urls, f"-notifier.url={notifier}", f"-httpListenAddr={address}")
        with Path(name, "log").open("w") as log:
            command = [victoria_metrics.program("vmalert"), *options, f"-datasource.queryStep={CYCLE}s"]
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not _answers(f"http://{address}"):
                if process.poll() is not None:
                    raise ValueError(Path(name, "log").read_text())
                time.sleep(0.1)
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(30)


class _Accepts(BaseHTTPRequestHandler):
    """Takes alerts as an Alertmanager does, and forgets them."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def _sink() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Accepts) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def _for_vmalert(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group every CYCLE; 1.79 refuses `keep_firing_for`."""
    every = [{key: value for key, value in rule.items() if key != "keep_firing_for"} for rule in group["rules"]]
    return {**group, "interval": f"{CYCLE}s", "rules": every}


def _answers(url: str) -> bool:
    try:
        return bool(numbers(url))
    except OSError:
        return False


def _wait_for(vmalert: str, cycles: int) -> None:
    """Wait until every group has been evaluated so often."""
    deadline = time.monotonic() + cycles * 4 * CYCLE
    while min(_iterations(vmalert), default=0) < cycles:
        if time.monotonic() > deadline:
            raise TimeoutError(f"vmalert has not evaluated every group {cycles} times")
        time.sleep(0.2)


def _iterations(vmalert: str) -> list[float]:
    return [count for name, count in numbers(vmalert).items() if name.startswith("vmalert_iteration_total{")]
