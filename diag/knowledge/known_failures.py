"""The table of failures: what the line that ended a server means, and the one action that mends it.

diag/knowledge/failures/*.toml has the table; docs/failures.md explains how to add to it. It is read when a log line was
quoted, so that its patterns cost nothing elsewhere.
"""

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from diag.core.declarations import PACKAGE, did_you_mean, read
from diag.core.formatting import printable
from diag.core.log_events import LogContext
from diag.knowledge.platforms import kernel_of, offers_what_it_lacks, platform_of, way_around, words
from diag.knowledge.raised_errors import RaisedError, raised_by_vllm
from diag.knowledge.signals.log import LEAST_SHARE
from diag.vllm.command.free_text import hidden
from diag.vllm.flags.registry import known, release, versions
from diag.vllm.metric_names import variables

FILES = read(PACKAGE / "knowledge" / "failure_files.toml", dict[str, str])
"""The files of the table with their headings, in the order in which their patterns are tried (failure_files.toml)."""


class _Words(SimpleNamespace):
    """Regular expressions of the texts of failures and of advice (failure_words.toml), read when one is asked for."""

    def __getattr__(self, name: str) -> Any:
        vars(self).update(read(PACKAGE / "knowledge" / "failure_words.toml", dict[str, re.Pattern[str]]))
        return vars(self)[name]


WORDS = _Words()
PLACES, RAISED, SHAPES, OTHERS, THREADS, TOPICS = "places", "raised", "shapes", "others", "threads", "topics"
TIERS = {SHAPES: 2, RAISED: 3, PLACES: 4, TOPICS: 5}
LAST_TIER = 6
"""The tiers of files: what an error says comes before its place, its topic after, what anything may reach last."""
OF_HOSTS = (OTHERS, "environment", "devices", "ranks", "memory", "launch")
"""Files with kinds that other programs than vLLM print: the host's, the container's, the cluster's, libraries."""
Basis = Literal["named by the error", "by its place", "guess"]
"""How sure a cause is: the error's own text, or what the log says around it, names it; the code that raised it does; or
it is the usual one of such an error."""
MOST_SEEN, BEFORE_SEEN = 120, 60
"""Characters of a line that decided, and of those before what was found in it."""
LONG_LINE, FEW_OPTIONS = 400, 3
"""Characters of a line that lists a whole configuration, and options that one advice names before it is a list."""
FAR_BEHIND, OLD = 3, 12
"""Minor releases, about two months and most of a year of them, in which vLLM mends hundreds of defects."""
RESERVE = 0.02
"""Share of a GPU's memory that stays free beside a server, for the CUDA contexts of others."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank."""
MOST_DIVISOR = 128
"""GPUs that one model is split over, at most."""
AVOID = "Start with {way}, which avoids it; if the error stays, "
AVOID_LATE = (
    f"{AVOID}start once with CUDA_LAUNCH_BLOCKING=1 (AMD: AMD_SERIALIZE_KERNEL=3), which shows the call that fails."
)
AVOID_CALL = f"{AVOID}upgrade vLLM."
TRIED = "Upgrade vLLM: what avoids this error otherwise is set already, as the log shows."
MOST_NATIVE = 8
"""Innermost frames of a native stack that tell whose code crashed."""
FEWEST_WORDS = 4
"""Of a sentence in an error, to be told as its cause."""
MOST_COMPLAINTS = 40
RAISED_BY_WORDS = {
    "No module named": "ModuleNotFoundError: ",
    "cannot import name": "ImportError: ",
    "[Errno": "OSError: ",
}
"""The class of an error that is quoted without it, by its first words."""
WITHOUT = "Start without ["
"""The beginning of an advice that is none for a server that has none of the options."""
_LINE = "@"
"""Among the values of a kind, a part of the line that decided, which no text can name."""
NOTHING = LogContext()
PLACE = re.compile(r"\{(?:(?P<function>\w+)\()?(?P<names>\w+(?:, ?\w+)*)\)?\}")


