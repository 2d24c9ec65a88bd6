"""Signals of the running configuration, and parts that signals of many files use: counters, gauges of load, settings.

Only range functions look at samples, so one missed scrape hides nothing; a gauge needs three samples in the window. A
metric that vLLM renamed is `(new or old)`. Comparisons inside an expression are `bool`, so a signal is missing only
if telemetry is missing. Metric names and their versions: vLLM 0.8 - 0.33, from its source. Fixes are computed from the
settings and from the memory that they leave free.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

from diag.core.declarations import Mistake, did_you_mean, shown_path
from diag.core.errors import BadDeclaration
from diag.core.incident import Part, Signal

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
NOW = {gauge: f"sum by ($by) (last_over_time({gauge}[$window]))" for gauge in (RUNNING, WAITING)}
IN_FLIGHT = " + ".join(NOW.values())
CAPACITY = 'vllm:num_requests_waiting_by_reason{reason="capacity"}'
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
TTFT = ("vllm:time_to_first_token_seconds",)
ITL = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
E2E = ("vllm:e2e_request_latency_seconds",)
PREFIX_CACHE_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
PREFIX_CACHE_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
"""Metrics by their names in the releases, the newest first (diag/vllm/metric_names.json has all, see `renamed`)."""
CONFIG = (
    "api_server_count",
    "block_size",
    "data_parallel_size",
    "enable_chunked_prefill",
    "enlarged_block_size",
    "gpu_memory_utilization",
    "kv_cache_max_concurrency",
    "kv_cache_memory_bytes",
    "kv_cache_size_tokens",
    "kv_offloading_size",
    "max_cpu_loras",
    "max_model_len",
    "max_num_active_seqs",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_gpu_blocks_override",
    "pipeline_parallel_size",
    "prefix_match_unit",
    "tensor_parallel_size",
)
"""Settings of a running server that expressions read, each as the part `config_NAME`."""
SLOWEST_MEMBER = "the slowest member: in tensor parallelism, each step waits for it"
ANY_MEMBER = "the largest value: one member that shows it is enough"
EVERY_MEMBER = "the largest value: it is 0 only if all members are"
USUAL_MEMBER = "the median: it shows what is usual among peers, whatever a few of them do"
FULLEST_MEMBER = "the fullest member: a setting applies to all of them, and it has the least to give"
"""Reasons for the member that stands for its group (`Part.group`)."""
_PLACE = re.compile(r"\{([A-Za-z_]\w*)(?: ((?:[^{}]|\{[^{}]*\})+))?\}")
_ARGUMENT = re.compile(r"(?:(\w+): )?([^;]+)(?:; )?")
_PART = re.compile(r"(?P<name>\w+)(?:: ?(?P<unit>[^(=]*?))?(?: ?\((?P<group>[^=]*)\))? =(?: (?P<promql>.+))?")


def renamed(expression: str, names: tuple[str, ...]) -> str:
    """Return an expression such as `increase({}_sum[$window])` of a metric under the name that the release gives it."""
    return " or ".join(expression.replace("{}", name) for name in names)


def usage(function: str) -> str:
    """Return a function, such as `max_over_time({}[$window])`, of the usage of the KV cache; it needs three samples."""
    sampled = "$kv_cache_usage_sampled", "$gpu_cache_usage_sampled"
    of_names = (f"{function.format(name)} and {samples}" for name, samples in zip(KV_USAGE, sampled, strict=True))
    return " or ".join(f"max by ($by) ({of_name})" for of_name in of_names)


def parts(module: Mapping[str, Any], *texts: str, **imported: Any) -> tuple[Part, ...]:
    """Return the parts in the file beside a module, MODULE.promql, and in further texts.

    Each is a line `name: unit (reason for the member) = PromQL`; unit and reason may be missing. An indented line
    continues the one above; # begins a comment. In the file, `{NAME}` stands for a name of the module, of this one, or
    an imported one, and `{function text; NAME; key: text}` for what a function returns.
    """
    names = {**globals(), **module, **imported}
    file = Path(module["__file__"]).with_suffix(".promql")

    def put(place: re.Match[str]) -> str:
        if place[1] not in names:
            raise Mistake(f"'{place[1]}' is not defined{did_you_mean(place[1], names)}")
        if not callable(names[place[1]]):
            return str(names[place[1]])
        words = [word.groups() for word in _ARGUMENT.finditer(_PLACE.sub(put, place[2] or ""))]
        texts = [names.get(text, text) for key, text in words if not key]
        return str(names[place[1]](*texts, **{key: names.get(text, text) for key, text in words if key}))

    written = [*enumerate(file.read_text(encoding="utf-8").splitlines(), 1)]
    written += [(0, line) for text in texts for line in dedent(text).splitlines()]
    whole: list[tuple[int, str]] = []
    for number, line in written:
        if line.startswith(" ") and whole and not line.lstrip().startswith("#"):
            whole[-1] = whole[-1][0], f"{whole[-1][1]} {line.strip()}"
        elif line and not line.startswith("#"):
            whole.append((number, line))
    declared = []
    for number, line in whole:
        try:
            if (part := _PART.fullmatch(_PLACE.sub(put, line))) is None:
                raise Mistake(f"'{line}' must be `name: unit = PromQL`")
        except Mistake as mistake:
            if not number:
                raise
            raise BadDeclaration(f"{shown_path(file)}:{number}: {mistake}") from mistake
        declared.append(Part(*(text or "" for text in part.group("name", "promql", "unit", "group"))))
    return tuple(declared)


def signal(formula: str, sentence: str, **options: Any) -> Signal:
    """Return a signal of the formula `name: unit = PromQL`; the options are further fields of Signal."""
    name, _, rest = formula.partition(": ")
    unit, _, promql = rest.partition(" = ")
    return Signal(name, promql, sentence, unit, **options)


def configured(setting: str) -> str:
    """Return the running value of a setting, one per instance; missing if no source publishes it."""
    return f'max by (instance) (last_over_time(diag_vllm_config{{flag="{setting}"}}[$window]))'


def setting_value(setting: str) -> str:
    """Return the running value of any setting: its part if it has one, otherwise the expression."""
    return f"$config_{setting}" if setting in CONFIG else configured(setting)


def cache_config_has(label: str, pattern: str) -> str:
    """Return 1 for each instance whose label of vllm:cache_config_info matches the pattern, else 0."""
    return (
        f'(max by (instance) (last_over_time(vllm:cache_config_info{{{label}=~"{pattern}"}}[$window]))'
        " or 0 * max by (instance) (last_over_time(vllm:cache_config_info[$window])))"
    )


def edge(limit: str) -> str:
    """Return the matcher of a histogram bucket, whose edge is written 1 or 1.0 by different exporters."""
    return f'le="{limit}"' if "." in limit else f'le=~"{limit}|{limit}[.]0"'


def within(limit: str, names: tuple[str, ...]) -> str:
    """Return the observations at or below an edge of a histogram, under the name that the release gives it."""
    return f"sum by ($by) ({renamed(f'increase({{}}_bucket{{{edge(limit)}}}[$window])', names)})"


def labelled(label: str, series: Mapping[str, str]) -> str:
    """Return several expressions as series of one, each with its name as the value of a label."""
    return " or ".join(f'label_replace({promql}, "{label}", "{name}", "", "")' for name, promql in series.items())


def any_of(**signs: str) -> str:
    """Return the largest of several signs: 1 if one shows, 0 if none of those that can be observed does."""
    return f"max by ($by) ({labelled('sign', signs)})"


def times_the_capacity(concurrency: str) -> str:
    """Return how many servers a load needs: by its concurrency, `concurrency` servers.

    Clients that wait for their answers keep so many requests in flight. Those that do not leave a backlog, which grows
    for as long as more requests arrive than are answered, or until they give up: then that ratio is the load, whatever
    the backlog.
    """
    return (
        f"($arrivals_per_answer_of_impatient_clients < {concurrency}"
        f" or $arrivals_per_answer_of_growing_backlog < {concurrency} or {concurrency})"
    )


def waiting_for_capacity(function: str, of_all: str = "") -> str:
    """Return a function, such as `max_over_time({}[$window])`, of the requests that wait for capacity, by series.

    vLLM 0.20 and later also counts waiting requests by reason. A deferred one waits for a KV transfer, a grammar or a
    LoRA slot: more capacity would not run it. Earlier releases export only the sum; `of_all` is its part.
    """
    return f"{function.format(CAPACITY)} or ignoring (reason) {of_all or function.format(WAITING)}"


RESERVE = 0.05
"""Share of a GPU's memory that fixes leave free."""

