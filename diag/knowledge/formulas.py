"""Formulas of the declared expressions: placeholders filled in, and each part as the series that a rule records.

A recorded series is named by Prometheus' convention, level:metric:operations: the labels of a subject, the name of the
part, and its range function and window, as in `instance_engine:preemptions:increase5m`.

Every signal that an alert compares with a threshold is recorded, the longest ones that only dashboards draw, every part
that more than one of the resulting expressions uses, and every part over a long range, which changes slowly. Any other
part stands in the expression that uses it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from diag.core.contract import Contract
from diag.core.incident import Condition, Incident, Part, Signal, regroup, seconds
from diag.core.metric_prefix import GENERATED, RUNNING, WAITING, in_any_release
from diag.knowledge.signals import (
    DECLARED,
    bandwidth_share,
    compute_share,
    infiniband_link_errors,
    infiniband_ports_down,
    nvlinks_trained_again,
    time_until_ttft_missed,
    tokens_of_peers,
)
from diag.promql import Formula, pretty

PLACEHOLDER = re.compile(r"\$\$|\$(\w+)(?:\[(\w+)\])?(?: offset (\w+))?(?: by \(([^()]*)\))?")
"""A dollar sign, or a name with the window, the offset and the labels that replace those of the surrounding text."""
_GROUPING = re.compile(r"\bby \(([^()]*)\)|\$(?!by\b|window\b)(\w+)(?:\[\w+\])?(?: offset \w+)?(?: by \(([^()]*)\))?")
_COPIED = re.compile(r"\bgroup_left \(([^()]+)\)")
_RANGE_FUNCTION = re.compile(r"(\w+?)(?:_over_time)?\([^()]*\[")
_Values = tuple[tuple[str, float], ...]
GENERATION = "diag_rules:generation"
"""The end of the name of series that exist for each server, engine and GPU while the rules are evaluated.

