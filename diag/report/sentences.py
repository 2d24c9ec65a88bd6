"""What every report says in the same words: times, numbers, changes; with nothing that a terminal would obey."""

import datetime
from collections import Counter
from collections.abc import Callable

from diag.core.incident import Fix, Source
from diag.core.subjects import Subject, agree
from diag.diagnosis.diagnose import Diagnosis, Reading, onset, says
from diag.diagnosis.progress import scope
from diag.diagnosis.proposals import FlagChange, Proposal, written
from diag.diagnosis.report import FAMILIES, Finding, Report
from diag.vllm.flags.registry import releases

Told = Callable[[float], str]
"""How an instant in unix seconds is told: `clock` to who looks on, `moment` to who reads it another day."""
FEW_SERVERS = 5
"""Servers up to which each is told of by itself; of more, those that have an incident in common are told together."""
MANY = 5
"""Incidents that cannot be judged on one subject: from more than these on, their names say enough."""


def printable(text: str) -> str:
    """The text with control characters, terminal escapes and line breaks made visible."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def clock(unix: float) -> str:
    """A time of day, "02:16:07 UTC"."""
    return datetime.datetime.fromtimestamp(unix, datetime.UTC).strftime("%H:%M:%S UTC")


def moment(unix: float) -> str:
    """A date and a time of day, "2026-07-14 02:16:07 UTC"."""
    return datetime.datetime.fromtimestamp(unix, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def since(unix: float | None, told: Told = clock) -> str:
    """Since when; None is before the first look."""
    return "since before the first look" if unix is None else f"since {told(unix)}"


def when(one: Diagnosis, told: Told = clock) -> str:
    """Since when, and whether it is still so."""
    began = since(one.since, told)
    return f"now, {began}" if one.ongoing or one.until is None else f"{began}, ended at {told(one.until)}"


def headline(report: Report, told: Told = clock) -> list[str]:
    """One sentence per primary incident, the worst first: verdict, scope, time, harm."""
    groups = alike(report)
    if groups:
        total = len(instances(report))
        return [_headline(each, told) if len(each) == 1 else _headline_of_many(each, total, told) for each in groups]
    if report.verdict == "unknown":
        return [f"CANNOT TELL {each}" for each in folded([printable(each) for each in report.blind])]
    return [_healthy(report)]


def _healthy(report: Report) -> str:
    """Healthy, and how much of that could be judged."""
    unknown = {each.incident.id for each in report.undecided}
    judged = {each.diagnosis.incident.id for each in report.findings if each.diagnosis.state != "unknown"}
    rest = f", {len(unknown)} could not be judged" if unknown else ""
    return f"HEALTHY {printable(report.observed.target)}: {states(report)}; none of {len(judged)} incidents{rest}"


def _headline(found: list[Finding], told: Told) -> str:
    one = found[0].diagnosis
    return f"{one.severity.upper()} {one.incident.id} on {where(one)}, {when(one, told)}: {one.incident.impact}"


def _headline_of_many(found: list[Finding], total: int, told: Told) -> str:
    one = found[0].diagnosis
    names = list(dict.fromkeys(printable(instance(each.diagnosis.subject)) for each in found))
    begun = [each.diagnosis.since for each in found]
    began = since(None if None in begun else min(each for each in begun if each is not None), told)
    now = sum(each.diagnosis.ongoing for each in found)
    lasting = "now" if now == len(found) else f"{now} of them now" if now else "over by now"
    scope = f"{len(names):,} of {total:,} servers ({listed(names)})"
    return f"{one.severity.upper()} {one.incident.id} on {scope}, {lasting}, {began}: {one.incident.impact}"


def alike(report: Report) -> list[list[Finding]]:
    """The primary findings, one by one; in a fleet those of one incident together: they may have one cause."""
    primaries = [each for each in report.present if each.diagnosis.primary]
    if len(instances(report)) <= FEW_SERVERS:
        return [[each] for each in primaries]
    groups: dict[tuple[str, str], list[Finding]] = {}
    for each in primaries:
        groups.setdefault((each.diagnosis.incident.id, each.diagnosis.severity), []).append(each)
    return list(groups.values())


def worth_telling(report: Report) -> list[Finding]:
    """What is present, in its order; of a fleet the first of each kind, which stands for those like it."""
    if not is_fleet(report):
        return list(report.present)
    return [found[0] for found in alike(report)]


def instances(report: Report) -> list[str]:
    """Every server that was judged, by name."""
    return sorted({instance(each.diagnosis.subject) for each in report.findings})


def is_fleet(report: Report) -> bool:
    """Whether there are too many servers to tell of each by itself."""
    return len(instances(report)) > FEW_SERVERS


def instance(subject: Subject) -> str:
    """The server of a subject."""
    return dict(subject).get("instance", "")


def listed(names: list[str], most: int = 3) -> str:
    """The first few of many: "a, b, c and 37 more"."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest:,} more" if rest > 0 else "")


