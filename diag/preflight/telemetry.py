"""Checks of the telemetry: the Prometheus scrapes the server, diag's rules are loaded, and an alert reaches a pager."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from diag.core.files import parse_yaml
from diag.core.formatting import plural, printable
from diag.knowledge.formulas import GENERATION, rule_set
from diag.preflight.check import NotChecked, Outcome, PreflightFacts, failed, need, passed, warned

_ALERT = {"alertname": "diag", "severity": "critical"}
"""The labels of diag's critical alerts that a route may match."""
_MATCHER = re.compile(r'\s*"?([\w.]+)"?\s*(=~|!~|!=|=)\s*"?(.*?)"?\s*')
_NO_PROMETHEUS = "no Prometheus is given (--prometheus URL)"
_LIST, _REPEATS, _ANY = re.compile(r"[\w|-]*"), re.compile(r"[*+?{]"), re.compile(r"[.\[\\]")
_NESTED = re.compile(r"\)[*+{]|\[\[|\(\?")
_SHAPE = (LookupError, TypeError, ValueError, AttributeError)


def scraped(facts: PreflightFacts) -> Iterator[Outcome]:
    targets = need(facts.prometheus, _NO_PROMETHEUS)("/api/v1/targets?state=active")
    try:
        addresses = [(target["labels"].get("instance", ""), target) for target in targets["activeTargets"]]
        own = [
            target
            for address, target in addresses
            if (address == facts.instance if facts.running else address.rpartition(":")[2] == str(facts.port))
        ]
        down = [target for target in own if target["health"] == "down"]
    except _SHAPE:
        raise NotChecked("the Prometheus does not list its targets") from None
    wanted = facts.instance if facts.running else f"port {facts.port}"
    if not own:
        state = failed if facts.running else warned
        yield state(f"no target of the Prometheus is {wanted}", "Add a scrape job (deploy/prometheus.yml shows one)")
    elif facts.running and len(down) == len(own):
        error = printable(str(down[0].get("lastError", "")), 120)
        yield failed(f"the Prometheus cannot scrape {wanted}: {error}", "Correct the scrape job")
    else:
        yield passed(f"{plural(len(own), 'target')} at {wanted}")


def rules_loaded(facts: PreflightFacts) -> Iterator[Outcome]:
    answer = need(facts.prometheus, _NO_PROMETHEUS)("/api/v1/rules")
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
    ask = need(facts.alertmanager, "no Alertmanager is given (--alertmanager URL)")
    try:
        config = parse_yaml(ask("/api/v2/status")["config"]["original"], "its configuration")[0]
        receiver = _receiver(config["route"])
        destinations = next(one for one in config["receivers"] if one["name"] == receiver)
    except _SHAPE:
        raise NotChecked("the Alertmanager does not show its configuration") from None
    except re.error:
        raise NotChecked("a route of the Alertmanager has a pattern that diag does not read") from None
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
    wanted += [(matcher[1], matcher[2], matcher[3]) for matcher in matchers if matcher]
    for name, operator, text in wanted:
        value = _ALERT.get(name, "")
        if "~" in operator:  # Go matches any in little time, Python a list of words, or a short one
            plain = text.replace("(?:", "(").removeprefix("(?i)")
            is_short = len(plain) <= 100 and len(_REPEATS.findall(plain)) <= 3 and len(_ANY.findall(plain)) <= 4
            if not _LIST.fullmatch(text) and (not is_short or _NESTED.search(plain)):
                raise re.error("it may take Python exponential time")
        is_equal = bool(re.fullmatch(text, value)) if "~" in operator else text == value
        if is_equal != (not operator.startswith("!")):
            return False
    return True


def liveness_probe(facts: PreflightFacts) -> Iterator[Outcome]:
    pod = facts.command.container if facts.command else None
    if pod is None or not pod.is_pod:
        return
    path = pod.live_path
    if path == "/livez":
        yield passed("the liveness probe reads /livez")
    elif not pod.is_whole:
        raise NotChecked("the chart or operator adds probes that the text does not show")
    else:
        message = f"the liveness probe reads {path}" if path else "the container has no liveness probe on an HTTP path"
        yield warned(message, "livenessProbe on /livez of diag exporter (deploy/kubernetes-sidecar.yaml)")