class FailureKind(NamedTuple):
    """One kind of failure: `pattern` is searched in the exception that ended a process, and in what it was raised from.

    `means` and `do` may name the pattern's groups, as {name} or {function(name)}; `releases` are the first and the last
    release of vLLM to which the advice applies, "" for an open end; `source` is the file that prints the line, or a
    page. `frames`, if given, has to be in the innermost frames of the traceback. A defect of vLLM has the day on which
    its thread was `checked`: it is told only of servers whose release is
    known to have it, and whose model, if the defect is one of some `models`, is known too.

    Of a log alone more is known. `nearby` has to be found in the lines around the error; its groups may be named too.
    `platforms` are vLLM's names of devices, `phases` those of the start in which it failed ("ready" at work). `figures`
    compare numbers of the groups: "allocated < 0.1 total". If `computed_first`, a value that is computed from the
    server's numbers is better advice. A kind with one of these comes before those without. An
    error that many causes have is `generic`: it comes last, and its cause is a guess, as one that is a `guess` itself.
    A kernel's error is mended `by_owner`: by the option that avoids the kernel in whose code the traceback ends.
    """

    id: str
    pattern: re.Pattern[str]
    means: str
    do: str
    source: str
    example: str
    file: str = ""
    releases: tuple[str, str] = ("", "")
    fixed_in: str = ""
    models: str = ""
    checked: str = ""
    frames: str = ""
    example_frames: str = ""
    nearby: str = ""
    platforms: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    computed_first: bool = False
    restart: bool = True
    generic: bool = False
    guess: bool = False
    by_owner: bool = False
    example_nearby: str = ""

    @property
    def has_context(self) -> bool:
        """Return True if more than the error itself decides."""
        return bool(self.nearby or self.platforms or self.phases or self.figures)

    @property
    def basis(self) -> Basis:
        if self.generic or self.guess:
            return "guess"
        return "by its place" if self.frames else "named by the error"

    def values(self, text: str, frames: str, context: LogContext) -> dict[str, str] | None:
        """Return the groups if the kind is that of an error, and under "" the line that decided; None if it is not."""
        place = re.search(self.frames, frames) if self.frames else None
        if self.frames and not place:
            return None
        if (match := self.pattern.search(text)) is None:
            return None
        if {"free", "share"} <= self.pattern.groupindex.keys():  # the rank with the least free memory decides
            match = min((match, *self.pattern.finditer(context.nearby)), key=lambda rank: _number(rank["free"]))
        platform = platform_of(text, context)
        if platform not in self.platforms and (
            self.platforms or offers_what_it_lacks(WORDS.alternatives.split(self.do)[0], platform)
        ):
            return None
        if self.phases and context.phase not in self.phases:
            return None
        near = _near(self.nearby, context.nearby) if self.nearby else None
        if self.nearby and near is None:
            return None
        named = {**match.groupdict(), **(place.groupdict() if place else {})}
        options = WORDS.options.search(self.do) if self.file == TOPICS and self.do.startswith(WITHOUT) else None
        if (options and not _options_given(options, context)) or (
            self.file == TOPICS and not WORDS.raised.search(text)
        ):
            return None
        values = {name: value or "?" for name, value in named.items()}
        values[_LINE] = match[0][:MOST_SEEN].split("\n")[0] if match.start() > MOST_SEEN else ""
        if near is not None:
            at = near.start(1) if near.re.groups and near[1] is not None else near.start()
            first = context.nearby.rfind("\n", 0, at) + 1
            whole = context.nearby[first:].partition("\n")[0]
            shown = "" if text[:BEFORE_SEEN] and text[:BEFORE_SEEN] in whole else around(hidden(whole), self.nearby)
            names_it = WORDS.says_nothing.search(text) and not WORDS.is_logged.search(whole)
            values |= {"": shown, _LINE: bare(whole) if names_it else values[_LINE]}
            values |= {name: hidden(value or "?") for name, value in near.groupdict().items()}
        for comparison in self.figures:  # of numbers of the error: "wanted < free", "allocated < 0.1 total"
            parts = _FIGURES.fullmatch(comparison)
            if parts is None:
                raise ValueError(comparison)
            texts = (values.get(parts[side], parts[side]) for side in ("left", "right"))
            amounts = [amount for said in texts if (amount := _AMOUNT.match(said.replace(",", "")))]
            if len(amounts) < 2:
                return None
            left, right = (float(amount["number"]) * _UNITS[amount["unit"].rstrip("i")] for amount in amounts)
            right *= float(parts["factor"] or 1)
            if not (left < right if parts["op"] == "<" else left > right):
                return None
        return values

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """Yield the mistakes of the texts, each with its key: a group or a function that does not exist."""
        groups = {**self.pattern.groupindex, **re.compile(self.nearby).groupindex, **re.compile(self.frames).groupindex}
        for key, text in (("means", self.means), ("do", self.do)):
            for place in PLACE.finditer(text):
                for name in (name.strip() for name in place["names"].split(",")):
                    if name not in groups:
                        yield f"names '{name}', which is no group of `pattern`{did_you_mean(name, groups)}", key
                function = place["function"]
                if function and function not in FUNCTIONS:
                    yield f"uses '{function}', which is no function{did_you_mean(function, FUNCTIONS)}", key

    def applies_to(self, version: str, model: str) -> bool:
        """Return True if the advice is for this release of vLLM, "" if unknown, and this model."""
        at, (first, last) = release(version), map(release, self.releases)
        if not at:
            return not self.checked
        is_release = (not first or first <= at) and (not last or at <= last)
        return is_release and (not self.models or bool(re.search(self.models, model)))

    @property
    def advice(self) -> str:
        """The action; for a defect that a release has mended, first the upgrade."""
        if not self.fixed_in or self.fixed_in in self.do:
            return self.do
        return f"Upgrade to vLLM {self.fixed_in} or later; until then, {self.do[:1].lower()}{self.do[1:]}"


