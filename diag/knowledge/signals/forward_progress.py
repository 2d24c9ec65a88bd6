"""Signals of forward progress: whether the engine processes tokens, and whether it answers."""

from diag.core.incident import Signal
from diag.knowledge.signals.expressions import KV_USAGE, RUNNING
from diag.knowledge.signals.load import in_flight


def moved(window: str) -> str:
    """Tokens, requests and changes of KV cache usage in the window: 0 means no progress.

    A prefill in chunks with nobody decoding yields no token until it ends, but each chunk takes KV blocks, and every
    step reports its gauges. Running and waiting do not count: they move in a scheduler's deadlock too.
    """
    counters = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total")
    grown = " + ".join(f"sum by ($by) (increase({counter}[{window}]))" for counter in counters)
    new, old = (f"sum by ($by) (changes({gauge}[{window}]))" for gauge in KV_USAGE)
    return f"({grown} + ({new} or {old} or 0 * ({grown})))"


def seen_before(age: str) -> str:
    """1 where there are samples older than `age`: a shorter standstill proves nothing."""
    return f"(sum by ($by) (count_over_time({RUNNING}[$window] offset {age})) > bool 0)"


def stuck(window: str, least: int) -> str:
    """Requests in flight throughout a window without progress; 0 where there was progress."""
    return f"{in_flight(window)} * ({in_flight(window)} >= bool {least}) * ({moved(window)} == bool 0)"


progress = Signal(
    "tokens and requests processed",
    moved("$window"),
    "tokens and requests processed (changes of KV cache usage included): {value}",
    "tokens",
    window_scaling="peak",
)
steps_per_second = Signal(
    "engine steps / s",
    "sum by ($by) (rate(vllm:iteration_tokens_total_count[$window]))",
    "engine steps per second: {value}",
    "1/s",
)
# The probe request of the exporter (or of --probe) got no token, and no other request did either.
PROBE_FAILED = (
    f"({moved('$window')} == bool 0) * on (instance) group_left () "
    "(1 - max by (instance) (last_over_time(diag_probe_success[$window])))"
)
# A single request may be one huge prefill in one step, which shows no progress either: it gets two minutes.
requests_stuck = Signal(
    "requests in flight without progress",
    f"({PROBE_FAILED} > 0) or (({stuck('2m', 1)} * {seen_before('100s')}) > 0)"
    f" or ({stuck('$window', 2)} == 0) or ({stuck('$window', 2)} * {seen_before('25s')})",
    "requests in flight without any progress: {value}",
    "requests",
)
endpoint_without_vllm = Signal(
    "metrics endpoint without vLLM's metrics",
    # an exporter answers whether or not vLLM does
    "max by (instance) (max_over_time(up[$window]))"
    ' unless on (instance) last_over_time(diag_scrape_success{collector="vllm"}[$window])',
    "an endpoint answered without vLLM's metrics: {value}",
    "bool",
)
serves = Signal(
    "vLLM's metrics available",
    "max by (instance) (max_over_time(diag_vllm_up[$window]))",
    "vLLM's metrics were available: {value}",
    "bool",
)
successful_scrapes = Signal(
    "successful scrapes",
    "max by (instance) ((avg_over_time(diag_vllm_up[$window]) and count_over_time(diag_vllm_up[$window]) >= 3)"
    " or (avg_over_time(up[$window]) and count_over_time(up[$window]) >= 3))"
    f" and on (instance) count by (instance) (count_over_time({RUNNING}[1d]))",
    "{value} of scrapes succeeded (the server had answered before)",
    "share",
)
