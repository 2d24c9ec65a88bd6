"""The generated dashboards, their panels and queries."""

import json
from collections.abc import Iterator
from typing import Any

from support.paths import ROOT

PAGES = {file.stem: json.loads(file.read_text()) for file in sorted((ROOT / "dashboards").glob("*.json"))}
INCIDENT, SIGNAL = "kv_eviction_cascade", "instance_engine:preemptions_per_finished_request:5m"
"""The incident that Server shows in tests, and one of its series."""
STATE = "instance_engine:steps_with_long_prefills:1m"


def panels(page: str) -> list[dict[str, Any]]:
    return [panel for panel in PAGES[page]["panels"] if panel["type"] != "row"]


def queries(page: str) -> Iterator[str]:
    """Everything that a page asks: panels and annotations."""
    yield from (target["expr"] for panel in panels(page) for target in panel["targets"])
    yield from (annotation["expr"] for annotation in PAGES[page]["annotations"]["list"])


def plain(promql: str) -> str:
    """Fill in the variables that are numbers, durations and names of series."""
    names = {"$__rate_interval": "1m", "$gpu_cost": "2.5", "$incident": INCIDENT, "$signal": SIGNAL}
    for name, value in {**names, "${state:pipe}": STATE}.items():
        promql = promql.replace(name, value)
    return promql
