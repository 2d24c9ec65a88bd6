"""Build the report of an observation: judge progress and incidents, propose fixes, and judge logs without a server."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from diag.core.contract import SLOS, Contract
from diag.core.formatting import clock, listed, plural, printable, quantity
from diag.core.incident import RANK, Incident
from diag.core.incident import judged as by_judgement
from diag.core.log_events import ANSWERS, READY, EventLine, LogContext, LogEnding
from diag.core.metric_prefix import GENERATED, OWN
from diag.core.subjects import instance_name
from diag.diagnosis.decision_table import Reading, shortest_look
from diag.diagnosis.diagnose import Diagnosis, Quote, diagnose, quotes, ranked
from diag.diagnosis.health import OF_A_LOG, HealthEvidence, health
from diag.diagnosis.onset import begun, by_scrapes, dated
from diag.diagnosis.progress import FAILED, INSTANCE, REASONS, NotJudged, Progress, judge
from diag.diagnosis.proposals import Running, by_failure, by_search, is_on_rocm, propose
from diag.diagnosis.query_cache import FEWEST_INTERVALS, INSTANCES, PARTS, QueryCache
from diag.diagnosis.relaunch import lint_findings, relaunch
from diag.diagnosis.report import Finding, Observed, ObservedServer, Report, verdict_of
from diag.diagnosis.telemetry_checks import claims, log_alone, strays
from diag.diagnosis.vitals import ceiling_shares
from diag.knowledge.formulas import expanded
from diag.knowledge.known_failures import (
    MOST_SEEN,
    NOTHING,
    OTHERS,
    WORDS,
    KnownFailure,
    around,
    known_failure,
    told_by_others,
    told_by_vllm,
)
from diag.knowledge.platforms import incident_on_rocm, look_alike_on_rocm
from diag.knowledge.signals import failed_share, refused_share, successful_scrapes
from diag.vllm.command.free_text import hidden

LOG_ENDS, WHY = REASONS["log_ends"], REASONS["incidents"]
ENDS_ILL = {"failed": "its start failed", "dead": "its engine died"}
"""Ends of a log that are a failure of the server itself."""
DUMP_OF = re.compile(r"VLLM_STACK_DUMP_for_(?P<role>[a-z]{1,20})_(?P<rank>\d{1,7})_(?P<pid>\d{1,10})\.log")
STACK_DUMP = re.compile(r">>> Call stack dump #\d+ at (?P<at>[^\n]{10,40}?) due to (?P<reason>[^\n]{1,60})")
GOES_BACK = f"""
max by ($by) (resets(process_start_time_seconds[$window])) > 1
or (max by ($by) (resets({GENERATED}[$window])) > 2
  and max by ($by) (changes(process_start_time_seconds[$window])) == 0)
