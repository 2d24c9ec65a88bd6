"""vLLM's metrics reach Prometheus under other names, so that no rule or dashboard sees the server.

The report judges such a server nevertheless. A relabelled server causes no warning if diag.toml has its prefix.
"""

from diag.core.metric_prefix import ANY, OWN, PROBE, RUNNING
from diag.incident import Fix, Incident, LookAlike, Signal, documented, judged

METHOD = "https://prometheus.io/docs/prometheus/latest/configuration/configuration/#metric_relabel_configs"
RAY = "https://github.com/vllm-project/vllm/blob/main/vllm/v1/metrics/ray_wrappers.py"
ON_PAGE = f'last_over_time(diag_vllm_metrics_renamed{{prefix!="{OWN}"}}[$window])'
STORED = f'last_over_time({{__name__=~"{ANY}({PROBE})",__name__!~"{OWN}num_.+"}}[$window])'
RENAMED = Signal(
    "metrics renamed",
    f"max by ($by) ({ON_PAGE}) or 0 * count by ($by) (last_over_time({RUNNING}[$window]))"
    f" or 1 + 0 * count by ($by) ({STORED})",
    "vLLM's metrics are stored under other names: {value}",
    "bool",
    culprit_promql=f"({ON_PAGE}) == 1",
    culprit_label="{prefix}...",
).at_least(1, documented("rules and dashboards select the names that vLLM gives its metrics", RAY))
incident = Incident(
    id="scrape_renames_metrics",
    title="Metrics stored under other names",
    severity="warning",
    per=("instance",),
    hold="5m",
    telemetry=True,
    cause="""
        The scrape or what serves the page renames vllm:... to vllm_... (a Prometheus 2 that negotiates OpenMetrics),
        kserve_vllm:... (KServe, RHOAI) or ray_vllm:... and ray_vllm_... (Ray). Every rule on vllm:... is then silent.
    """,
    impact="no alert fires for this server and its dashboards are empty, whatever happens to it",
    symptoms=(RENAMED,),
    looks_like=(
        LookAlike(
            "metrics switched off (--disable-log-stats)",
            distinguish="Then the page has no metrics of vLLM under any name.",
            refuted_by=RENAMED,
        ),
    ),
    fixes=(
        Fix.without_restart(
            change="Add the lines of alerts/relabel.yaml to the scrape job: they name the metrics vllm:... again.",
            effect="rules and dashboards see this server",
            why=documented("a relabelled series has the name that is asked for", METHOD),
            risk="rules of others that use the present names lose their series",
        ),
        Fix.without_restart(
            change="Where the platform decides about the names, state them in diag.toml ([site] prefix), run "
            "`diag generate`, and load the alerts and dashboards that it writes.",
            effect="rules and dashboards ask for the names that this site stores",
            why=judged("one prefix for all servers of a site is as good as another"),
        ),
    ),
    mitigate=("Until the names are mended, watch these servers with `diag doctor --prometheus`: it finds any name.",),
    hand_over=("one line of the page as the server sends it, and the same series as Prometheus stores it",),
    do_not=("Do not restart vLLM: the names change between it and Prometheus.",),
)
