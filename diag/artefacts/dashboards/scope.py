"""Which servers a dashboard is about: its variables, and every expression narrowed to what they choose."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from diag.core.contract import Contract, Site
from diag.core.incident import regroup
from diag.knowledge.formulas import formula
from diag.knowledge.signals.peers import PEERS
from diag.promql import metric_names, parse

SHORT, RATE_INTERVAL = "1m", "$__rate_interval"
GPU_COST = "gpu_cost"
"""A variable that is a number; an expression writes it as `$gpu_cost`."""
_WORD = re.compile(r'"[^"]*"|([\w:]+)(\{)?')
"""A string, in which nothing is a metric, or a name and whether a selector's matchers follow it."""


@dataclass(frozen=True)
class DashboardScope:
    """Which servers a page is about: chosen by its variables, grouped by the site's labels.

    `series` are the recorded series by the names that formulas use.
    """

    contract: Contract
    variables: tuple[str, ...]
    series: Mapping[str, str] = field(default_factory=dict)

    @property
    def site(self) -> Site:
        """How its servers are told apart."""
        return self.contract.site

    def by(self, *labels: str) -> tuple[str, ...]:
        """The labels of a server, and more."""
        return (*self.site.labels, *labels)

    def fill(self, promql: str, by: tuple[str, ...]) -> str:
        """An expression of ours over Grafana's rate interval; `$by` is what tells its series apart."""
        filled = formula(promql, by, SHORT, self.contract).written_out()
        return self.narrow(regroup(filled, self.site.labels)).replace(f"[{SHORT}]", f"[{RATE_INTERVAL}]")

    def narrow(self, promql: str) -> str:
        """The expression over what the page's variables choose; a comparison with peers needs all of them."""
        of_one = {*self.site.labels, "engine"} if PEERS in promql else set()
        names = metric_names(parse(promql.replace(f"${GPU_COST}", "1")))
        matchers = {name: self._matchers(name, of_one) for name in names}
        for name in sorted(each for each in names if each.startswith("{")):  # a selector that matches the metric's name
            promql = promql.replace(name, f"{{{matchers[name]}, {name[1:]}")
        return _WORD.sub(lambda word: _narrowed(word, matchers), promql)

    def _matchers(self, metric: str, left_out: Collection[str]) -> str:
        chosen = {label: variable for label, variable in self._labels(metric).items() if label not in left_out}
        return ", ".join(f'{label}=~"${variable}"' for label, variable in chosen.items())

    def _labels(self, metric: str) -> dict[str, str]:
        """The labels of a metric that a variable of the page chooses by."""
        if metric == "ALERTS" or metric in self.series.values():
            level = metric.partition(":")[0].split("_")
            chosen = [label for label in ("engine", "gpu") if label in level and label in self.variables]
            return {label: label for label in (*self.site.labels, *chosen)}
        labels = {label: label for label in ("job", *self.site.labels)}
        if metric.startswith("vllm:"):
            labels["model_name"] = "model"
        own = {"engine": "vllm:", "gpu": "diag_gpu_"}
        return labels | {name: name for name in own if name in self.variables and metric.startswith(own[name])}

    def variable_queries(self) -> dict[str, str]:
        """The query of each variable; each is narrowed by those before it."""
        queries = {"job": "label_values(up, job)"}
        chosen = ['job=~"$job"']
        for label in (label for label in self.site.labels if label != "job"):
            presence = f'{{__name__=~"vllm:num_requests_running|diag_vllm_up", {", ".join(chosen)}}}'
            queries[label] = f"label_values({presence}, {label})"
            chosen.append(f'{label}=~"${label}"')
        matchers = ", ".join(chosen)
        own = {"model": ("vllm:num_requests_running", "model_name"), "engine": ("vllm:num_requests_running", "engine")}
        own["gpu"] = ("diag_gpu_utilization_ratio", "gpu")
        return queries | {
            name: f"label_values({metric}{{{matchers}}}, {label})"
            for name, (metric, label) in own.items()
            if name in self.variables
        }


def _narrowed(word: re.Match[str], matchers: Mapping[str, str]) -> str:
    """A word of an expression, with the matchers of the metric that it is, unless it has them."""
    name, opens = word.groups()
    if name not in matchers or (opens and word.string.startswith(matchers[name], word.end())):
        return word[0]
    return f"{name}{{{matchers[name]}, " if opens else f"{name}{{{matchers[name]}}}"


def legend(labels: tuple[str, ...]) -> str:
    """The name of a series: its labels, "{{instance}} engine {{engine}}"."""
    prefixes = {"engine": "engine ", "gpu": "GPU ", "rank": "rank "}
    return " ".join(f"{prefixes.get(label, '')}{{{{{label}}}}}" for label in labels)