or (max by ($by) (resets({GENERATED}[$window]) > 2 and min_over_time({GENERATED}[$window])
  > 0.2 * max_over_time({GENERATED}[$window])) and on (instance) max by (instance) (min_over_time(up[$window])) > 0
  unless on (instance) count by (instance) (last_over_time(process_start_time_seconds[$window])))"""
"""Two servers at one address: an older process answers after a newer one more than once, as it does where traffic moves
back, or the counters of one process decrease again and again; or, where no page names its process, they never begin at
0 and no page fails, as one does while a server starts."""
FAILING, REFUSED, START_FAILED = "requests_failing", "requests_refused", "startup_failed"
FEWEST_FAILED, LEAST_FAILED = 3, 0.3
"""Failed answers among the last of a log, and their share, from which they are an incident."""
SHARE = failed_share.above(LEAST_FAILED, by_judgement("nearly a third of the last answers"))
REFUSED_SHARE = refused_share.at_least(1.0, by_judgement("all of the last answers"))
READS = re.compile(r"(?:sed|grep|tail|journalctl)\b")
"""Commands that look for what a known line already tells."""
READS_END = re.compile(r"journalctl\b")
"""The command of READ_LOG, of a server that has ended."""
MOST_QUOTED, MOST_FOUND, MOST_REFUSED = 300, 60, 240
"""Characters of a line that is quoted for what it names, of one by which it is found again, and of a client's error
beside its advice.
"""
TIMED = ("startup_slow",)
"""Incidents that are defined by elapsed time: a log that has ended cannot show them."""


def build_report(
    observed: Observed,
    incidents: Sequence[Incident],
    queries: QueryCache,
    running: Mapping[str, Running],
    judged: QueryCache | None = None,
    *,
    with_ceilings: bool = True,
) -> Report:
    """Judge progress and incidents, and propose fixes for the incidents that are present.

    The incidents are judged by the queries in `judged`, which may have fewer servers; None: those in `queries`. An
    incident that the site ignores is an info and never escalates.
    """
    progress, unknown = judge(queries) if not observed.endings else ((), ())
    judged, contract = judged or queries, queries.contract
    day = datetime.fromtimestamp(observed.end, UTC).date()
    ignored = {name for name, entry in contract.ignored.items() if day <= entry.until}
    incidents = tuple(
        incident._replace(severity="info", escalates=None) if incident.id in ignored else incident
        for incident in incidents
    )
    turned_back = queries.ask(GOES_BACK, INSTANCE, queries.whole).items()
    twofold = [subject for subject, row in turned_back if row[-1] > 0 and not queries.is_gone(subject)]
    mixed_up = {*map(instance_name, twofold)}
    all_judged = begun(dated(diagnose(incidents, judged), judged), incidents, judged)
    findings = tuple(_findings(_without_counters(all_judged, mixed_up), observed, judged, running))
    diagnoses = tuple(finding.diagnosis for finding in findings)
    present = [diagnosis for diagnosis in diagnoses if diagnosis.state == "present"]
    observed = observed._replace(notes=(*_ignored_notes(present, contract, ignored), *observed.notes))
    if observed.endings:
        return _log_report(observed, findings, queries, ignored)
    mixed = (NotJudged(WHY["mixed"].format(metric), (("instance", name),)) for name, metric in observed.mixed)
    is_dead = bool(progress) and {engine.state for engine in progress} == {"dead"}
    certain = [one for one in diagnoses if one.state != "unknown" or one.server not in mixed_up]
    seen = health(certain, progress, queries, observed.not_measured)
    seen = seen._replace(ignored=tuple(diagnosis for diagnosis in present if diagnosis.incident.id in ignored))
    not_judged = (
        *(_with_log(why, running) for why in unknown),
        *mixed,
        *(NotJudged(WHY["two_servers"], subject) for subject in twofold),
        *_not_judged(diagnoses, judged, is_dead=is_dead),
        *_accepted_outages(seen, progress, present),
    )
    ill = frozenset(diagnosis.server for diagnosis in present)
    defects = (*observed.defects, *claims(queries, "claimed"), *log_alone(ill, queries), *strays(queries))
    return Report(
        observed=observed._replace(defects=defects),
        verdict=verdict_of(findings, not_judged, seen),
        progress=progress,
        findings=findings,
        not_judged=not_judged,
        contract=tuple(contract.lines()),
        found_note=contract.found_note(),
        health=seen,
        slo_is_default=contract.stated.isdisjoint(SLOS),
        gone=tuple(sorted(queries.gone)),
        ceilings=ceiling_shares(queries) if with_ceilings else (),
    )


def _with_log(why: NotJudged, running: Mapping[str, Running]) -> NotJudged:
    """Return a reason that tells to look into the log with the last line of it, if it is there."""
    log = running.get(instance_name(why.subject), Running()).log if why.subject else None
    if log is None or not log.last or not re.search(r"\blog\b", why.why):
        return why
    return why._replace(why=WHY["log_ends"].format(why=why.why, at=clock(log.at), last=log.last))


def _without_counters(diagnoses: tuple[Diagnosis, ...], mixed_up: Collection[str]) -> tuple[Diagnosis, ...]:
    """Return the diagnoses, unknown where vLLM's counters and gauges decide and are those of two servers in turn."""
    of_nobody = {  # a death is told by /health, the log and the processes
        id(one)
        for one in diagnoses
        if one.state == "present" and one.server in mixed_up and one.incident.crash is None
        if all(OWN in expanded(condition.signal.promql) for condition in one.incident.symptoms)
    }
    judged = [
        one._replace(state="unknown", since=None, until=None, ongoing=False) if id(one) in of_nobody else one
        for one in diagnoses
    ]
    return ranked(judged) if mixed_up else diagnoses


