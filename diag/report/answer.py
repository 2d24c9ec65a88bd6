"""The answer of a report and the rows that several forms print: verdict, place, start, actions, fix, evidence."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from diag.core.formatting import TimeFormat, escaped, listed, plural, printable, quantity
from diag.core.incident import RANK
from diag.core.subjects import instance_name
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.diagnose import CRASH_LOOP, Diagnosis
from diag.diagnosis.proposals import Proposal
from diag.diagnosis.relaunch import launchable
from diag.diagnosis.report import Finding, Report
from diag.diagnosis.telemetry_checks import FAMILIES
from diag.report import coverage
from diag.report import sentences as words
from diag.report.layout import WIDTH, is_wide, line_width, shortened, with_roles
from diag.report.spans import Span, joined

VERDICTS = ("critical", "warning", "unknown", "gone", "unproven", "slow", "healthy")
LEAST_NAME = 20
"""Columns that the name of a server gets in line 1."""
BARS = "▁▂▃▄▅▆▇█"
BARS_WIDE = 20


class Actions(NamedTuple):
    """Actions on a finding: `advice` and `now`, a command or a number, need no restart; then the fix.

    `is_over`: the incident has ended, so advice and command are for the next time. The relaunch line carries the fix.
    """

    is_over: bool = False
    advice: tuple[str, ...] = ()
    now: Proposal | None = None
    fix: Proposal | None = None
    relaunch: str = ""
    alternatives: tuple[Proposal, ...] = ()
    do_not: tuple[str, ...] = ()

    @property
    def do_now(self) -> list[str]:
        """Sentences for the actions that need no restart, the first one first."""
        return [*self.advice, *([joined(words.action(self.now))] if self.now else [])]


def choose_actions(finding: Finding, report: Report) -> Actions:
    """Sort the proposals, which come the safest first; the fix is the one that the relaunch line carries.

    If the server has died of the incident, the advice is for a dead server.
    """
    incident, death = finding.diagnosis.incident, words.death(finding, report)
    complete = [proposal for proposal in finding.proposals if not proposal.needs]
    safest = list(takewhile(lambda fix: not fix.restart, incident.fixes))
    now = next((p for p in complete if p.fix in safest and (p.computed or p.fix.command)), None)
    is_over, is_of_start = not finding.diagnosis.ongoing, finding.failure or finding.is_of_start
    starts = incident.lints or finding.is_of_start  # a start that failed serves nobody: its cure comes first
    is_cure = now is not None and (now.computed or now.fix.while_it_lasts)
    is_client = finding.failure is not None and not finding.failure.needs_restart  # the server is well
    rest = [proposal for proposal in (*complete, *finding.proposals) if proposal is not now]
    fix = launchable(finding.proposals) or next(iter(rest), None)
    return Actions(
        is_over=is_over,
        advice=()
        if is_cure or is_client or (is_over and (now or fix)) or (fix and is_of_start and starts)
        else (death.incident if death else incident).mitigate,
        now=now,
        fix=fix,
        relaunch=finding.relaunch or "",
        alternatives=tuple(proposal for proposal in finding.proposals if proposal not in (now, fix)),
        do_not=incident.do_not,
    )


class ReportAnswer(NamedTuple):
    """The answer about one incident, on one server or on those of a fleet that have it, or about finding none.

    `verdict` is the word in capitals that it begins with; `since` is the unix time at which the last episode began, or
    at which it was first watched if it held from then on; `when` is the same in words. `findings` are those of the
    servers, the first one in detail, and `evidence` its values with their thresholds. Without an incident there are
    neither, and `reasons` are why none was found.
    """

    verdict: str
    where: str
    incident: str = ""
    title: str = ""
    impact: str = ""
    since: float | None = None
    when: str = ""
    actions: Actions = Actions()
    findings: tuple[Finding, ...] = ()
    reasons: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    ruled_out: tuple[str, ...] = ()
    not_ruled_out: tuple[str, ...] = ()
    not_seen: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The answer in one sentence; without an incident, one for each reason."""
        if not self.findings:
            return [f"{self.verdict} {reason}" for reason in self.reasons]
        return [f"{self.verdict} {self.title} ({self.incident}) on {self.where}, {self.when}: {self.impact}"]