class KnownFailure(NamedTuple):
    """A failure of the table with the numbers of a line filled in."""

    id: str
    means: str
    do: str
    source: str
    basis: Basis = "guess"
    needs_restart: bool = True
    is_decided: bool = False
    """True if the log around the error decided between several causes of it."""
    seen: str = ""
    """The line around the error that decided, without secrets."""
    line: str = ""
    """A part of the line that names the cause, as it is in the log, if the quoted line does not show it; else ""."""


def _options_given(place: re.Match[str], context: LogContext) -> list[str]:
    """Return those of some options that the server was given; if neither its log nor its command lists its arguments,
    those that its lines hint at, else all.
    """
    names: list[str] = place["names"].split(", ")
    if context.launch:
        launch = context.launch.replace("_", "-")
        return [name for name in names if re.search(rf"{name.partition('.')[0]}(?![\w-])", launch)]
    arguments = WORDS.given.search(context.nearby)
    fields = {name: name[2:].partition(".")[0].replace("-", "_") for name in names}
    if arguments:
        return [name for name in names if f"'{fields[name]}':" in arguments["args"]]
    hints, short = words().hints, "\n".join(line for line in context.nearby.splitlines() if len(line) < LONG_LINE)
    names = [name for name in names if not re.search(rf"\b{fields[name]}=(?:None|False|1)\b", context.nearby)]
    return [name for name in names if name in hints and hints[name].search(short)] or names


