"""The model of an incident: signals, conditions with their thresholds, look-alikes and fixes.

Everything here is frozen data. One `Incident` is the single source of the doctor's verdict, the Prometheus alert, the
dashboard and the runbook; nothing in this file depends on any of them. An expression may use these placeholders:

$window          the range of a range selector ("30s" for a live diagnosis, "5m" in an alert)
$by              the labels of one subject, `Incident.per`
$freeze_seconds  an entry of the measurement contract (diag.toml)
$preemptions     a part or a signal by its name; `$preemptions[2m]` over another window, `$preemptions offset 1h` at an
                 earlier time, `$preemptions by (instance)` for another kind of subject
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

from diag.core.formatting import quantity

Severity = Literal["info", "warning", "critical"]
Comparison = Literal[">", ">=", "<", "<="]
Operation = Literal["log", "drain", "cordon", "scale", "pause", "rollback", "restart"]
RANK: dict[Severity, int] = {"info": 0, "warning": 1, "critical": 2}
OPPOSITE: dict[Comparison, Comparison] = {">": "<=", ">=": "<", "<": ">=", "<=": ">"}
"""The comparison that holds if one does not."""


class Source(NamedTuple):
    """The rationale of a number; `reference` is a permalink, a recording's name, or empty (judged).

    `{threshold}` in `says` stands for the threshold of the condition that it explains.
    """

    kind: Literal["documented", "measured", "reported", "judged"]
    says: str
    reference: str = ""


def documented(says: str, link: str) -> Source:
    """The vendor's documentation or source code states it."""
    return Source("documented", says, link)


def measured(says: str, recording: str) -> Source:
    """A recording in tests/recordings shows it."""
    return Source("measured", says, recording)


def reported(says: str, link: str) -> Source:
    """A published report contains this measurement."""
    return Source("reported", says, link)


def judged(says: str) -> Source:
    """A judgement that no measurement supports yet."""
    return Source("judged", says)


class Part(NamedTuple):
    """A PromQL expression with a name, over raw series or over other parts; several signals may use it.

    If several expressions of the generated rules use a part, a recording rule evaluates it once. `unit` and `group`
    are as in `Signal`.
    """

    name: str
    promql: str
    unit: str = ""
    group: str = ""

    @property
    def id(self) -> str:
        """The name by which an expression refers to the part."""
        return self.name


class RecordingRule(NamedTuple):
    """A metric of diag that the metrics of another exporter have as well.

    `promql` is its value in our unit; `labels` are added to it, and `kept` are the other exporter's labels to keep.
    """

    metric: str
    promql: str
    labels: Mapping[str, str] = MappingProxyType({})
    kept: tuple[str, ...] = ()


