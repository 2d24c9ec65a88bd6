"""What other exporters measure of a server's container, in the place of metrics that only an exporter of ours has.

The expression is the same, with a subquery over the other metrics wherever it selects one of ours.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from diag.core.incident import RecordingRule
from diag.knowledge.containers import ASIDE, RECORDING_RULES, RESTARTS, WORKING_SET, joined, of_pods, servers
from diag.sources.prometheus.scope import any_of

METRICS = tuple(dict.fromkeys(rule.metric for rule in RECORDING_RULES))
OURS = f'__name__=~"{"|".join(METRICS)}",job!=""'
"""Matches what an exporter of ours has of containers; not what rules record, of which a short window has too little."""
ANY = of_pods(f"group({WORKING_SET}) or group({RESTARTS})")
"""Asks whether there is anything that the other exporters measure."""
SET_ASIDE = of_pods(f"group({RESTARTS})", kube=f'{ASIDE}pod!=""')
"""Asks whether the pods of kube-state-metrics are under names that its scrape has set aside."""
SHORTEST = 120
"""Seconds: cAdvisor looks every 10 - 30 s, and over less than this its counters go in jumps."""
MOST_STEPS = 240
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_STRING = r'"(?:\\.|[^"\\])*"'
_SELECTOR = re.compile(rf"\b({'|'.join(METRICS)})(?:\{{((?:[^\"}}]|{_STRING})*)\}})?\[(\d+)(\w+)\]")
_MATCHER = re.compile(rf"(\w+)=({_STRING})")


def mentioned(promql: str) -> bool:
    """Whether it selects anything that other exporters measure too."""
    return any(metric in promql for metric in METRICS)


class Containers(NamedTuple):
    """The servers whose containers other exporters measure, and their pods.

    `labels` tell servers apart; `all_named` says that the series of each server name its container, `aside` that
    kube-state-metrics has the labels of a pod under other names.
    """

    servers: frozenset[str] = frozenset()
    pods: Sequence[str] = ()
    labels: Sequence[str] = ("instance",)
    all_named: bool = False
    aside: bool = False

    def completed(self, promql: str, matchers: str, step: float) -> str:
        """The expression, whose selectors begin with `matchers`; `step`: seconds between two scrapes of a server."""
        of_servers = servers(f"up{{{f'{matchers},' if matchers else ''}$named}}", self.labels, self.all_named)

        def put(found: re.Match[str]) -> str:
            own = dict(_MATCHER.findall((found[2] or "").removeprefix(matchers)))
            span = max(SHORTEST, int(found[3]) * _UNITS[found[4]])
            parts = [_labelled(rule, joined(rule, self.labels, of_servers)) for rule in _rules(found[1], own)]
            return f"({' or '.join(parts)})[{round(span)}s:{round(max(step, span / MOST_STEPS, 1))}s]"

        kube = any_of(f"{ASIDE}pod" if self.aside else "pod", self.pods)
        return of_pods(_SELECTOR.sub(put, promql), any_of("pod", self.pods), kube)


def _rules(metric: str, own: dict[str, str]) -> list[RecordingRule]:
    """Those of a metric that have the labels which a selector asks for."""
    return [
        rule
        for rule in RECORDING_RULES
        if rule.metric == metric and own.items() <= {(name, f'"{value}"') for name, value in rule.labels.items()}
    ]


def _labelled(rule: RecordingRule, promql: str) -> str:
    for name, value in rule.labels.items():
        promql = f'label_replace({promql}, "{name}", "{value}", "", "")'
    return promql
