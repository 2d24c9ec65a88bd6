"""Parts of several dashboards: the servers that a page shows, matchers for them in every expression, panels."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from diag.artefacts import grafana
from diag.artefacts.grafana import BAD, GOOD, NEUTRAL, DashboardPage, PanelHeader, PanelQuery, QueryVariable, Threshold
from diag.artefacts.names import CARD, GENERATED_MARK, GRAFANA_UNITS, claim, dashboard_uid, expression, subject_labels
from diag.core.contract import Contract, Site
from diag.core.incident import Condition, Incident, Signal, regroup
from diag.core.metric_prefix import GENERATED, OWN, RUNNING, in_any_release, metric
from diag.knowledge.formulas import DRAWN, DRAWN_OVER, comparison, formula
from diag.knowledge.signals import DECLARED, E2E, ITL, TTFT, error_budget_burn_rate
from diag.knowledge.signals.gpu import THERMAL
from diag.knowledge.signals.peers import MODEL
from diag.promql import add_matchers

SHORT, RATE_INTERVAL = "1m", "$__rate_interval"
GPU_COST = "gpu_cost"
"""A dashboard variable with a number."""


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

    def recorded(self, signal: Signal | str, by: tuple[str, ...]) -> str:
        """Write a signal or an expression over the recorded series, for subjects with the labels `by`."""
        written = formula(signal, by, DRAWN_OVER, self.contract).written_out(self.series)
        return self.add_matchers(regroup(written, self.site.labels))

    def add_matchers(self, promql: str) -> str:
        """Restrict an expression to the page's variables; a comparison with peers keeps all servers."""
        of_one = {*self.site.labels, "engine"} if MODEL in promql else set()

        def chosen(name: str) -> str:
            labels = {label: label for label in self.site.labels}
            own: list[str]
            if name in ("ALERTS", "ALERTS_FOR_STATE") or name in self.series.values():
                level = name.partition(":")[0].split("_")
                own = [label for label in ("engine", "gpu") if label in level]
            else:
                labels = {"job": "job", **labels, **({"model_name": "model"} if name.startswith(OWN) else {})}
                prefixes = {"engine": OWN, "gpu": "diag_gpu_"}
                own = [label for label, prefix in prefixes.items() if name.startswith(prefix)]
            labels |= {label: label for label in own if label in self.variables}
            return ", ".join(f'{label}=~"${variable}"' for label, variable in labels.items() if label not in of_one)

        return add_matchers(promql, chosen)

    @property
    def server(self) -> str:
        """The matchers of the chosen servers."""
        return ", ".join(f'{label}=~"${label}"' for label in self.site.labels)

    def variable_queries(self) -> dict[str, QueryVariable]:
        """Return each variable, whose query is restricted by the variables before it."""
        queries = {"job": "label_values(up, job)"}
        chosen = ['job=~"$job"']
        for label in (label for label in self.site.labels if label != "job"):
            presence = in_any_release(f'{{__name__=~"{RUNNING}|diag_vllm_up", {", ".join(chosen)}}}')
            queries[label] = f"label_values({presence}, {label})"
            chosen.append(f'{label}=~"${label}"')
        matchers = ", ".join(chosen)
        own = {"model": (RUNNING, "model_name"), "engine": (RUNNING, "engine")}
        own["gpu"] = ("diag_gpu_utilization_ratio", "gpu")
        queries |= {
            name: in_any_release(f'label_values({{__name__=~"{series}", {matchers}}}, {label})')
            for name, (series, label) in own.items()
            if name in self.variables
        }
        return {name: QueryVariable(query) for name, query in queries.items()}


def legend(labels: tuple[str, ...]) -> str:
    """Return the name of a series from its labels: "{{instance}} engine {{engine}}"."""
    prefixes = {"engine": "engine ", "gpu": "GPU ", "rank": "rank "}
    return " ".join(f"{prefixes.get(label, '')}{{{{{label}}}}}" for label in labels)


REASONS = ("reason", "finished_reason")
"""Labels by which a panel may split the numbers of a subject."""
STATES = {
    0: ("ok", GOOD),
    1: ("pending", "yellow"),
    2: ("info", NEUTRAL),
    3: ("warning", "orange"),
    4: ("critical", BAD),
}
SEVERITIES = {"info": 2, "warning": 3, "critical": 4}
KV_CACHE_USAGE = f"max by ($by) ({metric('kv_cache_usage_perc')})"
OUTPUT_RATE = f"sum by ($by) (rate({GENERATED}[$window]))"


class LinePanel(NamedTuple):
    """Lines over time: the labels of a series beside the server's, and the expressions by their names in the legend.

    `$name` alone is read from the series that a rule records; any other expression is evaluated as it is.
    """

    title: str
    description: str
    labels: tuple[str, ...]
    lines: Mapping[str, str]
    unit: str = "short"
    width: int = 12
    threshold: float | None = None


def quantiles(histogram: str) -> dict[str, str]:
    """Return the p50, p95 and p99 of a histogram, by their names; `histogram` is PromQL of the rates of its buckets."""
    return {
        f"p{quantile}": f"histogram_quantile(0.{quantile}, sum by ($by, le) ({histogram}))" for quantile in (50, 95, 99)
    }