_FIGURES = re.compile(r"(?P<left>\w+) (?P<op><|>) (?:(?P<factor>[\d.]+) )?(?P<right>\w+)")
_AMOUNT = re.compile(r"(?P<number>\d{1,12}(?:\.\d{1,12})?) ?(?P<unit>[KMGT]?i?)(?:B|bytes)?$")
_UNITS = {"": 1.0, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def around(line: str, pattern: str | re.Pattern[str], most: int = MOST_SEEN) -> str:
    """Return what a line that decided has around the place that did; its secrets are hidden before it is cut."""
    head, place = WORDS.head.match(line), re.search(pattern, line)
    at = place.start() if place else len(line)
    first = head.end() if head and head.end() <= at else 0
    start = max(first, at - BEFORE_SEEN if place else 0)
    if start > first:  # not within a word
        start += next((gap.end() for gap in re.finditer(r"[\s/]", line[start:at])), 0)
        return printable(f"… {line[start:].strip()}", most)
    return printable(line[start:].strip(), most)


@lru_cache(maxsize=512)
def _near(pattern: str, lines: str) -> re.Match[str] | None:
    """Look for a pattern in the lines around an error, which are asked again for each of them that complains."""
    return re.search(pattern, lines)


@lru_cache(maxsize=1)
def table() -> tuple[FailureKind, ...]:
    """Return the whole table, in the order in which its patterns are tried."""
    return tuple(
        failure._replace(file=name)
        for name in FILES
        for failure in read(PACKAGE / "knowledge" / "failures" / f"{name}.toml", tuple[FailureKind, ...], "failure")
    )


def known_failure(
    texts: Sequence[str], version: str, model: str, frames: str = "", context: LogContext = NOTHING
) -> KnownFailure | None:
    """Return the failure that the first of these texts shows which shows any; None if the table has none.

    `version` and `model` are those of the server, `frames` the innermost ones of the traceback, "" if unknown. What the
    text of any exception says comes before the place at which one was raised, and what the `context` in a log decides
    before both.
    """
    if not texts:  # reading the table takes a tenth of a second
        return None
    said = ""
    if quoted := WORDS.of_worker.match(texts[0]):
        said = quoted["said"]
        said = next((name for begins, name in RAISED_BY_WORDS.items() if said.startswith(begins)), "") + said
        texts = (said, *texts)
    beside: list[str] = []
    if WORDS.says_nothing.search(texts[0]):  # what another program or a library printed beside it may say more
        lines = context.nearby.splitlines()[::-1]
        beside = [line for line in lines if not (WORDS.is_logged.search(line) or WORDS.says_nothing.search(line))]
    raised_beside = set(beside).intersection(_in_order((), beside, LAST_TIER))
    tiers = _tiers()
    spare: KnownFailure | None = None
    is_late, says_little = WORDS.late.search(texts[0]), bool(beside) or bool(WORDS.call_failed.search(texts[0]))
    places = (kind for kind in tiers[4] if kind.basis != "guess" and not kind.by_owner and not is_late)
    has_place = any(kind.values(texts[0], frames, context) is not None for kind in places)
    for number, kinds in enumerate(tiers):
        if number == (1 if says_little else 4) and (
            told := told_by_others(context, version, (OTHERS, THREADS)[: 1 + says_little], texts[0])
        ):  # an error that has words is not that of another program: its line is a guess
            return told if says_little else told._replace(basis="guess")
        if number == TIERS[RAISED] and (raised := raised_by_vllm(texts[0], frames)):
            texts, frames = _with_source(texts, raised, context, version), frames or f"{raised.module}:"
        for text, failure in itertools.product(_in_order(texts, beside, number), kinds):
            if text in raised_beside and not (number > 1 or failure.basis == "named by the error"):
                continue
            if has_place and failure.file != PLACES and failure.basis == "guess" and not failure.frames:
                continue
            values = failure.values(text, "" if text == said else frames, context)  # the frames are of the engine
            if values is None or not failure.applies_to(version, model):
                continue
            told = _told(failure, values, bare(text) if text in beside else text, version, frames, context)
            if not told.do:  # its own log refutes it: the next kind
                spare = spare or told._replace(do=TRIED)
                continue
            if text not in beside:
                pointed = next((line for line in beside if line in raised_beside), "")
                return told._replace(seen=told.seen or printable(hidden(bare(pointed)), MOST_SEEN))
            seen = told.seen or printable(hidden(bare(text)), MOST_SEEN)
            return told._replace(seen=seen, line=bare(text))
    return spare


def _told(
    kind: FailureKind, values: Mapping[str, str], text: str, version: str, frames: str, context: LogContext
) -> KnownFailure:
    """Fill in a kind; its `do` is "" if the log refutes it."""
    crashed = context.nearby.rpartition("Current thread ")[2]  # Python's dump of all threads
    owners = frames or "\n".join(WORDS.native.findall(crashed)[:MOST_NATIVE])
    kernel = kernel_of(owners, text) if kind.by_owner else None
    way = way_around(kernel, context.nearby, owners, platform_of(text, context), version) if kernel else ""
    owner = f" The traceback ends in {kernel.name}." if kernel and (way or kind.file != PLACES) else ""
    means = _filled(f"{kind.means}{owner}", values)
    if kind.file in TIERS:
        means = f"{_said(text)}{means}"
    way = "" if is_tried(way, context.nearby) else way
    late = AVOID_LATE if WORDS.late.search(text) else AVOID_CALL
    advice = late.format(way=way) if way else _filled(kind.advice, values, context, version)
    basis: Basis = "by its place" if way else kind.basis
    if advice and kind.file in (PLACES, TOPICS):
        advice = _with_upgrade(advice, version, basis)
    is_decided = kind.has_context and not kind.computed_first
    told = KnownFailure(kind.id, means, advice, kind.source, basis, kind.restart, is_decided, values.get("", ""))
    return told._replace(line=values[_LINE])


def _in_order(texts: Sequence[str], beside: Sequence[str], tier: int) -> Sequence[str]:
    """Return the texts for the kinds of a tier; of an error that only points to another one, that one first."""
    raised = [line for line in beside if (shown := WORDS.complains.match(line)) and shown["said"]]
    return [*raised, *texts, *beside] if tier <= 1 else [*raised, *texts]


@lru_cache(maxsize=1)
def _tiers() -> tuple[tuple[FailureKind, ...], ...]:
    """Return the kinds of each rank: what more than the error decides comes first, what many causes have last.

    Kinds of a rank are in the order of the table. Tests leave out rows, and then clear what is kept.
    """
    tiers: list[list[FailureKind]] = [[] for _ in range(LAST_TIER + 1)]
    for kind in table():
        is_placed = kind.file in (PLACES, TOPICS)
        usual = TIERS.get(kind.file, TIERS[RAISED] if kind.generic else 1)
        rank = 0 if kind.has_context and not is_placed else LAST_TIER if is_placed and kind.generic else usual
        tiers[rank].append(kind)
    return tuple(map(tuple, tiers))


def bare(text: str) -> str:
    """Return a line without what collectors and vLLM write before its text."""
    return text[head.end() :] if (head := WORDS.head.match(text)) else text


def _said(text: str) -> str:
    """Return what an error of no kind says itself, as a sentence; "" if that is code or a few words."""
    said = sentence["said"] if (sentence := WORDS.sentence.search(text)) else ""
    return f'The error says: "{printable(hidden(said))}". ' if len(said.split()) >= FEWEST_WORDS else ""


def told_by_others(
    context: LogContext, version: str, files: Collection[str] = OF_HOSTS, text: str = ""
) -> KnownFailure | None:
    """Return the failure that another program's line around the end of a log tells: the last one that names a cause.

    Else one that lets a cause be guessed, and if kinds of all files of hosts may tell it, any error of a known program.
    """
    lines = [line for line in context.nearby.splitlines() if not WORDS.is_of_vllm.search(line)]
    shown = "\n".join(lines)
    kinds = [kind for kind in table() if kind.file in files and not kind.has_context and kind.pattern.search(shown)]
    for sure in ("named by the error", "guess", *(("generic",) if files is OF_HOSTS else ())):
        for line, kind in itertools.product(lines[::-1], kinds):
            values = kind.values(line, "", context) if sure == ("generic" if kind.generic else kind.basis) else None
            if values is not None and (told := _told(kind, values, line, version, "", context)).do:
                at = kind.pattern.search(line)
                kept = at[0][:MOST_SEEN] if at and WORDS.says_nothing.search(text) else ""
                return told._replace(seen=around(hidden(line.strip()), kind.pattern), line=kept, is_decided=False)
    return None


def told_by_vllm(context: LogContext, version: str = "", *, is_alone: bool = False) -> KnownFailure | None:
    """Return the failure that a warning or an error names in a log that shows no state, the last such one.

    If such lines stand alone, the last error tells at least what it says.
    """
    last: KnownFailure | None = None
    for line in filter(None, map(WORDS.complains.match, context.nearby.splitlines()[: -MOST_COMPLAINTS - 1 : -1])):
        text = bare((line["said"] or line["text"]).strip())
        told, seen = known_failure([text], version, "", context=context), printable(hidden(text), MOST_SEEN)
        if told is not None and told.basis == "named by the error":
            return told._replace(seen=told.seen or seen)
        says = "" if WORDS.says_nothing.search(text) else _said(text)
        if is_alone and not (last or line["warning"]) and (says or told):
            last = (told or KnownFailure("", says, "", ""))._replace(seen=seen)
    return last


def _with_source(texts: Sequence[str], raised: RaisedError, context: LogContext, version: str) -> Sequence[str]:
    """Add to an error of vLLM's code its module and its options: those that the server was given or the error names.

    The last release that raises it is told to older servers only: a newer one has the message from elsewhere.
    """
    last = raised.last if release(version) <= release(raised.last) else ""
    arguments = WORDS.given.search(context.nearby)
    fields = {name: name[2:].replace("-", "_") for name in raised.options}
    options = [name for name in fields if arguments and f"'{fields[name]}':" in arguments["args"]]
    named = r"(?<!\w)(?:{}|{})(?!\w)"
    options = options or [one for one in fields if not arguments or re.search(named.format(one, fields[one]), texts[0])]
    reading = f" reading {' and '.join(options)}" if options else ""
    return (f"{texts[0]}\nraised by {raised.module}{last and f' to {last}'}{reading}", *texts)


def _with_upgrade(advice: str, version: str, basis: Basis) -> str:
    """Name the newest release if the server's is far behind: an exception of no kind is often a mended defect.

    If the cause is a guess and the server's release is old, the upgrade comes first.
    """
    newest = versions()[-1]
    (at, last) = release(version)[:2], release(newest)[:2]
    if not at and basis == "guess" and not re.search("(?i)upgrade", advice):
        if advice.startswith("Start without") and advice.count("--") > FEW_OPTIONS:
            return f"Upgrade vLLM ({newest} is the newest release); until then {advice[:1].lower()}{advice[1:]}"
        return f"{advice.removesuffix('.')}; if the error stays, upgrade vLLM."
    if not at or last < (at[0], at[1] + FAR_BEHIND):
        return advice
    numbers = f"(this server runs {printable(version)}, {newest} is newer)"
    if WORDS.upgrade.search(advice):
        return re.sub(WORDS.upgrade, rf"\1 {numbers}", advice, count=1)
    if basis == "guess" and last >= (at[0], at[1] + OLD):
        return f"Upgrade vLLM {numbers}; until then {advice[:1].lower()}{advice[1:]}"
    return f"{advice.removesuffix('.')}; if the error stays, upgrade vLLM {numbers}."


def _filled(text: str, values: Mapping[str, str], context: LogContext = NOTHING, version: str = "") -> str:
    """Fill in the groups, and the options that the server was given.

    An alternative is left out if its number cannot be computed, if the server was given none of its options, if it is a
    second one that lists many, or if its release or its platform does not have one.
    """

    platform = platform_of("", context) if context.nearby else ""

    def value(place: re.Match[str]) -> str:
        arguments = [values[name.strip()] for name in place["names"].split(",")]
        return FUNCTIONS[place["function"]](*arguments) if place["function"] else printable(arguments[0])

    def options(place: re.Match[str]) -> str:
        names = _options_given(place, context)
        if not names or (len(names) > FEW_OPTIONS and not text.startswith(place.string)):
            raise ValueError
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))

    def filled(fill_options: Callable[[re.Match[str]], str]) -> str:
        first, *others = WORDS.alternatives.split(text)
        result = ""
        for separator, clause in zip(("", *others[::2]), (first, *others[1::2]), strict=True):
            with suppress(ValueError, ArithmeticError):
                said = PLACE.sub(value, WORDS.options.sub(fill_options, clause))
                is_open = _has_options(version, said) and not is_refuted(said, context.nearby)
                is_open = is_open and not offers_what_it_lacks(said, platform)
                result += (f"{separator}{said}" if result else WORDS.second.sub("", said)) if is_open else ""
        return result

    result = filled(options) or filled(lambda place: place["names"]) or PLACE.sub(value, text)
    if is_refuted(result, context.nearby):
        return ""
    tools = words().tools.get(platform, {})
    for tool, theirs in tools.items():
        result = result.replace(tool, theirs)
    result = f"{result[:1].upper()}{result[1:]}" if WORDS.word.match(result) else result
    return result if result.endswith(".") else f"{result}."


