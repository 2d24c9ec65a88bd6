"""Alerts that fire over a timeline, with their times: evaluated by a real promtool, and by diag.promql.

promtool takes two seconds for all rules over one timeline, diag.promql a tenth; tests/prometheus/test_alerts.py holds
them equal.
"""

import json
import math
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from support.prometheus_server import PLACES, program
from support.rule_files import groups_of
from support.timelines import LEAD, STEP, TIMES, Key, Series

from diag import promql
from diag.core.incident import seconds
from diag.promql.data import without_holes


@dataclass(frozen=True)
class Fired:
    """First firing of alerts, in seconds after the onset (negative: in the lead-in), by incident and severity.

    guards: the alerts about the telemetry itself that fired.
    """

    first: Mapping[tuple[str, str], float] = field(default_factory=dict)
    guards: frozenset[str] = frozenset()

    @property
    def incidents(self) -> set[str]:
        """Incidents that fired with a severity above info."""
        return {incident for incident, severity in self.first if severity != "info"}


FIRING = 'timestamp(ALERTS{alertstate="firing"})'
SUBJECT = "(alertname, incident, severity, instance)"
FIRST = f"min by {SUBJECT} (min_over_time({FIRING}[{TIMES[-1]}s:{STEP}s]))"
NAME = re.compile(r"[\w:]+")
ALERT = re.compile(
    r'\{alertname="(\w+)", (?:incident="(\w+)", )?(?:instance="([^"]*):[^"]*", )?severity="(\w+)"\} ([0-9.E+]+)'
)


def fired(rules: Path, series: Series, names: set[str], folder: Path, place: str = PLACES[0]) -> Fired:
    """Have promtool evaluate the rules over the timeline."""
    return all_fired(rules, {"h": series}, names, folder, place)["h"]


def all_fired(
    rules: Path, timelines: Mapping[str, Series], names: set[str], folder: Path, place: str = PLACES[0]
) -> dict[str, Fired]:
    """Have promtool evaluate the rules over many timelines at once, each of a host and of a model of its own.

    An evaluation costs seconds however few series there are.
    """
    (found,) = _asked(rules, timelines, names, folder, place, [FIRST], TIMES[-1])
    return {host: _fired(found, host) for host in timelines}


