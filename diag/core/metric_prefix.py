"""The prefix of vLLM's metrics: `vllm:` from vLLM itself, another one from what stands between it and the reader.

A Prometheus 2 that negotiates OpenMetrics stores `vllm_`, KServe and RHOAI relabel to `kserve_vllm:`, Ray's agents
serve `ray_vllm:` or `ray_vllm_`. Expressions are written with `vllm:`; samples get that name before they are judged.
"""

import re

from diag.core import ray_metrics

OWN = "vllm:"
ANY = "(?:[a-zA-Z0-9_]+_)?vllm[_:]"
"""Matches every prefix; a recording rule (`job:vllm:...`) has none."""
PROBE = "num_requests_running"
"""The metric that every release has from its first scrape on."""
_RAY = "ray_"
_ON_PAGE = re.compile(rf"^({ANY}){PROBE}[ {{]".encode(), re.MULTILINE)
_IN_PROMQL = re.compile(r'(?<![\w:])vllm:(?=[a-z("])')


def with_prefix(text: str, prefix: str) -> str:
    """PromQL, or a text that contains some, for metrics that are stored with this prefix."""
    if prefix == OWN:
        return text
    text = _IN_PROMQL.sub(prefix, text)
    return ray_metrics.completed_promql(text, prefix) if prefix.startswith(_RAY) else text


def named_as_ours(page: bytes) -> tuple[bytes, str]:
    """The page with vLLM's metrics named `vllm:`, and the prefix that they had; "" where there was nothing to do."""
    if b"\nvllm:" in page or page.startswith(b"vllm:"):
        return page, ""
    found = _ON_PAGE.search(page)
    if found is None:
        return page, ""
    lines = re.compile(rb"^((?:# (?:HELP|TYPE) )?)" + found[1], re.MULTILINE)
    page, prefix = lines.sub(rb"\1vllm:", page), found[1].decode()
    return ray_metrics.completed_page(page) if prefix.startswith(_RAY) else page, prefix


def relabelling(prefix: str) -> str:
    """The line of a scrape job that gives metrics of this prefix their names back."""
    return (
        f"metric_relabel_configs: [{{source_labels: [__name__], regex: '{prefix}(.+)', target_label: __name__,"
        " replacement: 'vllm:$1'}]"
    )