def answers(report: Report, written_as: TimeFormat) -> list[ReportAnswer]:
    """Return an answer for each primary incident, the worst first; if there is none, the one about the whole report."""
    hints = words.grouped((FAMILIES[name].hint, FAMILIES[name].name) for name in report.observed.not_measured)
    not_seen = tuple(f"{', '.join(names)} ({hint})" for hint, names in hints.items())
    about: list[ReportAnswer] = []
    for group in words.alike(report):
        first, diagnoses = group[0].diagnosis, [finding.diagnosis for finding in group]
        newest = [diagnosis.one_by_one[-1] for diagnosis in diagnoses]
        where, when = words.where(first), words.when(first, written_as)
        if len(group) > 1:
            names = dict.fromkeys(printable(instance_name(diagnosis.subject)) for diagnosis in diagnoses)
            where = f"{len(names):,} of {len(report.servers):,} servers ({listed(list(names))})"
            ongoing = sum(diagnosis.ongoing for diagnosis in diagnoses)
            now = "ongoing" if ongoing == len(group) else f"ongoing on {ongoing} of them" if ongoing else "ended"
            when = f"{now}, first seen {words.began(diagnoses, written_as)}"
        if death := _death(group, report):  # what users feel dates from the death
            newest, when = [death.one_by_one[-1]], words.when(death, written_as)
        answer = ReportAnswer(
            verdict=words.severity(group[0], report).upper(),
            where=where,
            incident=first.incident.id,
            title=first.incident.title,
            impact=words.impact(group[0], report),
            since=min(last.watched_since if last.since is None else last.since for last in newest),
            when=when,
            actions=choose_actions(group[0], report),
            findings=tuple(group),
            evidence=readings(words.evidence(first)),
            ruled_out=tuple(refuted.name for refuted in first.refuted),
            not_ruled_out=tuple(look_alike.name for look_alike in first.open),
            not_seen=not_seen,
        )
        about.append(answer)
    if about:
        return about
    if report.verdict == "warning":
        return [
            ReportAnswer(
                "WARNING",
                each.where,
                reasons=(escaped(each.sentence),),
                evidence=readings(each.signs),
                not_seen=not_seen,
            )
            for each in coverage.suspected(report)
        ]
    target = printable(report.servers[0]) if len(report.servers) == 1 else escaped(report.observed.target)
    accepted = coverage.in_brackets(ignored=coverage.ignored(report)).strip()
    accepted = f"{accepted} " if accepted else ""
    if report.verdict == "unknown":
        why = words.folded([escaped(unjudged.sentence) for unjudged in report.not_judged])
        why[:1] = [f"{accepted}{each}" for each in why[:1]]
        return [ReportAnswer("CANNOT TELL", target, reasons=tuple(why), not_seen=not_seen)]
    states = listed(words.log_endings(report)) or words.states(report)
    healthy = f"{accepted}{target}: {states}; {words.found_nothing(report)}"
    if report.verdict == "no_incident":
        verdict = coverage.NO_FAILURE if report.observed.endings else coverage.NO_INCIDENT
        unseen = () if report.observed.endings else tuple(coverage.not_seen(report))
        return [ReportAnswer(verdict, target, reasons=(healthy,), not_seen=(*unseen, *not_seen))]
    return [ReportAnswer("HEALTHY", target, reasons=(healthy,), not_seen=not_seen)]


def readings(found: Sequence[Reading]) -> tuple[str, ...]:
    """Return the readings as texts: "queue time (mean): 9.1 s (> 1 s)"."""
    return tuple(f"{reading.condition.signal.name}: {reading.shown} ({reading.threshold})" for reading in found)


# -- line 1 -----------------------------------------------------------------------------------------------------------


class Headline(NamedTuple):
    """Line 1 about an incident or a report without one, and whether it has the whole place, and the start."""

    line: str
    has_place: bool = True
    has_start: bool = False


def verdicts(report: Report) -> list[str]:
    """Return line 1 of a report, which `--quiet` prints alone; one for each primary incident, the worst first."""
    return [headline.line for headline in headlines(report)]


