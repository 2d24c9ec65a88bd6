"""Checks of the telemetry: the Prometheus scrapes the server, diag's rules are loaded, and an alert reaches a pager."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from diag.core.files import parse_yaml
from diag.core.formatting import plural, printable
from diag.knowledge.formulas import GENERATION, rule_set
from diag.preflight.check import Ask, NotChecked, Outcome, PreflightFacts, check, failed, passed, warned

_PROMETHEUS = "https://prometheus.io/docs/prometheus/latest/querying/api/"
_ALERT = {"alertname": "diag", "severity": "critical"}
"""The labels of diag's critical alerts that a route may match."""
_MATCHER = re.compile(r'\s*"?([\w.]+)"?\s*(=~|!~|!=|=)\s*"?(.*?)"?\s*')
_SHAPE = (LookupError, TypeError, ValueError, AttributeError)


def _prometheus(facts: PreflightFacts) -> Ask:
    if facts.prometheus is None:
        raise NotChecked("no Prometheus is given (--prometheus URL)")
    return facts.prometheus


@check(
    "telemetry",
    "The Prometheus scrapes this server",
    reads="the active targets of the Prometheus: those of the server's address, for a launch those of its port",
    why="no alert fires, and no incident can be looked at afterwards",
    source=f"{_PROMETHEUS}#targets",
)
def scraped(facts: PreflightFacts) -> Iterator[Outcome]:
    targets = _prometheus(facts)("/api/v1/targets?state=active")
    try:
        found = [target for target in targets["activeTargets"] if _is_of(target["labels"].get("instance", ""), facts)]
        down = [target for target in found if target["health"] == "down"]
    except _SHAPE:
        raise NotChecked("the Prometheus does not list its targets") from None
    wanted = facts.instance if facts.running else f"port {facts.port}"
    if not found:
        state = failed if facts.running else warned
        yield state(f"no target of the Prometheus is {wanted}", "Add a scrape job (deploy/prometheus.yml shows one)")
    elif facts.running and len(down) == len(found):
        error = printable(str(down[0].get("lastError", "")), 120)
        yield failed(f"the Prometheus cannot scrape {wanted}: {error}", "Correct the scrape job")
    else:
        yield passed(f"{plural(len(found), 'target')} at {wanted}")


def _is_of(instance: str, facts: PreflightFacts) -> bool:
    return instance == facts.instance if facts.running else instance.rpartition(":")[2] == str(facts.port)


@check(
    "telemetry",
    "diag's alert rules are loaded",
    reads="the rules of the Prometheus, their health, and the label `generation` of diag's own",
    why="rules of another release look for other metrics, and a rule that errs never fires",
    source=f"{_PROMETHEUS}#rules",
)
def rules_loaded(facts: PreflightFacts) -> Iterator[Outcome]:
    answer = _prometheus(facts)("/api/v1/rules")
    try:
        groups = [group for group in answer["groups"] if group["name"].startswith("diag")]
        rules = [rule for group in groups for rule in group["rules"]]
        generations = {
            rule["labels"]["generation"] for rule in rules if rule["name"].endswith(GENERATION.partition(":")[2])
        }
        broken = [rule for rule in rules if rule.get("health") == "err"]
    except _SHAPE:
        raise NotChecked("the Prometheus does not list its rules") from None
    own = rule_set(facts.incidents, facts.contract).generation
    if not rules or not any(rule.get("type") == "alerting" for rule in rules):
        yield failed(
            "the Prometheus has none of diag's alerts", "rule_files: [alerts/diag.rules.yaml], after diag generate ."
        )
    elif broken:
        error = printable(str(broken[0].get("lastError", "")), 120)
        yield failed(
            f"{plural(len(broken), 'rule')} err, the first {broken[0]['name']}: {error}", "promtool check rules"
        )
    elif own not in generations:
        loaded = ", ".join(sorted(generations)) or "none"
        yield warned(f"the rules are of generation {loaded}, this diag writes {own}", "diag generate ., then reload")
    else:
        yield passed(f"{plural(len(rules), 'rule')} of generation {own}")


