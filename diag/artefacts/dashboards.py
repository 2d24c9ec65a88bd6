"""Grafana dashboards from the declarations: an overview, a page per incident, a page of GPUs and ranks.

A panel asks what the alert asks, over the same window, and draws the alert's limit as a line.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diag.artefacts import grafana
from diag.artefacts.grafana import BAD, GOOD, NEUTRAL, DashboardPage, Head, Limit, Query
from diag.artefacts.names import MARK, comparison, expression, opposite, per, runbook_url, uid
from diag.core.contract import Contract, Site
from diag.core.incident import Condition, Incident, fill, regroup
from diag.knowledge.signals.engine import KV_USAGE, budget_burn, itl
from diag.knowledge.signals.host import RANK_OF_GPU
from diag.knowledge.signals.peers import PEERS
from diag.promql import metric_names, parse

UNITS = {"seconds": "s", "1/s": "ops", "watts": "watt", "celsius": "celsius", "share": "percentunit", "bytes": "bytes"}
"""Grafana's name for a unit; every other number is shown as the doctor prints it."""
STATES = {
    0: ("calm", GOOD),
    1: ("pending", "yellow"),
    2: ("info", NEUTRAL),
    3: ("warning", "orange"),
    4: ("critical", BAD),
}
SEVERITIES = {"info": 2, "warning": 3, "critical": 4}
SHORT, INTERVAL = "1m", "$__rate_interval"


@dataclass(frozen=True)
class DashboardScope:
    """Which servers a page is about: by its variables, and grouped by these labels."""

    contract: Contract
    variables: tuple[str, ...]

    @property
    def site(self) -> Site:
        """How its servers are told apart."""
        return self.contract.site

    def by(self, *labels: str) -> tuple[str, ...]:
        """The labels of a server, and more."""
        return (*self.site.labels, *labels)

    def ask(self, promql: str, by: tuple[str, ...]) -> str:
        """An expression of ours over the interval that fits the scrapes; `$by` is what tells its series apart."""
        filled = fill(promql, by, SHORT, self.contract.values())
        return self.chosen(regroup(filled, self.site.labels)).replace(f"[{SHORT}]", f"[{INTERVAL}]")

    def chosen(self, promql: str) -> str:
        """The expression over what the page's variables choose; who looks at its peers needs all of them."""
        of_one = {*self.site.labels, "engine"} if PEERS in promql else set()
        for name in sorted(metric_names(parse(promql))):
            chosen = {label: variable for label, variable in self._labels(name).items() if label not in of_one}
            matchers = ", ".join(f'{label}=~"${variable}"' for label, variable in chosen.items())
            promql = re.sub(rf"(?<![\w:]){re.escape(name)}(?![\w:])(?!\{{)", f"{name}{{{matchers}}}", promql)
            promql = re.sub(
                rf"(?<![\w:]){re.escape(name)}\{{(?!{re.escape(matchers)})", f"{name}{{{matchers}, ", promql
            )
        return promql

    def _labels(self, metric: str) -> dict[str, str]:
        """The labels of a metric that a variable of the page chooses by."""
        if metric == "ALERTS":
            return {label: label for label in self.site.labels}
        labels = {label: label for label in ("job", *self.site.labels)}
        if metric.startswith("vllm:"):
            labels["model_name"] = "model"
        own = {"engine": "vllm:", "gpu": "diag_gpu_"}
        return labels | {name: name for name in own if name in self.variables and metric.startswith(own[name])}

    def queries(self) -> dict[str, str]:
        """The query of each variable; each is narrowed by those before it."""
        found = {"job": "label_values(up, job)"}
        chosen = ['job=~"$job"']
        for label in (each for each in self.site.labels if each != "job"):
            presence = f'{{__name__=~"vllm:num_requests_running|diag_vllm_up", {", ".join(chosen)}}}'
            found[label] = f"label_values({presence}, {label})"
            chosen.append(f'{label}=~"${label}"')
        at = ", ".join(chosen)
        own = {"model": ("vllm:num_requests_running", "model_name"), "engine": ("vllm:num_requests_running", "engine")}
        own["gpu"] = ("diag_gpu_utilization_ratio", "gpu")
        return found | {
            name: f"label_values({metric}{{{at}}}, {label})"
            for name, (metric, label) in own.items()
            if name in self.variables
        }


def dashboards(incidents: Sequence[Incident], contract: Contract) -> dict[str, str]:
    """The text of every dashboard by its file."""
    known = {each.id: each for each in incidents}
    pages = {each.id: _incident(each, known, contract) for each in incidents}
    pages |= {"overview": _overview(contract), "gpus": _gpus(incidents, contract)}
    return {f"dashboards/{name}.json": grafana.render(page) for name, page in pages.items()}


