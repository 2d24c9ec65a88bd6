"""The sentences that every report has in common: verdicts, times, changes, what was checked."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from diag.core.formatting import clock, escaped, listed, moment, printable, quantity
from diag.core.incident import Fix, Source
from diag.core.subjects import Subject, agree
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.diagnose import Diagnosis, onset
from diag.diagnosis.progress import scope
from diag.diagnosis.proposals import FlagChange, Proposal, written
from diag.diagnosis.report import FAMILIES, Finding, Report
from diag.diagnosis.shared_labels import SharedLabel
from diag.sources.prometheus.properties import Property
from diag.vllm.flags.registry import releases

Key = TypeVar("Key")
TimeFormat = Callable[[float], str]
"""How a time in unix seconds is written: `clock` for whoever looks on, `moment` for whoever reads it another day."""
FEW_SERVERS = 5
"""Up to so many servers are reported one by one; of more, those that have an incident in common are one line."""
MANY = 5
"""More unknown incidents than these on one subject are named without the signals that they lack."""


# -- times and places -------------------------------------------------------------------------------------------------


def time_format(report: Report) -> TimeFormat:
    """The time of day, or date and time where the report is about the past."""
    return moment if report.observed.source == "prometheus" else clock


def began(diagnoses: Sequence[Diagnosis], written_as: TimeFormat) -> str:
    """When the first of them began: "02:16:07 UTC", or "before 02:16:07 UTC" where it held from the start."""
    since = [diagnosis.since for diagnosis in diagnoses]
    known = [unix for unix in since if unix is not None]
    if len(known) == len(since):
        return written_as(min(known))
    return f"before {written_as(min(diagnosis.watched_since for diagnosis in diagnoses))}"


def when(diagnosis: Diagnosis, written_as: TimeFormat = clock) -> str:
    """Since when, and until when where it has ended; how many times where there was health between."""
    start = began([diagnosis], written_as)
    if len(diagnosis.episodes) > 1:
        return _again(diagnosis, start, written_as)
    if diagnosis.ongoing or diagnosis.until is None:
        return f"ongoing since {start}"
    return f"began {'' if diagnosis.since is None else 'at '}{start}, ended at {written_as(diagnosis.until)}"


def _again(diagnosis: Diagnosis, start: str, written_as: TimeFormat) -> str:
    last, times = diagnosis.one_by_one[-1], f"{len(diagnosis.episodes)} times"
    if diagnosis.ongoing or last.until is None:
        return f"ongoing since {began([last], written_as)}, {times} since {start}"
    return f"{times} from {start} to {written_as(last.until)}"


def place(subject: Subject) -> str:
    """A subject in words, harmless to a terminal."""
    return escaped(scope(tuple((label, printable(value)) for label, value in subject)))


def where(diagnosis: Diagnosis) -> str:
    """The subject, and the rank, GPU or event that its evidence names."""
    named = f" ({', '.join(map(printable, diagnosis.culprits))})" if diagnosis.culprits else ""
    return place(diagnosis.subject) + named


def instance(subject: Subject) -> str:
    """The server of a subject."""
    return dict(subject).get("instance", "")


def instances(report: Report) -> list[str]:
    """Return every server that was judged, by name; of a large fleet some only as to their progress."""
    judged = (finding.diagnosis.subject for finding in report.findings)
    seen = (*(progress.subject for progress in report.progress), *(why.subject for why in report.not_judged))
    return sorted({*map(instance, judged), *map(instance, filter(None, seen)), *report.gone})


def is_fleet(report: Report) -> bool:
    """Whether there are too many servers to report them one by one."""
    return len(instances(report)) > FEW_SERVERS


def folded(lines: Sequence[str], most: int = 8) -> list[str]:
    """The first few of many lines, and how many were left out."""
    rest = len(lines) - most
    return [*lines[:most], *([f"... and {rest:,} more"] if rest > 0 else [])]


# -- the verdict ------------------------------------------------------------------------------------------------------


def headline(report: Report, written_as: TimeFormat = clock) -> list[str]:
    """One sentence per primary incident, the worst first: verdict, scope, time, impact."""
    groups = alike(report)
    if groups:
        total = len(instances(report))
        return [
            _headline(group[0].diagnosis, written_as) if len(group) == 1 else _shared(group, total, written_as)
            for group in groups
        ]
    if report.verdict == "unknown":
        return [f"CANNOT TELL {line}" for line in folded([escaped(each.sentence) for each in report.not_judged])]
    return [f"HEALTHY {escaped(report.observed.target)}: {states(report)}; {found_nothing(report)}"]


def _headline(diagnosis: Diagnosis, written_as: TimeFormat) -> str:
    return (
        f"{diagnosis.severity.upper()} {diagnosis.incident.id} on {where(diagnosis)}, {when(diagnosis, written_as)}: "
        f"{diagnosis.incident.impact}"
    )


def _shared(group: list[Finding], total: int, written_as: TimeFormat) -> str:
    """The headline of an incident that several servers of a fleet have."""
    diagnoses = [finding.diagnosis for finding in group]
    first, ongoing = diagnoses[0], sum(diagnosis.ongoing for diagnosis in diagnoses)
    names = list(dict.fromkeys(printable(instance(diagnosis.subject)) for diagnosis in diagnoses))
    now = "ongoing" if ongoing == len(group) else f"ongoing on {ongoing} of them" if ongoing else "ended"
    scope = f"{len(names):,} of {total:,} servers ({listed(names)})"
    start = f"{now}, first seen {began(diagnoses, written_as)}"
    return f"{first.severity.upper()} {first.incident.id} on {scope}, {start}: {first.incident.impact}"


def found_nothing(report: Report) -> str:
    """That nothing (else) was found, and in how many incidents: "no incident found (19 checked)"."""
    found = "no other incident found" if report.present else "no incident found"
    checked, unknown = len(report.checked), len(report.needs_telemetry)
    rest = f"; {unknown} {'needs' if unknown == 1 else 'need'} more telemetry" if unknown else ""
    return f"{found} ({checked} checked{rest})"


def states(report: Report) -> str:
    """How many engines are busy, idle and so on: "2 engines busy, 1 idle"."""
    names = [progress.state for progress in report.progress]
    counts = [f"{names.count(name)} {name}" for name in dict.fromkeys(names)]
    if not counts:
        return "no engine seen"
    number, _, rest = ", ".join(counts).partition(" ")
    return f"{number} engine{'s' if number != '1' else ''} {rest}"


def alike(report: Report) -> list[list[Finding]]:
    """The primary findings, one by one; in a fleet those of one incident together, since they may have one cause."""
    primaries = [finding for finding in report.present if finding.diagnosis.primary]
    if not is_fleet(report):
        return [[finding] for finding in primaries]
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in primaries:
        groups.setdefault((finding.diagnosis.incident.id, finding.diagnosis.severity), []).append(finding)
    return list(groups.values())


def detailed(report: Report) -> list[Finding]:
    """What is reported in detail: all that is present; of a fleet the first of each kind, for those like it."""
    return [group[0] for group in alike(report)] if is_fleet(report) else list(report.present)


# -- what the ill servers share ---------------------------------------------------------------------------------------

HAVE: dict[str, str] = {"version": "run ", "model": "serve ", "flag": "run with "}
"""The verb before a value in a sentence about servers; "have" before any other."""


def shared(report: Report) -> list[str]:
    """A paragraph for each incident whose servers have something in common that healthy servers lack."""
    sentences = grouped((found.incident, shared_sentence(found, report)) for found in report.shared)
    return [
        " ".join([first, *(text.replace(incident, "It", 1) for text in rest)])
        for incident, (first, *rest) in sentences.items()
    ]


def shared_sentence(found: SharedLabel, report: Report) -> str:
    """The label and its counts: 'all 40 have pool="b"; 0 of the 60 healthy servers do'.

    Servers are not called healthy if something could not be judged.
    """
    those = f"all {found.ill:,}" if found.ill_with == found.ill else f"{found.ill_with:,} of {found.ill:,}"
    if found.property.kind == "hour":
        start, _, end = found.value.partition("-")
        return f"{found.incident} began between {start} and {end} UTC on {those} servers."
    labels = [shared_label(item, value) for item, value in found.also]
    also = f" (also {listed(labels)})" if labels else ""
    have = HAVE.get(found.property.kind, "have ") + shared_label(found.property, found.value)
    others = "servers without an incident" if report.not_judged else "healthy servers"
    healthy = f"{found.healthy_with:,} of the {found.healthy:,} {others} do"
    return f"{found.incident} on {found.ill:,} servers: {those} {have}{also}; {healthy}."


def shared_label(item: Property, value: str) -> str:
    """A value with its property: 'pool="b"', "vLLM 0.24.0", "--max-num-seqs 64", "GPU driver 570.86"."""
    shown = printable(value, 60)
    if item.kind == "flag":
        name = item.name.replace("_", "-")
        return {"true": f"--{name}", "false": f"--no-{name}"}.get(value, f"--{name} {shown}")
    names = {"version": "vLLM", "model": "model", "gpu": "GPU", "driver": "GPU driver"}
    return f"{names[item.kind]} {shown}" if item.kind in names else f'{printable(item.name, 60)}="{shown}"'


# -- what was found ---------------------------------------------------------------------------------------------------


def not_busy(report: Report) -> list[str]:
    """The engines that are not simply busy, and why; in a fleet, how many."""
    found = [progress for progress in report.progress if progress.state != "busy"]
    if not is_fleet(report):
        return [f"{place(progress.subject)} is {progress.state}: {progress.reason}" for progress in found]
    states = grouped((progress.state, place(progress.subject)) for progress in found)
    return [f"{len(places):,} {state}: {listed(sorted(places))}" for state, places in states.items()]


def ceilings(report: Report) -> list[str]:
    """How near each engine is to the ceilings of its GPUs, the nearest first; not of a fleet: a dashboard shows it."""
    if is_fleet(report):
        return []
    several = len(report.ceilings) > 1
    ordered = sorted(report.ceilings, key=lambda shares: -shares.nearest)
    return [f"{place(shares.subject)}: {shares.sentence}" if several else shares.sentence for shares in ordered]


def also(report: Report) -> list[str]:
    """What is present besides: infos, and incidents in the scope of another primary that it does not explain."""
    others = [d for d in (f.diagnosis for f in report.present) if not d.primary and not d.explained_by]
    if is_fleet(report):
        where = grouped((f"{d.severity}: {d.incident.id}", place(d.subject)) for d in others)
        return [f"{name} on {listed(sorted(places))}" for name, places in where.items()]
    return [
        f"{d.severity}: {d.incident.id} on {place(d.subject)}, {when(d, time_format(report))}: {d.symptoms[0].sentence}"
        for d in others
    ]


def evidence(diagnosis: Diagnosis) -> list[Reading]:
    """The symptoms, then what supports them; what only rules out a look-alike is reported with that."""
    symptoms = [reading for reading in diagnosis.symptoms if reading.condition in diagnosis.incident.symptoms]
    return [*symptoms, *(reading for reading in diagnosis.supports if reading.holds)]


def quoted(finding: Finding) -> list[str]:
    """The log lines that decide, each with its place in the log and the process that wrote it, and what caused them."""
    lines = []
    for quote in finding.quotes:
        where = ", ".join(part for part in (quote.place, quote.process) if part)
        lines += [f"{quote.text} ({where})" if where else quote.text]
        lines += [f"raised from {quote.cause}"] if quote.cause else []
    return lines


def first_sign(diagnosis: Diagnosis, written_as: TimeFormat) -> list[str]:
    """The evidence that showed before the incident was complete."""
    onsets = [(onset(reading, diagnosis), reading.condition.signal.name) for reading in evidence(diagnosis)]
    start, name = min(((start, name) for start, name in onsets if start is not None), default=(0.0, ""))
    since = diagnosis.one_by_one[-1].since
    early = since is not None and diagnosis.instants[0] < start < since
    return [f"{name}, beyond its threshold since {written_as(start)}"] if early else []


def timeline(report: Report) -> list[str]:
    """Every episode in the order in which they began; nothing where all of them began at once or in a fleet."""
    found = [episode for finding in report.present for episode in finding.diagnosis.one_by_one]
    if is_fleet(report) or len({diagnosis.since for diagnosis in found}) < 2:
        return []
    ordered = sorted(found, key=lambda diagnosis: diagnosis.since or 0.0)
    return [f"{d.incident.id} on {where(d)}: {when(d, time_format(report))}" for d in ordered]


def consequences(finding: Finding, report: Report) -> list[Diagnosis]:
    """What the finding explains in its own scope, directly or by what it explains."""
    cause = finding.diagnosis
    scope = [other.diagnosis for other in report.present if agree(other.diagnosis.subject, cause.subject)]
    followed: list[Diagnosis] = []
    causes = {cause.incident.id}
    while new := [diagnosis for diagnosis in scope if diagnosis.explained_by in causes and diagnosis not in followed]:
        followed += new
        causes = {diagnosis.incident.id for diagnosis in new}
    return followed


# -- what to change ---------------------------------------------------------------------------------------------------


def change(proposal: Proposal) -> str:
    """The change in one line: `--max-num-seqs 64 -> 6`, or the command, or nothing for advice."""
    fix = proposal.fix
    if fix.kind == "host_command":
        return proposal.name
    if fix.kind == "advice":
        return ""
    return "; ".join(_change(change, fix.value is None) for change in proposal.changes)


def _change(change: FlagChange, removed: bool) -> str:
    """`--max-num-seqs 64 -> 6`, `remove --enforce-eager`; a value that is only the release's default is called so."""
    before = "" if change.before is None else written(change.before)
    if removed:
        return f"remove {change.name}" + (f" (now {before})" if before else "")
    after = "?" if change.after is None else written(change.after)
    default = " (default)" if before and change.assumed else ""
    return " ".join(part for part in (change.name, before + default, f"-> {after}") if part) if after else change.name


