"""The page of GPUs and tensor-parallel ranks: which of them differs from its peers."""

from collections.abc import Mapping, Sequence
from typing import Any

from diag.artefacts.dashboards.scope import DashboardScope, legend
from diag.artefacts.dashboards.shared import SM_CLOCK, LinePanel, annotations, line_panels, links, symptom_panel
from diag.artefacts.grafana import panels
from diag.artefacts.grafana.page import DashboardPage
from diag.artefacts.grafana.panels import PanelHeader, PanelQuery
from diag.artefacts.names import GENERATED_MARK, dashboard_uid
from diag.core.contract import Contract
from diag.core.incident import Condition, Incident

MARGIN = "min by ($by) (diag_gpu_temperature_margin_celsius)"
THROTTLED = "max by ($by, reason) (rate(diag_gpu_throttle_seconds_total[$window]))"
MEMORY = "max by ($by) (diag_gpu_memory_used_bytes or diag_gpu_memory_total_bytes - diag_gpu_memory_free_bytes)"
OTHERS = 'sum by ($by) (diag_gpu_process_memory_bytes{role="other"}) or 0 * max by ($by) (diag_gpu_memory_total_bytes)'
PCIE = "sum by ($by) (rate(diag_gpu_pcie_bytes_total[$window]) or diag_gpu_pcie_throughput_bytes_per_second)"
NVLINK = "sum by ($by) (rate(diag_gpu_nvlink_bytes_total[$window]))"
XID = "sum by ($by) (increase(diag_gpu_xid_errors_total[$window]))"
ECC = 'sum by ($by) (increase(diag_gpu_ecc_errors_total{kind="uncorrected"}[$window]))'
WORKER_CORES = 'sum by ($by) (rate(diag_vllm_process_cpu_seconds_total{role="worker"}[$window]))'
GPU_PANELS = (
    LinePanel(
        PanelHeader("Temperature margin", "Healthy: more than 5 °C below the slowdown temperature.", "celsius"),
        ("gpu",),
        {"": MARGIN},
    ),
    LinePanel(
        PanelHeader(
            "Share of time throttled", "Healthy: 0 % for thermal reasons; a power cap is normal.", "percentunit"
        ),
        ("gpu",),
        {"": THROTTLED},
    ),
    LinePanel(
        PanelHeader(
            "SM clock", "Healthy: steady under load, the same on all GPUs. A sawtooth: thermal throttling.", "hertz"
        ),
        ("gpu",),
        {"": SM_CLOCK},
    ),
    LinePanel(
        PanelHeader("Memory", "Healthy: other processes hold none.", "bytes"),
        ("gpu",),
        {"used": MEMORY, "of other processes": OTHERS},
    ),
    LinePanel(
        PanelHeader("PCIe and NVLink traffic", "Healthy: the same on all GPUs.", "Bps"),
        ("gpu",),
        {"PCIe": PCIE, "NVLink": NVLINK},
    ),
    LinePanel(PanelHeader("GPU faults", "Healthy: 0."), ("gpu",), {"Xid": XID, "uncorrected ECC": ECC}),
)


def gpus_page(incidents: Sequence[Incident], contract: Contract, series: Mapping[str, str]) -> DashboardPage:
    """The page of all GPUs."""
    scope = DashboardScope(contract, ("gpu",), series)
    alerted = [symptom_panel(condition, incident, scope) for condition, incident in _gpu_symptoms(incidents)]
    return DashboardPage(
        uid=dashboard_uid("gpus"),
        title="vLLM / GPUs and ranks",
        description=f"{GENERATED_MARK}. Which GPU or rank differs from its peers.",
        rows=[
            ("By rank: look for the row that differs", _by_rank(scope)),
            ("Signals that alert", panels.fit(alerted)),
            ("GPUs", line_panels(GPU_PANELS, scope)),
        ],
        variables=scope.variable_queries(),
        annotations=annotations(scope),
        links=links("README", contract.site),
    )


def _gpu_symptoms(incidents: Sequence[Incident]) -> list[tuple[Condition, Incident]]:
    return [(condition, incident) for incident in incidents if "gpu" in incident.per for condition in incident.symptoms]


def _by_rank(scope: DashboardScope) -> list[Any]:
    """GPUs by the rank that runs on them, where that is known; processes by their rank."""
    series = f"{legend(scope.by())} {legend(('gpu', 'rank'))}"

    def gpu_rows(title: str, description: str, promql: str) -> Any:
        header = PanelHeader(title, description, "percentunit", 24)
        return panels.heatmap(header, PanelQuery(_with_rank(promql, scope), series))

    busy, power, power_limit = (
        f"max by ($by) (avg_over_time(diag_gpu_{metric}[$window]))"
        for metric in ("utilization_ratio", "power_watts", "power_limit_watts")
    )
    by_worker = scope.by("rank")
    cores = PanelHeader(
        "CPU cores used per worker", "Healthy: all rows alike. 0 beside 1: this rank stands still.", width=24
    )
    return [
        gpu_rows("GPU utilisation", "Healthy: all rows alike. 0 % beside full peers: this rank is missing.", busy),
        gpu_rows(
            "GPU power / limit",
            "Healthy: all rows alike. High utilisation at low power: busy-waiting.",
            f"({power} / ({power_limit} > 0))",
        ),
        panels.heatmap(cores, PanelQuery(scope.fill(WORKER_CORES, by_worker), legend(by_worker))),
    ]


def _with_rank(promql: str, scope: DashboardScope) -> str:
    joined = f"{promql} * on (instance, gpu) group_left (rank) $rank_of_gpu or on (instance, gpu) {promql}"
    return scope.fill(joined, scope.by("gpu"))