# -- a page per incident ----------------------------------------------------------------------------------------------


def _incident(incident: Incident, known: Mapping[str, Incident], contract: Contract) -> DashboardPage:
    site = contract.site
    scope = DashboardScope(contract, ("model", "engine", "gpu"))
    worse = (*incident.supports, *((incident.escalates,) if incident.escalates else ()))
    rows = {
        incident.title: [_intro(incident, site), _state(incident, scope)],
        "It is this where all of these hold": [_condition(each, incident, scope) for each in incident.symptoms],
        "What supports it, or makes it worse": [_condition(each, incident, scope) for each in worse],
        "What looks like it": _look_alikes(incident, known, scope),
        "The server and its GPUs on one time axis": _vitals(scope),
    }
    return DashboardPage(
        uid=uid(incident.id),
        title=f"vLLM / {incident.title}",
        description=f"{MARK}. {' '.join(incident.cause.split())}",
        rows=[(title, grafana.fit(panels)) for title, panels in rows.items() if panels],
        variables=scope.queries(),
        annotations=_annotations(scope),
        links=_links(incident.id, site),
    )


def _intro(incident: Incident, site: Site) -> Any:
    address = "http://${instance}" if "instance" in site.labels else "URL"
    return grafana.text(
        f"**{incident.severity}**: {incident.impact}.\n\n{' '.join(incident.cause.split())}\n\n"
        f"Judge it now: `diag doctor {address}`; read on: `diag explain {incident.id}`"
    )


def _state(incident: Incident, scope: DashboardScope) -> Any:
    """The alert at every subject that is judged, also where it is silent."""
    by = per(incident, scope.site)
    first = expression(incident.conditions[0].signal, incident, incident.window, scope.contract)
    alert = scope.chosen(_severity(f'incident="{incident.id}"', by) + f" or 0 * ({first})")
    head = Head("The alert", "Calm. Pending: it holds, but not yet for as long as the alert waits.")
    return grafana.states(head, [Query(alert, _legend(by))], STATES)


def _severity(matchers: str, by: Sequence[str]) -> str:
    """The worst state of the alerts: 1 pending, then by severity."""
    firing = [
        f'ALERTS{{alertstate="firing", severity="{name}", {matchers}}} * 0 + {value}'
        for name, value in SEVERITIES.items()
    ]
    every = [*firing, f'ALERTS{{alertstate="pending", {matchers}}}']
    return f"max by ({', '.join(by)}) ({' or '.join(every)})"


def _condition(condition: Condition, incident: Incident, scope: DashboardScope) -> Any:
    """A signal with its limit: what is on the wrong side of the line holds."""
    limit = scope.contract.limit(condition.limit)
    good = f"Good, that is not this incident: {opposite(condition, scope.contract)}. The limit: {condition.why.says}."
    line = Limit(limit, GOOD, BAD) if condition.op in (">", ">=") else Limit(limit, BAD, GOOD)
    return _signal(condition, incident, ("", good), line, scope)


def _look_alikes(incident: Incident, known: Mapping[str, Incident], scope: DashboardScope) -> list[Any]:
    """What must hold for it to be this incident; for another incident, what that one is recognised by first."""
    panels = []
    for look in incident.looks_like:
        if look.requires:
            limit = comparison(look.requires, scope.contract)
            said = (
                f"not {look.name}: ",
                f"It is {incident.id} where this is {limit}, else {look.name}. {look.distinguish}",
            )
            panels.append(_neutral(look.requires, incident, said, scope))
        elif look.name in known:
            first = known[look.name].symptoms[0]
            limit = comparison(first, scope.contract)
            said = (f"{look.name}: ", f"Where this is {limit}, it may be {look.name} as well. {look.distinguish}")
            panels.append(_neutral(first, known[look.name], said, scope))
    return panels


def _neutral(condition: Condition, incident: Incident, said: tuple[str, str], scope: DashboardScope) -> Any:
    return _signal(condition, incident, said, Limit(scope.contract.limit(condition.limit), NEUTRAL, NEUTRAL), scope)


def _signal(condition: Condition, incident: Incident, said: tuple[str, str], line: Limit, scope: DashboardScope) -> Any:
    """A condition's signal as the alert asks it; `said` is what stands before its name, and what good looks like."""
    asked = scope.chosen(expression(condition.signal, incident, incident.window, scope.contract))
    title = f"{said[0]}{condition.signal.name} {comparison(condition, scope.contract)}"
    head = Head(title, said[1], UNITS.get(condition.signal.unit, "none"))
    return grafana.series(head, [Query(asked, _legend(per(incident, scope.site)))], line)