def _findings(
    diagnoses: Sequence[Diagnosis], observed: Observed, queries: QueryCache, running: Mapping[str, Running]
) -> Iterator[Finding]:
    models = {server.name: server.model for server in observed.servers}
    endings = dict(observed.endings)
    ill = {diagnosis.server for diagnosis in diagnoses if diagnosis.is_alarming}
    # an access log has no times, so that it fills no window; a log that ends is judged by its last answers
    last = {
        (incident, server): (reading, number, least)
        for server, ending in endings.items()
        for incident, number, reading, least in (
            (FAILING, ending.failed, SHARE, LEAST_FAILED),
            (REFUSED, 0 if ending.succeeded else ending.refused, REFUSED_SHARE, 1.0),
        )
        if ending.state == "serving" and server not in ill and number >= max(FEWEST_FAILED, least * ending.answered)
    }
    judged = [*diagnoses]
    for place, diagnosis in enumerate(diagnoses):
        key = diagnosis.incident.id, diagnosis.server
        if key in last and diagnosis.state != "present":
            reading, number, least = last[key]
            share, end = number / endings[diagnosis.server].answered, diagnosis.instants[-1]
            history = [*(None for _ in diagnosis.instants[1:]), share]
            judged[place] = diagnosis._replace(
                state="present",
                severity=diagnosis.incident.severity,
                severity_alone=diagnosis.incident.severity,
                primary=True,
                until=end,
                episodes=((None, end),),
                ongoing=True,
                symptoms=(),
                supports=(Reading(reading, share, least, True, history),),
            )
    failed_to_start = {
        diagnosis.server
        for diagnosis in judged
        if diagnosis.incident.id == START_FAILED
        and diagnosis.state == "present"
        and (diagnosis.ongoing or (diagnosis.server in endings and endings[diagnosis.server].state == "starting"))
    }
    for diagnosis in judged:
        if diagnosis.state != "present":
            yield Finding(diagnosis)
            continue
        name, ending = diagnosis.server, endings.get(diagnosis.server)
        finding = _with_fixes(diagnosis, queries, running.get(name, Running()), models.get(name, ""), ending)
        yield finding._replace(is_of_start=name in failed_to_start or (ending is not None and ending.state == "failed"))


