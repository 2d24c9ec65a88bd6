"""Signals of the running configuration, and parts that signals of many files use: counters, gauges of load, settings.

Only range functions look at samples, so one missed scrape hides nothing; a gauge needs three samples in the window. A
metric that vLLM renamed is `(new or old)`. Comparisons inside an expression are `bool`, so a signal is missing only
if telemetry is missing. Metric names and their versions: vLLM 0.8 - 0.33, from its source. Fixes are computed from the
settings and from the memory that they leave free.
"""

import re
from collections.abc import Iterable, Mapping
from functools import reduce
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any, get_type_hints

from diag.core import log_events as events
from diag.core.declarations import Mistake, did_you_mean, no_key, shown_path, typed
from diag.core.errors import BadDeclaration
from diag.core.incident import Condition, Part, Signal
from diag.core.metric_prefix import ANY, CACHE_INFO, OWN, PROBE, RUNNING, WAITING, metric

NOW = {gauge: f"sum by ($by) (last_over_time({gauge}[$window]))" for gauge in (RUNNING, WAITING)}
IN_FLIGHT = " + ".join(NOW.values())
CAPACITY = metric('num_requests_waiting_by_reason{reason="capacity"}')
RENAMED_ON_PAGE = f'last_over_time(diag_vllm_metrics_renamed{{prefix!="{OWN}"}}[$window])'
STORED_UNDER_OTHER_NAMES = f'last_over_time({{__name__=~"{ANY}({PROBE})",__name__!~"{OWN}num_.+"}}[$window])'
TTFT = metric("time_to_first_token_seconds")
ITL = metric("inter_token_latency_seconds")
E2E = metric("e2e_request_latency_seconds")
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
_PLACE = re.compile(r"\{([A-Za-z_][\w.]*)(?: ((?:[^{}]|\{[^{}]*\})+))?\}")
_ARGUMENT = re.compile(r"(?:(\w+): )?([^;]+)(?:; )?")
_PART = re.compile(r"(?P<name>\w+)(?:: ?(?P<unit>[^(=]*?))?(?: ?\((?P<group>[^=]*)\))? =(?: (?P<promql>.+))?")


_FIELDS = get_type_hints(Signal)
_FILES = {file.stem for file in Path(__file__).parent.glob("*.promql")}


def percent(share: float) -> str:
    return f"{100 * share:g}"


def minutes(time: float) -> str:
    return f"{time / 60:g}"


def thousands(number: int) -> str:
    return f"{number:,}"


def one_of(names: Iterable[str]) -> str:
    return "|".join(names)


def declared(module: Mapping[str, Any], *texts: str, **imported: Any) -> tuple[tuple[Part, ...], dict[str, Signal]]:
    """Return the parts and the signals of the file beside a module, MODULE.promql, and the parts in further texts.

    A part is a line `name: unit (reason for the member) = PromQL`; unit and reason may be missing. A signal is a line
    `[name]`, by which incidents refer to it, a line `words: unit = PromQL`, and a line `field: value` for each further
    field of Signal. An indented line continues the one above; # begins a comment. `{NAME}` stands for a name of the
    module, of this one, or a given one, `{steps.NAME}` for one of another module of signals, `{events.NAME}` for a log
    event, and `{function text; NAME; key: text}` for what a function returns. In the sentences of a signal, `{name}` is
    its value or a label.
    """
    names = {**globals(), **module, **imported}
    file = Path(module["__file__"]).with_suffix(".promql")
    written = statements(file.read_text(encoding="utf-8"))
    declared_parts: list[Part] = []
    fields: dict[str, dict[str, Any]] = {}
    for number, line in (*written, *((0, line) for text in texts for _, line in statements(dedent(text)))):
        try:
            if line.startswith("["):
                if (name := line[1:-1]) in fields:
                    raise Mistake(f"the signal '{name}' exists twice")
                fields[name] = {}
            elif not number or not fields:
                if (part := _PART.fullmatch(filled(line, names))) is None:
                    raise Mistake(f"'{line}' must be `name: unit = PromQL`")
                declared_parts.append(Part(*(text or "" for text in part.group("name", "promql", "unit", "group"))))
            else:
                add_to_signal(line, fields[name], names)
        except Mistake as mistake:
            if not number:
                raise
            raise BadDeclaration(f"{shown_path(file)}:{number}: {mistake}") from mistake
    for name, given in fields.items():
        if "sentence" not in given:
            raise BadDeclaration(f"{shown_path(file)}: the signal '{name}' lacks the key 'sentence'")
    return tuple(declared_parts), {name: Signal(**given) for name, given in fields.items()}


def statements(text: str) -> list[tuple[int, str]]:
    """Return each statement of a file in one line, with the number of its first line."""
    statements: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(" ") and statements and not line.lstrip().startswith("#"):
            statements[-1] = statements[-1][0], f"{statements[-1][1]} {line.strip()}"
        elif line and not line.startswith("#"):
            statements.append((number, line))
    return statements


def add_to_signal(line: str, fields: dict[str, Any], names: Mapping[str, Any]) -> None:
    """Add one more line of a signal to its fields: its formula, then one field at a time."""
    if not fields:
        name, colon, rest = filled(line, names).partition(": ")
        unit, equals, promql = rest.partition(" = ")
        if not colon or not equals:
            raise Mistake(f"'{line}' must be `words: unit = PromQL`")
        fields.update(name=name, unit=unit, promql=promql)
        return
    key, _, text = line.partition(": ")
    if key not in Signal._fields:
        raise Mistake(no_key(key, Signal._fields))
    value = filled(text, names, is_text=key != "culprit_promql")
    as_typed = {bool: {"true": True}.get(value, value), tuple[str, ...]: value.split("; ")}
    fields[key] = typed(as_typed.get(_FIELDS[key], value), _FIELDS[key], (key,))


