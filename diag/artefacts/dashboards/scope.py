"""The servers that a dashboard shows: its variables, and matchers for them in every expression."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from diag.core.contract import Contract, Site
from diag.core.incident import Signal, regroup
from diag.knowledge.formulas import formula
from diag.knowledge.rule_set import DRAWN_OVER
from diag.knowledge.signals.peers import MODEL
from diag.promql import metric_names, parse

SHORT, RATE_INTERVAL = "1m", "$__rate_interval"
GPU_COST = "gpu_cost"
"""A dashboard variable with a number; an expression writes it as `$gpu_cost`."""
_WORD = re.compile(r'"[^"]*"|([\w:]+)(\{)?')
"""A string, or a name and the brace of its matchers."""


@dataclass(frozen=True)
class DashboardScope:
    """The servers that a page shows: chosen by its variables, grouped by the site's labels.

    `series` are the recorded series by the names that formulas use.
    """

    contract: Contract
    variables: tuple[str, ...]
    series: Mapping[str, str] = field(default_factory=dict)

    @property
    def site(self) -> Site:
        return self.contract.site

    def by(self, *labels: str) -> tuple[str, ...]:
        """Return the labels of a server, and more."""
        return (*self.site.labels, *labels)

    def fill(self, promql: str, by: tuple[str, ...]) -> str:
        """Write an expression over Grafana's rate interval; `$by` are the labels of its series."""
        filled = formula(promql, by, SHORT, self.contract).written_out()
        return self.add_matchers(regroup(filled, self.site.labels)).replace(f"[{SHORT}]", f"[{RATE_INTERVAL}]")

    def recorded(self, signal: Signal, by: tuple[str, ...]) -> str:
        """Write a signal over the recorded series, for subjects with the labels `by`."""
        written = formula(signal, by, DRAWN_OVER, self.contract).written_out(self.series)
        return self.add_matchers(regroup(written, self.site.labels))

    def add_matchers(self, promql: str) -> str:
        """Restrict an expression to the page's variables; a comparison with peers keeps all servers."""
        of_one = {*self.site.labels, "engine"} if MODEL in promql else set()
        names = metric_names(parse(promql.replace(f"${GPU_COST}", "1")))
        matchers: dict[str, str] = {}
        for name in names:
            labels = {label: label for label in self.site.labels}
            own: list[str]
            if name in ("ALERTS", "ALERTS_FOR_STATE") or name in self.series.values():
                level = name.partition(":")[0].split("_")
                own = [label for label in ("engine", "gpu") if label in level]
            else:
                labels = {"job": "job", **labels, **({"model_name": "model"} if name.startswith("vllm:") else {})}
                prefixes = {"engine": "vllm:", "gpu": "diag_gpu_"}
                own = [label for label, prefix in prefixes.items() if name.startswith(prefix)]
            labels |= {label: label for label in own if label in self.variables}
            chosen = (f'{label}=~"${variable}"' for label, variable in labels.items() if label not in of_one)
            matchers[name] = ", ".join(chosen)
        for name in sorted(name for name in names if name.startswith("{")):  # a selector that matches the metric's name
            promql = promql.replace(name, f"{{{matchers[name]}, {name[1:]}")

        def with_matchers(word: re.Match[str]) -> str:
            name, opens = word.groups()
            if name not in matchers or (opens and word.string.startswith(matchers[name], word.end())):
                return word[0]
            return f"{name}{{{matchers[name]}, " if opens else f"{name}{{{matchers[name]}}}"

        return _WORD.sub(with_matchers, promql)

    def variable_queries(self) -> dict[str, str]:
        """Return the query of each variable, restricted by the variables before it."""
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


def legend(labels: tuple[str, ...]) -> str:
    """Return the name of a series from its labels: "{{instance}} engine {{engine}}"."""
    prefixes = {"engine": "engine ", "gpu": "GPU ", "rank": "rank "}
    return " ".join(f"{prefixes.get(label, '')}{{{{{label}}}}}" for label in labels)