def _with_fixes(
    diagnosis: Diagnosis, queries: QueryCache, server: Running, model: str, ending: LogEnding | None
) -> Finding:
    """Return a present incident with its fixes, and the log line that shows it."""
    quoted, is_of_request = _quoted(diagnosis, queries, server.log, ending), diagnosis.incident.id == FAILING
    launch = server.launch * server.whole
    context = ending.context if ending else NOTHING._replace(phase=READY * is_of_request, launch=launch)
    if is_on_rocm(diagnosis, queries, quoted):
        look_alikes = tuple(map(look_alike_on_rocm, diagnosis.open))
        diagnosis = diagnosis._replace(incident=incident_on_rocm(diagnosis.incident), open=look_alikes)
    follows = diagnosis.explained_by is not None and not diagnosis.primary
    fixes = () if follows else propose(diagnosis, queries, server, quoted)  # what mends a consequence is its cause
    if server.log and server.log.last and not quoted:  # no line of the log tells the reason
        said = WHY["log_gives_no_reason"].format(at=clock(server.log.at), last=server.log.last)
        fixes = tuple(
            fix._replace(name="dmesg -T | tail -100", text=said) if READS_END.match(fix.fix.command) else fix
            for fix in fixes
        )
    linted = lint_findings(server, quoted) if diagnosis.incident.lints else ()
    if linted:  # first the proposals without a restart, which only read
        fixes = tuple(sorted((*linted, *fixes), key=lambda proposal: proposal.fix.restart))
    proposals = tuple(proposal for proposal in fixes if proposal.is_computed)
    texts = [text for line in quoted for text in (line.text, line.cause) if text]
    if ending and texts and texts[0][:MOST_SEEN] == ending.context.error[:MOST_SEEN]:  # a quotation is cut
        texts[0] = ending.context.error
    frames = quoted[0].frames if quoted else ""
    failure = known_failure(texts, server.version, model, frames, context)
    if ending and not texts and diagnosis.incident.lints:  # no line says why: what the last lines complain of may
        failure = told_by_vllm(ending.context, server.version)
        failure = failure._replace(basis="guess") if failure else None
    if failure:  # what is known of the line says more than the incident's advice for any line
        kept = [
            proposal
            for proposal in proposals
            if proposal in linted or (not failure.is_decided and (proposal.changes or proposal.computed))
        ]
        commands = [
            proposal
            for proposal in proposals
            if proposal.fix.command and proposal not in kept and not READS.match(proposal.fix.command)
        ]
        mends = [] if any(not proposal.needs for proposal in kept) else [by_failure(failure)]
        proposals = (*kept, *mends, *commands)
    elif (
        quoted
        and (diagnosis.incident.lints or frames)
        and not any(proposal.changes or proposal.computed for proposal in proposals)
    ):
        proposals = (by_search(quoted[0], server.version), *proposals)
    decisive = _decisive(quoted, failure.line if failure else "", ending.context if ending else NOTHING)
    seen = ending.context.error if ending and failure and failure.basis == "guess" else ""
    proposals = tuple(proposal for proposal in proposals if not (ending and proposal.needs))  # no log tells those
    return Finding(
        diagnosis=by_scrapes(diagnosis, queries),
        proposals=proposals,
        relaunch=relaunch(server.launch, proposals),
        uncomputed=tuple(proposal for proposal in fixes if not proposal.is_computed),
        quotes=decisive or quoted,
        failure=failure._replace(seen=seen) if failure and decisive else failure,
    )


def _quoted(
    diagnosis: Diagnosis, queries: QueryCache, log: LogEnding | None, ending: LogEnding | None
) -> tuple[Quote, ...]:
    """Return the line of a log that shows a present incident.

    Of a log that is read alone, it is the newest with an event that the incident's symptoms count; of one beside pages
    the last exception that ended a request, where requests fail, and of a server that has ended what is last in it.
    """
    lines, since = log.lines if log and diagnosis.incident.id == FAILING else (), diagnosis.since or 0.0
    reasons = [line for line in lines if line.event == ANSWERS and line.at >= since - 4 * queries.source.interval]
    reasons += [log.reason] if log and log.reason and diagnosis.incident.quotes and diagnosis.ongoing else []
    if ending:
        formulas = " ".join(expanded(condition.signal.promql) for condition in diagnosis.incident.conditions)
        reasons = [line for line in ending.lines if re.search(rf"\b{line.event}\b", formulas)]
    line = max(reasons, key=lambda line: line.at, default=None)
    told = (Quote(line.text, line.file, line.number or None, line.process, "", line.frames),) if line else ()
    return quotes(diagnosis, queries) or told


def _decisive(quoted: Sequence[Quote], line: str, context: LogContext) -> tuple[Quote, ...]:
    """Return the quotes with the line that names the cause in place of one that does not show it, () without one.

    A line that is quoted without its number is looked up.
    """
    line = line or (quoted[0].text[:MOST_SEEN] if quoted and quoted[0].line is None else "")
    for text, number in zip(reversed(context.nearby.split("\n")), reversed(context.numbers), strict=False):
        if quoted and line and line in text:
            if number == quoted[0].line and line in quoted[0].text:
                break
            shown = around(hidden(text.strip()), re.escape(hidden(line)), MOST_QUOTED)
            return (quoted[0]._replace(text=shown, line=number or None, process="", cause=""), *quoted[1:])
    return ()


