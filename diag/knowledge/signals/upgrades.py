"""Signals of an upgrade of vLLM: its presence, and the speed at the same load before and after it.

A quarter of an hour now is compared with one some time ago, when another release ran. ITL grows at most in proportion
to the requests that share a step, so its ratio is divided by how many more run now, on average or at the peak: the
rest is not due to load. While requests wait, the server generates at its capacity; if it once generated more, its
capacity was higher. Times whose requests were longer or less cached are not compared.
"""

from collections.abc import Iterator

from diag.core.incident import Part, Signal

SPAN = "15m"
AGO = ("30m", "1h", "1d")
"""Offsets of the comparison: half an hour or an hour ago the load is similar; a day ago it was the same time of day."""
INFO = 'diag_vllm_info{version!=""}'
MOST_LONGER = 1.33
"""Mean lengths of two times of one load differ by up to 1.07 (kv_cascade, kv_cascade_base)."""
MOST_REQUESTS = 1.33
"""Runs of one load differ by up to 1.21 in requests in flight (engine_stalled, healthy)."""
FEWEST_TOKENS, FEWEST_REQUESTS = 1000, 10
"""In either quarter of an hour; below them single requests decide (judged)."""
SPEEDS = {"slower_decode": "ITL", "lower_throughput": "time per output token of the whole server"}
"""Measures of speed: the names of the parts, and their names in a report."""


def _change(part: str, ago: str) -> str:
    """Return a part as a multiple of its value at the offset `ago`."""
    return f"${part}[{SPAN}] / (${part}[{SPAN}] offset {ago} > 0)"


def _since(ago: str) -> Iterator[Part]:
    """Yield the parts that compare the last quarter of an hour with the one that ended at the offset `ago`."""
    yield Part(
        f"upgraded_within_{ago}",
        # one series, of the new release, if both times have one release each and these differ; caches are cold and
        # kernels are compiled in the first minutes of a release
        f"($release[{SPAN}] and on (instance, version) $release[5m] offset 20m and on (instance)"
        f" ((count by (instance) ($release[{SPAN}]) == 1) and on (instance)"
        f" (count by (instance) ($release[{SPAN}] offset {ago}) == 1)))"
        f" unless on (instance, version) $release[{SPAN}] offset {ago}",
        "bool",
    )
    yield Part(f"running_growth_since_{ago}", _change("running_average", ago), "ratio")
    yield Part(f"peak_growth_since_{ago}", _change("running_highest", ago), "ratio")
    # growth of ITL beyond what more requests in a step explain; unknown if there are many more
    yield Part(
        f"slower_decode_since_{ago}",
        f"{_change('seconds_per_token', ago)}"
        f" / (clamp_min($running_growth_since_{ago} > $peak_growth_since_{ago} or $peak_growth_since_{ago}, 1)"
        f" <= {MOST_REQUESTS})",
        "ratio",
    )
    # the least factor by which tokens/s fell: requests wait all the time, so that the server runs at capacity
    yield Part(
        f"lower_throughput_since_{ago}",
        f"$output_tokens[{SPAN}] offset {ago} / ($output_tokens[{SPAN}] > 0) and $waiting_lowest[{SPAN}] >= 1",
        "ratio",
    )
    yield Part(
        f"requests_like_those_of_{ago}_ago",
        f"({_change('request_length', ago)} <= {MOST_LONGER})"
        f" and on (instance) ({_change('prompt_tokens_per_output_token', ago)} <= {MOST_LONGER})",
        "ratio",
    )
    factors = " or ".join(
        f'label_replace(${part}_since_{ago}, "speed", "{name}", "", "")' for part, name in SPEEDS.items()
    )
    yield Part(
        f"slower_since_{ago}",
        f"label_replace(({factors}) and on (instance) $requests_like_those_of_{ago}_ago"
        f' and on (instance) $upgraded_within_{ago}, "ago", "{ago}", "", "")',
        "ratio",
    )


PARTS: tuple[Part, ...] = (
    Part("release", f"count by (instance, version) (last_over_time({INFO}[$window]))", "series"),
    Part("running_average", "sum by ($by) ($running_average_by_series)", "requests"),
    Part("cached_prompt_tokens", "$prefix_cache_hits or 0 * $prompt_tokens", "tokens"),
    Part("seconds_per_token", f"$itl_sum / ($itl_count >= {FEWEST_TOKENS})", "seconds"),
    Part("request_length", f"($prompt_tokens + $output_tokens) / ($finished_requests >= {FEWEST_REQUESTS})", "tokens"),
    # prompt tokens that are computed for each token of an answer
    Part(
        "prompt_tokens_per_output_token",
        "clamp_min($prompt_tokens - $cached_prompt_tokens, 0) / ($output_tokens > 0)",
        "tokens",
    ),
    *(part for ago in AGO for part in _since(ago)),
    Part("upgraded_release", " or ".join(f"$upgraded_within_{ago}" for ago in AGO), "series"),
    Part("slower_speeds", " or ".join(f"$slower_since_{ago}" for ago in AGO), "ratio"),
    # two releases within a day, and no two times to compare: unknown
    Part(
        "one_release_within_a_day",
        f"0 * (count by ($by) (count by ($by, version) (count_over_time({INFO}[1d]))) == 1)",
        "bool",
    ),
    # without a restart there was no upgrade, even if no exporter names the release
    Part("not_restarted", "0 * (max by ($by) (resets(vllm:generation_tokens_total[1d])) == 0)", "bool"),
    Part("flag_values", "max by (instance, flag) (last_over_time(diag_vllm_config[$window]))"),
    Part(
        "flags_of_other_value",
        " or ".join(f"($flag_values[{SPAN}] != $flag_values[{SPAN}] offset {ago})" for ago in AGO),
    ),
)

upgraded = Signal(
    "upgraded within the last day",
    "max by ($by) ($upgraded_release) or $one_release_within_a_day or $not_restarted",
    "the server runs another release than before, and has for 20 minutes: {value}",
    "bool",
    culprit_promql="$upgraded_release",
    culprit_label="vLLM {version}",
)
slower_since_upgrade = Signal(
    "time per token / before the upgrade",
    "max by ($by) ($slower_speeds)",
    "at the same load, a token takes {value} times as long as before the upgrade",
    "ratio",
    needs="a quarter of an hour with the earlier release and requests like now's",
    culprit_promql="$slower_speeds > 1.1",
    culprit_label="{speed} {value}x that of {ago} ago",
)
flags_changed_with_upgrade = Signal(
    "settings that changed with the upgrade",
    f"count by ($by) ($flags_of_other_value) or 0 * max by ($by) (last_over_time(diag_vllm_config[{SPAN}]))",
    "settings that have another value than before the upgrade: {value}",
    "settings",
    culprit_promql="$flags_of_other_value",
    culprit_label="{flag}",
)
