"""The page on capacity: which ceiling binds first, how long requests are, and what a token costs."""

from typing import Any

from diag.artefacts.dashboards.scope import GPU_COST, DashboardScope
from diag.artefacts.dashboards.shared import (
    GENERATED,
    KV_CACHE_USAGE,
    PROMPT,
    LinePanel,
    annotations,
    line_panels,
    links,
)
from diag.artefacts.grafana import panels
from diag.artefacts.grafana.page import DashboardPage
from diag.artefacts.grafana.panels import PanelHeader, PanelQuery
from diag.artefacts.names import GENERATED_MARK, dashboard_uid
from diag.core.contract import Contract
from diag.knowledge.signals import (
    all_reduce_share,
    bandwidth_share,
    batch,
    compute_share,
    nvlink_share,
    running_share_of_cap,
)

SERVING = "unless on (instance, gpu) diag_gpu_serving == 0"
WATTS = f"sum by ($by) (diag_gpu_power_watts {SERVING})"
GPUS = f"count by ($by) (diag_gpu_power_watts {SERVING})"
OUTPUT = f"({GENERATED} > 0)"
KILOWATT_HOURS = 1e6 / 3.6e6
"""Of a million tokens, for each joule of one."""
COST = f"$${GPU_COST} / 3600 * {GPUS} / {OUTPUT} * 1e6"
SATURATION = {
    "KV cache": KV_CACHE_USAGE,
    "sequence cap": running_share_of_cap.promql,
    "memory bandwidth": bandwidth_share.promql,
    "compute": compute_share.promql,
    "all-reduces": f"{nvlink_share.promql} or {all_reduce_share.promql}",
}
LENGTHS = {"Prompt length": "prompt", "Answer length": "generation"}


def capacity_page(contract: Contract) -> DashboardPage:
    """The page on all servers that are chosen."""
    scope = DashboardScope(contract, ("model", "engine"))
    return DashboardPage(
        uid=dashboard_uid("capacity"),
        title="vLLM / Capacity and cost",
        description=f"{GENERATED_MARK}. Headroom to every ceiling, lengths of requests, energy and cost of tokens.",
        rows=[
            ("Headroom: the highest line binds first", line_panels(_headroom(), scope)),
            ("Lengths of requests", [_lengths(title, kind, scope) for title, kind in LENGTHS.items()]),
            ("Energy and cost", line_panels(_cost(), scope)),
        ],
        variables=scope.variable_queries(),
        annotations=annotations(scope),
        links=links("README", contract.site),
        inputs={GPU_COST: ("$ per GPU and hour", "1")},
    )


def _headroom() -> list[LinePanel]:
    saturation = (
        "Healthy: every line below 80 %. KV cache and sequence cap are limits of vLLM; bandwidth and compute are"
        " shares of the GPU's data sheet, of which servers reach 21 % to 80 %."
    )
    return [
        LinePanel(PanelHeader("Saturation", saturation, "percentunit", 24), ("engine",), SATURATION),
        LinePanel(
            PanelHeader(
                "Decode batch",
                "Tokens decoded in a step. Below the compute ceiling a larger batch costs little latency.",
            ),
            ("engine",),
            {"": batch.promql},
        ),
        LinePanel(
            PanelHeader(
                "All-reduces / link bandwidth",
                "Healthy: below 20 %. What tensor parallelism sends, of NVLink's bandwidth and of PCIe's.",
                "percentunit",
            ),
            ("engine",),
            {"NVLink": nvlink_share.promql, "PCIe": all_reduce_share.promql},
        ),
    ]


def _lengths(title: str, kind: str, scope: DashboardScope) -> Any:
    """A heat map of a histogram of vLLM."""
    description = "Finished requests by tokens. Two bands: two kinds of traffic, which may want servers of their own."
    promql = scope.fill(f"sum by (le) (increase(vllm:request_{kind}_tokens_bucket[$window]))", ())
    return panels.histogram(PanelHeader(title, description), PanelQuery(promql, "{{le}}"))


def _cost() -> list[LinePanel]:
    return [
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
        LinePanel(
            PanelHeader(
                "Cost per million output tokens",
                "All GPUs of the server at the cost above, and if their memory bandwidth were used up.",
                "currencyUSD",
            ),
            (),
            {"now": COST, "at the bandwidth ceiling": f"{COST} * {bandwidth_share.promql}"},
        ),
    ]
