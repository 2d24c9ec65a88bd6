"""The vocabulary of an incident: what is asked, which limit is set on it and why, and what cures it.

Everything here is frozen data. One `Incident` is the single source of the doctor's verdict, the Prometheus alert, the
dashboard and the runbook; nothing in this file knows any of them. An expression may hold three placeholders:

$window   the span a range function looks back over ("30s" at a prompt, "5m" in an alert)
$by       the labels of one subject, `Incident.per`
$<name>   an entry of the measurement contract (diag.toml), `$freeze_seconds` for one
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from string import Template
from typing import Literal

Severity = Literal["info", "warning", "critical"]
Comparison = Literal[">", ">=", "<", "<=", "=="]
OPPOSITE: dict[Comparison, Comparison] = {">": "<=", ">=": "<", "<": ">=", "<=": ">"}
"""What holds where a comparison does not; `==` has no opposite among the comparisons."""


@dataclass(frozen=True)
class Source:
    """Why a number is what it is: `reference` is a permalink, a recording's name or empty (judged)."""

    kind: Literal["documented", "measured", "reported", "judged"]
    says: str
    reference: str = ""


def documented(says: str, link: str) -> Source:
    """The vendor's own documentation or source says so."""
    return Source("documented", says, link)


def measured(says: str, recording: str) -> Source:
    """A recording in tests/recordings shows it."""
    return Source("measured", says, recording)


def reported(says: str, link: str) -> Source:
    """Somebody measured it in public."""
    return Source("reported", says, link)


def judged(says: str) -> Source:
    """Nobody has measured it: a debt, and listed as one."""
    return Source("judged", says)


@dataclass(frozen=True)
class Signal:
    """One PromQL expression that yields one number per subject, and the sentence that reads it out.

    `sentence` has one `{value}`. `window_scaling` tells whether a limit on it holds at any window ("rate": shares, ratios, means) or
    grows with it ("peak": maxima and counts of events). `unit` is "ratio", "seconds", "tokens", ...

    Where the number does not say which rank or which event is meant, `culprit_promql` is PromQL with one series for each of
    them, and `culprit_label` reads one out of its labels and its value: "rank {rank}", "{phase} {value} s".
    """

    name: str
    promql: str
    sentence: str
    unit: str = ""
    window_scaling: Literal["rate", "peak"] = "rate"
    culprit_promql: str = ""
    culprit_label: str = ""
    culprit_unit: str = ""

    def above(self, limit: float | str, why: Source) -> "Condition":
        """`self > limit`; a limit that is a word is an entry of the measurement contract."""
        return Condition(self, ">", limit, why)

    def at_least(self, limit: float | str, why: Source) -> "Condition":
        """`self >= limit`."""
        return Condition(self, ">=", limit, why)

    def below(self, limit: float | str, why: Source) -> "Condition":
        """`self < limit`."""
        return Condition(self, "<", limit, why)

    def at_most(self, limit: float | str, why: Source) -> "Condition":
        """`self <= limit`."""
        return Condition(self, "<=", limit, why)


@dataclass(frozen=True)
class Condition:
    """A signal, a comparison, a limit, and why this limit."""

    signal: Signal
    op: Comparison
    limit: float | str
    why: Source

    @property
    def promql(self) -> str:
        """The comparison as a filter; a named limit stays a placeholder until the contract fills it."""
        limit = f"${self.limit}" if isinstance(self.limit, str) else f"{self.limit:g}"
        return f"({self.signal.promql}) {self.op} {limit}"


@dataclass(frozen=True)
class LookAlike:
    """What shows the same picture and how it is told apart.

    `requires` must hold, or the incident is absent; `refuted_by`, one of its symptoms or supports, rules the look-alike
    out where it holds, and leaves it open where it does not.
    """

    name: str
    distinguish: str
    requires: Condition | None = None
    refuted_by: Condition | None = None