# -- the overview -----------------------------------------------------------------------------------------------------


def _overview(contract: Contract) -> DashboardPage:
    scope = DashboardScope(contract, ("model",))
    return DashboardPage(
        uid=uid("overview"),
        title="vLLM / Overview",
        description=f"{MARK}. What is wrong where, whom it harms, every server in a row.",
        rows=[
            ("Verdict and impact", _verdict(scope)),
            ("Incidents", [_timeline(scope)]),
            ("Servers, the worst on top", [_servers(scope)]),
            ("What users get", _served(scope)),
            ("Load and GPUs", _vitals(scope, width=12)),
        ],
        variables=scope.queries(),
        annotations=_annotations(scope),
        links=_links("README", contract.site),
    )


def _verdict(scope: DashboardScope) -> list[Any]:
    def one(title: str, good: str, promql: str, limit: Limit | None = None) -> Any:
        return grafana.number(Head(title, good, width=4), promql, limit)

    def firing(severity: str) -> str:
        alerts = f'ALERTS{{alertstate="firing", severity="{severity}", incident=~".+"}}'
        return scope.chosen(f"count({alerts}) or vector(0)")

    waiting = scope.ask("sum(last_over_time(vllm:num_requests_waiting[$window]))", ())
    tokens = scope.ask("sum(rate(vllm:generation_tokens_total[$window]))", ())
    servers = scope.ask("count(count by (instance) (vllm:num_requests_running))", ())
    return [
        one("Critical", "Good: 0.", firing("critical"), Limit(1)),
        one("Warnings", "Good: 0.", firing("warning"), Limit(1, GOOD, "orange")),
        one("Worst error budget burn", "Good: below 1, as fast as promised.", f"max({_burn(scope)})", Limit(6)),
        one("Servers that answer", "Good: as many as you run.", servers, Limit(1, BAD, GOOD)),
        one("Requests waiting", "Good: 0 for most of the time.", waiting),
        one("Tokens written / s", "Good: in proportion to the load.", tokens),
    ]


def _burn(scope: DashboardScope) -> str:
    asked = fill(budget_burn.promql, ("instance", "engine"), "5m", scope.contract.values())
    return scope.chosen(regroup(asked, scope.site.labels))


def _timeline(scope: DashboardScope) -> Any:
    by = scope.by("incident")
    head = Head("Incidents", "Good: empty. A bar is an incident at one server, from pending to critical.", width=24)
    return grafana.states(head, [Query(scope.chosen(_severity('incident=~".+"', by)), _legend(by))], STATES)


def _servers(scope: DashboardScope) -> Any:
    by = scope.by()
    there = scope.ask("0 * max by ($by) (vllm:num_requests_running or diag_vllm_up)", by)
    worst = scope.chosen(_severity('incident=~".+"', by))
    burn = f"max by ({', '.join(by)}) ({_burn(scope)})"

    columns = {
        "worst (4 is critical)": f"{worst} or {there}",
        "running": scope.ask("sum by ($by) (vllm:num_requests_running)", by),
        "waiting": scope.ask("sum by ($by) (vllm:num_requests_waiting)", by),
        "KV usage, of 1": scope.ask(USED, by),
        "tokens / s": scope.ask(WRITTEN, by),
        "TTFT p95, s": scope.ask(TTFT, by),
        "error budget burn": burn,
    }
    good = "Good: 0, nobody waits, KV usage below 0.9, burn below 1. A cell leads to this page of its server alone."
    chosen = "&".join(f"var-{label}=${{__data.fields.{label}}}" for label in by)
    address = f"/d/{uid('overview')}?{chosen}&${{__url_time_range}}"
    queries = {name: Query(promql) for name, promql in columns.items()}
    return grafana.table(Head("Servers", good, width=24), queries, STATES, address)