def _has_options(version: str, clause: str) -> bool:
    """Return True if a release, "" if unknown, has the options that a clause offers; a container's are not vLLM's."""
    at = release(version)
    flags = WORDS.flag.finditer(clause) if at and not WORDS.of_container.search(clause) else ()
    named = [(*variables().get(word["name"], ("", "")), word) for word in WORDS.variable.finditer(clause) if at]
    return all(
        (name := "--" + flag["name"][2:].removeprefix("no-")) not in known()
        or bool(flag["other"])
        or known()[name].in_release(version)
        or bool(WORDS.removes.search(clause))
        for flag in flags
    ) and all(
        not first
        or bool(word["of"] or word["other"])  # the clause names it for other releases
        or (release(first) <= at and (not last or at <= release(last) or last == versions()[-1]))
        for first, last, word in named
    )


def is_refuted(clause: str, near: str) -> bool:
    """Return True if the log shows that a clause cannot help: it is set already, or it offers what is used already."""
    offers = (used.search(near) for offered, used in words().in_use.items() if re.search(rf"\b{offered}\b", clause))
    return is_tried(clause, near) or any(offers)


def is_tried(clause: str, near: str) -> bool:
    """Return True if the log shows everything that a clause would set as set, or as too small to be less."""
    if not (settings := list(WORDS.setting.finditer(clause))) or WORDS.removes.search(clause):
        return False

    def is_set(setting: re.Match[str]) -> bool:
        if variable := setting["variable"]:
            return bool(re.search(rf"(?m)(?:^|export |-e |--env ){re.escape(variable)}(?!\w)", near))
        name = setting["flag"].replace("-", "_")
        values = re.findall(rf"(?:'{name}': |\b{name}=)'?(?!{name}\b)([\w.]+)", near)
        if not values or values[-1] in ("True", "False"):
            return bool(values) and values[-1] == str(not setting["no"])
        is_least = values[-1] == "1" and WORDS.less.search(clause[: setting.start()])
        return bool(is_least) or values[-1] == setting["value"]

    return all(map(is_set, settings))


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _divisors(text: str, limit: str = "") -> str:
    """List the divisors below a limit, of those that are numbers of GPUs: "1, 2, 4 or 7"."""
    count, end = int(_number(text)), int(_number(limit)) if limit else MOST_DIVISOR + 1
    *others, last = (str(divisor) for divisor in range(1, min(count + 1, end)) if count % divisor == 0)
    return f"{', '.join(others)} or {last}" if others else last


