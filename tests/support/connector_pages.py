"""Pages of servers with a KV connector: real pages of vLLM 0.32 without one, with the connector's families beside them.

Names, labels and buckets are those of vLLM's source (nixl/stats.py, offloading/metrics.py); what they count is scripted
as a share of the requests and prompt tokens that the real page counts.
"""

import re
from collections.abc import Iterator

from support import rewriting
from support.rewriting import Scrape

LABELS = 'engine="0",model_name="tiny"'
XFER_SECONDS = ("0.005", "0.01", "0.025", "0.05", "0.075", "0.1", "0.2", "0.3", "0.5", "0.75", "1.0", "5.0", "+Inf")
NIXL = (
    ("failed_transfers", "Number of failed NIXL KV Cache transfers, including handshake and notification failures."),
    ("failed_notifications", "Number of failed NIXL KV Cache notifications."),
    ("kv_expired_reqs", "Number of requests that had their KV expire. NOTE: This metric is tracked on the P instance."),
    ("notifications_after_expiry", "Number of completion notifications for requests that were no longer tracked."),
)


def value(page: str, series: str) -> float:
    """The value of the first series whose line begins so."""
    found = re.search(rf"^{re.escape(series)}\S* (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def counter(name: str, text: str, number: float, labels: str = LABELS) -> str:
    return f"# HELP {name}_total {text}\n# TYPE {name}_total counter\n{name}_total{{{labels}}} {number:.1f}\n"


def transfers(done: float) -> str:
    """The histogram of NIXL's transfers, each of 60 ms."""
    name = "vllm:nixl_xfer_time_seconds"
    text = f"# HELP {name} Histogram of transfer duration for NIXL KV Cache transfers.\n# TYPE {name} histogram\n"
    for edge in XFER_SECONDS:
        below = 0.0 if float(edge) < 0.06 else done
        text += f'{name}_bucket{{engine="0",le="{edge}",model_name="tiny"}} {below:.1f}\n'
    return text + f"{name}_count{{{LABELS}}} {done:.1f}\n{name}_sum{{{LABELS}}} {0.06 * done:.3f}\n"


def asked(page: str, queries: float, hits: float) -> str:
    """The page of a server whose connector was asked for so many tokens and had so many of them."""
    for what, number in (("queries", queries), ("hits", hits)):
        page = rewriting.with_value(page, f"vllm:external_prefix_cache_{what}_total", f"{number:.1f}")
    return page


def nixl(page: str, *, done: float = 0.0, failed: float = 0.0, expired: float = 0.0, late: float = 0.0) -> str:
    """The page with NIXL's families: shares of the requests that finished."""
    finished = value(page, 'vllm:request_success_total{engine="0",finished_reason="length"')
    numbers = dict(zip((name for name, _ in NIXL), (failed, 0.0, expired, late), strict=True))
    families = (counter(f"vllm:nixl_num_{name}", text, finished * numbers[name] // 1) for name, text in NIXL)
    return page + transfers(finished * done // 1) + "".join(families)


def decode(page: str, failed: float) -> str:
    """A decode instance: it fetches the KV blocks of every prompt; what fails ends its request in an error."""
    finished = value(page, 'vllm:request_success_total{engine="0",finished_reason="length"')
    error = 'vllm:request_success_total{engine="0",finished_reason="error"'
    tokens = value(page, "vllm:prompt_tokens_total")
    page = rewriting.with_value(asked(page, tokens, tokens), error, f"{finished * failed // 1:.1f}")
    return nixl(page, done=1 - failed, failed=failed)


def prefill(page: str, expired: float, late: float = 0.0) -> str:
    """A prefill instance: it asks its connector for each prompt and finds nothing, and others fetch its blocks."""
    return nixl(asked(page, value(page, "vllm:prompt_tokens_total"), 0.0), expired=expired, late=late)


def offload(page: str, hits: float, before: float = 600_000.0) -> str:
    """A server that stores KV blocks in host memory and finds that share of the tokens there, after so many before."""
    tokens = before + value(page, "vllm:prompt_tokens_total")
    stored = counter("vllm:kv_offload_store_bytes", "Total bytes stored from GPU to offload storage.", tokens * 2048)
    loaded = counter(
        "vllm:kv_offload_load_bytes", "Total bytes loaded from offload storage to GPU.", tokens * hits * 2048
    )
    return asked(page, tokens, tokens * hits // 1) + stored + loaded


TIERS = {
    "promotion_job_failures": "Number of failed secondary-tier promotion jobs, labeled by tier.",
    "cascade_job_failures": "Number of failed secondary-tier cascade jobs, labeled by tier.",
    "backpressure_stores_dropped": "Number of store operations dropped due to back-pressure on a secondary tier.",
}


def tiers(page: str, hits: float = 0.0, **shares: float) -> str:
    """A server that offloads to host memory and a disk: of each counter, a share of the requests that finished.

    vLLM makes a series with the label `tier` when it counts for the first time.
    """
    finished = value(page, 'vllm:request_success_total{engine="0",finished_reason="length"')
    numbers = {name: finished * share // 1 for name, share in shares.items()}
    labels = f'{LABELS},tier="1:fs"'
    return offload(page, hits) + "".join(
        counter(f"vllm:kv_offload_tiering_{name}", TIERS[name], number, labels)
        for name, number in numbers.items()
        if number
    )


def buffered(page: str, size: object, backend: str = "native") -> str:
    """A server with --kv-offloading-size."""
    page = page.replace('kv_offloading_size="None"', f'kv_offloading_size="{size}"')
    return page.replace('kv_offloading_backend="native"', f'kv_offloading_backend="{backend}"')


def pages(name: str, change: object, every: float = 2.0) -> Iterator[Scrape]:
    """The recording's pages so changed, thinned."""
    return rewriting.changed(rewriting.thinned(rewriting.scrapes(name), every), change)  # type: ignore[arg-type]