def filled(text: str, names: Mapping[str, Any], is_text: bool = False) -> str:
    """Return a text with what its places stand for; a word in lower case is none in a text."""
    if "{" not in text:
        return text

    def meant(word: str) -> Any:
        first, *attributes = word.split(".")
        if not attributes:
            return names.get(word, word)
        if first not in {"events", *_FILES}:
            return reduce(getattr, attributes, names[first]) if isinstance(names.get(first), tuple) else word
        module = events if first == "events" else import_module(f"{__package__}.{first}")
        if not hasattr(module, attributes[0]):
            raise Mistake(f"{first} has no '{attributes[0]}'{did_you_mean(attributes[0], dir(module))}")
        return getattr(module, attributes[0])

    def put(place: re.Match[str]) -> str:
        if is_text and place[1].islower() and "." not in place[1] and not place[2]:
            return place[0]
        if (value := meant(place[1])) == place[1]:
            raise Mistake(f"'{place[1]}' is not defined{did_you_mean(place[1], names)}")
        if not callable(value):
            return str(value)
        words = [word.groups() for word in _ARGUMENT.finditer(_PLACE.sub(put, place[2] or ""))]
        texts = [meant(text) for key, text in words if not key]
        return str(value(*texts, **{key: meant(text) for key, text in words if key}))

    return _PLACE.sub(put, text)


def configured(setting: str) -> str:
    """Return the running value of a setting, one per instance; missing if no source publishes it."""
    return f'max by (instance) (last_over_time(diag_vllm_config{{flag="{setting}"}}[$window]))'


def setting_value(setting: str) -> str:
    """Return the running value of any setting: its part if it has one, otherwise the expression."""
    return f"$config_{setting}" if setting in CONFIG else configured(setting)


def cache_config_has(label: str, pattern: str) -> str:
    """Return 1 for each instance whose label of cache_config_info matches the pattern, else 0."""
    return (
        f'(max by (instance) (last_over_time({CACHE_INFO}{{{label}=~"{pattern}"}}[$window]))'
        f" or 0 * max by (instance) (last_over_time({CACHE_INFO}[$window])))"
    )


def edge(limit: str) -> str:
    """Return the matcher of a histogram bucket, whose edge is written 1 or 1.0 by different exporters."""
    return f'le="{limit}"' if "." in limit else f'le=~"{limit}|{limit}[.]0"'


def within(limit: str, histogram: str) -> str:
    """Return the observations at or below an edge of a histogram."""
    return f"sum by ($by) (increase({histogram}_bucket{{{edge(limit)}}}[$window]))"


def labelled(label: str, series: Mapping[str, str]) -> str:
    """Return several expressions as series of one, each with its name as the value of a label."""
    return " or ".join(f'label_replace({promql}, "{label}", "{name}", "", "")' for name, promql in series.items())


def any_of(**signs: str) -> str:
    """Return the largest of several signs: 1 if one shows, 0 if none of those that can be observed does."""
    return f"max by ($by) ({labelled('is', signs)})"


def times_the_capacity(concurrency: str) -> str:
    """Return how many servers a load needs: by its concurrency, `concurrency` servers.

    Clients that wait for their answers keep so many requests in flight. Those that do not leave a backlog, which grows
    for as long as more requests arrive than are answered, or until they give up: then that ratio is the load, whatever
    the backlog. One that has grown within half an hour is theirs, too, unless it stays at its peak.
    """
    return (
        f"($arrivals_per_answer_of_impatient_clients < {concurrency}"
        f" or $arrivals_per_answer_of_growing_backlog < {concurrency}"
        f" or $arrivals_per_answer_of_former_backlog < {concurrency} or {concurrency})"
    )


def waiting_for_capacity(function: str, of_all: str = "") -> str:
    """Return a function, such as `max_over_time({}[$window])`, of the requests that wait for capacity, by series.

    vLLM 0.20 and later also counts waiting requests by reason. A deferred one waits for a KV transfer, a grammar or a
    LoRA slot: more capacity would not run it. Earlier releases export only the sum; `of_all` is its part.
    """
    return f"{function.format(CAPACITY)} or ignoring (reason) {of_all or function.format(WAITING)}"


RESERVE = 0.05
"""Share of a GPU's memory that fixes leave free."""


def running_value(flag: str) -> Signal:
    name = f"--{flag.replace('_', '-')}"
    return Signal(name, setting_value(flag), f"{name} is {{value}}")


def throughout(signal: Signal) -> Signal:
    """Return a signal whose conditions hold once they have held in the whole window."""
    return signal._replace(throughout=True)


def opposite(condition: Condition) -> Condition:
    return condition.opposite


def unless_unset(setting: str) -> Signal:
    """Return the value of a KV cache setting, 0 if vLLM exports that it is not set."""
    unset = f'0 * max by (instance) (last_over_time({CACHE_INFO}{{{setting}="None"}}[$window]))'
    return running_value(setting)._replace(promql=f"{setting_value(setting)} or {unset}")


PARTS, SIGNALS = declared(
    vars(),
    *(f"config_{name} = {configured(name)}" for name in CONFIG),
)