# -- why finding no incident does not mean health ---------------------------------------------------------------------


def _ignored_notes(present: Iterable[Diagnosis], contract: Contract, ignored: Collection[str]) -> Iterator[str]:
    """Yield a note for each present incident that [ignore] of diag.toml names, or named until a day that is over."""
    for name in dict.fromkeys(diagnosis.incident.id for diagnosis in present):
        entry = contract.ignored.get(name)
        if entry and name in ignored:
            yield f"{name} is ignored until {entry.until}: {entry.reason} ({contract.origin})"
        elif entry:
            yield f"{name} counts again: [ignore.{name}] of {contract.origin} ended on {entry.until}; remove it"


def _accepted_outages(
    seen: HealthEvidence, progress: Sequence[Progress], present: Sequence[Diagnosis]
) -> Iterator[NotJudged]:
    """Yield the servers that serve nobody, or of whose health nothing was seen, and whose incidents are ignored."""
    ill = {diagnosis.server for diagnosis in present if RANK[diagnosis.severity]}
    for name in dict.fromkeys(diagnosis.server for diagnosis in seen.ignored):
        failed = [each.state for each in progress if instance_name(each.subject) == name and each.state in FAILED]
        accepted = seen.of(name)
        if name not in ill and (failed or not accepted.seen):
            state = f"its engine is {failed[0]}" if failed else "no part of its health was measured"
            yield _accepted(state, accepted)


def _accepted(state: str, server: HealthEvidence) -> NotJudged:
    ids = listed(list(dict.fromkeys(diagnosis.incident.id for diagnosis in server.ignored)))
    return NotJudged(WHY["accepted"].format(state=state, incidents=ids), (("instance", server.ignored[0].server),))


def _not_judged(diagnoses: Sequence[Diagnosis], queries: QueryCache, *, is_dead: bool) -> Iterator[NotJudged]:
    """Yield why incidents could not be judged: no telemetry, queries that were refused, too short an observation.

    If all servers are dead, a longer observation shows nothing new.
    """
    if not queries.unanswered.isdisjoint((INSTANCES, *PARTS.values())):
        yield NotJudged("queries refused: it is unknown which servers, engines and GPUs there are")
    ids = sorted({diagnosis.incident.id for diagnosis in diagnoses if diagnosis.unanswered})
    if ids:
        unknown = plural(len(ids), "incident")
        yield NotJudged(f"queries refused: {unknown} unknown for want of an answer ({listed(ids, most=5)})")
    looks = {diagnosis.incident.id: shortest_look(diagnosis.incident) for diagnosis in diagnoses if diagnosis.brief}
    if looks and not is_dead:
        longest = max(*looks.values(), FEWEST_INTERVALS * queries.source.interval)
        span, wanted = quantity(round(queries.span), "seconds"), quantity(longest, "seconds")
        unruled = plural(len(looks), "incident")
        yield NotJudged(f"too little seen: {span} do not rule out {unruled}; observe for {wanted}")

    # without telemetry, no incident is brief, refused or decided
    judged = {each.server for each in diagnoses if each.state != "unknown" or each.brief or each.unanswered}
    judged |= queries.gone
    servers = queries.subjects(INSTANCE)
    yield from (NotJudged(WHY["nothing_judged"], server) for server in servers if instance_name(server) not in judged)
    if not servers:
        yield NotJudged(WHY["no_server"])


# -- logs without a server --------------------------------------------------------------------------------------------