BUCKETS = {
    "TTFT": f"rate({TTFT}_bucket[$window])",
    "ITL": f"rate({ITL}_bucket[$window])",
    "E2E": f"rate({E2E}_bucket[$window])",
    "queue": f"rate({metric('request_queue_time_seconds')}_bucket[$window])",
}
"""The buckets of vLLM's latencies."""


def line_panels(specs: Iterable[LinePanel], scope: DashboardScope) -> list[Any]:
    panels = []
    for spec in specs:
        by = scope.by(*spec.labels)
        reasons = [each for each in REASONS if any(f", {each})" in promql for promql in spec.lines.values())]
        name = legend((*by, *reasons))
        queries = []
        for line, promql in spec.lines.items():
            declared = DECLARED.get(promql.removeprefix("$"))
            asked = declared if isinstance(declared, Signal) else promql
            filled = scope.recorded(asked, ("instance", *spec.labels)) if declared else scope.fill(promql, by)
            queries.append(PanelQuery(filled, f"{name} {line}".strip()))
        header = PanelHeader(spec.title, spec.description, spec.unit, spec.width)
        threshold = None if spec.threshold is None else Threshold(spec.threshold)
        panels.append(grafana.time_series(header, queries, threshold))
    return panels


def burn_rate(scope: DashboardScope) -> str:
    return scope.recorded(error_budget_burn_rate, ("instance", "engine"))


def worst_severity(matchers: str, by: Sequence[str], *, pending: bool = True) -> str:
    """Return the expression of the worst state of the alerts: 1 pending, then by severity."""
    firing = [
        f'ALERTS{{alertstate="firing", severity="{name}", {matchers}}} * 0 + {value}'
        for name, value in SEVERITIES.items()
    ]
    states = [*firing, *([f'ALERTS{{alertstate="pending", {matchers}}}'] if pending else [])]
    return f"max by ({', '.join(by)}) ({' or '.join(states)})"


def alarm_panel(condition: Condition, incident: Incident, meaning: str, scope: DashboardScope) -> Any:
    """Return a signal with its threshold and rationale, red on the side where the condition holds."""
    description = f"{meaning} Threshold rationale: {condition.why.says}."
    limit = scope.contract.limit(condition.limit)
    line = Threshold(limit, GOOD, BAD) if condition.op in (">", ">=") else Threshold(limit, BAD, GOOD)
    return signal_panel(condition, incident, ("", description), line, scope)


def signal_panel(
    condition: Condition, incident: Incident, texts: tuple[str, str], line: Threshold, scope: DashboardScope
) -> Any:
    """Return a signal as the alert evaluates it; `texts` are a prefix of the title, and the description."""
    window = DRAWN_OVER if condition.signal in DRAWN else incident.window
    promql = expression(condition.signal, incident, window, scope.contract, scope.series)
    prefix, description = texts
    if promql in scope.series.values():
        description += f" Condition: `{comparison(promql, condition, scope.contract)}`."
    header = PanelHeader(
        f"{prefix}{claim(condition, scope.contract)}", description, GRAFANA_UNITS.get(condition.signal.unit, "short")
    )
    return grafana.time_series(
        header, [PanelQuery(scope.add_matchers(promql), legend(subject_labels(incident, scope.site)))], line
    )


def page_of(
    scope: DashboardScope,
    name: str,
    title: str,
    description: str,
    rows: Mapping[str, Sequence[Any]],
    *,
    runbook: str = CARD,
    more: Mapping[str, QueryVariable] = MappingProxyType({}),
    inputs: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> DashboardPage:
    """Return a page with what all have: variables, annotations, links to all dashboards and a runbook or the card.

    The annotations are alerts, restarts, thermal throttling and Xid errors; `more` are variables after those of
    `scope`.
    """
    server, by_gpu = legend(scope.by()), scope.by("gpu")
    throttled = f"sum by ($by) (increase(diag_gpu_throttle_seconds_total{{{THERMAL}}}[$window])) > 1"
    restarts = "max by ($by) (changes(process_start_time_seconds[$window])) > 0"
    xid = "sum by ($by, xid) (increase(diag_gpu_xid_errors_total[$window])) > 0"
    firing = scope.add_matchers('ALERTS{alertstate="firing", incident=~".+"}')
    return DashboardPage(
        uid=dashboard_uid(name),
        title=f"vLLM / {title}",
        description=f"{GENERATED_MARK}. {description}",
        rows=[*rows.items()],
        variables={**scope.variable_queries(), **more},
        annotations={
            "alerts": (firing, f"{{{{incident}}}} {server}", "red"),
            "restarts": (scope.fill(restarts, scope.by()), f"restart {server}", "blue"),
            "throttling": (scope.fill(throttled, by_gpu), f"thermal throttling {server} GPU {{{{gpu}}}}", "orange"),
            "Xid": (scope.fill(xid, by_gpu), f"Xid {{{{xid}}}} {server} GPU {{{{gpu}}}}", "purple"),
        },
        links={
            "vLLM dashboards": "",
            "on-call card" if runbook == CARD else "runbook": scope.site.runbook_url(runbook),
        },
        inputs=inputs,
    )
