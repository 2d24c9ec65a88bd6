"""Fix + readings + running configuration -> concrete changes with their numbers.

Nothing here changes a server: a proposal is a text to read.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote_plus

from diag.core.errors import BadUsage
from diag.core.formatting import printable, quantity
from diag.core.incident import Fix, Signal, documented, judged
from diag.core.log_events import LogEnding
from diag.core.subjects import Subject
from diag.diagnosis.decision_table import COMPARE
from diag.diagnosis.diagnose import Diagnosis, Quote, culprits
from diag.diagnosis.pools import find_pools
from diag.diagnosis.query_cache import QueryCache
from diag.knowledge.formulas import expanded
from diag.knowledge.known_failures import KnownFailure
from diag.knowledge.platforms import words
from diag.knowledge.signals import gpu_memory_total, running_value, runs_on_cpu, runs_on_rocm
from diag.vllm.command.command import Command, json_object
from diag.vllm.flags.registry import UNSET, default, release, releases, versions

Value = float | str | None
OLDEST = (0, 8, 0)
"""The oldest release that is judged: a flag that every later release accepts is accepted by any server."""
ISSUES = "https://github.com/vllm-project/vllm/issues?q="
MOST_WORDS = 9
"""Words of an exception that are searched for; the numbers among them are of one server."""
UNNAMED = re.compile(r"\$\{[A-Z]+:\?\}")
"""A place in a text for a part of the server, such as a GPU, that nothing names."""
PLAIN_WORD = r"[\w.-]{0,40}"
"""Pattern of a value of a launch command that is shown as it is."""
PLACEHOLDER = r"((?:/[\w./-]*/)?)\{(\w+)\}((?:/[\w./-]*)?)"
"""Pattern of a place that a fix's text leaves open, with the path around it: one path for each value."""
SERVER_PLACEHOLDER = r"\{(log\w*|launch)\}"
"""Pattern of a place for the server's log or launch command: without them the fix has no command."""
_UNSET = UNSET | {"--compilation-config", "--cudagraph-capture-sizes", "--max-cudagraph-capture-size"}


# -- what the launch command sets -------------------------------------------------------------------------------------


@lru_cache(maxsize=256)  # every fix asks
def command_in(launch: str) -> Command | None:
    """Parse the launch command; None if it is unknown or cannot be read (a note reports it)."""
    if not launch:
        return None
    from diag.vllm.command.parse import parse  # noqa: PLC0415  # without a launch command, its readers are not needed

    try:
        return parse(launch)
    except BadUsage:
        return None


@lru_cache(maxsize=64)
def given_values(launch: str) -> Mapping[str, float | str]:
    """Return the values that a launch command sets, by --flag, --flag.key (behind a dot, or in JSON) and NAME.

    A switch has the value "". A size with a suffix (8k) stays a text: the sources publish sizes as numbers.
    """
    command = command_in(launch)
    if command is None:
        return {}
    texts = dict(command.environment)
    for argument in command.given:
        if argument.option and argument.option.on:
            text, key = " ".join(argument.values), argument.option.key
            texts[argument.name] = "" if key else text
            keys = {key: text} if key else json_object(text)
            texts |= {f"{argument.name}.{name}": str(value) for name, value in keys.items()}
    values: dict[str, float | str] = dict(texts)
    for name, text in texts.items():
        with suppress(ValueError):
            if math.isfinite(number := float(text)):
                values[name] = number
    return values


# -- proposals --------------------------------------------------------------------------------------------------------


class FlagChange(NamedTuple):
    """One flag or variable from one value to another; None: not set, or unknown.

    `assumed` is whether `before` is the release's own default, which no source contradicts.
    """

    name: str
    before: Value
    after: Value
    assumed: bool = False


class Proposal(NamedTuple):
    """A fix made concrete: `before` and `after` are the running and the proposed value (None: not set, or unknown).

    `needs` names what diag could not measure and has to be checked before the change; `computed` is whether `after`
    came from this server's numbers; `name` is the flag, variable or command, with all values filled in, and `text` the
    fix's own sentence, likewise. `changes` are the flags or the variable that it sets, its own first. `is_guess` is
    whether a condition under which it applies was not measured, `is_search` whether it only looks for a known cause.
    """

    fix: Fix
    before: Value
    after: Value
    needs: tuple[str, ...]
    computed: bool
    name: str
    text: str = ""
    assumed: bool = False
    changes: tuple[FlagChange, ...] = ()
    is_guess: bool = False
    is_search: bool = False

    @property
    def is_computed(self) -> bool:
        """True if all of its numbers are known; a proposal without its number only asks for telemetry."""
        if self.fix.value is None:
            return True
        values = [self.after] if isinstance(self.fix.value, Signal) else []
        return None not in [*values, *(change.after for change in self.changes if change.name != self.fix.name)]