def _log_report(
    observed: Observed, findings: Sequence[Finding], queries: QueryCache, ignored: Collection[str]
) -> Report:
    """Return the report on logs without a server: the incidents that they show, and how they end.

    Nothing was scraped, so the readings of scrapes are left out. An incident that is a matter of load is over when its
    server was stopped on purpose. Of a suspect nothing but preemptions is unknown, which no release logs.
    """
    endings = dict(observed.endings)
    lost = {name for name, ending in endings.items() if ending.state == "lost"}
    still = {name for name, ending in endings.items() if ending.is_still or ending.waits}
    idle = still | {name for name, ending in endings.items() if ending.state in ("shut down", "stopped")}
    told = []
    for finding in findings:
        diagnosis, incident = finding.diagnosis, finding.diagnosis.incident
        if diagnosis.state == "unknown" or incident.id in TIMED or diagnosis.server in lost:
            continue
        formulas = (expanded(reading.condition.signal.promql) for reading in diagnosis.symptoms)
        if diagnosis.server in idle and not incident.outage and any(OWN in formula for formula in formulas):
            continue
        symptoms, supports = (
            tuple(reading for reading in readings if reading.condition.signal is not successful_scrapes)
            for readings in (diagnosis.symptoms, diagnosis.supports)
        )
        told.append(finding._replace(diagnosis=diagnosis._replace(symptoms=symptoms, supports=supports)))
    present = [finding.diagnosis for finding in told if finding.diagnosis.state == "present"]
    at_work = {name for name, ending in endings.items() if ending.state == "serving"} - still
    suspects = [
        (suspect, [reading.condition.signal for reading in suspect.diagnosis.symptoms if reading.holds is None])
        for suspect in health([each.diagnosis for each in findings], (), queries, observed.not_measured).suspects
        if suspect.diagnosis.server in at_work
    ]
    seen = OF_A_LOG._replace(
        suspects=tuple(
            suspect
            for suspect, unknown in suspects
            if all("num_preemptions" in expanded(signal.promql) for signal in unknown)
        ),
        ignored=tuple(diagnosis for diagnosis in present if diagnosis.incident.id in ignored),
    )
    ill = {diagnosis.server for diagnosis in present if diagnosis.incident.id not in ignored}
    not_judged, notes = [], [*observed.notes]
    for name, ending in endings.items():
        if name not in ill:
            why = _log_unjudged(ending, name, seen.of(name), is_still=name in still)
            is_told = why is not None and why.told is not None and ending.state in ("serving", "lost")
            notes += () if is_told else _failed_requests(ending, name, observed.servers)
            not_judged += [why] if why else []
        elif all(diagnosis.incident.id == "requests_failing" for diagnosis in present if diagnosis.server == name):
            notes += _without_reason(ending)
    return Report(
        observed=observed._replace(notes=tuple(notes), defects=(*observed.defects, *claims(queries, "survived"))),
        verdict=verdict_of(told, not_judged, seen),
        progress=(),
        findings=tuple(told),
        not_judged=tuple(not_judged),
        contract=tuple(queries.contract.lines()),
        found_note=queries.contract.found_note(),
        health=seen,
    )


def _log_unjudged(ending: LogEnding, name: str, accepted: HealthEvidence, *, is_still: bool) -> NotJudged | None:
    """Return why a log without an incident is no all-clear, with the failure that it names; None if it is one."""
    subject = (("instance", name),)
    line = next((line for line in ending.lines if line.event == ANSWERS), None)
    if ending.state in ENDS_ILL and accepted.ignored:
        return _accepted(ENDS_ILL[ending.state], accepted)
    if is_still or ending.state in LOG_ENDS:
        why, last = _why_unknown(ending, name), known_failure([ending.last], "", "", context=ending.context)
        if ending.state == "lost" and line and (told := _of_request(line, ending, "")):
            return NotJudged(why, subject, told._replace(seen=_failed_request(line)))
        told = next((each for each in (_told_near(ending), last) if each and each.do and each.do in why), None)
        if told:  # with the line of the log that names it, and the number of that line
            quoted = told.seen or ending.last
            text = quoted.removeprefix("… ")[:MOST_FOUND]
            lines = zip(reversed(ending.context.nearby.split("\n")), reversed(ending.context.numbers), strict=False)
            number = next((number for logged, number in lines if text in logged), 0)
            told = told._replace(seen=f"{quoted} (line {number})" if number else quoted)
        return NotJudged(why, subject, told)
    tail = ending.context.nearby.rstrip().rpartition("\n")[2]
    if ending.state == "serving" and WORDS.crash.match(tail):
        return NotJudged(REASONS["log_shows"]["crash"].format(line=around(hidden(tail), WORDS.crash)), subject)
    few_failed = 2 * ending.failed >= max(ending.answered, 1)
    signs = {"unhealthy": ending.is_unhealthy, "raised": ending.raised, "few_failed": few_failed}
    doubt = next((sign for sign, holds in signs.items() if holds and ending.state == "serving"), "")
    doubt = doubt or ("not_done" if ending.not_done and ending.state in ("serving", "shut down") else "")
    if doubt:
        why = REASONS["log_shows"][doubt].format(
            failed=f"{ending.failed} of its last {plural(ending.answered, 'answer')}",
            route=ending.not_done,
            raised=ending.raised,
        )
        told = _of_request(line, ending, "") if line else None
        return NotJudged(why, subject, told._replace(seen=_failed_request(line)) if line and told else None)
    return None


