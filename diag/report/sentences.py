"""Sentences that all forms of a report share: verdicts, times, places, findings, changes."""

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from diag.core.contract import Contract
from diag.core.formatting import TimeFormat, clock, escaped, listed, moment, plural, printable, quantity
from diag.core.incident import RANK, Fix, Incident, Severity, Source
from diag.core.log_events import LOG_EVENTS
from diag.core.subjects import Subject, SubjectIndex, agree, in_words
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.onset import onset
from diag.diagnosis.proposals import Proposal, written
from diag.diagnosis.report import Finding, Report
from diag.diagnosis.shared_labels import SharedLabel
from diag.knowledge.catalog import load
from diag.report.layout import has_local_times, name_room, shortened
from diag.report.spans import Span, Text, phrases
from diag.report.spans import states as in_words_of
from diag.sources.prometheus.properties import Property
from diag.vllm.flags.registry import releases

if TYPE_CHECKING:
    from diag.diagnosis.roll_call import RollCall

Key = TypeVar("Key")
Item = TypeVar("Item")
NOW = 300.0
"""Seconds before the present in which the end of a range in a Prometheus is now."""
EVENTS = frozenset({*(event.name for event in LOG_EVENTS), "kernel_oom_kill", "api_server_stopped"})
FEW_SERVERS = 5
"""The most servers that are reported one by one; in a larger fleet, servers with the same incident share a line."""


# -- times and places -------------------------------------------------------------------------------------------------


def time_format(report: Report) -> TimeFormat:
    """Return the time of day for servers that were scraped just now; anything else may be about another day."""
    seen = report.observed
    times = moment._replace(local=has_local_times.get())
    return times._replace(dated=seen.source != "scrape" or not times.is_one_day(seen.start, seen.end))


def began(diagnoses: Sequence[Diagnosis], written_as: TimeFormat) -> str:
    """Return the first start: "02:16:07 UTC", or "before 02:16:07 UTC" if it held from the first sample on."""
    since = [diagnosis.since for diagnosis in diagnoses]
    known = [unix for unix in since if unix is not None]
    if len(known) == len(since):
        return written_as(min(known))
    return f"before {written_as(min(diagnosis.watched_since for diagnosis in diagnoses))}"


def when(diagnosis: Diagnosis, written_as: TimeFormat = clock) -> str:
    """Return start and end of an incident, or the number of its episodes: "ongoing since 02:16:07 UTC"."""
    start = began([diagnosis], written_as)
    watched = diagnosis.instants[-1] - diagnosis.watched_since
    if diagnosis.ongoing and diagnosis.since is None and len(diagnosis.episodes) == 1 and watched:
        return f"ongoing for at least {quantity(watched, 'seconds')} (since {start})"
    if len(diagnosis.episodes) > 1:
        last, times = diagnosis.one_by_one[-1], f"{len(diagnosis.episodes)} times"
        if diagnosis.ongoing or last.until is None:
            return f"ongoing since {began([last], written_as)}, {times} since {start}"
        return f"{times} since {start}, the last from {began([last], written_as)} to {written_as(last.until)}"
    if diagnosis.ongoing or diagnosis.end is None:
        return f"ongoing since {start}"
    return f"began {'' if diagnosis.since is None else 'at '}{start}, ended at {written_as(diagnosis.end)}"


def ended(until: float, report: Report) -> str:
    """Return how long ago an incident ended, or how long before the end of a recording, a log or a past time range."""
    end = report.observed.end
    is_now = report.observed.source == "scrape" or (report.observed.source == "prometheus" and time.time() - end < NOW)
    noun = {"recording": "recording", "log": "log"}.get(report.observed.source, "time range")
    ago = "ago" if is_now else f"before the {noun} ends"
    return f"ended {quantity(max(end - until, 0), 'seconds')} {ago}"


class Period(NamedTuple):
    """The time in which incidents held: "since 02:16:07 UTC (32 s)", and in `brief`, which may lack the start."""

    full: str
    brief: str
    has_start: bool