def needs(proposal: Proposal) -> str:
    """What diag could not measure, and the reader has to look up before the change."""
    return f"Not measured, check first: {', '.join(proposal.needs)}." if proposal.needs else ""


def uncomputed(finding: Finding) -> list[str]:
    """The fixes that are not offered for want of their number, and the telemetry that would give it."""
    return [f"{proposal.name or proposal.text}: {', '.join(proposal.needs)}" for proposal in finding.uncomputed]


def versions(proposal: Proposal) -> str:
    """The releases that have the flag, "vLLM 0.24.0 and later"; empty where every release has it."""
    return released(proposal.fix)


def released(fix: Fix) -> str:
    """The same for a fix."""
    first, last = releases(fix.flag, fix.versions)
    if first and last:
        return f"vLLM {first} - {last}"
    return f"vLLM {first} and later" if first else f"vLLM up to {last}" if last else ""


def why(source: Source) -> str:
    """Where a claim comes from, in one line."""
    return f"{source.says} ({source.kind}{': ' if source.reference else ''}{source.reference})"


# -- what all of this rests on ----------------------------------------------------------------------------------------


def source(report: Report, written_as: TimeFormat) -> str:
    """Which samples were judged."""
    seen = report.observed
    failed = f", {seen.failed_scrapes} of them failed" if seen.failed_scrapes else ""
    span = f"{written_as(seen.start)} - {written_as(seen.end)} ({quantity(seen.end - seen.start, 'seconds')})"
    return f"{seen.source} {escaped(seen.target)}: {seen.scrapes:,} scrapes{failed}, {span}"


