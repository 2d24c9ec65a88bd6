"""How long after its onset each incident alerts, by promtool over the recordings; writes bench/alerts.md."""

import sys
import tempfile
from pathlib import Path

import table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import alert_rules, timelines  # noqa: E402
from support.firing import fired, fired_last  # noqa: E402

from diag.core.incident import seconds  # noqa: E402

HEAD = """# How soon the alerts come

`bench/alerts.py`: a real promtool evaluates ten healthy minutes, then the fault, with scrapes and evaluations every
15 s. Host incidents are scripted scenarios beside a recorded server. The aim is half the window plus `for` plus two
scrapes; for a standstill, which must last for its whole window, 2 min 30 s. An alert later than its aim needs more of
its window. The bound is the limit in the tests: the aim if users suffer at once, else the aim with the whole window.
The server recovers after 15 minutes; below zero, the alert is about an event that is over before. Chronic infos, whose
alerts wait for 6 h, are left out.

| incident | shown by | window | for | alert after (s) | aim (s) | bound (s) | gone after recovery (s) |
|---|---|---|---|---|---|---|---|
"""


def row(name: str) -> str:
    """One incident's line."""
    incident = alert_rules.INCIDENTS[name]
    series, onset = timelines.faulty(name)
    first, gone = _first(name, series) - onset, _gone(name)
    shown = timelines.RECORDED.get(name, "") or f"scenario on {timelines.HOSTS[name][0] or 'no page'}"
    beside = "".join(f" beside {peer}" for peer in dict.fromkeys(timelines.PEERS.get(name, ())))
    since = " after 300 s without progress" if onset else ""
    aim = 150.0 if name in alert_rules.STALLS else seconds(incident.window) / 2 + seconds(incident.hold) + 30
    times = f"{incident.window} | {incident.hold} | {first:g} | {aim:g} | {alert_rules.allowed(incident):g} | {gone:g}"
    return f"| {name} | {shown}{beside}{since} | {times} |\n"


def _gone(name: str) -> float:
    """Return how long after recovery, 15 minutes after the fault, promtool sees the alert fire no more."""
    with tempfile.TemporaryDirectory() as folder:
        rules = alert_rules.only(name, Path(folder))
        last, _ = fired_last(rules, {"h": timelines.recovered(name)}, Path(folder))["h", name]
    return last + timelines.STEP - timelines.SICK


def _first(name: str, series: timelines.Series) -> float:
    """When promtool sees the incident's alert fire, in seconds after the fault."""
    with tempfile.TemporaryDirectory() as folder:
        rules = alert_rules.only(name, Path(folder))
        found = fired(rules, series, alert_rules.metrics_read(), Path(folder))
    return found.first[name, alert_rules.INCIDENTS[name].severity]


if __name__ == "__main__":
    rows = [row(name) for name in sorted({*timelines.RECORDED, *timelines.HOSTS} - {*timelines.CHRONIC})]
    table.write("alerts.md", HEAD + "".join(rows))