class Running(NamedTuple):
    """The facts of a server beyond its samples: vLLM's version ("" unknown) and its launch command.

    `whole` is whether all settings that were made are known, so that any other setting has its release's default.
    `exported_by` are the first and the last release that have the metrics of its page; `log` is how the log
    beside its pages ends.
    """

    version: str = ""
    launch: str = ""
    whole: bool = False
    exported_by: tuple[str, str] = ("", "")
    log: LogEnding | None = None


def propose(
    diagnosis: Diagnosis, queries: QueryCache, running: Running, quotes: Sequence[Quote] = ()
) -> tuple[Proposal, ...]:
    """Return the applicable fixes of a present incident: guesses last, otherwise in their order, the safest first."""
    launch = (("launch", shlex.quote(running.launch)),) if running.launch else ()
    proposer = _Proposer(diagnosis, queries, running, (*(quotes[0].names if quotes else ()), *launch))
    proposals = filter(None, map(proposer.propose, diagnosis.incident.fixes))
    # a guess at a part that no reading names may be about one that this server does not have
    named = (proposal for proposal in proposals if not (proposal.is_guess and UNNAMED.search(proposal.text)))
    return tuple(sorted(named, key=lambda proposal: proposal.is_guess))


def is_on_rocm(diagnosis: Diagnosis, queries: QueryCache, quotes: Sequence[Quote]) -> bool:
    """Return True if the server's telemetry, or a quoted line of its log, is of AMD GPUs."""
    proposer = _Proposer(diagnosis, queries, Running(), ())
    shown = (words().shows["rocm"].search(f"{one.text} {one.cause}") for one in quotes)
    return bool(proposer.value(runs_on_rocm)) or any(shown)


def by_failure(failure: KnownFailure) -> Proposal:
    """Return the action that is known to mend a failure."""
    fix = Fix(
        change=failure.do,
        effect="the server starts, and serves",
        restart=failure.needs_restart,
        why=documented(failure.means, failure.source),
    )
    return Proposal(fix, None, None, (), computed=False, name="", text=failure.do)


def by_search(quote: Quote, version: str) -> Proposal:
    """Return the search for an exception that the table of failures lacks, and the newest release if it is older."""
    words = re.findall(r"[A-Za-z_][A-Za-z_.'-]*", re.sub(r"/\S+|<[^>]*>|REDACTED", " ", quote.text))[:MOST_WORDS]
    newest = versions()[-1]
    older = f"since this server runs {version}" if version else "if this server runs an older release"
    upgrade = f", and try vLLM {newest}, {older}" if release(version) < release(newest) else ""
    text = f"Search vLLM's issues for this exception: {ISSUES}{quote_plus(' '.join(words))}{upgrade}."
    why = judged("diag knows no cause of this exception; a search shows whether others do")
    fix = Fix(change=text, effect="a known cause, or a release without the defect", why=why)
    return Proposal(fix, None, None, (), computed=False, name="", text=text, is_search=True)