def _failed_request(line: EventLine) -> str:
    return f"a request failed{f' (line {line.number})' if line.number else ''}: {line.text}"


def _failed_requests(ending: LogEnding, name: str, servers: Sequence[ObservedServer]) -> Iterator[str]:
    """Yield what is no incident: the last exception that ended a request, and why a server was told to end."""
    version = next((server.version for server in servers if server.name == name), "")
    for line in ending.lines:
        if line.event == ANSWERS and ending.state in ("serving", "lost", "shut down"):
            failure = _of_request(line, ending, version)
            said = f"{_failed_request(line).removesuffix('.')}."
            ended = f"{plural(ending.refused, 'request')} refused with HTTP 4xx, of the last {ending.answered}"
            refused = said.replace("a request failed", f"{ended}; the last error", 1)
            yield said if ending.refused <= 1 else printable(refused, MOST_REFUSED) if failure else refused
            if failure and (ending.failed or ending.state == "lost" or failure.is_decided):
                yield f"{failure.means} ({failure.basis})"
            yield from (failure.do,) if failure else ()
    if all(line.event != ANSWERS for line in ending.lines) and ending.state == "serving" and ending.errors:
        told = told_by_vllm(ending.context, version)
        yield from (f"an error of its log: {told.seen.removesuffix('.')}. {told.means}", told.do) if told else ()
    yield from _without_reason(ending)
    if ending.state == "shut down" and (told := told_by_others(ending.context, version, (OTHERS,))):
        yield from (f"another program's line before the end: {told.means}", told.do)


def _without_reason(ending: LogEnding) -> Iterator[str]:
    """Yield how to see why requests failed, if no exception in the log says it."""
    if ending.failed and all(line.event != ANSWERS for line in ending.lines):
        failed = f"{plural(ending.failed, 'request')} of the last {ending.answered}"
        yield REASONS["log_shows"]["no_stack"].format(failed=failed)


def _of_request(line: EventLine, ending: LogEnding, version: str) -> KnownFailure | None:
    told = known_failure([line.text], version, "", line.frames, ending.context._replace(phase=READY))
    is_guess = told is not None and told.basis == "guess" and bool(ending.refused) and not ending.failed
    return None if is_guess else told  # of a request that was refused, its own words are enough


def _told_near(ending: LogEnding) -> KnownFailure | None:
    """Return the failure that the lines at the end of a log tell, of one that shows no state that explains it."""
    is_ill = ending.state in ("lost", *ENDS_ILL) or bool(WORDS.start_failed.search(ending.context.nearby))
    told = told_by_others(ending.context, "") if ending.state in ("lost", "starting", "stopped") else None
    return told or (told_by_vllm(ending.context, is_alone=True) if is_ill else None)