Their label `generation` identifies the rules.
"""
_SERVERS = f'group by (instance) (last_over_time({{__name__=~"{RUNNING}|diag_vllm_up"}}[1d]))'
_ENGINES = f'group by (instance, engine) (last_over_time({{__name__=~"{RUNNING}|{WAITING}|{GENERATED}"}}[5m]))'
_GPUS = 'group by (instance, gpu) (last_over_time({__name__=~"diag_gpu_(up|power_watts|utilization_ratio)"}[5m]))'
SUBJECTS = {
    ("instance",): in_any_release(_SERVERS),
    ("instance", "engine"): f"{in_any_release(_ENGINES)} or on (instance) instance:{GENERATION}",
    ("instance", "gpu"): f"{_GPUS} or on (instance) instance:{GENERATION}",
}
"""Subjects of the rules: servers; engines and GPUs, and each server without a visible one."""
INTERVAL, TICKET_INTERVAL, SLOW_INTERVAL = "15s", "30s", "1m"
"""Evaluation intervals: of pages, of tickets over minutes, and of long ranges, alerts over long windows and infos."""
MOST_LINES = 15
"""Lines of a recording rule; the parts of a longer one are recorded on their own."""
DRAWN_OVER = "5m"
DRAWN = (
    bandwidth_share,
    compute_share,
    tokens_of_peers,
    infiniband_link_errors,
    infiniband_ports_down,
    nvlinks_trained_again,
    time_until_ttft_missed,
)
"""Signals that no alert compares and that are too long for the query of a dashboard, and the window they have there."""
OF_A_FORMER_PROCESS = DECLARED["samples_of_a_former_process"]
LONG = 900.0
"""Seconds from which on a range is long."""
_WORD = re.compile(r"[\w:]+")
_RANGE = re.compile(r"\[(\w+)(?::\w+)?\]")


def formula(asked: Part | Signal | str, per: tuple[str, ...], window: str, contract: Contract) -> Formula:
    """Return the formula of a signal, a part or an expression for subjects with the labels `per`.

    KeyError names an unknown placeholder.
    """
    return _filled(asked, per, window, "", tuple(contract.values().items()))


def conjunction(incident: Incident, window: str, contract: Contract) -> Formula:
    """Return what the doctor calls present as one PromQL conjunction, infos too: one sample per affected subject."""
    parts, terms = {}, []
    for condition in incident.conditions:
        part = formula(condition.signal, incident.per, window, contract)
        parts[part.name] = part
        terms.append(comparison(part.name, condition, contract))
    return Formula("", " and ".join(terms), parts)


def parts_first(formulas: Iterable[Formula]) -> dict[str, Formula]:
    """Return formulas and all their parts by name, each after those that it reads."""
    by_name: dict[str, Formula] = {}

    def add(reader: Formula) -> None:
        if reader.name not in by_name:
            for part in reader.parts.values():
                add(part)
            by_name[reader.name] = reader

    for reader in formulas:
        add(reader)
    return by_name


def comparison(series: str, condition: Condition, contract: Contract) -> str:
    return f"{series} {condition.op} {contract.limit(condition.limit):g}"


@lru_cache(maxsize=4096)
def expanded(promql: str) -> str:
    """Return an expression with its parts written out; `$window`, `$by` and entries of the contract stay."""

    def put(place: re.Match[str]) -> str:
        part = DECLARED.get(place[1] or "")
        if part is None:
            return place[0]
        text = expanded(part.promql)
        text = text.replace("$window", place[2]) if place[2] else text
        text = re.sub(r"(\[[$\w]+\])", rf"\1 offset {place[3]}", text) if place[3] else text
        return f"({text.replace('$by', place[4]) if place[4] else text})"

    return PLACEHOLDER.sub(put, promql)


@lru_cache(maxsize=4096)  # a catalogue over one window takes 600
def _filled(asked: Part | Signal | str, per: tuple[str, ...], window: str, ago: str, values: _Values) -> Formula:
    entries = {**_written(values), "window": window, "by": ", ".join(per)}
    parts: dict[str, Formula] = {}

    def put(place: re.Match[str]) -> str:
        name, own_window, own_offset, by = place.groups()
        if name is None:
            return "$"
        if name in entries:
            return entries[name] + place[0][len(name) + 1 :]
        own_per = per if by is None else _labels(by, per)
        part = _filled(DECLARED[name], own_per, own_window or window, own_offset or ago, values)
        parts[part.name] = part
        return part.name

    promql = in_any_release(asked if isinstance(asked, str) else asked.promql)
    if ago:
        promql = promql.replace("[$window]", f"[$window] offset {ago}")
    text = PLACEHOLDER.sub(put, promql) if "$" in promql else promql
    if isinstance(asked, str):
        return Formula("", text, parts)

    # the name of the series that a rule records
    operations, has_window = _operations(asked.promql)
    over = f"{window}{f'_offset{ago}' if ago else ''}" if has_window else ""
    labels = _level(asked.promql, per)
    if "histogram_quantile(" in expanded(asked.promql):  # it takes the buckets away
        labels = tuple(label for label in labels if label != "le")
    level = "_".join(labels) or "series"
    return Formula(":".join(filter(None, (level, asked.id, f"{operations}{over}"))), text, parts)


@lru_cache(maxsize=4096)
def _operations(promql: str) -> tuple[str, bool]:
    """Return the range function of an expression without parts that has one, and whether any range is the window."""
    whole = expanded(promql)
    is_leaf = whole == promql and promql.count("[") == 1
    return "".join(_RANGE_FUNCTION.findall(promql)) if is_leaf else "", "$window" in whole


@lru_cache
def _written(values: _Values) -> Mapping[str, str]:
    return {name: f"{value:g}" for name, value in values}


@lru_cache(maxsize=4096)
def _level(promql: str, per: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of the result: those of its first aggregation or part, and those that are copied to it."""
    clause = _GROUPING.search(promql)
    if clause is None:
        return ()
    if clause[2] is not None:
        if clause[2] not in DECLARED:
            return _level(promql[clause.end() :], per)
        labels = _level(DECLARED[clause[2]].promql, _labels(clause[3], per) if clause[3] else per)
    else:
        labels = _labels(clause[1], per)
    copied = "group_left" in promql and _COPIED.search(promql)
    return tuple(dict.fromkeys((*labels, *(_labels(copied[1], per) if copied else ()))))