class _Proposer(NamedTuple):
    """Makes the fixes of one diagnosis concrete, by the signals at the instant that the diagnosis reports.

    `names` are the place in the log and the launch command, as words of a shell.
    """

    diagnosis: Diagnosis
    queries: QueryCache
    running: Running
    names: Subject

    def propose(self, fix: Fix) -> Proposal | None:
        """Return the proposal, or None if the fix does not apply here."""
        if (
            not available(fix, self.running.version, self.running.exported_by)
            or not dict(self.names).keys() >= set(re.findall(SERVER_PLACEHOLDER, fix.command))
            or (fix.while_it_lasts and not self.diagnosis.ongoing)
        ):
            return None
        # GPU telemetry that decides on a fix or gives it its number, before the conditions, which cost queries
        signals = (*fix.signals, *(condition.signal for condition in fix.only_if))
        is_of_gpus = any("diag_gpu_" in expanded(signal.promql) for signal in signals)
        if is_of_gpus and "gpu" not in self.diagnosis.incident.per and self.value(runs_on_cpu):
            return None
        met = {condition: self.value_or_setting(condition.signal) for condition in fix.only_if}
        if any(
            value is not None and not COMPARE[condition.op](value, self.queries.contract.limit(condition.limit))
            for condition, value in met.items()
        ):
            return None
        needs = [condition.signal.name for condition, value in met.items() if value is None]
        ends = [releases(fix.flag, fix.versions) if fix.flag else ("", ""), *(releases(flag) for flag, _ in fix.also)]
        in_all_releases = all(release(first) <= OLDEST and not last for first, last in ends)
        if not in_all_releases and fix.value is not None and not release(self.running.version):
            needs.append("the vLLM version")

        change = fix.change
        if fix.pools:
            limits = map(self.value_or_setting, map(running_value, ("max_num_batched_tokens", "max_num_seqs")))
            end = self.diagnosis.instants[self.diagnosis.reported]
            pools = find_pools(self.diagnosis.subject, end, self.queries, *limits)
            if isinstance(pools, str):
                return None
            change = pools.text

        before, assumed = self._before(fix)
        after, lacking = self._after(fix)
        if not moves(fix.direction, before, after):
            return None
        needs += lacking
        if fix.direction and before is None and fix.flag and not assumed:
            needs.append(f"the current {fix.flag}")
        changes = [FlagChange(fix.name, before, after, assumed)] if fix.flag or fix.environment else []
        for flag, signal in fix.also:
            value, set_value = self.value(signal), self._running(flag)[0]
            needs += [] if value is not None else [signal.name]
            rounded = None if value is None else float(round(value))
            changes += [FlagChange(flag, set_value, rounded)] if rounded is None or rounded != set_value else []
        name, text = self._in_words(fix, change, after)
        return Proposal(
            fix=fix,
            before=before,
            after=after,
            needs=tuple(dict.fromkeys(needs)),
            computed=isinstance(fix.value, Signal) and after is not None,
            name=name,
            text=text,
            assumed=assumed,
            changes=tuple(changes),
            is_guess=None in met.values(),
        )

    def _in_words(self, fix: Fix, change: str, after: Value) -> tuple[str, str]:
        """Return the name and the text of a fix, with its value and labels, as words of a shell, filled in.

        The labels are those of the subject and of what the fix's conditions name, and `names`; the flags that a
        condition names are a sentence behind the fix's own.
        """
        words = {name: [word(name, value)] for name, value in self.diagnosis.subject}
        words |= {name: [value] for name, value in self.names}
        flags: list[str] = []
        for condition in fix.only_if:
            is_flag, has_places = condition.signal.culprit_label == "{flag}", "{" in fix.command
            named = culprits(condition.signal, self.diagnosis, self.queries) if is_flag or has_places else []
            flags += [f"--{printable(flag).replace('_', '-')}" for _, flag in named if is_flag]
            for name, value in (pair for labels, _ in named if has_places for pair in labels.items()):
                words.setdefault(name, []).append(word(name, value))
        labels = {name: list(dict.fromkeys(several)) for name, several in words.items()}
        shown = prose = "?" if after is None else written(after)
        if isinstance(fix.value, Signal) and isinstance(after, float):
            prose = quantity(after, fix.value.unit)
        changed = f" Changed: {', '.join(dict.fromkeys(flags))}." if flags else ""
        return _filled(fix.name, {**labels, "value": [shown]}), _filled(change, {**labels, "value": [prose]}) + changed

    def value(self, signal: Signal) -> float | None:
        """Return the value of a signal; None for no value."""
        incident, window = self.diagnosis.incident, self.queries.window(self.diagnosis.incident)
        row = self.queries.ask(signal, incident.per, window).of(self.diagnosis.subject)
        value = math.nan if row is None else float(row[self.diagnosis.reported])
        return None if math.isnan(value) else value

    def value_or_setting(self, signal: Signal) -> float | None:
        """Return a signal's value; for a flag that no source publishes, what the command sets (no number: 1).

        If all settings are known and the flag is not among them, its default; 0 if it then has no effect.
        """
        value, flag = self.value(signal), signal.name
        if value is not None or not flag.startswith("--"):
            return value
        set_value = given_values(self.running.launch).get(flag)
        if set_value is not None:
            return set_value if isinstance(set_value, float) else 1.0
        if not self.running.whole:
            return None
        if flag in _UNSET or not _within(releases(flag), self.running.version):
            return 0.0
        return default(flag, self.running.version, self.value(gpu_memory_total))

    def _before(self, fix: Fix) -> tuple[Value, bool]:
        """Return the value that a fix changes, and whether it is only the release's default."""
        measured = self.value(fix.current) if fix.current else None
        if measured is not None or (fix.current and not fix.flag):
            return measured, False
        return self._running(fix.flag or fix.environment)

    def _running(self, name: str) -> tuple[Value, bool]:
        """Return the running value of a flag or a variable, and whether it is only the release's default."""
        if not name:
            return None, False
        is_flag = name.startswith("--")
        value = self.value(running_value(name.removeprefix("--").replace("-", "_"))) if is_flag else None
        running = given_values(self.running.launch).get(name) if value is None else value
        if isinstance(running, float) or (running is not None and re.fullmatch(PLAIN_WORD, running)):
            return running, False
        value = default(name, self.running.version, self.value(gpu_memory_total))
        return value, value is not None or name in UNSET or (self.running.whole and name in _UNSET)

    def _after(self, fix: Fix) -> tuple[Value, list[str]]:
        """Return the value within its bounds, and the names of the signals that are lacking to compute or bound it."""
        if not isinstance(fix.value, Signal):
            return fix.value, []
        value = self.value(fix.value)
        if value is None:
            return None, [fix.value.name]
        if fix.rounding == "power_of_two_below":
            value = float(2 ** math.floor(math.log2(value))) if value >= 1 else 1.0
        elif fix.rounding == "hundredth_below":
            value = math.floor(value * 100 + 1e-9) / 100
        else:
            value = float(math.ceil(value - 1e-9) if fix.rounding == "up" else round(value))
        bounds = fix.least, fix.most
        least, most = (self.value_or_setting(bound) if isinstance(bound, Signal) else bound for bound in bounds)
        pairs = zip(bounds, (least, most), strict=True)
        lacking = [bound.name for bound, number in pairs if isinstance(bound, Signal) and number is None]
        value = max(value, 0.0 if least is None else least)
        return float(value if most is None else min(value, most)), lacking