def checked(report: Report, verbose: bool) -> list[str]:
    """The state of the engines and how many incidents were checked; `verbose` names those that are not present."""
    lines = [f"{states(report)}; {found_nothing(report)}"]
    names = {"absent": report.absent, "need more telemetry": sorted(report.needs_telemetry)}
    return lines + [f"{what}: {', '.join(ids)}" for what, ids in names.items() if ids and verbose]


def not_collected(report: Report) -> list[str]:
    """Each family of telemetry that is missing as a whole, and how to get it."""
    families = (FAMILIES[name] for name in report.observed.not_measured)
    return [f"{family.name}: {family.shows} ({family.hint})" for family in families]


def not_judged(report: Report) -> list[str]:
    """Whose health is unknown, and why, where the headline is about something else."""
    return [] if report.verdict == "unknown" else folded([escaped(each.sentence) for each in report.not_judged])


def normality(report: Report) -> list[str]:
    """What is unlike the normal of a baseline or of the peers; that all is like it, or why that is not known."""
    found = report.normality
    alone = len(instances(report)) == 1
    unlike = [reading for reading in found.readings if reading.notable]
    said = [f"{'' if alone else f'{place(reading.subject)}: '}{reading.sentence}" for reading in unlike]
    if found.readings and not unlike:
        names = listed(list(dict.fromkeys(reading.measure for reading in found.readings)), most=5)
        said = [f"{names}: as usual at this load ({printable(found.file)})"]
    return [*said, *(f"not compared with {printable(found.file)}: {reason}" for reason in found.reasons)]