def period(diagnoses: Sequence[Diagnosis], report: Report, written_as: TimeFormat | None = None) -> Period:
    """Return when incidents held, in times of the report's own format without another one.

    One diagnosis with several episodes has the period of the last one; several diagnoses, from the first start to the
    last end. A log without times tells none.
    """
    if any(not ending.is_timed for _, ending in report.observed.endings):
        return Period("", "", has_start=False)
    written_as = written_as or time_format(report)
    episodes = len(diagnoses[0].episodes) if len(diagnoses) == 1 else 1
    last = diagnoses[0].one_by_one[-1:] if episodes > 1 else diagnoses
    start = min(diagnosis.watched_since if diagnosis.since is None else diagnosis.since for diagnosis in last)
    is_cut = any(diagnosis.since is None for diagnosis in last)
    until = max(diagnosis.end or diagnosis.instants[-1] for diagnosis in last)
    lasted = quantity(until - start, "seconds") if until > start else ""
    times = f"episode {episodes}" if episodes > 1 else ""
    before = "before " if is_cut else ""
    if not any(diagnosis.ongoing for diagnosis in last):
        remarks = ", ".join(filter(None, (lasted and f"for {'at least ' if is_cut else ''}{lasted}", times)))
        held = before + written_as.span(start, until)
        told = ended(until, report)
        return Period(f"{told}: {held}" + (f" ({remarks})" if remarks else ""), told, has_start=False)
    since = f"since {before}{written_as(start)}"
    if is_cut and lasted:
        remarks = ", ".join(filter(None, (since, times)))
        return Period(f"for at least {lasted} ({remarks})", f"for at least {lasted}", has_start=False)
    remarks = ", ".join(filter(None, (lasted, times)))
    return Period(f"{since} ({remarks})" if remarks else since, since, has_start=True)


def place(subject: Subject) -> str:
    """Return a subject in words, harmless to a terminal, with a name of its server that has room."""
    return escaped(in_words(tuple((name, server_name(value)) for name, value in subject)))


def server_name(name: str) -> str:
    """Return the name of a server, harmless to a terminal, shortened where a report has room for short ones only."""
    return shortened(printable(name), name_room.get())


def where(diagnosis: Diagnosis, *, with_server: bool = True) -> str:
    """Return the subject, and the rank, GPU or event that its evidence names."""
    parts = (f"{name} {printable(value)}" for name, value in diagnosis.subject if name != "instance" and value)
    subject = place(diagnosis.subject) if with_server else escaped(" ".join(parts))
    named = ", ".join(map(culprit, diagnosis.culprits))
    return f"{subject} ({named})" if subject and named else subject or named


def culprit(name: str) -> str:
    """Return what a reading names, harmless to a terminal, and an event of the log in words."""
    return printable(name.replace("_", " ") if name in EVENTS else name)


def is_fleet(report: Report) -> bool:
    """Return True if there are too many servers to report them one by one."""
    return len(report.servers) > FEW_SERVERS


def folded(lines: Sequence[str], most: int = 8) -> list[str]:
    """Return the first few of many lines, and the number of lines left out."""
    rest = len(lines) - most
    return [*lines[:most], *([f"... and {rest:,} more"] if rest > 0 else [])]


def grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """Group the second items of pairs by the first, in the order of the first items."""
    groups: dict[Key, list[Item]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


# -- the verdict ------------------------------------------------------------------------------------------------------


def found_nothing(report: Report) -> str:
    """Return "no incident found (19 checked on 1 server)", or "no incident with an impact found ..." beside an info."""
    if report.observed.endings and report.verdict == "unknown":
        return "no server was asked"
    if report.observed.endings:
        found = "no other failure" if report.present else "no failure"
        load = "its load was judged where it has stats lines"
        if len(report.observed.endings) == 1:
            _, ending = report.observed.endings[0]
            load = f"last load: {ending.load}" if ending.load else "it has no stats line, so load was not judged"
            refused = f" and {ending.refused} HTTP 4xx" if ending.refused else ""
            failed = f", {ending.failed} of its last {plural(ending.answered, 'answer')} HTTP 5xx{refused}"
            load += failed if ending.answered else ""
        return f"{found} is in the log up to its end; {load}; no server was asked"
    found = "no incident with an impact found" if report.present else "no incident found"
    return f"{found} ({number_checked(report)})"


def number_checked(report: Report) -> str:
    unknown = len(report.needs_telemetry)
    rest = f"; {unknown} {'needs' if unknown == 1 else 'need'} more telemetry" if unknown else ""
    return f"{len(report.checked)} checked on {plural(len(report.judged_servers), 'server')}{rest}"


def slo_missing(report: Report) -> str:
    """Return the sentence that no SLO is set, "" if one is set; the defaults count only extreme latency."""
    if not report.slo_is_default:
        return ""
    ttft, itl = (quantity(getattr(Contract, f"{name}_seconds"), "seconds") for name in ("ttft", "itl"))
    return f"none in diag.toml: slow is only beyond {ttft} to the first token or {itl} between tokens"


def log_endings(report: Report, ends: str = "ends ") -> list[str]:
    """Return for each log that was judged alone how it ends: "ends with a dead engine, 2026-11-20 03:12:44 UTC"."""
    lines = []
    for name, ending in report.observed.endings:
        head = f"{name}: " if len(report.observed.endings) > 1 else ""
        done = "" if ending.done is None else f" ({quantity(ending.done, 'share')} done)"
        errors = ""
        if ending.errors and ending.state in ("failed", "dead"):
            raised = f" in {plural(ending.processes, 'process', 'processes')}" if ending.processes > 1 else ""
            errors = f"; {plural(ending.errors, 'line')} of errors{raised}"
        named = ending.state == "lost" and (("instance", name),) in [
            why.subject for why in report.not_judged if why.told
        ]
        state = "goes on" if ending.goes_on else "named" if named else ending.state
        end = in_words_of("log")[state].format(ends=ends, phase=ending.phase)
        lines.append(f"{head}{end}{done}{f', {moment(ending.at)}' if ending.is_timed else ''}{errors}")
    return lines


def states(report: Report) -> str:
    """Count the engines by state: "2 engines busy, 1 idle"."""
    counts = Counter(progress.state for progress in report.progress)
    if not counts:
        unjudged = {why.subject for why in report.not_judged if "engine" in dict(why.subject or ())}
        return f"{plural(len(unjudged), 'engine')} not judged" if unjudged else "no engine seen"
    (first, count), *rest = counts.items()
    engines = "engine" if count == 1 else "engines"
    return ", ".join([f"{count} {engines} {first}", *(f"{number} {state}" for state, number in rest)])


def alike(report: Report) -> list[list[Finding]]:
    """Group the primary findings, the worst now first: one by one, or in a fleet by incident, as of one cause."""
    beside = _beside(report)
    primaries = [(_worst(each.diagnosis, beside), each) for each in report.present if each.diagnosis.primary]
    primaries.sort(key=lambda pair: (-RANK[pair[0].severity], not pair[1].diagnosis.ongoing))
    if not is_fleet(report):
        return [[finding] for _, finding in primaries]
    pairs = (((finding.diagnosis.incident.id, worst.severity), finding) for worst, finding in primaries)
    return list(grouped(pairs).values())


def severity(finding: Finding, report: Report) -> Severity:
    """Return the severity of an incident or, of a primary one, of the worst that its server or engine has with it."""
    return _worst(finding.diagnosis, _beside(report)).severity


def _beside(report: Report) -> SubjectIndex[Diagnosis]:
    """Return the present incidents that are reported below a primary one."""
    present = (finding.diagnosis for finding in report.present)
    return SubjectIndex((each.subject, each) for each in present if not each.primary)


def _worst(lead: Diagnosis, beside: SubjectIndex[Diagnosis]) -> Diagnosis:
    others = (other for _, other in beside.like(lead.subject) if lead.primary)
    return max((lead, *others), key=lambda each: RANK[each.severity])


def death(finding: Finding, report: Report) -> Diagnosis | None:
    """Return the ongoing death of a server that the incident brought about, None while it lives."""
    deaths = (other for other in consequences(finding, report) if other.incident.crash and other.ongoing)
    return next(deaths, None)


def worse(finding: Finding, report: Report) -> Diagnosis | None:
    """Return the graver incident that accompanies a primary one, for which line 1 is graver."""
    worst = _worst(finding.diagnosis, _beside(report))
    return worst if RANK[worst.severity] > RANK[finding.diagnosis.severity] else None


def impact(finding: Finding, report: Report) -> str:
    """Return the impact of an incident and, if a graver one accompanies it, that one."""
    graver = worse(finding, report)
    more = f"; with it, {graver.severity}: {titled(graver.incident)}" if graver else ""
    return finding.diagnosis.incident.impact + more


def titled(incident: Incident) -> str:
    return f"{incident.title} ({incident.id})"


def titles(names: Iterable[str], report: Report) -> list[str]:
    """Return the names of incidents with their titles; other names, such as that of a look-alike, as they are."""
    judged = {finding.diagnosis.incident.id: titled(finding.diagnosis.incident) for finding in report.findings}
    return [judged.get(name) or built_in_titles().get(name, name) for name in names]


@cache
def built_in_titles() -> Mapping[str, str]:
    """Return the titles of the incidents that diag has of its own; a log alone is not judged for each of them."""
    return {incident.id: titled(incident) for incident in load()}


def detailed(report: Report) -> list[Finding]:
    """Return the findings to report in detail: all that are present; in a fleet, the first of each incident."""
    return [group[0] for group in alike(report)] if is_fleet(report) else list(report.present)


# -- labels that unhealthy servers share ------------------------------------------------------------------------------

HAVE = {"version": "run ", "model": "serve ", "flag": "run with "}
"""The verb before a value in a sentence about servers; "have" before any other."""


def shared(report: Report) -> list[str]:
    """Return a paragraph for each incident whose servers share a label that healthy servers lack."""
    found = grouped((label.incident, label) for label in report.shared)
    return [
        " ".join([shared_sentence(first, report), *(shared_sentence(label, report, "It") for label in rest)])
        for first, *rest in found.values()
    ]


def shared_sentence(shared: SharedLabel, report: Report, subject: str = "") -> str:
    """Return the label and its counts: 'all 40 have pool="b"; 0 of the 60 healthy servers do'.

    Servers are not called healthy if something could not be judged. An incident that goes on at no server has ended.
    Without another `subject` the incident has its title.
    """
    subject = subject or titles([shared.incident], report)[0]
    several = [finding.diagnosis for finding in report.present if finding.diagnosis.incident.id == shared.incident]
    ended = " (ended)" if several and not any(diagnosis.ongoing for diagnosis in several) else ""
    ill = f"all {shared.ill:,}" if shared.ill_with == shared.ill else f"{shared.ill_with:,} of {shared.ill:,}"
    if shared.property.kind == "hour":
        start, _, end = shared.value.partition("-")
        return f"{subject} began between {start} and {end} UTC on {ill} servers."
    labels = [shared_label(item, value) for item, value in shared.also]
    also = f" (also {listed(labels)})" if labels else ""
    have = HAVE.get(shared.property.kind, "have ") + shared_label(shared.property, shared.value)
    others = "servers without an incident" if report.not_judged else "healthy servers"
    healthy = f"{shared.healthy_with:,} of the {shared.healthy:,} {others} do"
    return f"{subject} on {shared.ill:,} servers{ended}: {ill} {have}{also}; {healthy}."


def shared_label(item: Property, value: str) -> str:
    """Return a value with its property: 'pool="b"', "vLLM 0.24.0", "--max-num-seqs 64", "GPU driver 570.86"."""
    shown = printable(value, 60)
    if item.kind == "flag":
        name = item.name.replace("_", "-")
        return {"true": f"--{name}", "false": f"--no-{name}"}.get(value, f"--{name} {shown}")
    names = {"version": "vLLM", "model": "model", "gpu": "GPU", "driver": "GPU driver"}
    return f"{names[item.kind]} {shown}" if item.kind in names else f'{printable(item.name, 60)}="{shown}"'


# -- findings ---------------------------------------------------------------------------------------------------------


def not_busy(report: Report) -> list[str]:
    """List the engines in any state but busy, and the reason; in a fleet, count them by state."""
    found = [progress for progress in report.progress if progress.state != "busy"]
    if not is_fleet(report):
        return [f"{place(progress.subject)} is {progress.state}: {progress.reason}" for progress in found]
    states = grouped((progress.state, place(progress.subject)) for progress in found)
    return [f"{len(places):,} {state}: {listed(sorted(places))}" for state, places in states.items()]


def ceilings(report: Report) -> list[str]:
    """Return the distance of each engine from the ceilings of its GPUs, the nearest first; [] for a fleet."""
    if is_fleet(report):
        return []
    several = len(report.ceilings) > 1
    ordered = sorted(report.ceilings, key=lambda shares: -shares.nearest)
    return [f"{place(shares.subject)}: {shares.sentence}" if several else shares.sentence for shares in ordered]


def also(report: Report) -> list[str]:
    """List further incidents: infos, and incidents that no primary one explains."""
    others = [d for d in (f.diagnosis for f in report.present) if not d.primary and not d.explained_by]
    if is_fleet(report):
        where = grouped((f"{d.severity}: {titled(d.incident)}", place(d.subject)) for d in others)
        return [f"{name} on {listed(sorted(places))}" for name, places in where.items()]
    texts = []
    for d in others:
        numbers = [reading for reading in evidence(d) if reading.condition.signal.unit != "bool"]
        shown = numbers or d.symptoms[:1]
        since = f"{d.severity}: {titled(d.incident)} on {place(d.subject)}, {when(d, time_format(report))}"
        texts.append(f"{since}: {'; '.join(reading.sentence for reading in shown)}")
    return texts


def evidence(diagnosis: Diagnosis) -> list[Reading]:
    """Return the symptoms, then the supporting readings, without readings that only rule out a look-alike."""
    symptoms = [reading for reading in diagnosis.symptoms if reading.condition in diagnosis.incident.symptoms]
    return [*symptoms, *(reading for reading in diagnosis.supports if reading.holds)]


def ruled_out(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return each look-alike that was ruled out, with the evidence against it: the number and its threshold."""
    evidence = []
    for name, reading, by_requirement in diagnosis.refuted:
        shown = "that" if reading.condition.signal.unit == "bool" else reading.threshold
        decides = f"it requires {required(reading)}" if by_requirement else f"{shown} rules it out"
        evidence.append((name, f"{reading.sentence}; {decides}"))
    return evidence


def required(reading: Reading) -> str:
    """Return the threshold of a reading in a sentence: "> 90 %", "yes"."""
    is_yes_or_no = reading.condition.signal.unit == "bool"
    return quantity(reading.condition.op in (">", ">="), "bool") if is_yes_or_no else reading.threshold


def ruled_out_by_evidence(diagnosis: Diagnosis, report: Report) -> list[tuple[str, str]]:
    """Return the evidence of `ruled_out` once, with the titles of all look-alikes that it rules out."""
    names = grouped((evidence, name) for name, evidence in ruled_out(diagnosis))
    return [(", ".join(titles(look_alikes, report)), evidence) for evidence, look_alikes in names.items()]


def not_ruled_out(diagnosis: Diagnosis, report: Report) -> list[tuple[str, str]]:
    """Return each look-alike that was not ruled out, by its title, with how to distinguish it."""
    names = titles((look_alike.name for look_alike in diagnosis.open), report)
    return list(zip(names, (look_alike.distinguish for look_alike in diagnosis.open), strict=True))


def quoted(finding: Finding) -> list[str]:
    """Return the log lines that show the incident, each with its place, process and cause."""
    lines = []
    for quote in finding.quotes:
        where = ", ".join(part for part in (quote.place, quote.process) if part)
        lines += [f"{quote.text} ({where})" if where else quote.text]
        lines += [f"raised from {quote.cause}"] if quote.cause else []
    return lines


_USUAL = re.compile(r"\b(?:mostly|usually|often|probably)\b")
"""Words before the causes of a failure that its error does not name."""


def how_sure(finding: Finding) -> str:
    """Return on what the cause rests that a log names: "named by the error (line 250), with: ...", "" if none does."""
    if not finding.basis:
        return ""
    line = finding.quotes[0].line if finding.quotes else None
    seen, means = (finding.failure.seen, finding.failure.means) if finding.failure else ("", "")
    usual = _USUAL.search(means) if finding.basis != "guess" else None
    more = f"; what '{usual[0]}' brings it about is a guess" if usual else ""
    return f"{finding.basis}{f' (line {line})' if line else ''}{more}{f', with: {seen}' if seen else ''}"


def first_sign(diagnosis: Diagnosis, written_as: TimeFormat) -> list[str]:
    """Return the evidence that appeared before the incident was complete."""
    onsets = [(onset(reading, diagnosis), reading.condition.signal.name) for reading in evidence(diagnosis)]
    start, name = min(((start, name) for start, name in onsets if start is not None), default=(0.0, ""))
    since = diagnosis.one_by_one[-1].since
    early = since is not None and diagnosis.instants[0] < start < since
    return [f"{name}, beyond its threshold since {written_as(start)}"] if early else []


def timeline(report: Report) -> list[str]:
    """List all episodes in order of their start; [] if all began at once, and for a fleet."""
    held = (*(finding.diagnosis for finding in report.present), *report.brief)
    found = [episode for diagnosis in held for episode in diagnosis.one_by_one]
    if is_fleet(report) or len({diagnosis.since for diagnosis in found}) < 2:
        return []
    ordered = sorted(found, key=lambda diagnosis: diagnosis.since or 0.0)
    return [f"{titled(d.incident)} on {where(d)}: {when(d, time_format(report))}" for d in ordered]


def consequences(finding: Finding, report: Report) -> list[Diagnosis]:
    """Return the incidents in the scope of the finding that it explains, directly or through another one."""
    cause = finding.diagnosis
    scope = [other.diagnosis for other in report.present if agree(other.diagnosis.subject, cause.subject)]
    followed: list[Diagnosis] = []
    causes = {cause.incident.id}
    while new := [diagnosis for diagnosis in scope if diagnosis.explained_by in causes and diagnosis not in followed]:
        followed += new
        causes = {diagnosis.incident.id for diagnosis in new}
    return followed


# -- changes ----------------------------------------------------------------------------------------------------------


def change(proposal: Proposal) -> str:
    """Return the change in one line: `--max-num-seqs 64 -> 6`, `add --async-scheduling`, a command; "" for advice."""
    fix = proposal.fix
    if fix.kind == "host_command":
        return proposal.name
    if fix.kind == "advice":
        return ""
    changes = []
    for flag in proposal.changes:
        before = "" if flag.before is None else written(flag.before)
        after = "?" if flag.after is None else written(flag.after)
        if fix.value is None and flag.after is None:
            changes.append(f"remove {flag.name}" + (f" (now {before})" if before else ""))
        elif after:
            default = " (default)" if before and flag.assumed else ""
            changes.append(" ".join(part for part in (flag.name, before + default, f"-> {after}") if part))
        else:
            changes.append(f"add {flag.name}")
    return "; ".join(changes)


def action(proposal: Proposal) -> Text:
    """Return the change and what it is for: "--max-num-seqs 64 -> 6: Run no more requests than ..."."""
    changed = command(change(proposal))
    gap = "   " if proposal.fix.kind == "host_command" else ": "  # what is copied to a shell ends with the command
    told = phrases(proposal.text)
    return (changed, gap, *told) if changed and proposal.text else changed or told


def command(text: str) -> Span | str:
    """Return a text to be pasted, or a change of the command line; "" without one."""
    return Span(text, "command") if text else ""


def uncomputed(finding: Finding) -> list[str]:
    """List the fixes whose value could not be computed, with the telemetry that it needs."""
    return [f"{proposal.name or proposal.text}: {', '.join(proposal.needs)}" for proposal in finding.uncomputed]


def released(fix: Fix) -> str:
    """Return the releases that have the flag of a fix, "vLLM 0.24.0 and later"; "" if every release has it."""
    first, last = releases(fix.flag, fix.versions)
    if first and last:
        return f"vLLM {first} - {last}"
    return f"vLLM {first} and later" if first else f"vLLM up to {last}" if last else ""


def why(source: Source) -> Text:
    """Return the source of a claim, in one line."""
    if not source.reference:
        return f"{source.says} ({source.kind})"
    return (f"{source.says} ({source.kind}: ", Span(source.reference, "link"), ")")


# -- where processes stand ---------------------------------------------------------------------------------------------


def roll_call(call: "RollCall") -> str:
    """Return the conclusion from the stacks of a server, with the next step."""
    return " ".join(filter(None, (call.conclusion, call.next)))


def standing_rows(call: "RollCall") -> list[tuple[str, str, str]]:
    """Return the processes, those that stand at one place in one row, what they do, and whether they moved."""
    together: dict[tuple[bool, str, str, str], list[str]] = {}
    for each in call.standing:
        does = f"{each.waits}: {each.place}" if each.place else each.problem or each.waits
        moved = {None: "", True: "moved", False: "did not move"}[each.moved]
        together.setdefault((each.pid not in call.suspects, each.title, does, moved), []).append(each.rank)
    return [
        (f"{title} {listed(ranks, most=8)}", moved, does) for (_, title, does, moved), ranks in sorted(together.items())
    ]