def fired_last(
    rules: Path, timelines: Mapping[str, Series], folder: Path, place: str = PLACES[0]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return by host and incident when its alert fired last, in seconds after the onset, and for how long in all."""
    end = STEP * (len(next(iter(next(iter(timelines.values())).values()))) - 1)
    over = f"({FIRING}[{end}s:{STEP}s])"
    names = {dict(key)["__name__"] for series in timelines.values() for key in series}
    asked = [f"max by {SUBJECT} ({function}{over})" for function in ("max_over_time", "count_over_time")]
    last, samples = (
        {(host, incident): float(value) for _, incident, host, _, value in found if incident}
        for found in _asked(rules, timelines, names, folder, place, asked, end)
    )
    return {key: (last[key] - LEAD, samples[key] * STEP) for key in last}


def _asked(
    rules: Path,
    timelines: Mapping[str, Series],
    names: set[str],
    folder: Path,
    place: str,
    asked: Sequence[str],
    end: float,
) -> list[list[tuple[str, ...]]]:
    """Return promtool's answer to each query at the end of these timelines: alert, incident, host, severity, value.

    Either all of the queries find something, or none does.
    """
    inputs = [
        {"series": _written(key, host), "values": " ".join(map(_number, values))}
        for host, series in timelines.items()
        for key, values in series.items()
        if dict(key)["__name__"] in names
    ]
    expected = [{"expr": promql, "eval_time": f"{end}s", "exp_samples": []} for promql in asked]
    test = {"interval": f"{STEP}s", "input_series": inputs, "promql_expr_test": expected}
    # JSON is YAML, and faster to write
    file = folder / "test.yaml"
    order = [group["name"] for group in groups_of(rules)]  # by itself promtool takes any, so that series are read late
    document = {"rule_files": [str(rules)], "evaluation_interval": f"{STEP}s", "group_eval_order": order}
    file.write_text(json.dumps({**document, "tests": [test]}))
    promtool = program(place).with_name("promtool")
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if "SUCCESS" in said:
        return [[] for _ in asked]
    answers = said.split("got:")[1:]
    found = [ALERT.findall(answer) for answer in answers]
    assert len(found) == len(asked), said
    assert all(len(alerts) == answer.count("alertname=") > 0 for alerts, answer in zip(found, answers, strict=True)), (
        said
    )
    return found


def _fired(found: Iterable[tuple[str, ...]], host: str) -> Fired:
    """The alerts of one host, with those that are of none."""
    own = [(alert, incident, severity, float(at)) for alert, incident, of, severity, at in found if of in (host, "")]
    first: dict[tuple[str, str], float] = {}
    for _, incident, severity, at in own:
        if incident:
            first[incident, severity] = min(at - LEAD, first.get((incident, severity), np.inf))
    return Fired(first, frozenset(alert for alert, incident, _, _ in own if not incident))


def evaluated(rules: Path, series: Series) -> Fired:
    """Evaluate the alerts of one timeline with diag.promql."""
    labels = tuple({"instance": "h:1", **dict(key)} for key in series)
    values, instants = np.array([*series.values()]), TIMES.astype(np.int64) * 1000
    blocks = without_holes(labels, instants[: values.shape[1]], values, ~np.isnan(values))
    held = promql.Evaluator(promql.Samples(blocks))
    first: dict[tuple[str, str], float] = {}
    guards = set()
    for alert, expression in alerts(rules):
        at = min(_first_firing(alert, held.evaluate(expression, instants).present), default=np.inf)
        incident = alert["labels"].get("incident")
        if at < np.inf and incident:
            first[incident, alert["labels"]["severity"]] = at - LEAD
        elif at < np.inf:
            guards.add(alert["alert"])
    return Fired(first, frozenset(guards))


def episodes(rules: Path, series: Series) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return when the alerts of one timeline begin and cease to fire by diag.promql, in seconds after LEAD.

    Those of the same incident and severity are one. The effects fire as if no cause had an alert.
    """
    labels = tuple({"instance": "h:1", **dict(key)} for key in series)
    values = np.array([*series.values()])
    instants = STEP * 1000 * np.arange(values.shape[1], dtype=np.int64)
    held = promql.Evaluator(promql.Samples(without_holes(labels, instants, values, ~np.isnan(values))))
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for alert, expression in alerts(rules):
        hold, keep = (math.ceil(seconds(alert.get(name, "0s")) / STEP) for name in ("for", "keep_firing_for"))
        fires = np.zeros(instants.size, bool)
        for row in held.evaluate(expression, instants).present:
            lasted = over = 0
            is_firing = False
            for at, holds in enumerate(row):
                lasted, over = (lasted + 1, 0) if holds else (0, over + 1)
                is_firing = lasted > hold or (is_firing and over <= keep)
                fires[at] |= is_firing
        edges = np.flatnonzero(np.diff(fires.astype(int), prepend=0, append=0)) * STEP - LEAD
        if edges.size and alert["labels"].get("incident"):
            key = alert["labels"]["incident"], alert["labels"]["severity"]
            found[key] = [(float(begin), float(end)) for begin, end in edges.reshape(-1, 2)]
    return found


@cache
def alerts(rules: Path) -> list[tuple[dict[str, Any], promql.Expression]]:
    """The alerts of a rule file, each with its query over raw series."""
    return [(rule, promql.parse(asked)) for _, rule, asked in _over_raw_series(rules)]


def alerts_alone(rules: Path) -> list[dict[str, Any]]:
    """The groups of a rule file without its recording rules: in place of their names, alerts have their expressions."""
    groups: dict[str, dict[str, Any]] = {}
    for group, rule, asked in _over_raw_series(rules):
        alone = groups.setdefault(group["name"], {**group, "rules": []})
        alone["rules"].append({**rule, "expr": asked.written_out()})
    return [*groups.values()]


def _over_raw_series(rules: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any], promql.Formula]]:
    """Each alert of a rule file with its group, and with what it reads as the rules record it at the same instant."""
    every = [(group, rule) for group in groups_of(rules) for rule in group["rules"]]
    texts = {rule["record"]: rule["expr"] for _, rule in every if "record" in rule}

    @cache
    def over(text: str) -> promql.Formula:
        text = re.sub(
            r"last_over_time\(([\w:]+)\[(\w+)\]\)",
            lambda found: f"last_over_time({found[1]}[{found[2]}:{STEP}s])" if found[1] in texts else found[0],
            text,
        )
        return promql.Formula("", text, {name: over(texts[name]) for name in NAME.findall(text) if name in texts})

    return ((group, rule, over(rule["expr"])) for group, rule in every if "alert" in rule)


def _first_firing(alert: Mapping[str, Any], present: npt.NDArray[np.bool_]) -> Iterator[float]:
    """Return the time at which each series of the alert has lasted for its `for`, in seconds since the start."""
    hold = round(seconds(alert.get("for", "0s"))) // STEP
    at = np.arange(TIMES.size)
    for row in present:
        absent = np.maximum.accumulate(np.where(row, -1, at))  # when it was not there last
        yield from TIMES[at - absent > hold][:1].tolist()


def _written(key: Key, host: str) -> str:
    """A series in PromQL: its server is named by the host, its model too."""
    labels = {"instance": "h:1", **dict(key)}
    name, port = labels.pop("__name__"), labels["instance"].rpartition(":")[2]
    labels |= {"instance": f"{host}:{port}"} | ({"model_name": host} if "model_name" in labels else {})
    return name + "{" + ",".join(f"{label}={json.dumps(value)}" for label, value in sorted(labels.items())) + "}"


def _number(value: float) -> str:
    return "_" if np.isnan(value) else f"{value:.12g}"