class Signal(NamedTuple):
    """One PromQL expression that yields one number per subject, and the sentence that states it.

    `sentence` has one `{value}`. `unit` decides how the value is printed (`diag.core.formatting.quantity`): "share" for
    0..1, "seconds", "bytes", "celsius", "watts", "bool" for 1 or 0, "ratio" for x per y; any other unit names what is
    counted. `window_scaling`: a threshold holds at any window ("rate": shares, ratios, means) or grows with the window
    ("peak": maxima and counts of events). `throughout`: a condition on the signal holds once it has held in
    the whole window, so it began a window before it shows. `hindsight`: a condition that does not hold now did not hold
    two minutes ago either, when its value was not known yet. `context`: a healthy server at work has such values, too,
    so a condition that holds is no sign of trouble. `needs` names what has to happen before the signal has a value
    ("10 finished requests"): a few events prove nothing. `group` is the reason for the member (GPU, engine, rank,
    process) whose value stands for its group, if the expression takes the least, the largest or the median of them.
    `formerly` are former names, which a site's file may still use for the threshold.

    If the number does not identify the rank or the event that it is about, `culprit_promql` is PromQL with one series
    for each of them, and `culprit_label` is filled with the labels and the value (of `culprit_unit`) of each series:
    "rank {rank}", "{phase} for {value}".
    """

    name: str
    promql: str
    sentence: str
    unit: str = ""
    window_scaling: Literal["rate", "peak"] = "rate"
    throughout: bool = False
    hindsight: bool = False
    context: bool = False
    needs: str = ""
    culprit_promql: str = ""
    culprit_label: str = ""
    culprit_unit: str = ""
    group: str = ""
    formerly: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The name by which an expression refers to the signal: its words, as in `preemptions_per_finished_request`."""
        return _id(self.name)

    def above(self, limit: float | str, why: Source) -> "Condition":
        """`self > limit`; a limit given by name is an entry of the measurement contract."""
        return _condition(self, ">", limit, why)

    def at_least(self, limit: float | str, why: Source) -> "Condition":
        return _condition(self, ">=", limit, why)

    def below(self, limit: float | str, why: Source) -> "Condition":
        return _condition(self, "<", limit, why)

    def at_most(self, limit: float | str, why: Source) -> "Condition":
        return _condition(self, "<=", limit, why)


class Condition(NamedTuple):
    """A signal, a comparison, a threshold (`limit`), and the rationale of the threshold."""

    signal: Signal
    op: Comparison
    limit: float | str
    why: Source

    @property
    def opposite(self) -> "Condition":
        return self._replace(op=OPPOSITE[self.op])

    @property
    def limit_with_unit(self) -> str:
        """The threshold for a text beside the condition, "5 %"; the name of an entry of the contract stays a name."""
        return self.limit if isinstance(self.limit, str) else quantity(self.limit, self.signal.unit)


@lru_cache(maxsize=4096)
def _id(name: str) -> str:
    words = name.replace("--", "").replace("/", " per ").replace("'", "")
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def _condition(signal: Signal, op: Comparison, limit: float | str, why: Source) -> Condition:
    """Return the condition, with its threshold in the place of `{threshold}` in the rationale."""
    condition = Condition(signal, op, limit, why)
    if "{threshold}" not in why.says:
        return condition
    return condition._replace(why=why._replace(says=why.says.replace("{threshold}", condition.limit_with_unit)))


class LookAlike(NamedTuple):
    """A situation with the same symptoms, and how to distinguish it from the incident.

    `incident` is the id of one that is an incident, which has to exist; it is its `name`, too.
    `requires` must hold, or the incident is absent. `refuted_by` is one of the incident's symptoms or supports: if it
    holds, the look-alike is ruled out; otherwise the look-alike stays possible.
    """

    name: str
    distinguish: str
    requires: Condition | None = None
    refuted_by: Condition | None = None
    incident: str = ""


class Fix(NamedTuple):
    """One fix: a vLLM flag, an environment variable, a host command, or (with none of these) advice.

    A command may use the labels of the subject, such as `{gpu}`; the command and `change` may use `{value}`.

    `value` is a constant, or a Signal that computes the number from this server's telemetry; it is then rounded and
    kept between `least` and `most`, each a number or a Signal. None with a flag removes the flag. `also` are flags that
    change together with it. `direction` is the way the value may go: a proposal that would not move the running value
    that way is omitted. `current` is the running value as telemetry shows it, before any source of settings. `only_if`
    are the conditions under which the fix applies: if one is false, the fix is omitted; if one cannot be judged, the
    fix is kept and reports the telemetry it needs. `expects` are the conditions that must hold once the fix is applied;
    without any, the incident's first symptom must be gone. `risk` is the trade-off.

    `while_it_lasts`: the fix only makes sense before the incident has ended. A command may also use the labels of the
    culprits that the signals of `only_if` name, such as `{pid}`. `pools`: diag/diagnosis/pools.py replaces `change` by
    the pools that it finds for this server's lengths; the fix is omitted if none helps.

    A flag is proposed only to releases whose parser accepts it (diag/vllm/flags/flags.json). `versions` is the first
    and the last release in which the variable is read or the flag takes this value, "" for an open end. `instead_of`
    names a flag that this one replaces in releases without that flag.
    """

    change: str
    effect: str
    why: Source
    flag: str = ""
    environment: str = ""
    command: str = ""
    value: float | str | Signal | None = None
    also: tuple[tuple[str, Signal], ...] = ()
    rounding: Literal["nearest", "up", "power_of_two_below", "hundredth_below"] = "nearest"
    least: float | Signal = 1
    most: float | Signal | None = None
    direction: Literal["lower", "raise", ""] = ""
    current: Signal | None = None
    only_if: tuple[Condition, ...] = ()
    expects: tuple[Condition, ...] = ()
    versions: tuple[str, str] = ("", "")
    instead_of: str = ""
    risk: str = ""
    rollback: str = ""
    restart: bool = True
    while_it_lasts: bool = False
    pools: bool = False

    @property
    def kind(self) -> Literal["vllm_flag", "environment", "host_command", "advice"]:
        """The kind of change, as the JSON report names it."""
        if self.flag:
            return "vllm_flag"
        if self.environment:
            return "environment"
        return "host_command" if self.command else "advice"

    @property
    def name(self) -> str:
        """The flag, the variable or the command; empty for advice."""
        return self.flag or self.environment or self.command

    @property
    def signals(self) -> tuple[Signal, ...]:
        named = (self.value, self.least, self.most, self.current, *(value for _, value in self.also))
        return tuple(value for value in named if isinstance(value, Signal))


class Effect(NamedTuple):
    """An incident that another one causes under conditions; its alert is not muted, which no condition could limit.

    `where` are conditions on signals of the cause or of the effect, all of which must hold. `began_first`: the cause
    must have begun no later than the effect, whose onset is known, and earlier if either may explain the other. A cause
    that has ended explains nothing that goes on, and a missing reading decides nothing: both incidents then stand side
    by side.
    """

    incident: str
    where: tuple[Condition, ...] = ()
    began_first: bool = False


class BurnRateWindow(NamedTuple):
    """A burn-rate alert over two windows: in both of them the first symptom must be above `factor`.

    The long window shows that the violation is worth a page; the short one ends the alert soon after the violation has
    ended.
    """

    factor: float
    long: str
    short: str


class Incident(NamedTuple):
    """One incident: present if every symptom and every look-alike's `requires` holds.

    `per` are the labels of one subject. `window` is the range of the alert, `live_window` that of a live diagnosis,
    `hold` the alert's `for`, `immediate` the reason why a critical alert has none; with `burns`, burn-rate windows
    instead of `window`, except for the critical alert of `escalates`; where `sudden` holds, half of the lowest burn
    rate is told over `window` already. `ended_by` is the signal of the symptom that shows soonest that it is over, if
    that is not the first. `explains` names incidents that are consequences of this one in any case, `may_explain` those
    that are under a condition. `telemetry`: it is about the telemetry, and is reported after all others. The culprits
    of `quotes` are log lines that decide; `lints`: a wrong launch command may be the cause. `outage`: while it lasts,
    requests fail or stand still, so each episode counts, however short, and is a warning for 15 minutes after its end.
    `crash` tells a crash from a restart: without it, an episode after which another process answers is a restart.
    `began` is the unix time at which it began, if a signal knows it. `ended` is the unix time since which it is over,
    although its symptoms still hold, and has no value before: such an incident stays a warning for 15 minutes.
    `sign` is above 0 at each scrape that shows it, however few: an episode began at the first of an unbroken row of
    them. `serious`, one of `supports`, is the stronger form of the symptom `mild`: the incident is an info unless it
    holds, and the alert has it in place of `mild`. `impact` is what users notice, `mitigate` what helps immediately
    without a restart, `operations` what an operator does for it, in this order, with the commands of
    diag/artefacts/operations.toml, `hand_over` what the vendor's engineers need, `do_not` what makes the incident
    worse.
    """

    id: str
    title: str
    severity: Severity
    per: tuple[str, ...]
    cause: str
    impact: str
    symptoms: tuple[Condition, ...]
    looks_like: tuple[LookAlike, ...]
    fixes: tuple[Fix, ...]
    ended_by: Signal | None = None
    supports: tuple[Condition, ...] = ()
    explains: tuple[str, ...] = ()
    may_explain: tuple[Effect, ...] = ()
    escalates: Condition | None = None
    serious: Condition | None = None
    mild: Condition | None = None
    window: str = "5m"
    live_window: str = "30s"
    hold: str = "1m"
    immediate: str = ""
    burns: tuple[BurnRateWindow, ...] = ()
    sudden: Condition | None = None
    quotes: Signal | None = None
    lints: bool = False
    telemetry: bool = False
    outage: bool = False
    crash: Condition | None = None
    began: Signal | None = None
    ended: Signal | None = None
    sign: Signal | None = None
    mitigate: tuple[str, ...] = ()
    operations: tuple[Operation, ...] = ()
    hand_over: tuple[str, ...] = ()
    do_not: tuple[str, ...] = ()

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """All conditions that must hold, in the order in which they are reported."""
        return self.symptoms + tuple(look.requires for look in self.looks_like if look.requires)

    @property
    def alerting(self) -> tuple[Condition, ...]:
        """The conditions of its alert."""
        stronger = {self.mild: self.serious}
        return tuple(stronger.get(condition) or condition for condition in self.conditions)

    @property
    def every_condition(self) -> tuple[Condition, ...]:
        return (*self.conditions, *self.supports, *filter(None, (self.escalates, self.crash, self.sudden)))

    @property
    def windows(self) -> tuple[str, ...]:
        """Every window over which its alerts judge; an escalated one judges over `window`."""
        burning = [window for burn in self.burns for window in (burn.short, burn.long)]
        return tuple(dict.fromkeys([*burning, *([] if burning and not self.escalates else [self.window])]))

    @property
    def ending(self) -> Condition:
        """The condition that ends its alert once it holds over the short window `ends_over`.

        Half of a symptom's lower bound refutes it: a short window is noisy, and between the two the long one decides. A
        count is refuted if nothing is counted any more, a burn rate if the SLO is kept.
        """
        signal = self.ended_by or self.symptoms[0].signal
        opposite = next(symptom.opposite for symptom in self.symptoms if symptom.signal == signal)
        if isinstance(opposite.limit, str) or opposite.op not in ("<", "<="):
            return opposite
        if signal.window_scaling == "peak":
            return opposite._replace(op="<=", limit=0)
        return opposite._replace(limit=1 if self.burns else opposite.limit / 2)

    @property
    def ends_over(self) -> str:
        """The short window over which its alert is refuted.

        Empty if its own is as short, or it takes hours to begin or to end (an upgrade).
        """
        if not 120 < seconds(self.window) < 900 or seconds(self.hold) > 3600:
            return ""
        return "4m" if self.burns else "2m"

    @property
    def remembers(self) -> str:
        """The time for which a refutation holds without a new value: that in which older samples leave the window."""
        leaves = f"{seconds(self.window) - seconds(self.ends_over or self.window):.0f}s"
        return max((burn.short for burn in self.burns), key=seconds, default=leaves)

    def over(self, burn: BurnRateWindow) -> "Incident":
        """Return the incident with the factor of a burn-rate window as the threshold of its first symptom."""
        first, *rest = self.symptoms
        return self._replace(symptoms=(first._replace(limit=burn.factor), *rest))

    @property
    def rising(self) -> "tuple[Incident, ...]":
        """The incident as `sudden` tells it, if it has one: at half of the lowest burn rate, without hours of it."""
        if not (self.sudden and self.burns):
            return ()
        slow = self.over(self.burns[-1]._replace(factor=self.burns[-1].factor / 2))
        return (slow._replace(symptoms=(*slow.symptoms, self.sudden), burns=()),)


SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
"""PromQL's units of time."""
GROUP = ("job", "namespace")
"""Labels within which servers of the same model are peers."""
OF_ONE_SERVER = ("instance", "pod", "host", "hostname", "node", "nodename")
"""Labels of a site that tell one server from its peers; if a site has none of these, its last label does."""