def _labels(written: str, per: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of a grouping clause, `per` in the place of `$by`."""
    labels = (label.strip() for label in written.split(","))
    return tuple(name for label in labels for name in (per if label == "$by" else (label,)))


class RecordedSeries(NamedTuple):
    """One recording rule: the series, its PromQL, the rules that it reads, and the longest range that it selects.

    `longest_range` is in seconds, 0 if the rule selects no range itself.
    """

    series: str
    promql: str
    reads: tuple[str, ...]
    longest_range: float


class RuleSet(NamedTuple):
    """The recording rules by their series, in an order in which each reads only those before it.

    `recorded` is the series of every recorded formula by its name: formulas with the same expression share one.
    """

    rules: Mapping[str, RecordedSeries]
    recorded: Mapping[str, str]
    labels: tuple[str, ...]

    @property
    def series(self) -> dict[str, str]:
        """The recorded series at this site, by the name that formulas use."""
        subjects = {generation_series(per, ("instance",)): generation_series(per, self.labels) for per in SUBJECTS}
        return {**subjects, **self.recorded}

    @property
    def generation(self) -> str:
        """A short hash of all rules: two generations with the same hash record the same."""
        import hashlib  # noqa: PLC0415  # 4 ms of each start, for the rules alone

        text = "\n".join(f"{rule.series} {rule.promql}" for rule in sorted(self.rules.values()))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def rule_set(incidents: Iterable[Incident], contract: Contract) -> RuleSet:
    """Return the recording rules for the alerts of these incidents at this site."""
    signals: dict[str, Formula] = {}  # that the alerts of an incident compare, and that dashboards draw
    for incident in incidents:
        asked = [(window, condition) for window in incident.windows for condition in incident.alerting]
        asked += [(incident.window, condition) for rising in incident.rising for condition in rising.alerting]
        asked += [(incident.window, incident.escalates)] if incident.escalates else []
        read = [formula(condition.signal, incident.per, window, contract) for window, condition in asked]
        read += ending_signals(incident, contract).values()
        drawn = (condition.signal for condition in incident.supports if condition.signal in DRAWN)
        read += (formula(signal, incident.per, DRAWN_OVER, contract) for signal in drawn)
        signals |= {reader.name: reader for reader in read}
    formulas = parts_first(signals.values())
    # raw expressions of two names are one: the same bucket of a histogram for two thresholds, for example
    key = {name: name if reader.parts else reader.text for name, reader in formulas.items()}
    uses = Counter(key[name] for reader in formulas.values() for name in reader.references())
    chosen = {
        name: name
        for name, reader in formulas.items()
        if name in signals or uses[key[name]] > 1 or _longest_range(reader.text) > LONG
    }
    for reader in formulas.values():
        while len(pretty(reader.text_over(chosen)).splitlines()) > MOST_LINES:
            inside = {name: len(part.text_over(chosen)) for name, part in reader.parts.items() if name not in chosen}
            if not inside:
                break
            longest = max(inside, key=inside.__getitem__)
            chosen[longest] = longest

    labels, server = contract.site.labels, ", ".join(contract.site.labels)
    recorded: dict[str, str] = {}
    rules: dict[str, RecordedSeries] = {}
    written: dict[str, str] = {}
    for name in filter(chosen.__contains__, formulas):
        promql = regroup(formulas[name].text_over(recorded), labels)
        # the sum of a server is that of its engines, if they are recorded: raw samples are read once
        summed = promql.removeprefix(f"sum by ({server}) (")
        engines = written.get(f"sum by ({server}, engine) ({summed}")
        promql = f"sum by ({server}) ({engines})" if engines and summed != promql else promql
        series = written.setdefault(promql, promql if promql in rules else at_site(name, labels))
        if series not in rules:
            reads = tuple(dict.fromkeys(word for word in _WORD.findall(promql) if word in rules))
            rules[series] = RecordedSeries(series, promql, reads, _longest_range(promql))
        recorded[name] = series
    return RuleSet(rules, recorded, labels)


def _longest_range(promql: str) -> float:
    return max(map(seconds, _RANGE.findall(promql)), default=0.0)


def ending_signals(incident: Incident, contract: Contract) -> dict[str, Formula]:
    """Return the formulas that end the alerts of an incident soon after recovery, by name."""
    if not incident.ends_over:
        return {}
    formulas = (
        formula(incident.ending.signal, incident.per, incident.ends_over, contract),
        formula(OF_A_FORMER_PROCESS, ("instance",), "5m", contract),
    )
    return {signal.name: signal for signal in formulas}


def generation_series(per: Sequence[str], labels: Sequence[str]) -> str:
    """Return the series that exists for each subject of this kind while the rules are evaluated."""
    return at_site(f"{'_'.join(per)}:{GENERATION}", labels)


def model_series(labels: Sequence[str]) -> str:
    """Return the series that names each server, up or down: its model_name, namespace, pod, job, and `place`."""
    return at_site("instance:served_model:last", labels)


def served_models(labels: Sequence[str]) -> str:
    """Return the PromQL of that series: labels that were last seen on the server, for as long as the rules see it."""
    by = ", ".join(dict.fromkeys((*labels, "model_name", "namespace", "pod", "job")))
    server, evaluated = f"on ({', '.join(labels)})", generation_series(("instance",), labels)
    places = {"": labels} if labels != ("instance",) else {'{pod!=""}': ("namespace", "pod"), '{pod=""}': labels}
    named = " or ".join(
        f'label_join(label_join(group by ({by}) ({in_any_release(RUNNING + matcher)}), "server", "/",'
        f' {", ".join(map(json.dumps, names))}), "place", " at ", "model_name", "server")'
        for matcher, names in places.items()
    )
    return f"{named} or {server} (last_over_time({model_series(labels)}[10m]) and {server} {evaluated})"


def at_site(series: str, labels: Sequence[str]) -> str:
    """Return the name of a recorded series at a site whose servers are identified by other labels than `instance`."""
    return re.sub(r"(?<![a-z])instance(?=[_:])", "_".join(labels), series, count=1)
