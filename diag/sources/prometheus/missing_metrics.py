"""Queries for metrics of `diag exporter`, rewritten for servers that run without one.

Container metrics: a selector becomes a subquery over cAdvisor and kube-state-metrics. Configuration: PromQL cannot read
numbers in labels, but a series of value 1 on the server's own page, multiplied by the number in its label, is the flag.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from diag.core.incident import seconds
from diag.core.metric_prefix import CACHE_INFO
from diag.core.subjects import label_value
from diag.knowledge.containers import ASIDE, RECORDING_RULES, RESTARTS, WORKING_SET, joined, of_pods, servers
from diag.sources.prometheus.scope import any_of
from diag.vllm import running_config

METRICS = tuple(dict.fromkeys(rule.metric for rule in RECORDING_RULES))
OURS = f'__name__=~"{"|".join(METRICS)}",job!=""'
"""Matches container metrics of `diag exporter`, but not recorded ones, which are too sparse for a short window."""
ANY = of_pods(f"group({WORKING_SET}) or group({RESTARTS})")
"""Query: does any other exporter measure containers?"""
SET_ASIDE = of_pods(f"group({RESTARTS})", kube=f'{ASIDE}pod!=""')
"""Query: did the scrape of kube-state-metrics rename its label `pod` to `exported_pod`?"""
SHORTEST = 120
"""Seconds: cAdvisor measures every 10 - 30 s, and its counters move in jumps over shorter windows."""
MOST_STEPS = 240
MOST_VALUES = 20
"""Distinct values of one flag in a fleet; further ones stay unknown."""
Flags = Mapping[str, Mapping[float, list[str]]]
"""By flag, by value: the instances with that value."""
_STRING = r'"(?:\\.|[^"\\])*"'
_SELECTOR = re.compile(rf"\b({'|'.join(METRICS)})(?:\{{((?:[^\"}}]|{_STRING})*)\}})?\[(\d+\w+)\]")
_MATCHER = re.compile(rf"(\w+)=({_STRING})")
_CONFIG_SELECTOR = re.compile(r'last_over_time\(diag_vllm_config\{flag="(\w+)"\}\[(\w+)\]\)')


def mentioned(promql: str) -> bool:
    """Return True if a query selects a metric that other exporters measure, too."""
    return any(metric in promql for metric in METRICS)


class Containers(NamedTuple):
    """The servers whose containers other exporters measure, and their pods.

    labels: identify a server. all_named: the series of each server name its container. aside: the labels of
    kube-state-metrics for a pod are renamed.
    """

    servers: frozenset[str] = frozenset()
    pods: Sequence[str] = ()
    labels: Sequence[str] = ("instance",)
    all_named: bool = False
    aside: bool = False

    def completed(self, promql: str, matchers: str, step: float) -> str:
        """Rewrite a query whose selectors begin with `matchers`; `step`: seconds between two scrapes of a server."""
        of_servers = servers(f"up{{{f'{matchers},' if matchers else ''}$named}}", self.labels, self.all_named)

        def subquery(selector: re.Match[str]) -> str:
            labels = dict(_MATCHER.findall((selector[2] or "").removeprefix(matchers)))
            span = max(SHORTEST, seconds(selector[3]))
            parts = []
            for rule in RECORDING_RULES:
                quoted = {name: f'"{value}"' for name, value in rule.labels.items()}
                if rule.metric != selector[1] or not labels.items() <= quoted.items():
                    continue
                part = joined(rule, self.labels, of_servers)
                for name, value in rule.labels.items():
                    part = f'label_replace({part}, "{name}", "{value}", "", "")'
                parts.append(part)
            if not parts:  # no other exporter counts this event: without a value, its other signs decide
                return selector[0]
            return f"({' or '.join(parts)})[{round(span)}s:{round(max(step, span / MOST_STEPS, 1))}s]"

        kube = any_of(f"{ASIDE}pod" if self.aside else "pod", self.pods)
        return of_pods(_SELECTOR.sub(subquery, promql), any_of("pod", self.pods), kube)


def read_page_flags(infos: Iterable[Mapping[str, str]]) -> Flags:
    """Read the flags in the labels of CACHE_INFO, which has one series for each engine of an instance."""
    pages: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for info in infos:
        pages[label_value(info, "instance")].append(info)
    flags: dict[str, dict[float, list[str]]] = defaultdict(lambda: defaultdict(list))
    for instance, page in sorted(pages.items()):
        for flag, value in running_config.from_page(page, len({label_value(info, "engine") for info in page})).items():
            flags[flag][value].append(instance)
    return flags


def with_page_flags(promql: str, flags: Flags) -> str:
    """Add the flags from the servers' own pages wherever a query selects `diag_vllm_config`."""

    def alternatives(selector: re.Match[str]) -> str:
        parts = [selector[0]]
        for value, instances in list(flags.get(selector[1], {}).items())[:MOST_VALUES]:
            matcher = any_of("instance", [re.escape(instance) for instance in instances])
            parts.append(f"{value!r} * max by (instance) (last_over_time({CACHE_INFO}{{{matcher}}}[{selector[2]}]))")
        return f"({' or '.join(parts)})" if len(parts) > 1 else selector[0]

    return _CONFIG_SELECTOR.sub(alternatives, promql)
