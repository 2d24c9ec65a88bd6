"""The generated alerting rules, evaluated by a real promtool over a timeline."""

import gzip
import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from support import timelines
from support.firing import NAME
from support.paths import ALL_RECORDINGS, ROOT
from support.rewriting import OLD_NAMES
from support.rule_files import groups_of

from diag import promql
from diag.core.incident import Incident, seconds
from diag.core.metric_families import families
from diag.knowledge.catalog import load

INCIDENTS = {incident.id: incident for incident in load()}


RULES = ROOT / "alerts" / "diag.rules.yaml"


STALLS = ("engine_dead", "engine_stalled", "tp_communication_stall")


PROMPT = (
    "kv_eviction_cascade",
    "prefill_decode_contention",
    "gpu_thermal_throttling",
    "cuda_graph_capture_hang",
    "gpu_out_of_memory",
)


CONNECTORS = (
    "vllm:mooncake_",
    "vllm:kv_offload_",
    "vllm:simple_kv_offload_",
    "lmcache:",
    "vllm:num_requests_kv_fetch_",
)
"""KV connectors that need RDMA or a GPU: the names are those of their sources."""


def allowed(incident: Incident) -> float:
    """Window, `for` and two scrapes; half the window where users suffer at once, and 2 min 30 s for a standstill."""
    share = 0.5 if incident.id in PROMPT else 1
    limit = share * seconds(incident.window) + seconds(incident.hold) + 2 * timelines.STEP
    return min(limit, 150) if incident.id in STALLS else limit


@cache
def rules(file: Path = RULES) -> list[dict[str, str]]:
    return [rule for group in groups_of(file) for rule in group["rules"]]


@cache
def metrics_read() -> set[str]:
    """Every metric that a rule selects."""
    return {name for rule in rules() for name in promql.metric_names(promql.parse(rule["expr"]))}


def in_no_recording(metrics: Iterable[str]) -> set[str]:
    """Return the metrics that no recording, exporter, older release or connector has, without prefix selectors."""
    pages = (gzip.decompress((recording / "metrics.prom.gz").read_bytes()).decode() for recording in ALL_RECORDINGS)
    recorded = {NAME.match(line)[0] for page in pages for line in {*page.splitlines()} if line[:1] not in "#"}  # type: ignore[index]
    recorded |= {"up"}
    unknown = {*metrics} - recorded - set(families()) - {"ALERTS"}
    return {name for name in unknown if not name.startswith((*OLD_NAMES.values(), *CONNECTORS, "{"))}


def only(incident: str | None, folder: Path, file: Path = RULES) -> Path:
    """The rules of one incident's alerts, None for those of the telemetry: to evaluate all of them takes long."""
    chosen = folder / "only.yaml"
    chosen.write_text(json.dumps({"groups": groups_for([incident], file)}))
    return chosen


def groups_for(incidents: Sequence[str | None], file: Path = RULES) -> list[dict[str, Any]]:
    """The groups of a rule file with the alerts of these incidents, and with all that these read."""
    groups = groups_of(file)
    every = [rule for group in groups for rule in group["rules"]]
    alerts = [rule for rule in every if "alert" in rule and rule["labels"].get("incident") in incidents]
    recorded = {rule["record"]: rule for rule in every if "record" in rule}
    asked = [name for rule in alerts for name in NAME.findall(rule["expr"])]
    for name in asked:
        asked += [found for found in NAME.findall(recorded.get(name, {}).get("expr", "")) if found not in asked]
    wanted = [*alerts, *(rule for name, rule in recorded.items() if name in asked)]
    kept = [{**group, "rules": [rule for rule in group["rules"] if rule in wanted]} for group in groups]
    return [group for group in kept if group["rules"]]