@dataclass(frozen=True)
class Fix:
    """One remedy: a vLLM flag, an environment variable, a host command, or (with none of these) advice.

    A command may hold the labels of the subject, `{gpu}` for one; it and `change` may hold `{value}`.

    `value` is a constant, or a Signal that computes the number from this server, then rounded and held between `least`
    and `most`, each a number or a Signal; None with a flag takes the flag away. `also` are flags that change along with
    it. `direction` says which way the value may go: a proposal that would not move the running value that way is left
    out. `only_if` says when the fix applies: where a condition is false it is left out, where one cannot be judged it
    is kept and says what it needs. `expects` is what must hold once it is applied; without any, that the incident's
    first symptom is gone.

    A flag is proposed to the releases whose parser accepts it (diag/vllm/flags/flags.json). `versions` is the (first, last)
    release in which the variable is read or the flag takes this value, "" for an open end; `instead_of` names a flag
    whose place it takes, in releases that lack that one.
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
    only_if: tuple[Condition, ...] = ()
    expects: tuple[Condition, ...] = ()
    versions: tuple[str, str] = ("", "")
    instead_of: str = ""
    risk: str = ""
    rollback: str = ""
    restart: bool = True

    @property
    def kind(self) -> Literal["vllm_flag", "environment", "host_command", "advice"]:
        """What sort of change it is, as the JSON report names it."""
        if self.flag:
            return "vllm_flag"
        if self.environment:
            return "environment"
        return "host_command" if self.command else "advice"

    @property
    def name(self) -> str:
        """What is changed: the flag, the variable or the command; empty for advice."""
        return self.flag or self.environment or self.command

    @property
    def signals(self) -> tuple[Signal, ...]:
        """Every signal that its numbers are computed from."""
        named = (self.value, self.least, self.most, *(value for _, value in self.also))
        return tuple(each for each in named if isinstance(each, Signal))


@dataclass(frozen=True)
class BurnRateWindow:
    """An alert over two windows at once, in both of which the first symptom must be above `factor`.

    The long one makes it worth waking somebody, the short one ends it soon after the harm has ended.
    """

    factor: float
    long: str
    short: str


@dataclass(frozen=True)
class Incident:
    """One incident: present where every symptom and every look-alike's `requires` holds.

    `per` are the labels of one subject. `window` is the span of the alert and `live_window` that of a doctor who
    watches for half a minute; `hold` is the alert's `for`; with `burns` it alerts over each of these pairs of windows
    instead. `explains` names incidents that follow from this one. `impact` says what users notice, `mitigate` what
    relieves them before the cause is found, `hand_over` what an engineer of the vendor's needs to go on.
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
    supports: tuple[Condition, ...] = ()
    explains: tuple[str, ...] = ()
    escalates: Condition | None = None
    window: str = "5m"
    live_window: str = "30s"
    hold: str = "1m"
    burns: tuple[BurnRateWindow, ...] = ()
    mitigate: tuple[str, ...] = ()
    hand_over: tuple[str, ...] = ()
    do_not: tuple[str, ...] = ()

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """What must hold, in the order in which it is told."""
        return self.symptoms + tuple(look.requires for look in self.looks_like if look.requires)

    @property
    def every_condition(self) -> tuple[Condition, ...]:
        """All that is asked of a server: what must hold, what supports it, what makes it worse."""
        return (*self.conditions, *self.supports, *((self.escalates,) if self.escalates else ()))

    def over(self, burn: BurnRateWindow) -> "Incident":
        """The same incident with the factor of a burn as the limit of its first symptom."""
        first, *rest = self.symptoms
        return replace(self, symptoms=(replace(first, limit=burn.factor), *rest))

    def query(self, window: str, contract: Mapping[str, float]) -> str:
        """The whole incident as one PromQL conjunction: a sample for every subject that has it."""
        on = " and "
        return on.join(f"({fill(each.promql, self.per, window, contract)})" for each in self.conditions)


def fill(promql: str, per: tuple[str, ...], window: str, contract: Mapping[str, float]) -> str:
    """The expression with its placeholders filled in; an unknown placeholder raises KeyError."""
    entries = {name: f"{value:g}" for name, value in contract.items()}
    return Template(promql).substitute(entries, window=window, by=", ".join(per))


def regroup(promql: str, labels: tuple[str, ...]) -> str:
    """The expression for a site that tells its servers apart by these labels instead of by `instance`."""
    clause = re.compile(r"\b(by|on) ?\(([^()]*)\)")
    return clause.sub(lambda found: re.sub(r"\binstance\b", ", ".join(labels), found[0]), promql)


def seconds(duration: str) -> float:
    """A PromQL duration of one unit, "30s" or "5m", in seconds."""
    return float(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]