def headlines(report: Report) -> list[Headline]:
    rows: list[Headline] = []
    for group in words.alike(report):
        diagnoses = [finding.diagnosis for finding in group]
        first, place = diagnoses[0], words.place(diagnoses[0].subject)
        if len(group) > 1:
            servers = {instance_name(diagnosis.subject) for diagnosis in diagnoses}
            place = f"{len(servers):,} of {len(report.servers):,} servers"
        period, worse = line_period(group, report), words.worse(group[0], report)
        ends = {period.full: True, period.brief: period.has_start}
        if len(group) == 1 and first.incident.began and first.culprits:
            since, course = words.began([first], words.time_format(report)), [*map(words.culprit, first.culprits)]
            whole, last = f"since {since}: {listed(course)}", f"since {since}: {course[-1]}"
            ends = {whole: True, listed(course): False, last: True} | ends
        verdict, name = words.severity(group[0], report).upper(), f"  {first.incident.id} "
        line = _fitted(verdict, f"{name}with {worse.incident.id} ", place, list(ends), ends) if worse else None
        rows.append(line if line and line.has_place else _fitted(verdict, name, place, list(ends), ends))
    if rows:
        return rows
    written_as, observed, names = words.time_format(report), report.observed, report.servers
    if report.verdict == "warning":
        when = written_as(observed.end)
        return [
            _fitted("WARNING", f"  {part.question} ", part.where, [f"{part.lacking}   {when}", part.lacking, when, ""])
            for part in coverage.suspected(report)
        ]
    verdict, lists = "HEALTHY", {} if report.verdict == "healthy" else {"ignored": coverage.ignored(report)}
    if report.verdict in ("healthy", "no_incident"):
        lists |= {"over": coverage.over(report)}
    if report.verdict == "unknown":
        verdict = "CANNOT TELL"
    if report.verdict == "no_incident":
        verdict = coverage.NO_FAILURE if observed.endings else coverage.NO_INCIDENT
        lists |= {} if observed.endings else {"not seen": list(report.health.lacking)}
    remark = coverage.in_brackets(**lists)
    if observed.endings:
        place = names[0] if len(names) == 1 else plural(len(names), "log")
        return [_fitted(verdict, remark, place, [words.log_endings(report)[0]])]
    place = names[0] if len(names) == 1 else plural(len(names), "server") if names else observed.target
    when = written_as.span(observed.start, observed.end)
    states = words.states(report)
    lasted = quantity(observed.end - observed.start, "seconds")
    return [_fitted(verdict, remark, place, [f"{states}   {when} ({lasted})", f"{states}   {when}", when])]