PARTS = parts(
    vars(),
    f"""
    kv_cache_usage_sampled: samples = count_over_time({KV_USAGE[0]}[$window]) >= 3
    gpu_cache_usage_sampled: samples = count_over_time({KV_USAGE[1]}[$window]) >= 3
    """,
    *(f"config_{name} = {configured(name)}" for name in CONFIG),
)


most_sequences = signal(
    # vLLM refuses more sequences than tokens in a step; no release since 0.8 has a default below 2,048
    "--max-num-batched-tokens: tokens ="
    " $config_max_num_batched_tokens or 2048 + 0 * $config_max_num_seqs or 2048 + 0 * $running_highest by (instance)",
    "a step processes up to {value} tokens, at least one per request",
)


def running_value(flag: str) -> Signal:
    name = f"--{flag.replace('_', '-')}"
    return Signal(name, setting_value(flag), f"{name} is {{value}}")


def unless_unset(setting: str) -> Signal:
    """Return the value of a KV cache setting, 0 if vLLM exports that it is not set."""
    unset = f'0 * max by (instance) (last_over_time(vllm:cache_config_info{{{setting}="None"}}[$window]))'
    return running_value(setting)._replace(promql=f"{setting_value(setting)} or {unset}")


kv_cache_is_fp8 = signal(
    "KV cache is quantized: bool = "
    + cache_config_has("cache_dtype", ".*(fp8|int8|int4|nvfp4|turboquant|octave|ultraquant).*"),
    "the KV cache is quantized already: {value}",
)
runs_on_cpu = signal(
    'vLLM runs on the CPU: bool = max by (instance) (last_over_time(diag_vllm_info{device="cpu"}[$window]))',
    "vLLM runs on the CPU: {value}",
)
runs_on_rocm = signal(
    'vLLM runs on ROCm: bool = max by (instance) (last_over_time(diag_vllm_info{device="rocm"}[$window])'
    ' or on (instance) last_over_time(diag_gpu_info{name=~"(AMD|Radeon) .+"}[$window]))',
    "vLLM runs on ROCm: {value}",
)
gpu_memory_total = signal(
    "GPU memory (smallest GPU): bytes = min by (instance) (last_over_time(diag_gpu_memory_total_bytes[$window]))",
    "the smallest GPU has {value} of memory",
    group=FULLEST_MEMBER,
)
gpu_memory_free_share = signal(
    "GPU memory free: share = $gpu_memory_free_share",
    "{value} of the fullest GPU's memory is free",
)
utilization_that_uses_free_memory = signal(
    "GPU memory share for vLLM with the free memory: share ="
    f" $config_gpu_memory_utilization + $gpu_memory_free_share - {RESERVE}",
    f"vLLM would use {{value}} of the GPU's memory and leave a {100 * RESERVE:g} % reserve",
)
kv_bytes_with_free_memory = signal(
    "KV cache size that uses the free memory: bytes ="
    f" $config_kv_cache_memory_bytes + ($gpu_memory_free_share - {RESERVE})"
    " * min by (instance) (last_over_time(diag_gpu_memory_total_bytes[$window]))",
    f"the KV cache would be {{value}}, with {100 * RESERVE:g} % of the GPU's memory left as a reserve",
    group=FULLEST_MEMBER,
)
gpu_compute_capability_has_fp8 = signal(
    "GPUs with FP8 (compute capability 8.9 or later, MI300 or later): GPUs ="
    ' count by (instance) (last_over_time(diag_gpu_info{compute_capability=~"8[.]9|9[.].*|1[0-9][.].*"}[$window])'
    ' or last_over_time(diag_gpu_info{name=~"AMD Instinct MI3.+"}[$window]))'
    ' or 0 * count by (instance) (last_over_time(diag_gpu_info{compute_capability!=""}[$window])'
    ' or last_over_time(diag_gpu_info{name=~"AMD Instinct MI[12].+|AMD Radeon .+"}[$window]))',
    "GPUs that support FP8: {value}",
)
chunked_prefill_is_off = signal(
    "chunked prefill is off: bool ="
    f" (1 - $config_enable_chunked_prefill) or 0 * max by (instance) (last_over_time({RUNNING}[$window]))",
    "chunked prefill is off: {value}",
    group=ANY_MEMBER,
)
sequences_in_a_step = signal(
    "--max-num-seqs: tokens = clamp_min($config_max_num_seqs, 256)",
    "a step processes at least {value} tokens: one per request, and enough for a prompt to make progress",
)
twice_the_token_budget = signal(
    "2 x --max-num-batched-tokens: tokens = 2 * $config_max_num_batched_tokens",
    "twice the token budget is {value} tokens",
)
longest_that_is_admitted = signal(
    # vLLM keeps one block empty, for blocks that sliding windows no longer need
    "tokens that the KV cache holds at most: tokens ="
    " $config_kv_cache_size_tokens - ($config_block_size or 0 * $config_kv_cache_size_tokens)",
    "an empty KV cache holds {value} tokens of one request",
)
