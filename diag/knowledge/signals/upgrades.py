"""Signals of an upgrade of vLLM: whether there was one, and how fast the server is at the same load as before it.

A quarter of an hour now is compared with one some time ago, when another release ran. ITL grows at most in proportion
to the requests that share a step, so its ratio is divided by how many more run now, on average or at the peak: what is
left is not the load. Where requests wait, the server generates as much as it can; where it once generated more, it
could do more. Times whose requests were longer or less cached are not compared.
"""

from diag.core.incident import Signal
from diag.knowledge.signals.expressions import ITL, RUNNING, WAITING

SPAN = "15m"
AGO = ("1h", "1d")
"""When to look back to: an hour ago the load is like now's; a day ago it was the same time of day."""
WARM = "5m] offset 20m"
"""When the release has to run already: caches are cold and kernels are compiled in its first minutes."""
INFO = 'diag_vllm_info{version!=""}'
MOST_LONGER = 1.33
"""Mean lengths of two times of one load differ by up to 1.07 (kv_cascade, kv_cascade_base)."""
MOST_REQUESTS = 1.33
"""Runs of one load differ by up to 1.21 in requests in flight (engine_stalled, healthy)."""
FEWEST_TOKENS, FEWEST_REQUESTS = 1000, 10
"""In either quarter of an hour, below which single requests decide (judged)."""


def _at(promql: str, ago: str) -> str:
    """The expression over the quarter of an hour that ended so long ago; "" for now."""
    return promql.replace("[$span]", f"[{SPAN}] offset {ago}" if ago else f"[{SPAN}]")


def _counted(metric: str) -> str:
    return f"sum by ($by) (increase({metric}[$span]))"


def _release(window: str) -> str:
    """The releases that ran then, one series for each."""
    return f"count by (instance, version) (last_over_time({INFO}[{window}))"


NOW = _release(f"{SPAN}]")
RUNNING_MEAN, RUNNING_PEAK = (
    f"sum by ($by) ({function}({RUNNING}[$span]))" for function in ("avg_over_time", "max_over_time")
)
QUEUED = f"sum by ($by) (min_over_time({WAITING}[{SPAN}])) >= 1"
GENERATED, PROMPTS = _counted("vllm:generation_tokens_total"), _counted("vllm:prompt_tokens_total")
CACHED = f"({_counted('vllm:prefix_cache_hits_total')} or 0 * {PROMPTS})"
DECODE_TIME, DECODED = (
    f"({_counted(f'{ITL[0]}_{part}')} or {_counted(f'{ITL[1]}_{part}')})" for part in ("sum", "count")
)
LENGTHS = (
    f"({PROMPTS} + {GENERATED}) / ({_counted('vllm:request_success_total')} >= {FEWEST_REQUESTS})",
    f"clamp_min({PROMPTS} - {CACHED}, 0) / ({GENERATED} > 0)",
)
"""Tokens of a request, and prompt tokens that are computed for each token of an answer."""
TOKEN_TIME = f"{DECODE_TIME} / ({DECODED} >= {FEWEST_TOKENS})"


def _change(promql: str, ago: str) -> str:
    return f"({_at(promql, '')}) / (({_at(promql, ago)}) > 0)"


def _upgraded(ago: str) -> str:
    """One series, of the new release, where each time saw one release and these differ."""
    before = _release(f"{SPAN}] offset {ago}")
    alone = " and on (instance) ".join(f"(count by (instance) ({then}) == 1)" for then in (NOW, before))
    warm = f"{NOW} and on (instance, version) {_release(WARM)}"
    return f"({warm} and on (instance) ({alone})) unless on (instance, version) {before}"


def _slower_decode(ago: str) -> str:
    """By which factor ITL grew beyond what more requests in a step explain; of many more it cannot be told."""
    mean, peak = (_change(running, ago) for running in (RUNNING_MEAN, RUNNING_PEAK))
    more = f"clamp_min(({mean}) > ({peak}) or ({peak}), 1)"
    return f"{_change(TOKEN_TIME, ago)} / ({more} <= {MOST_REQUESTS})"


def _lower_throughput(ago: str) -> str:
    """By which factor tokens/s fell at least: requests wait all the time, so that the server does what it can."""
    return f"({_at(GENERATED, ago)}) / (({_at(GENERATED, '')}) > 0) and ({QUEUED})"


SPEEDS = {"ITL": _slower_decode, "time per output token of the whole server": _lower_throughput}


def _slower(ago: str) -> str:
    """The factors, where requests were alike and each time saw one release."""
    alike = " and on (instance) ".join(f"({_change(length, ago)} <= {MOST_LONGER})" for length in LENGTHS)
    factors = " or ".join(f'label_replace({factor(ago)}, "speed", "{name}", "", "")' for name, factor in SPEEDS.items())
    compared = f"({factors}) and on (instance) {alike} and on (instance) ({_upgraded(ago)})"
    return f'label_replace({compared}, "ago", "{ago}", "", "")'


SLOWER = " or ".join(map(_slower, AGO))
UPGRADED = " or ".join(f"({_upgraded(ago)})" for ago in AGO)
# without a restart there was no upgrade, also where no exporter names the release
NOT_RESTARTED = "0 * (max by ($by) (resets(vllm:generation_tokens_total[1d])) == 0)"
upgraded = Signal(
    "upgraded within the last day",
    f"max by ($by) ({UPGRADED}) or 0 * max by ($by) (last_over_time({INFO}[{SPAN}])) or {NOT_RESTARTED}",
    "the server runs another release than before, and has for 20 minutes: {value}",
    "bool",
    culprit_promql=UPGRADED,
    culprit_label="vLLM {version}",
)
slower_since_upgrade = Signal(
    "time per token / before the upgrade",
    f"max by ($by) ({SLOWER})",
    "at the same load, a token takes {value} times as long as before the upgrade",
    "ratio",
    needs="a quarter of an hour with the earlier release and requests like now's",
    culprit_promql=f"({SLOWER}) > 1.1",
    culprit_label="{speed} {value}x that of {ago} ago",
)

FLAG = "max by (instance, flag) (last_over_time(diag_vllm_config[15m]{}))"
OTHER_FLAGS = " or ".join(f"({FLAG.format('')} != {FLAG.format(f' offset {ago}')})" for ago in AGO)
flags_changed_with_upgrade = Signal(
    "settings that changed with the upgrade",
    f"count by ($by) ({OTHER_FLAGS}) or 0 * max by ($by) (last_over_time(diag_vllm_config[15m]))",
    "settings that have another value than before the upgrade: {value}",
    "settings",
    culprit_promql=OTHER_FLAGS,
    culprit_label="{flag}",
)