def _served(scope: DashboardScope) -> list[Any]:
    by = scope.by("engine")
    ended = "sum by ($by, finished_reason) (rate(vllm:request_success_total[$window]))"
    gaps = f"{itl('sum')} / ({itl('count')} > 0)"

    def panel(head: Head, promql: str, limit: float) -> Any:
        return grafana.series(head, [Query(promql, _legend(by))], Limit(limit))

    burn = Head("Error budget burn", "Good: below 1. Over 14.4 for an hour, or 6 for six hours: it pages.")
    first = Head("Time to first token, p95", f"Good: below the promised {scope.contract.ttft_seconds:g} s.", "s")
    gap = Head("Gap between tokens, mean", "Good: steady. A mean hides freezes: they have their own page.", "s")
    return [
        panel(burn, _burn(scope), 14.4),
        panel(first, scope.ask(TTFT, by), scope.contract.ttft_seconds),
        panel(gap, scope.ask(gaps, by), scope.contract.itl_seconds),
        grafana.series(
            Head("Answers that ended / s", "Good: in proportion to the load; few by length, none by error."),
            [Query(scope.ask(ended, by), _legend((*by, "finished_reason")))],
        ),
    ]


USED = "(max by ($by) ({}) or max by ($by) ({}))".format(*KV_USAGE)
TTFT = "histogram_quantile(0.95, sum by ($by, le) (rate(vllm:time_to_first_token_seconds_bucket[$window])))"
WRITTEN, READ = (f"sum by ($by) (rate(vllm:{each}_tokens_total[$window]))" for each in ("generation", "prompt"))
SM = 'max by ($by) (diag_gpu_clock_hertz{clock="sm"})'
Told = tuple[Head, tuple[str, ...], dict[str, str]]
"""A panel: the labels beside the server's, and its expressions by what they are called."""


def _panels(told: Sequence[Told], scope: DashboardScope) -> list[Any]:
    panels = []
    for head, labels, promql in told:
        by = scope.by(*labels)
        legend = _legend((*by, *("reason" for each in promql.values() if "reason)" in each)))
        queries = [Query(scope.ask(text, by), f"{legend} {name}".strip()) for name, text in promql.items()]
        panels.append(grafana.series(head, queries))
    return panels


def _vitals(scope: DashboardScope, width: int = 24) -> list[Any]:
    """What vLLM does over what its GPUs do."""
    share, engine, gpu = "percentunit", ("engine",), ("gpu",)
    requests = {each: f"sum by ($by) (vllm:num_requests_{each})" for each in ("running", "waiting")}
    power = {"drawn": "max by ($by) (diag_gpu_power_watts)", "limit": "max by ($by) (diag_gpu_power_limit_watts)"}
    busy = {"": "max by ($by) (diag_gpu_utilization_ratio)"}
    told: list[Told] = [
        (Head("Requests", "Good: few wait; what runs follows the load.", "none", width), engine, requests),
        (
            Head("Tokens / s", "Good: they flow while requests run.", "none", width),
            engine,
            {"out": WRITTEN, "in": READ},
        ),
        (Head("KV cache usage", "Good: below 0.9; full is not ill by itself.", share, width), engine, {"": USED}),
        (Head("GPU busy", "Good: high under load. Busy at little power is spinning.", share, width), gpu, busy),
        (Head("GPU power", "Good: at the limit under load is normal.", "watt", width), gpu, power),
        (Head("SM clock", "Good: steady under load. A saw is heat.", "hertz", width), gpu, {"": SM}),
    ]
    return _panels(told, scope)


# -- GPUs and ranks ---------------------------------------------------------------------------------------------------


def _gpus(incidents: Sequence[Incident], contract: Contract) -> DashboardPage:
    scope = DashboardScope(contract, ("gpu",))
    return DashboardPage(
        uid=uid("gpus"),
        title="vLLM / GPUs and ranks",
        description=f"{MARK}. Which rank, which GPU: the one that differs from its peers.",
        rows=[
            ("By rank: the row that differs is the one", _by_rank(scope)),
            ("What is alerted on", grafana.fit([_condition(*each, scope) for each in _of_a_gpu(incidents)])),
            ("GPUs", _panels(GPU_PANELS, scope)),
        ],
        variables=scope.queries(),
        annotations=_annotations(scope),
        links=_links("README", contract.site),
    )


def _of_a_gpu(incidents: Sequence[Incident]) -> list[tuple[Condition, Incident]]:
    return [(condition, each) for each in incidents if "gpu" in each.per for condition in each.symptoms]