def folded(lines: list[str], most: int = 8) -> list[str]:
    """The first few of many lines, and how many were left out."""
    rest = len(lines) - most
    return [*lines[:most], *([f"... and {rest:,} more like these"] if rest > 0 else [])]


def told(report: Report) -> Told:
    """How its instants are told: by the clock of today, unless it is about the past."""
    return moment if report.observed.source == "prometheus" else clock


def also(report: Report) -> list[str]:
    """What is present besides: infos, and incidents in the scope of another primary that it does not explain."""
    others = [e.diagnosis for e in report.present if not e.diagnosis.primary and not e.diagnosis.explained_by]
    if is_fleet(report):
        where: dict[tuple[str, str], list[str]] = {}
        for each in others:
            where.setdefault((each.severity, each.incident.id), []).append(place(each.subject))
        return [f"{severity}: {name} on {listed(sorted(places))}" for (severity, name), places in where.items()]
    return [
        f"{d.severity}: {d.incident.id} on {place(d.subject)}, {when(d, told(report))}: {says(d.symptoms[0])}"
        for d in others
    ]


def restless(report: Report) -> list[str]:
    """The engines that are not simply busy, and why they are called what they are; in a fleet, how many."""
    found = [each for each in report.progress if each.state in ("slow", "stalled", "starting", "dead", "idle")]
    if not is_fleet(report):
        return [f"{place(each.subject)} is {each.state}: {each.because}" for each in found]
    states: dict[str, list[str]] = {}
    for each in found:
        states.setdefault(each.state, []).append(place(each.subject))
    return [f"{len(places):,} {state}: {listed(sorted(places))}" for state, places in states.items()]


def where(one: Diagnosis) -> str:
    """The subject, and the rank, GPU or event that its evidence names."""
    named = f" ({', '.join(map(printable, one.culprits))})" if one.culprits else ""
    return place(one.subject) + named


def evidence(one: Diagnosis) -> list[Reading]:
    """What an incident is made of, then what supports it; what only tells it from a look-alike is told with that."""
    symptoms = [each for each in one.symptoms if each.condition in one.incident.symptoms]
    return [*symptoms, *(each for each in one.supports if each.holds)]


def first_sign(one: Diagnosis, told: Told) -> list[str]:
    """The evidence that showed before the incident was complete."""
    signs = [(began, each.condition.signal.name) for each in evidence(one) if (began := onset(each, one)) is not None]
    began, name = min(signs, default=(0.0, ""))
    early = one.since is not None and signs and one.instants[0] < began < one.since
    return [f"{name}, beyond its limit since {told(began)}"] if early else []


def timeline(report: Report) -> list[str]:
    """What is present in the order in which it began; nothing where all of it began at once or in a fleet."""
    found = [each.diagnosis for each in report.present]
    if is_fleet(report) or len({each.since for each in found}) < 2:
        return []
    ordered = sorted(found, key=lambda each: each.since or 0.0)
    return [f"{each.incident.id} on {where(each)}: {when(each, told(report))}" for each in ordered]


def states(report: Report) -> str:
    """How many engines are busy, idle and so on: "2 engines busy, 1 idle"."""
    names = [each.state for each in report.progress]
    counts = [f"{names.count(name)} {name}" for name in dict.fromkeys(names)]
    if not counts:
        return "no engine"
    number, _, rest = ", ".join(counts).partition(" ")
    return f"{number} engine{'s' if number != '1' else ''} {rest}"


def change(proposal: Proposal) -> str:
    """The change in one line: `--max-num-seqs 64 -> 6`, or the command, or nothing for advice."""
    fix = proposal.fix
    if fix.kind == "host_command":
        return proposal.name
    if fix.kind == "advice":
        return ""
    changes = [_change(each, fix.value is None) for each in proposal.changes]
    return "; ".join(changes)


