"""Which alerts fire over a timeline, and when, as a real promtool evaluates the rules."""

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from support.timelines import LEAD, STEP, TIMES, Key, Series


@dataclass(frozen=True)
class Fired:
    """When alerts fired first, in seconds after the onset (negative: in the lead-in), by incident and severity.

    guards: the alerts about the telemetry itself that fired.
    """

    first: Mapping[tuple[str, str], float] = field(default_factory=dict)
    guards: frozenset[str] = frozenset()

    @property
    def incidents(self) -> set[str]:
        """Those that fired and are no mere information."""
        return {incident for incident, severity in self.first if severity != "info"}


FIRING = f'min_over_time(timestamp(ALERTS{{alertstate="firing"}})[{TIMES[-1]}s:{STEP}s])'
FIRST = f"min by (alertname, incident, severity, instance) ({FIRING})"
ALERT = re.compile(
    r'\{alertname="(\w+)", (?:incident="(\w+)", )?(?:instance="([^"]*):[^"]*", )?severity="(\w+)"\} ([0-9.E+]+)'
)


def fired(rules: Path, series: Series, names: set[str], folder: Path) -> Fired:
    """Have promtool evaluate the rules over the timeline."""
    return all_fired(rules, {"h": series}, names, folder)["h"]


def all_fired(rules: Path, timelines: Mapping[str, Series], names: set[str], folder: Path) -> dict[str, Fired]:
    """Have promtool evaluate the rules over many timelines at once, each of a host and of a model of its own.

    An evaluation costs seconds however few series there are.
    """
    inputs = [
        {"series": _written(key, host), "values": " ".join(map(_number, values))}
        for host, series in timelines.items()
        for key, values in series.items()
        if dict(key)["__name__"] in names
    ]
    expectation = [{"expr": FIRST, "eval_time": f"{TIMES[-1]}s", "exp_samples": []}]
    test = {"interval": f"{STEP}s", "input_series": inputs, "promql_expr_test": expectation}
    # JSON is YAML, and faster to write
    file = folder / "test.yaml"
    file.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": f"{STEP}s", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    found = _read(done.stdout + done.stderr)
    return {host: _fired(found, host) for host in timelines}


def _read(said: str) -> list[tuple[str, ...]]:
    """What promtool got although nothing was expected: alert, incident, host, severity, time."""
    got = said.partition("got:")[2]
    found = ALERT.findall(got)
    assert "SUCCESS" in said or len(found) == got.count("alertname=") > 0, said
    return found


def _fired(found: Iterable[tuple[str, ...]], host: str) -> Fired:
    """The alerts of one host, with those that are of none."""
    own = [(alert, incident, severity, float(at)) for alert, incident, of, severity, at in found if of in (host, "")]
    first: dict[tuple[str, str], float] = {}
    for _, incident, severity, at in own:
        if incident:
            first[incident, severity] = min(at - LEAD, first.get((incident, severity), np.inf))
    return Fired(first, frozenset(alert for alert, incident, _, _ in own if not incident))


def _written(key: Key, host: str) -> str:
    """A series in PromQL: its server is named by the host, its model too."""
    labels = {"instance": "h:1", **dict(key)}
    name, port = labels.pop("__name__"), labels["instance"].rpartition(":")[2]
    labels |= {"instance": f"{host}:{port}"} | ({"model_name": host} if "model_name" in labels else {})
    return name + "{" + ",".join(f"{label}={json.dumps(value)}" for label, value in sorted(labels.items())) + "}"


def _number(value: float) -> str:
    return "_" if np.isnan(value) else f"{value:.12g}"