def undecided(report: Report) -> list[str]:
    """Which incidents are unknown where, and for want of which signals; in a fleet, on how many servers."""
    if is_fleet(report):
        return _undecided_by_many(report)
    where: dict[Subject, list[Diagnosis]] = {}
    for diagnosis in report.undecided:
        where.setdefault(diagnosis.subject, []).append(diagnosis)
    return [line for subject, unknown in where.items() for line in _undecided(subject, unknown)]


def _undecided(subject: Subject, unknown: list[Diagnosis]) -> list[str]:
    if len(unknown) > MANY:
        names = ", ".join(diagnosis.incident.id for diagnosis in unknown)
        return [f"{len(unknown)} incidents on {place(subject)}: {names}"]
    return [f"{d.incident.id} on {place(subject)}: {'; '.join(d.lacking)}" for d in unknown]


def _undecided_by_many(report: Report) -> list[str]:
    counts = Counter(diagnosis.subject for diagnosis in report.undecided)
    nearly = sorted(place(subject) for subject, count in counts.items() if count > MANY)
    few = (d for d in report.undecided if counts[d.subject] <= MANY)
    lacking = grouped(((d.incident.id, "; ".join(d.lacking)), place(d.subject)) for d in few)
    lines = [f"{name} on {listed(sorted(places))}: {missing}" for (name, missing), places in lacking.items()]
    return [*([f"nearly all incidents on {listed(nearly)}"] if nearly else []), *folded(lines)]


def grouped(pairs: Iterable[tuple[Key, str]]) -> dict[Key, list[str]]:
    """The second of each pair under the first, in the order in which the first ones came."""
    groups: dict[Key, list[str]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
