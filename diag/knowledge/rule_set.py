"""Recording rules as data: the parts and signals that are recorded, each as PromQL over raw and recorded series.

Every signal that an alert compares with a threshold is recorded, the longest ones that only dashboards draw, every part
that more than one of the resulting expressions uses, and every part over a long range, which changes slowly. Any other
part stands in the expression that uses it.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from diag.core.contract import Contract
from diag.core.incident import Incident, regroup, seconds
from diag.knowledge.formulas import formula, parts_first
from diag.knowledge.signals.ceilings import bandwidth_share, compute_share
from diag.knowledge.signals.gpu import infiniband_link_errors, infiniband_ports_down, nvlinks_trained_again
from diag.knowledge.signals.load import time_until_ttft_missed
from diag.knowledge.signals.peers import tokens_of_peers
from diag.knowledge.signals.startup import OF_A_FORMER_PROCESS
from diag.promql import Formula, pretty

GENERATION = "diag_rules:generation"
"""The end of the name of series that exist for each server, engine and GPU while the rules are evaluated.

Their label `generation` identifies the rules.
"""
_SERVERS = 'group by (instance) (last_over_time({__name__=~"vllm:num_requests_running|diag_vllm_up"}[1d]))'
_ENGINES = (
    "group by (instance, engine)"
    ' (last_over_time({__name__=~"vllm:num_requests_(running|waiting)|vllm:generation_tokens_total"}[5m]))'
)
_GPUS = 'group by (instance, gpu) (last_over_time({__name__=~"diag_gpu_(up|power_watts|utilization_ratio)"}[5m]))'
SUBJECTS = {
    ("instance",): _SERVERS,
    ("instance", "engine"): f"{_ENGINES} or on (instance) instance:{GENERATION}",
    ("instance", "gpu"): f"{_GPUS} or on (instance) instance:{GENERATION}",
}
"""Subjects of the rules: servers; engines and GPUs, and each server without a visible one."""
INTERVAL, SLOW_INTERVAL = "15s", "1m"
"""Evaluation intervals; the second is for alerts over long windows and records of long ranges."""
MOST_LINES = 8
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
LONG = 900.0
"""Seconds from which on a range is long."""
_WORD = re.compile(r"[\w:]+")
_RANGE = re.compile(r"\[(\w+)(?::\w+)?\]")


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
        text = "\n".join(f"{rule.series} {rule.promql}" for rule in sorted(self.rules.values()))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def rule_set(incidents: Iterable[Incident], contract: Contract) -> RuleSet:
    """Return the recording rules for the alerts of these incidents at this site."""
    signals = {
        name: found
        for incident in incidents
        for recorded in (alert_signals, ending_signals, drawn_signals)
        for name, found in recorded(incident, contract).items()
    }
    formulas = parts_first(signals.values())
    # raw expressions of two names are one: the same bucket of a histogram for two thresholds, for example
    key = {name: name if found.parts else found.text for name, found in formulas.items()}
    uses = Counter(key[name] for found in formulas.values() for name in found.references())
    chosen = {
        name: name
        for name, found in formulas.items()
        if name in signals or uses[key[name]] > 1 or _longest_range(found.text) > LONG
    }
    for found in formulas.values():
        while len(pretty(found.text_over(chosen)).splitlines()) > MOST_LINES:
            inside = {name: len(part.text_over(chosen)) for name, part in found.parts.items() if name not in chosen}
            if not inside:
                break
            longest = max(inside, key=inside.__getitem__)
            chosen[longest] = longest

    labels = contract.site.labels
    recorded: dict[str, str] = {}
    rules: dict[str, RecordedSeries] = {}
    written: dict[str, str] = {}
    for name in filter(chosen.__contains__, formulas):
        promql = _over_engines(regroup(formulas[name].text_over(recorded), labels), labels, written)
        series = written.setdefault(promql, promql if promql in rules else at_site(name, labels))
        if series not in rules:
            reads = tuple(dict.fromkeys(word for word in _WORD.findall(promql) if word in rules))
            rules[series] = RecordedSeries(series, promql, reads, _longest_range(promql))
        recorded[name] = series
    return RuleSet(rules, recorded, labels)


def _over_engines(promql: str, labels: tuple[str, ...], written: Mapping[str, str]) -> str:
    """Return the sum of a server as that of its engines, if they are recorded: raw samples are read once."""
    server = ", ".join(labels)
    summed = promql.removeprefix(f"sum by ({server}) (")
    engines = written.get(f"sum by ({server}, engine) ({summed}")
    return f"sum by ({server}) ({engines})" if engines and summed != promql else promql


def _longest_range(promql: str) -> float:
    return max(map(seconds, _RANGE.findall(promql)), default=0.0)


def alert_signals(incident: Incident, contract: Contract) -> dict[str, Formula]:
    """Return the formulas of the signals that the alerts of an incident compare, by name."""
    asked = [(window, condition) for window in incident.windows for condition in incident.conditions]
    asked += [(incident.window, incident.escalates)] if incident.escalates else []
    found = (formula(condition.signal, incident.per, window, contract) for window, condition in asked)
    return {signal.name: signal for signal in found}


def ending_signals(incident: Incident, contract: Contract) -> dict[str, Formula]:
    """Return the formulas that end the alerts of an incident soon after recovery, by name."""
    if not incident.ends_over:
        return {}
    found = (
        formula(incident.ending.signal, incident.per, incident.ends_over, contract),
        formula(OF_A_FORMER_PROCESS, ("instance",), "5m", contract),
    )
    return {signal.name: signal for signal in found}


def drawn_signals(incident: Incident, contract: Contract) -> dict[str, Formula]:
    """Return the formulas of the incident's supporting signals that are recorded for dashboards, by name."""
    drawn = (condition.signal for condition in incident.supports if condition.signal in DRAWN)
    found = (formula(signal, incident.per, DRAWN_OVER, contract) for signal in drawn)
    return {signal.name: signal for signal in found}


def generation_series(per: Sequence[str], labels: Sequence[str]) -> str:
    """Return the series that exists for each subject of this kind while the rules are evaluated."""
    return at_site(f"{'_'.join(per)}:{GENERATION}", labels)


def at_site(series: str, labels: Sequence[str]) -> str:
    """Return the name of a recorded series at a site whose servers are identified by other labels than `instance`."""
    return re.sub(r"(?<![a-z])instance(?=[_:])", "_".join(labels), series, count=1)