def _fitted(verdict: str, what: str, place: str, ends: Sequence[str], starts: Mapping[str, bool] = {}) -> Headline:
    """Fit a line into the width: with the first of the ends that leaves room for the place, which is shortened.

    If the place does not fit, the line leaves it out: the report prints it below. What is ignored stays whole. `starts`
    has the ends that tell when the incident began.
    """
    start = f"{verdict}{what}  "
    name, shortest, head = escaped(place), min(ends, key=len), start.rstrip()
    least = min(len(name), LEAST_NAME * line_width() // WIDTH)
    if len(f"{start}   {shortest}") + (least if is_wide() else len(name)) > line_width():
        left = line_width() - len(f"{head}   ")
        shown, end = "", shortened(shortest, left) if left >= least else shortest
        text = f"{head}   {end}"
    else:
        room = [line_width() - len(f"{start}   {end}") for end in ends]
        at = next((at for at, columns in enumerate(room) if columns >= least), len(ends) - 1)
        shown, end = shortened(name, max(room[at], least)), ends[at]
        text = f"{start}{shown}   {end}".rstrip()
    lines = with_roles([shortened(text, line_width())], (Span(head, verdict),))
    return Headline(lines[0], has_place=shown == name, has_start=starts.get(end, False))


def _death(group: Sequence[Finding], report: Report) -> Diagnosis | None:
    """Return the death from which line 1 dates; None where it dates from the incident, as a loop of deaths does."""
    is_loop = group[0].diagnosis.incident.id == CRASH_LOOP
    return None if is_loop or len(group) > 1 else words.death(group[0], report)


def line_period(group: Sequence[Finding], report: Report, written_as: TimeFormat | None = None) -> words.Period:
    """Return when the incident of line 1 held; a death dates from the death."""
    death = _death(group, report)
    return words.period([death] if death else [finding.diagnosis for finding in group], report, written_as)


# -- a row per server -------------------------------------------------------------------------------------------------


class FleetRow(NamedTuple):
    """The line of one server: verdict, states of its engines, the ids of its incidents, and since when.

    `found` has the incidents in words or, without one, what cannot be told, or the states. `name` is the raw label,
    `instance` the printable one.
    """

    instance: str
    verdict: str
    states: str
    incidents: tuple[str, ...]
    found: str
    when: str
    name: str = ""


def fleet_rows(report: Report) -> list[FleetRow]:
    """Return a row for every server, the worst first."""
    harmful = [finding.diagnosis for finding in report.present if RANK[finding.diagnosis.severity]]
    ids = dict.fromkeys(diagnosis.incident.id for diagnosis in harmful)
    titles, written_as = dict(zip(ids, words.titles(ids, report), strict=True)), words.time_format(report)
    present = words.grouped((instance_name(diagnosis.subject), diagnosis) for diagnosis in harmful)
    engines_of = ((instance_name(progress.subject), progress.state) for progress in report.progress)
    states: dict[str, list[str]] = words.grouped(engines_of)
    states |= {name: ["gone"] for name in set(report.gone) - states.keys()}
    not_judged = {instance_name(each.subject) for each in report.not_judged}
    unseen = {missing.server for missing in report.health.missing}
    possible = {name: each.in_words for each in coverage.suspected(report) for name in each.servers}

    rows = []
    for name in report.servers:
        diagnoses, engines = present.get(name, []), states.get(name, [])
        worst = max((RANK[diagnosis.severity] for diagnosis in diagnoses), default=0)
        unknown = not engines or bool(not_judged & {"", name})
        shown = "unproven" if unseen & {"", name} else "slow" if "slow" in engines else "healthy"
        without_incident = "gone" if "gone" in engines else "unknown" if unknown else shown
        without_incident = "warning" if name in possible else without_incident
        causes = [diagnosis for diagnosis in diagnoses if not diagnosis.explained_by]
        incidents = tuple(dict.fromkeys(diagnosis.incident.id for diagnosis in causes))
        state = ", ".join(sorted(set(engines)))
        rows.append(
            FleetRow(
                instance=printable(name),
                verdict=(without_incident, "warning", "critical")[worst],
                states=state,
                incidents=incidents,
                found=", ".join(map(titles.__getitem__, incidents)) or possible.get(name, state),
                when=words.period(causes[:1], report, written_as).brief if causes else "",
                name=name,
            )
        )
    leads = [group[0].diagnosis.incident.id for group in words.alike(report)]

    def place(row: FleetRow) -> tuple[int, int, str]:
        """Sort as the answers do: the incident of line 1 is that of the first row."""
        lead = min([leads.index(name) for name in row.incidents if name in leads], default=len(leads))
        return VERDICTS.index(row.verdict), lead, row.instance

    return sorted(rows, key=place)


def merge_by_cause(report: Report, rows: Sequence[FleetRow], written_as: TimeFormat, most: int = 3) -> list[FleetRow]:
    """Merge the rows of servers whose first incident comes with the same shared label; name at most `most` of them."""
    shared = {
        (found.incident, name): found
        for found in report.shared
        if found.property.kind != "hour"
        for name in found.servers
    }
    pairs = ((shared.get(("".join(row.incidents[:1]), row.name), row.name), row) for row in rows)
    merged = []
    for cause, group in words.grouped(pairs).items():
        if isinstance(cause, str):
            merged += group[:1]
            continue
        names = {row.name for row in group}
        label = words.shared_label(cause.property, cause.value)
        incidents = tuple(dict.fromkeys(incident for row in group for incident in row.incidents))
        states = {state for row in group for state in row.states.split(", ")}
        present = (found.diagnosis for found in report.present if found.diagnosis.incident.id == cause.incident)
        began = words.began([found for found in present if instance_name(found.subject) in names], written_as)
        merged.append(
            FleetRow(
                instance=f"{label}: {listed([row.instance for row in group], most=most)}",
                verdict=group[0].verdict,
                states=", ".join(sorted(states)),
                incidents=incidents,
                found=", ".join(words.titles(incidents, report)),
                when=f"first seen {began}",
            )
        )
    return merged


def count_verdicts(verdicts: Sequence[str]) -> str:
    """Count the servers with each verdict: "1,000 servers: 3 critical, 40 warning, 957 healthy"."""
    counted = Counter(verdicts)
    shown = ", ".join(f"{counted[verdict]:,} {verdict}" for verdict in VERDICTS if counted[verdict])
    return f"{plural(len(verdicts), 'server')}: {shown}"


# -- rows of evidence -------------------------------------------------------------------------------------------------


def evidence_rows(found: Sequence[Reading]) -> list[tuple[str, ...]]:
    """Return a row of name, value, threshold and history for each reading; the name has the ranks or events in it."""
    rows = []
    for reading in found:
        name, *values = reading_row(reading)
        culprits = listed(list(map(words.culprit, reading.culprits)))
        rows.append((f"{name} ({culprits})" if culprits else name, *values))
    return rows


def reading_row(reading: Reading) -> tuple[str, str, str, str]:
    """Return name, value, threshold and history of a reading; "yes" and "no" say all without a threshold."""
    threshold = "" if reading.condition.signal.unit == "bool" else reading.threshold
    # if instants outnumber bars, each bar shows the worst value of its part: an hour of trouble stays visible in a day
    step = -(-len(reading.history) // BARS_WIDE)
    worst = max if reading.condition.op.startswith(">") else min
    parts = [reading.history[at : at + step] for at in range(0, len(reading.history), step)]
    history = [worst((value for value in part if value is not None), default=None) for part in parts]
    measured = [value for value in history if value is not None]
    encoding = getattr(sys.stdout, "encoding", "utf-8")  # the stand-in for stdout in diag top has none
    bars = ""
    if len(measured) > 1 and (encoding or "").lower().startswith("utf"):
        low, span = min(measured), (max(measured) - min(measured)) or 1.0
        heights = (None if value is None else int((value - low) / span * (len(BARS) - 1)) for value in history)
        bars = "".join("·" if height is None else BARS[height] for height in heights)
    return reading.condition.signal.name, Span(reading.shown, "value"), threshold, Span(bars, "history")
