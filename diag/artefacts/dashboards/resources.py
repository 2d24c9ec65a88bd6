"""The dashboards of resources: GPUs and tensor-parallel ranks; capacity and the cost of tokens."""

from collections.abc import Mapping
from typing import Any

from diag.artefacts import grafana
from diag.artefacts.dashboards.shared import (
    GENERATED,
    GPU_COST,
    KV_CACHE_USAGE,
    PROMPT,
    SM_CLOCK,
    DashboardScope,
    LinePanel,
    annotations,
    legend,
    line_panels,
    links,
)
from diag.artefacts.grafana import DashboardPage, PanelHeader, PanelQuery
from diag.artefacts.names import CARD, GENERATED_MARK, dashboard_uid
from diag.core.contract import Contract
from diag.core.incident import Signal
from diag.knowledge.signals import (
    all_reduce_share,
    bandwidth_share,
    batch,
    compute_share,
    nvlink_share,
    running_share_of_cap,
)

# -- GPUs and ranks

MARGIN = "min by ($by) (diag_gpu_temperature_margin_celsius)"
THROTTLED = "max by ($by, reason) (rate(diag_gpu_throttle_seconds_total[$window]))"
MEMORY = "max by ($by) (diag_gpu_memory_used_bytes or diag_gpu_memory_total_bytes - diag_gpu_memory_free_bytes)"
OTHERS = 'sum by ($by) (diag_gpu_process_memory_bytes{role="other"}) or 0 * max by ($by) (diag_gpu_memory_total_bytes)'
PCIE = "sum by ($by) (rate(diag_gpu_pcie_bytes_total[$window]) or diag_gpu_pcie_throughput_bytes_per_second)"
NVLINK = "sum by ($by) (rate(diag_gpu_nvlink_bytes_total[$window]))"
RESETS = "sum by ($by) (increase(diag_gpu_resets_total[$window]))"
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
    LinePanel(
        PanelHeader("Active NVLinks", "Healthy: steady, the same on all GPUs. One fewer: a link is down."),
        ("gpu",),
        {"": "min by ($by) (diag_gpu_nvlink_active_links)"},
    ),
    LinePanel(
        PanelHeader("GPU faults", "Healthy: 0."), ("gpu",), {"Xid": XID, "resets": RESETS, "uncorrected ECC": ECC}
    ),
)


def gpus_page(contract: Contract, series: Mapping[str, str]) -> DashboardPage:
    """Return the page of GPUs and tensor-parallel ranks: which one differs from its peers."""
    scope = DashboardScope(contract, ("gpu",), series)
    return DashboardPage(
        uid=dashboard_uid("gpus"),
        title="vLLM / GPUs and ranks",
        description=f"{GENERATED_MARK}. Which GPU or rank differs from its peers.",
        rows=[
            ("By rank: look for the row that differs", _by_rank(scope)),
            ("GPUs", line_panels(GPU_PANELS, scope)),
        ],
        variables=scope.variable_queries(),
        annotations=annotations(scope),
        links=links(CARD, contract.site),
    )


def _by_rank(scope: DashboardScope) -> list[Any]:
    """Return panels of GPUs, named by the rank that runs on them if it is known, and of processes by rank."""
    series = f"{legend(scope.by())} {legend(('gpu', 'rank'))}"

    def gpu_rows(title: str, description: str, promql: str) -> Any:
        header = PanelHeader(title, description, "percentunit", 24)
        ranked = f"{promql} * on (instance, gpu) group_left (rank) $rank_of_gpu or on (instance, gpu) {promql}"
        return grafana.heatmap(header, PanelQuery(scope.fill(ranked, scope.by("gpu")), series))

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
        grafana.heatmap(cores, PanelQuery(scope.fill(WORKER_CORES, by_worker), legend(by_worker))),
    ]


# -- capacity and cost