def regroup(promql: str, labels: tuple[str, ...]) -> str:
    """Return the expression for a site that identifies its servers by these labels instead of by `instance`.

    The labels that name more than one server, such as its cluster, are added to those that group peers.
    """
    of_one_server = [label for label in labels if label in OF_ONE_SERVER] or labels[-1:]
    shared = [label for label in labels if label not in of_one_server]

    def clause(match: re.Match[str]) -> str:
        named = match[2].split(", ")
        peers = shared if {*GROUP} <= {*named} else []
        names = [name for label in named for name in (labels if label == "instance" else (label,))]
        return f"{match[1]} ({', '.join(dict.fromkeys((*peers, *names)))})"

    def without_joined(match: re.Match[str]) -> str:
        """Leave out of group_left the labels on which is joined, which PromQL refuses there."""
        joined, copied = match[1].split(", "), match[2].split(", ")
        return f"on ({match[1]}) group_left ({', '.join(label for label in copied if label not in joined)})"

    grouped = re.sub(r"\b(by|on|group_left) ?\(([^()]*)\)", clause, promql)
    return re.sub(r"\bon \(([^()]*)\) group_left \(([^()]*)\)", without_joined, grouped)


def seconds(duration: str) -> float:
    """Convert a PromQL duration of one unit, "30s" or "5m", to seconds."""
    number = duration.rstrip("smhdw")
    return float(number) * SECONDS[duration[len(number) :]]
