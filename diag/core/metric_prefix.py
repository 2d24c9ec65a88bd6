"""The prefix of vLLM's metrics: `vllm:` from vLLM itself, another one from what stands between it and the reader.

A Prometheus 2 that negotiates OpenMetrics stores `vllm_`, KServe and RHOAI relabel to `kserve_vllm:`, Ray's agents serve
`ray_vllm:` or `ray_vllm_`. Expressions are written with `vllm:`; samples are given that name before they are judged.
"""

import re

OWN = "vllm:"
ANY = "(?:[a-zA-Z0-9_]+_)?vllm[_:]"
"""Matches every prefix; a recording rule (`job:vllm:...`) has none."""
PROBE = "num_requests_running"
"""The metric that every release has from its first scrape on."""
_ON_PAGE = re.compile(rf"^({ANY}){PROBE}[ {{]".encode(), re.MULTILINE)
_IN_PROMQL = re.compile(r'(?<![\w:])vllm:(?=[a-z("])')
_REPLICAS = [re.compile(rb'^vllm:.*[{,]' + label + rb'="([^"]+)"') for label in (b"ReplicaId", b"WorkerId")]
_ENGINE = re.compile(rb'([{,]engine="[^"]*)(")')


def with_prefix(text: str, prefix: str) -> str:
    """PromQL, or a text that contains some, for metrics that are stored with this prefix."""
    return text if prefix == OWN else _IN_PROMQL.sub(prefix, text)


def named_as_ours(page: bytes) -> tuple[bytes, str]:
    """The page with vLLM's metrics named `vllm:`, and the prefix that they had; "" where there was nothing to do."""
    if b"\nvllm:" in page or page.startswith(b"vllm:"):
        return page, ""
    found = _ON_PAGE.search(page)
    if found is None:
        return page, ""
    lines = re.compile(rb"^((?:# (?:HELP|TYPE) )?)" + found[1], re.MULTILINE)
    return _replicas_as_engines(lines.sub(rb"\1vllm:", page)), found[1].decode()


def relabelling(prefix: str) -> str:
    """The line of a scrape job that gives metrics of this prefix their names back."""
    return (
        f"metric_relabel_configs: [{{source_labels: [__name__], regex: '{prefix}(.+)', target_label: __name__,"
        " replacement: 'vllm:$1'}]"
    )


def _replicas_as_engines(page: bytes) -> bytes:
    """A page of Ray's agent has every replica of its node, each with an engine 0: "0@<replica>" tells them apart."""
    lines = page.split(b"\n")
    of_line = {at: found[1] for at, line in enumerate(lines) if (found := _replica(line))}
    if len(set(of_line.values())) > 1:
        for at, replica in of_line.items():
            lines[at] = _ENGINE.sub(rb"\1@" + replica + rb"\2", lines[at])
    return b"\n".join(lines)


def _replica(line: bytes) -> re.Match[bytes] | None:
    return next((found for label in _REPLICAS if (found := label.match(line))), None)