def _by_rank(scope: DashboardScope) -> list[Any]:
    """GPUs by the rank that runs on them, where that is known; processes by their rank."""

    def ranked(promql: str) -> str:
        joined = f"{promql} * on (instance, gpu) group_left (rank) {RANK_OF_GPU} or on (instance, gpu) {promql}"
        return scope.ask(joined, scope.by("gpu"))

    name, share = _legend(scope.by()), "percentunit"
    busy, power, most = (f"max by ($by) (avg_over_time(diag_gpu_{each}[$window]))" for each in OF_A_GPU)
    cores = 'sum by ($by) (rate(diag_vllm_process_cpu_seconds_total{role="worker"}[$window]))'
    rows = {
        Head("GPU busy", "Good: all rows alike. 0 while its peers are full: missing.", share, 24): ranked(busy),
        Head("GPU power / limit", "Good: all alike. Busy at little power: it spins.", share, 24): ranked(
            f"({power} / ({most} > 0))"
        ),
    }
    heats = [grafana.heat(head, Query(promql, f"{name} {_legend(('gpu', 'rank'))}")) for head, promql in rows.items()]
    workers = Head("Cores that a worker uses", "Good: all rows alike. 0 beside 1: this rank stands still.", width=24)
    asked = scope.ask(cores, scope.by("rank"))
    return [*heats, grafana.heat(workers, Query(asked, _legend(scope.by("rank"))))]


OF_A_GPU = ("utilization_ratio", "power_watts", "power_limit_watts")
MARGIN = "min by ($by) (diag_gpu_temperature_margin_celsius)"
THROTTLE = "max by ($by, reason) (rate(diag_gpu_throttle_seconds_total[$window]))"
MEMORY = "max by ($by) (diag_gpu_memory_used_bytes or diag_gpu_memory_total_bytes - diag_gpu_memory_free_bytes)"
OTHERS = 'sum by ($by) (diag_gpu_process_memory_bytes{role="other"}) or 0 * max by ($by) (diag_gpu_memory_total_bytes)'
PCIE = "sum by ($by) (rate(diag_gpu_pcie_bytes_total[$window]) or diag_gpu_pcie_throughput_bytes_per_second)"
NVLINK = "sum by ($by) (rate(diag_gpu_nvlink_bytes_total[$window]))"
XID = "sum by ($by) (increase(diag_gpu_xid_errors_total[$window]))"
ECC = 'sum by ($by) (increase(diag_gpu_ecc_errors_total{kind="uncorrected"}[$window]))'
GPU_PANELS: tuple[Told, ...] = (
    (Head("Degrees to slowdown", "Good: above 5.", "celsius"), ("gpu",), {"": MARGIN}),
    (Head("Share of time under a throttle", "Good: none for heat; a power cap is normal."), ("gpu",), {"": THROTTLE}),
    (Head("SM clock", "Good: steady under load, all alike.", "hertz"), ("gpu",), {"": SM}),
    (Head("Memory", "Good: others hold none.", "bytes"), ("gpu",), {"used": MEMORY, "of others": OTHERS}),
    (Head("Links", "Good: all alike.", "Bps"), ("gpu",), {"PCIe": PCIE, "NVLink": NVLINK}),
    (Head("Faults", "Good: 0."), ("gpu",), {"Xid": XID, "uncorrected ECC": ECC}),
)


# -- what all pages have ----------------------------------------------------------------------------------------------


def _annotations(scope: DashboardScope) -> dict[str, tuple[str, str, str]]:
    """Alerts, restarts, throttling and Xid errors: expression, title and colour."""
    name = _legend(scope.by())
    heat = 'sum by ($by) (increase(diag_gpu_throttle_seconds_total{reason=~"sw_thermal|hw_thermal"}[$window])) > 1'
    restarts = "max by ($by) (changes(process_start_time_seconds[$window])) > 0"
    xid = "sum by ($by, xid) (increase(diag_gpu_xid_errors_total[$window])) > 0"
    firing = scope.chosen('ALERTS{alertstate="firing", incident=~".+"}')
    return {
        "alerts": (firing, f"{{{{incident}}}} {name}", "red"),
        "restarts": (scope.ask(restarts, scope.by()), f"restart {name}", "blue"),
        "throttling": (scope.ask(heat, scope.by("gpu")), f"too hot: {name} GPU {{{{gpu}}}}", "orange"),
        "Xid": (scope.ask(xid, scope.by("gpu")), f"Xid {{{{xid}}}} {name} GPU {{{{gpu}}}}", "purple"),
    }


def _links(page: str, site: Site) -> dict[str, str]:
    """All pages of ours, and the runbook where it is on the web."""
    runbook = runbook_url(site, page)
    return {"vLLM dashboards": "", **({"runbook": runbook} if runbook.startswith("http") else {})}


def _legend(labels: Sequence[str]) -> str:
    named = {"engine": "engine ", "gpu": "GPU ", "rank": "rank "}
    return " ".join(f"{named.get(label, '')}{{{{{label}}}}}" for label in labels)