def _why_unknown(ending: LogEnding, name: str) -> str:
    """Return why a log alone does not show the health of its server."""
    shows, last, nearby = REASONS["log_shows"], ending.last, ending.context.nearby
    if ending.waits:
        return shows["rank_waits"].format(line=ending.waits)
    if ending.is_still:
        cause = told_by_vllm(ending.context)
        return shows["still"].format(load=ending.load) + (f". {cause.means} {cause.do}" if cause else "")
    told = _told_near(ending)
    if ending.state in ("starting", "script failed"):
        failure = known_failure([last], "", "", context=ending.context)
        failure = failure if failure != told else None
        if failure and ending.state == "script failed":
            return f"{LOG_ENDS[ending.state].format(last=last.removesuffix('.'))}. {failure.means} {failure.do}"
        if failure:
            return f"its log ends in the middle of the start, at the line {last!r}. {failure.means} {failure.do}"
    waited = known_failure([last], "", "", context=ending.context) if ending.state == "stopped" else None
    if waited and waited.is_decided:
        return f"{waited.means} {waited.do} Then it was ended from outside: {last}"
    if ending.state == "lost":
        if any(line.event == ANSWERS for line in ending.lines):
            return shows["request_alone"]
        if dumps := list(STACK_DUMP.finditer(nearby)):
            from diag.diagnosis.roll_call import stand_in_dump  # noqa: PLC0415  # loaded where there is a dump

            dump, stands = dumps[-1], stand_in_dump(nearby)
            of = DUMP_OF.search(name)
            who = f"The main thread of {of['role']} {of['rank']} (PID {of['pid']})" if of else "Its main thread"
            place = f" {who} {hidden(stands)}." if stands else ""
            return shows["watchdog"].format(at=dump["at"], reason=hidden(dump["reason"]), place=place)
    if told:
        guess = " That is a guess." if told.do and told.basis == "guess" else ""
        return shows["told" if told.do else "said"].format(line=told.seen, means=f"{told.means}{guess}", do=told.do)
    for end, words in REASONS["ended_by"].items():
        if ending.state == "stopped" and re.match(words, last):
            return shows[end].format(last=last)
    usual = f" {REASONS['usual'][ending.phase]}" if ending.phase in REASONS["usual"] else ""
    behind = nearby.rstrip().rpartition("\n")[2]
    if ending.state == "starting" and last.rpartition(" (")[0] not in behind:
        last = f"{last}; behind it stands {around(hidden(behind), '^')!r}"
    return LOG_ENDS[ending.state].format(last=last, usual=usual)


def merge_log_reports(reports: Sequence[Report]) -> Report:
    """Merge the reports on logs, each judged at its own end: the worst first, then the first that gives a reason.

    The logs may be those of the ranks or nodes of one server, whose other processes only notice that a peer is gone.
    """
    if len(reports) == 1:
        return reports[0]
    from diag.log.trackers import informativeness  # noqa: PLC0415  # compiles the patterns of a log

    def order(finding: Finding) -> tuple[int, int, float]:
        reason = max((informativeness(quote.text) for quote in finding.quotes), default=0)
        began = finding.diagnosis.since or finding.diagnosis.watched_since
        return -RANK[finding.diagnosis.severity], -reason, began

    logs = [report.observed for report in reports]
    findings = tuple(sorted((finding for report in reports for finding in report.findings), key=order))
    not_judged = tuple(why for report in reports for why in report.not_judged)
    ignored = tuple(diagnosis for report in reports for diagnosis in report.health.ignored)
    observed = logs[0]._replace(
        target=listed([log.target for log in logs]),
        start=min(log.start for log in logs),
        end=max(log.end for log in logs),
        servers=tuple(server for log in logs for server in log.servers),
        notes=tuple(dict.fromkeys(note for log in logs for note in log.notes)),
        defects=tuple(defect for log in logs for defect in log.defects),
        endings=tuple(ending for log in logs for ending in log.endings),
    )
    return reports[0]._replace(
        observed=observed,
        verdict=verdict_of(findings, not_judged, OF_A_LOG._replace(ignored=ignored)),
        findings=findings,
        not_judged=not_judged,
        health=reports[0].health._replace(ignored=ignored),
    )