def moves(direction: str, before: Value, after: Value) -> bool:
    """Return True if a change moves a value in a direction, "" for any; if that is "lower", 0 before means "off"."""
    if not isinstance(before, float) or not isinstance(after, int | float):
        return before is None or written(before) != written(after)
    if direction == "lower":
        return before == 0 or after < before
    return after > before if direction == "raise" else after != before


def available(fix: Fix, version: str, between: tuple[str, str] = ("", "")) -> bool:
    """Return True if a release accepts the fix's flags or reads its variable.

    If the release is unknown, one `between` two releases does ("": an open end).
    """
    flags = (fix.flag, *(flag for flag, _ in fix.also))
    if not all(_within(releases(flag), version, between) for flag in flags if flag):
        return False
    if fix.instead_of and release(version) and _within(releases(fix.instead_of), version):
        return False
    return _within(fix.versions, version, between)


def _within(ends: tuple[str, str], version: str, between: tuple[str, str] = ("", "")) -> bool:
    first, last = map(release, ends)
    oldest, newest = map(release, (version, version) if release(version) else between)
    return not (first and newest and newest < first) and not (last and oldest and last < oldest)


def written(value: Value) -> str:
    """Return a value as it stands on a command line: counts whole, shares as they are."""
    if isinstance(value, float):
        return f"{value:g}" if value < 1 else f"{value:.0f}"
    return str(value)


# -- labels in a command that is pasted into a shell ------------------------------------------------------------------

MOST = 255
"""Characters of a label in a command: as many as a host or a file may have."""
LABEL_PATTERNS = {
    "gpu": r"\d{1,4}|(?:GPU|MIG)-[\w/-]{1,100}|[0-9A-Fa-f]{4,8}(?::[0-9A-Fa-f]{2}){2}\.[0-7]",
    "pid": r"[1-9]\d{0,9}",
    "rank": r"\d{1,6}",
    "engine": r"\d{1,6}",
    "host": r"\w[\w.:-]{0,254}|its host",
}
"""Patterns of the values of these labels, none with a character special to a shell: an index, a UUID, a PCI address, a
number, a host."""


def _filled(text: str, known: Mapping[str, Sequence[str]]) -> str:
    """Fill the values into the places that are left for them, several of them side by side."""
    return re.sub(
        PLACEHOLDER, lambda at: " ".join(at[1] + value + at[3] for value in known.get(at[2], [word(at[2], "")])), text
    )


def word(name: str, value: str) -> str:
    """Return the value of a label, quoted for a shell; if it is invalid, `"${GPU:?}"`, which a shell refuses to run."""
    if name in LABEL_PATTERNS:
        if re.fullmatch(LABEL_PATTERNS[name], value, re.ASCII):
            return value
    elif 0 < len(value) <= MOST and value.isprintable() and not value.startswith("-"):
        return shlex.quote(value)
    return f'"${{{re.sub(r"[^A-Z0-9]", "_", name.upper())}:?}}"'