SERVING = "unless on (instance, gpu) diag_gpu_serving == 0"
WATTS = f"sum by ($by) (diag_gpu_power_watts {SERVING})"
GPUS = f"count by ($by) (diag_gpu_power_watts {SERVING})"
OUTPUT = f"({GENERATED} > 0)"
KILOWATT_HOURS = 1e6 / 3.6e6
"""Kilowatt-hours of a million tokens at one joule per token."""
COST = f"$${GPU_COST} / 3600 * {GPUS} / {OUTPUT} * 1e6"
SATURATION: Mapping[str, str | Signal] = {
    "KV cache": KV_CACHE_USAGE,
    "sequence cap": running_share_of_cap._replace(promql="$share_of_known_cap"),
    "memory bandwidth": bandwidth_share,
    "compute": compute_share,
    "all-reduces over NVLink": nvlink_share,
    "all-reduces over PCIe": all_reduce_share,
}
LENGTHS = {"Prompt length": "prompt", "Answer length": "generation"}
HEADROOM_PANELS = (
    LinePanel(
        PanelHeader(
            "Saturation",
            "Healthy: every line below 80 %. KV cache and sequence cap are limits of vLLM; bandwidth and compute are"
            " shares of the GPU's data sheet, of which servers reach 21 % to 80 %.",
            "percentunit",
            24,
        ),
        ("engine",),
        SATURATION,
    ),
    LinePanel(
        PanelHeader(
            "Decode batch", "Tokens decoded in a step. Below the compute ceiling a larger batch costs little latency."
        ),
        ("engine",),
        {"": batch},
    ),
    LinePanel(
        PanelHeader(
            "All-reduces / link bandwidth",
            "Healthy: below 20 %. What tensor parallelism sends, of NVLink's bandwidth and of PCIe's.",
            "percentunit",
        ),
        ("engine",),
        {"NVLink": nvlink_share, "PCIe": all_reduce_share},
    ),
)
ENERGY_PANELS = (
    LinePanel(
        PanelHeader(
            "Energy per million tokens",
            "Power of the GPUs for the tokens of that time; 1 kWh is 3.6 J a token. It falls as the batch grows.",
            "kwatth",
        ),
        (),
        {
            "output": f"{WATTS} / {OUTPUT} * {KILOWATT_HOURS:.6f}",
            "prompt and output": f"{WATTS} / (({GENERATED} + {PROMPT}) > 0) * {KILOWATT_HOURS:.6f}",
        },
    ),
)
COST_HEADER = PanelHeader(
    "Cost per million output tokens",
    "All GPUs of the server at the cost above, and if their memory bandwidth were used up.",
    "currencyUSD",
)


def capacity_page(contract: Contract, series: Mapping[str, str]) -> DashboardPage:
    """Return the page on capacity: which ceiling binds first, how long requests are, what a token costs."""
    scope = DashboardScope(contract, ("model", "engine"), series)
    bands = "Finished requests by tokens. Two bands: two kinds of traffic, which may want servers of their own."

    def length(title: str, kind: str) -> Any:
        promql = scope.fill(f"sum by (le) (increase(vllm:request_{kind}_tokens_bucket[$window]))", ())
        return grafana.histogram(PanelHeader(title, bands), PanelQuery(promql, "{{le}}"))

    return DashboardPage(
        uid=dashboard_uid("capacity"),
        title="vLLM / Capacity and cost",
        description=f"{GENERATED_MARK}. Headroom to every ceiling, lengths of requests, energy and cost of tokens.",
        rows=[
            ("Headroom: the highest line binds first", line_panels(HEADROOM_PANELS, scope)),
            ("Lengths of requests", [length(title, kind) for title, kind in LENGTHS.items()]),
            ("Energy and cost", [*line_panels(ENERGY_PANELS, scope), _cost_panel(scope)]),
        ],
        variables=scope.variable_queries(),
        annotations=annotations(scope),
        links=links(CARD, contract.site),
        inputs={GPU_COST: ("$ per GPU and hour", "1")},
    )


def _cost_panel(scope: DashboardScope) -> Any:
    now = scope.fill(COST, scope.by())
    busiest = f"max by ({', '.join(scope.by())}) ({scope.recorded(bandwidth_share, ('instance', 'engine'))})"
    queries = {"now": now, "at the bandwidth ceiling": f"{now} * {busiest}"}
    series = legend(scope.by())
    return grafana.time_series(COST_HEADER, [PanelQuery(text, f"{series} {name}") for name, text in queries.items()])