def _change(change: FlagChange, removed: bool) -> str:
    """`--max-num-seqs 64 -> 6`; a value that only the release's default tells is called so."""
    before = "" if change.before is None else f"{written(change.before)} {'(default) ' if change.assumed else ''}"
    after = "remove it" if removed else "?" if change.after is None else written(change.after)
    return f"{change.name} {before}-> {after}" if after else change.name


def versions(proposal: Proposal) -> str:
    """The releases that have the flag, "vLLM 0.24.0 and later"; empty where every release has it."""
    return released(proposal.fix)


def released(fix: Fix) -> str:
    """The same for a fix."""
    first, last = releases(fix.flag, fix.versions)
    if first and last:
        return f"vLLM {first} - {last}"
    return f"vLLM {first} and later" if first else f"vLLM up to {last}" if last else ""


def measure(report: Report) -> list[str]:
    """How to get each family of telemetry that was not measured."""
    return [f"{name}: {FAMILIES[name][1]}" for name in report.observed.not_measured]


def blind(report: Report) -> list[str]:
    """Whose health cannot be told, and why, where the headline is about something else."""
    return [] if report.verdict == "unknown" else folded([printable(each) for each in report.blind])


def undecided(report: Report) -> list[str]:
    """What could not be judged where, and for want of which signals; in a fleet, on how many servers."""
    if is_fleet(report):
        return _undecided_by_many(report)
    where: dict[Subject, list[Diagnosis]] = {}
    for each in report.undecided:
        where.setdefault(each.subject, []).append(each)
    return [line for subject, unknown in where.items() for line in _undecided(subject, unknown)]


def _undecided_by_many(report: Report) -> list[str]:
    counts = Counter(each.subject for each in report.undecided)
    nearly = sorted(place(subject) for subject, count in counts.items() if count > MANY)
    lacking: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for each in report.undecided:
        if counts[each.subject] <= MANY:
            lacking.setdefault((each.incident.id, each.missing), []).append(place(each.subject))
    told = (
        f"{name} on {listed(sorted(places))}: no {', '.join(missing)}" for (name, missing), places in lacking.items()
    )
    return [*([f"nearly all incidents on {listed(nearly)}"] if nearly else []), *folded(list(told))]


def _undecided(subject: Subject, unknown: list[Diagnosis]) -> list[str]:
    if len(unknown) > MANY:
        return [f"nearly all of {place(subject)}: {', '.join(each.incident.id for each in unknown)}"]
    return [f"{each.incident.id} on {place(subject)}: no {', '.join(each.missing)}" for each in unknown]


def looked_at(report: Report, told: Told = clock) -> str:
    """Which samples were judged."""
    seen = report.observed
    failed = f", {seen.failed_scrapes} of them failed" if seen.failed_scrapes else ""
    span = f"{told(seen.start)} - {told(seen.end)} ({seen.end - seen.start:.0f} s)"
    return f"{seen.source} {printable(seen.target)}: {seen.scrapes} scrapes{failed}, {span}"


def checked(report: Report) -> str:
    """How many incidents were judged, and on how many engines which state of progress was found."""
    absent = {each.diagnosis.incident.id for each in report.findings if each.diagnosis.state == "absent"}
    held = {each.diagnosis.incident.id for each in report.present}
    return f"{states(report)}; absent: {', '.join(sorted(absent - held)) or 'none'}"


def why(source: Source) -> str:
    """Where a claim comes from, in one line."""
    return f"{source.says} ({source.kind}{': ' if source.reference else ''}{source.reference})"


def place(subject: Subject) -> str:
    """A subject in words, harmless to a terminal."""
    return printable(scope(subject))


def consequences(finding: Finding, report: Report) -> list[Diagnosis]:
    """What the finding explains in its own scope, directly or by what it explains."""
    cause = finding.diagnosis
    scope = [each.diagnosis for each in report.present if agree(each.diagnosis.subject, cause.subject)]
    followed: list[Diagnosis] = []
    causes = {cause.incident.id}
    while new := [each for each in scope if each.explained_by in causes and each not in followed]:
        followed += new
        causes = {each.incident.id for each in new}
    return followed