@check(
    "telemetry",
    "A critical alert reaches somebody",
    reads="the Alertmanagers of the Prometheus, and the route of Alertmanager's API for severity=critical",
    why="an alert that is sent to nobody, or to a receiver without a destination, wakes nobody",
    source="https://prometheus.io/docs/alerting/latest/configuration/#route",
)
def pager_route(facts: PreflightFacts) -> Iterator[Outcome]:
    active = True
    if facts.prometheus is not None:
        try:
            active = bool(facts.prometheus("/api/v1/alertmanagers")["activeAlertmanagers"])
        except _SHAPE:
            raise NotChecked("the Prometheus does not list its Alertmanagers") from None
    if not active:
        yield failed("the Prometheus sends its alerts to no Alertmanager", "alerting: alertmanagers: in prometheus.yml")
        return
    if facts.alertmanager is None:
        raise NotChecked("no Alertmanager is given (--alertmanager URL)")
    try:
        config = parse_yaml(facts.alertmanager("/api/v2/status")["config"]["original"], "its configuration")[0]
        receiver = _receiver(config["route"])
        destinations = next(each for each in config["receivers"] if each["name"] == receiver)
    except _SHAPE:
        raise NotChecked("the Alertmanager does not show its configuration") from None
    except StopIteration:
        destinations = {}
    kinds = [
        kind.removesuffix("_configs") for kind, list_ in destinations.items() if kind.endswith("_configs") and list_
    ]
    name = printable(str(receiver), 60)
    if kinds:
        yield passed(f"severity=critical goes to {name} ({', '.join(kinds)})")
    else:
        yield failed(f"severity=critical goes to {name}, which has no destination", "Give the receiver a destination")


def _receiver(route: Mapping[str, Any]) -> str:
    """Return the receiver of the first route that matches, the deepest one."""
    for child in route.get("routes") or ():
        if _matches(child):
            return _receiver({"receiver": route["receiver"], **child})
    return str(route["receiver"])


def _matches(route: Mapping[str, Any]) -> bool:
    """Return True if a route takes an alert with the labels `_ALERT`; a label of another name is taken for absent."""
    wanted = [(name, "=", text) for name, text in (route.get("match") or {}).items()]
    wanted += [(name, "=~", text) for name, text in (route.get("match_re") or {}).items()]
    matchers = (_MATCHER.fullmatch(text) for text in route.get("matchers") or ())
    wanted += [(found[1], found[2], found[3]) for found in matchers if found]
    for name, operator, text in wanted:
        value = _ALERT.get(name, "")
        is_equal = bool(re.fullmatch(text, value)) if "~" in operator else text == value
        if is_equal != (not operator.startswith("!")):
            return False
    return True


@check(
    "telemetry",
    "The liveness probe notices a server that hangs",
    reads="the liveness probe of a Kubernetes manifest",
    why="vLLM's /health answers 200 while the engine hangs; /livez of diag exporter answers 503 once nothing moves",
    source="docs/platform.md",
)
def liveness_probe(facts: PreflightFacts) -> Iterator[Outcome]:
    pod = facts.command.container if facts.command else None
    if pod is None or not pod.is_pod:
        return
    path = pod.liveness.path if pod.liveness else ""
    if path == "/livez":
        yield passed("the liveness probe reads /livez")
    elif not pod.is_whole:
        raise NotChecked("the chart or operator adds probes that the text does not show")
    else:
        message = f"the liveness probe reads {path}" if path else "the container has no liveness probe on an HTTP path"
        yield warned(message, "livenessProbe on /livez of diag exporter (deploy/kubernetes-sidecar.yaml)")


CHECKS = (scraped, rules_loaded, pager_route, liveness_probe)