def _lora_rank(text: str) -> str:
    """The least rank that --max-lora-rank takes for an adapter of this rank; ValueError if there is none."""
    fitting = [rank for rank in LORA_RANKS if rank >= _number(text)]
    if not fitting:
        raise ValueError(text)
    return str(fitting[0])


def _scaled(length: str, have: str, need: str) -> str:
    """The context that fits the memory there is, in steps of 256 tokens; ValueError if none does."""
    tokens = int(_number(length) * _number(have) / _number(need)) // 256 * 256
    if not tokens:
        raise ValueError(length)
    return str(tokens)


def _share(free: str, total: str) -> str:
    """The share of the GPU that a server may take; ValueError if that is too little for one."""
    share = math.floor(100 * (_number(free) / _number(total) - RESERVE)) / 100 if _number(total) else 0.0
    if share < LEAST_SHARE:
        raise ValueError
    return f"{share:g}"


@lru_cache(maxsize=1)
def _packages() -> dict[str, str]:
    return read(PACKAGE / "knowledge" / "packages.toml", dict[str, str])


FUNCTIONS: Mapping[str, Callable[..., str]] = {
    "divisors": _divisors,
    "divisors_below": _divisors,
    "down": lambda value: str(math.floor(_number(value))),
    "up": lambda value: str(math.ceil(_number(value))),
    "minus": lambda one, other: f"{_number(one) - _number(other):g}",
    "share": _share,
    "half": lambda value: str(int(_number(value)) // 2),
    "flag": lambda name: option if (option := f"--{name.replace('_', '-')}") in known() else name,
    "double": lambda value: str(int(_number(value)) * 2),
    "gib": lambda size: f"{_number(size) / 2**30:.1f}",
    "release": lambda rule, least: f">={least}" if rule == "?" else rule,
    "after": lambda last: f"{release(last)[0]}.{release(last)[1] + 1}",
    "lora_rank": _lora_rank,
    "scaled": _scaled,
    "cuda": lambda release: f"{int(release) // 1000}.{int(release) % 1000 // 10}",
    "pip": lambda module: _packages().get(str(module), str(module)),
}
"""What the texts compute; `after` is the minor release behind one, `cuda` the release that the driver reports as 12020,
`pip` the package of a module and `flag` the option of a field."""
