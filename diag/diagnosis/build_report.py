"""Build the report of an observation: judge progress and incidents, propose fixes, and judge logs without a server."""

import re
from collections.abc import Iterator, Mapping, Sequence

from diag.core.contract import SLOS
from diag.core.formatting import listed, plural, quantity
from diag.core.incident import RANK, Incident
from diag.core.incident import judged as by_judgement
from diag.core.log_events import ANSWERS, READY, LogEnding
from diag.core.subjects import instance_name
from diag.diagnosis.decision_table import Reading, shortest_look
from diag.diagnosis.diagnose import Diagnosis, diagnose
from diag.diagnosis.health import OF_A_LOG, HealthEvidence, Suspect, health
from diag.diagnosis.ignored import ignored_notes, ignored_present, without_ignored
from diag.diagnosis.onset import begun, by_scrapes, dated
from diag.diagnosis.progress import FAILED, INSTANCE, NotJudged, Progress, judge
from diag.diagnosis.proposals import Running, by_failure, by_search, by_subject, is_on_rocm, propose
from diag.diagnosis.query_cache import FEWEST_INTERVALS, INSTANCES, PARTS, QueryCache
from diag.diagnosis.quotes import Quote, quotes
from diag.diagnosis.relaunch import lint_findings, relaunch
from diag.diagnosis.report import Finding, Observed, Report, verdict_of
from diag.diagnosis.telemetry_checks import claims, log_alone, strays
from diag.diagnosis.vitals import ceiling_shares
from diag.knowledge.formulas import expanded
from diag.knowledge.known_failures import NOTHING, known_failure
from diag.knowledge.platforms import incident_on_rocm, look_alike_on_rocm
from diag.knowledge.signals.answers import failed_share
from diag.knowledge.signals.forward_progress import successful_scrapes
from diag.vllm.command.free_text import hidden

ENDS_OPEN = {
    "starting": "its log ends in the middle of the start, without an error.{usual} Whether the start goes on, hangs, "
    "or was killed from outside is not in the log: look at the container's status (OOMKilled, exit code 137) and at "
    "dmesg; of a process that still runs, py-spy dump --pid PID shows the stack. The last line: {last}",
    "stopped": "it was ended from outside (a signal, Ctrl-C, a time limit, the OOM killer), as its last line says. "
    "Look at the limits of the start script, the probe or the scheduler, and at dmesg. The last line: {last}",
    "lost": "its log shows neither a start of vLLM nor a server at work",
    "script failed": "its engine had started, and the script that used it ended with an exception; nothing in the log "
    "says that vLLM failed: {last}",
    "failed": "its start failed, and no incident fits what the log says of it. The last line: {last}",
    "dead": "its engine died, and no incident fits what the log says of it. The last line: {last}",
}
"""Reasons why a log alone does not show the health of its server, by the state in which the log ends."""
STILL = (
    "its last stats line reports requests and no token: {load}. vLLM writes no further one while nothing moves: the "
    "engine hangs, or the log ends during a long prefill or a compilation. Ask the server itself (diag doctor URL), or "
    "read more of the log: two minutes without a stats line are a hang"
)
"""The reason where the server was at work."""
RANK_WAITS = (
    "the ranks of its engine wait for each other, and the log shows no token since then: {line}. One of them hangs, or "
    "the log ends during a compilation. Ask the server itself (diag doctor URL), and see where its ranks are (--stacks)"
)
"""The reason where ranks wait for each other."""
ACCEPTED = "{state}, and [ignore] accepts {incidents}: its health was not seen"
"""The reason where an ignored incident is all that is known of a server."""
ENDS_ILL = {"failed": "its start failed", "dead": "its engine died"}
"""Ends of a log that are a failure of the server itself."""
USUAL = {
    "load_weights": "If the process is gone, the usual cause in this phase is the kernel's OOM killer: raise the "
    "memory limit above the size of the model's files.",
    "compile": "If it hangs, start with --enforce-eager to get past this phase; if the process is gone, compilers took "
    "too much memory: MAX_JOBS=1 and TORCHINDUCTOR_COMPILE_THREADS=1.",
    "profile_memory": "If the process is gone, kernels that are built now (FlashInfer's, by ninja) took too much host "
    "memory: start with MAX_JOBS=1.",
    "cuda_graph_capture": "If it hangs, one rank may have failed while the others wait for it: --enforce-eager gets "
    "past this phase.",
    "warm_up": "If the process is gone, kernels that are built now took too much host memory: start with MAX_JOBS=1.",
}
"""The usual cause and its action where a start ends without an error, by phase."""
STACK_DUMP = re.compile(r">>> Call stack dump #\d+ at (?P<at>[^\n]{10,40}?) due to (?P<reason>[^\n]{1,60})")
WATCHDOG = (
    "it is a stack dump that vLLM's watchdog wrote at {at} because of {reason!r}: 'feed timeout' means that the engine "
    "or the worker had made no progress for the watchdog's time-out, so that it is stalled or compiles.{place} Compare "
    "the dumps of all ranks, the one that stands elsewhere is the cause; then restart the server, and run diag doctor "
    "on its log"
)
REQUEST_ALONE = "its log shows a request that failed (see the note), and nothing of the server's own state"
FAILING, START_FAILED = "requests_failing", "startup_failed"
FEWEST_FAILED, LEAST_FAILED = 3, 0.3
"""Failed answers among the last of a log, and their share, from which they are an incident."""
SHARE = ((failed_share.above(LEAST_FAILED, by_judgement("nearly a third of the last answers")), LEAST_FAILED),)
READS = re.compile(r"(?:sed|grep|tail|journalctl)\b")
"""Commands that look for what a known line already tells."""
TIMED = ("startup_slow",)
"""Incidents that are defined by elapsed time: a log that has ended cannot show them."""
NOTHING_JUDGED = "no incident could be judged: the telemetry that they need is missing"
MIXED = "its page has several values for one series of {}: a label is missing, so some incidents are unknown"
NO_SERVER = "no incident could be judged: no sample names a server"


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

    The incidents are judged by the queries in `judged`, which may have fewer servers; None: those in `queries`.
    """
    progress, unknown = judge(queries) if not observed.endings else ((), ())
    judged = judged or queries
    contract = queries.contract
    incidents = without_ignored(incidents, contract, observed.end)
    models = {server.name: server.model for server in observed.servers}
    endings = dict(observed.endings)
    findings = []
    found_all = begun(dated(diagnose(incidents, judged), judged), incidents, judged)
    failed_to_start = {
        instance_name(each.subject)
        for each in found_all
        if each.incident.id == START_FAILED and each.state == "present" and each.ongoing
    }
    for found_here in _with_failing_answers(found_all, endings):
        if found_here.state != "present":
            findings.append(Finding(found_here))
            continue
        known = by_subject(running, found_here.subject)
        quoted = quotes(found_here, judged) or _quote_event(found_here, observed)
        diagnosis = found_here
        if is_on_rocm(found_here, judged, quoted):
            in_words = incident_on_rocm(found_here.incident)
            look_alikes = tuple(map(look_alike_on_rocm, found_here.open))
            diagnosis = found_here._replace(incident=in_words, open=look_alikes)
        follows = diagnosis.explained_by is not None and not diagnosis.primary
        found = () if follows else propose(diagnosis, judged, known, quoted)  # what mends a consequence is its cause
        linted = lint_findings(known, quoted) if diagnosis.incident.lints else ()
        if linted:  # first the proposals without a restart, which only read
            found = tuple(sorted((*linted, *found), key=lambda proposal: proposal.fix.restart))
        proposals = tuple(proposal for proposal in found if proposal.is_computed)
        uncomputed = tuple(proposal for proposal in found if not proposal.is_computed)
        texts = [text for each in quoted for text in (each.text, each.cause) if text]
        model, frames = models.get(instance_name(diagnosis.subject), ""), quoted[0].frames if quoted else ""
        ending = endings.get(instance_name(diagnosis.subject))
        context = ending.context if ending else NOTHING
        failure = known_failure(texts, known.version, model, frames, context)
        if failure:  # what is known of the line says more than the incident's advice for any line
            own = [
                each
                for each in proposals
                if each in linted or (not failure.is_decided and (each.changes or each.computed))
            ]
            commands = [
                each for each in proposals if each.fix.command and each not in own and not READS.match(each.fix.command)
            ]
            mends = [] if any(not each.needs for each in own) else [by_failure(failure)]
            proposals = (*own, *mends, *commands)
        elif (
            quoted
            and (diagnosis.incident.lints or quoted[0].frames)
            and not any(each.changes or each.computed for each in proposals)
        ):
            proposals = (by_search(quoted[0], known.version), *proposals)
        if ending is not None:  # what a log does not tell is no advice
            proposals = tuple(each for each in proposals if not each.needs)
        line = relaunch(known.launch, proposals)
        is_of_start = ending.state == "failed" if ending else instance_name(diagnosis.subject) in failed_to_start
        findings.append(
            Finding(by_scrapes(diagnosis, judged), proposals, line, uncomputed, quoted, failure, is_of_start)
        )
    diagnoses = [finding.diagnosis for finding in findings]
    observed = observed._replace(notes=(*ignored_notes(diagnoses, contract, observed.end), *observed.notes))
    if observed.endings:
        return _log_report(observed, findings, queries)
    ill = frozenset(instance_name(each.diagnosis.subject) for each in findings if each.diagnosis.state == "present")
    mixed = (NotJudged(MIXED.format(metric), (("instance", name),)) for name, metric in observed.mixed)
    is_dead = bool(progress) and {each.state for each in progress} == {"dead"}
    not_judged = (*unknown, *mixed, *_not_judged(findings, judged, is_dead=is_dead))
    seen = health(diagnoses, progress, queries, observed.not_measured)
    seen = seen._replace(ignored=ignored_present(diagnoses, contract, observed.end))
    not_judged = (*not_judged, *_accepted_outages(seen, progress, diagnoses))
    return Report(
        observed=observed._replace(
            defects=(*observed.defects, *claims(queries, "claimed"), *log_alone(ill, queries), *strays(queries))
        ),
        verdict=verdict_of(findings, not_judged, seen),
        progress=progress,
        findings=tuple(findings),
        not_judged=not_judged,
        contract=tuple(contract.lines()),
        found_note=contract.found_note(),
        health=seen,
        slo_is_default=contract.stated.isdisjoint(SLOS),
        gone=tuple(sorted(queries.gone)),
        ceilings=ceiling_shares(queries) if with_ceilings else (),
    )


def _accepted_outages(
    seen: HealthEvidence, progress: Sequence[Progress], diagnoses: Sequence[Diagnosis]
) -> Iterator[NotJudged]:
    """Yield the servers that serve nobody, or of whose health nothing was seen, and whose incidents are ignored."""
    ill = {instance_name(each.subject) for each in diagnoses if each.state == "present" and RANK[each.severity]}
    for name in dict.fromkeys(instance_name(each.subject) for each in seen.ignored):
        failed = [each.state for each in progress if instance_name(each.subject) == name and each.state in FAILED]
        own = seen.of(name)
        if name not in ill and (failed or not own.seen):
            state = f"its engine is {failed[0]}" if failed else "no part of its health was measured"
            yield _accepted(state, own.ignored, name)


def _accepted(state: str, ignored: Sequence[Diagnosis], name: str) -> NotJudged:
    incidents = listed(list(dict.fromkeys(each.incident.id for each in ignored)))
    return NotJudged(ACCEPTED.format(state=state, incidents=incidents), (("instance", name),))


def _with_failing_answers(diagnoses: Sequence[Diagnosis], endings: Mapping[str, LogEnding]) -> Iterator[Diagnosis]:
    """Yield the diagnoses, with failing answers as an incident of a log alone if its last answers were errors.

    An access log has no times, so that it fills no window; a log that ends is judged by its last answers.
    """
    ill = {instance_name(each.subject) for each in diagnoses if each.state == "present" and RANK[each.severity]}
    for each in diagnoses:
        name = instance_name(each.subject)
        ending = endings.get(name)
        if (
            each.incident.id != FAILING
            or each.state == "present"
            or ending is None
            or ending.state != "serving"
            or name in ill
            or ending.failed < max(FEWEST_FAILED, LEAST_FAILED * ending.answered)
        ):
            yield each
            continue
        share = ending.failed / ending.answered
        history = [*(None for _ in each.instants[1:]), share]
        readings = tuple(Reading(condition, share, limit, True, history) for condition, limit in SHARE)
        yield each._replace(
            state="present",
            severity=each.incident.severity,
            severity_alone=each.incident.severity,
            primary=True,
            until=each.instants[-1],
            episodes=((None, each.instants[-1]),),
            ongoing=True,
            symptoms=(),
            supports=readings,
        )


def _quote_event(diagnosis: Diagnosis, observed: Observed) -> tuple[Quote, ...]:
    """Return the newest line of a log, read alone, that shows an event which the incident's symptoms count."""
    ending = dict(observed.endings).get(instance_name(diagnosis.subject))
    formulas = " ".join(expanded(condition.signal.promql) for condition in diagnosis.incident.conditions)
    lines = [line for line in (ending.lines if ending else ()) if re.search(rf"\b{line.event}\b", formulas)]
    newest = max(lines, key=lambda line: line.at, default=None)
    if newest is None:
        return ()
    return (Quote(newest.text, newest.file, newest.number or None, newest.process, "", newest.frames),)


def _why_unknown(ending: LogEnding) -> str:
    if ending.waits:
        return RANK_WAITS.format(line=ending.waits)
    if ending.is_still:
        return STILL.format(load=ending.load)
    known = (
        known_failure([ending.last], "", "", context=ending.context)
        if ending.state in ("starting", "script failed")
        else None
    )
    if known and ending.state == "script failed":
        return f"{ENDS_OPEN[ending.state].format(last=ending.last.removesuffix('.'))}. {known.means} {known.do}"
    if known:
        return f"its log ends in the middle of the start, at the line {ending.last!r}. {known.means} {known.do}"
    if ending.state == "lost" and any(line.event == ANSWERS for line in ending.lines):
        return REQUEST_ALONE
    dump = STACK_DUMP.search(ending.context.nearby) if ending.state == "lost" else None
    if dump:
        frames = re.findall(r'File "[^"]*/(vllm/[^"]+)", line (\d+) in (\w+)', ending.context.nearby)
        place = f" Its innermost frame in vLLM: {':'.join(frames[0][:2])}, {frames[0][2]}." if frames else ""
        return WATCHDOG.format(at=dump["at"], reason=hidden(dump["reason"]), place=place)
    usual = f" {USUAL[ending.phase]}" if ending.phase in USUAL else ""
    return ENDS_OPEN[ending.state].format(last=ending.last, usual=usual)


def _failed_requests(ending: LogEnding, observed: Observed, name: str) -> Iterator[str]:
    """Yield a note with the last exception that ended a request: the server goes on, so that it is no incident."""
    for line in ending.lines:
        if line.event == ANSWERS and ending.state in ("serving", "lost", "shut down"):
            server = next((each for each in observed.servers if each.name == name), None)
            context = ending.context._replace(phase=READY)
            known = known_failure([line.text], server.version if server else "", "", line.frames, context)
            place = f" (line {line.number})" if line.number else ""
            advice = f" {known.do}" if known else ""
            yield f"a request failed{place}: {line.text.removesuffix('.')}.{advice}"


def _log_report(observed: Observed, findings: Sequence[Finding], queries: QueryCache) -> Report:
    """Return the report on logs without a server: the incidents that they show, and how they end."""
    lost = {name for name, ending in observed.endings if ending.state == "lost"}
    ended = {name for name, ending in observed.endings if ending.state in ("shut down", "stopped")}
    still = {name for name, ending in observed.endings if ending.is_still or ending.waits}
    told = [
        each._replace(diagnosis=_without_scrapes(each.diagnosis))
        for each in findings
        if each.diagnosis.state != "unknown"
        and each.diagnosis.incident.id not in TIMED
        and instance_name(each.diagnosis.subject) not in lost
        and not (instance_name(each.diagnosis.subject) in ended | still and _is_of_load(each.diagnosis))
    ]
    present = [found.diagnosis for found in told if found.diagnosis.state == "present"]
    ignored = ignored_present(present, queries.contract, observed.end)
    accepted = {each.incident.id for each in ignored}
    ill = {instance_name(each.subject) for each in present if each.incident.id not in accepted}
    suspects = health([each.diagnosis for each in findings], (), queries, observed.not_measured).suspects
    at_work = {name for name, ending in observed.endings if ending.state == "serving"} - still
    seen = OF_A_LOG._replace(
        suspects=tuple(
            each for each in suspects if instance_name(each.diagnosis.subject) in at_work and _lacks_preemptions(each)
        ),
        ignored=ignored,
    )
    not_judged = tuple(
        _accepted(ENDS_ILL[ending.state], own, name)
        if ending.state in ENDS_ILL and (own := seen.of(name).ignored)
        else NotJudged(_why_unknown(ending), (("instance", name),))
        for name, ending in observed.endings
        if (name in still or ending.state in ENDS_OPEN) and name not in ill
    )
    notes = tuple(
        note
        for name, ending in observed.endings
        if name not in ill
        for note in _failed_requests(ending, observed, name)
    )
    return Report(
        observed=observed._replace(
            notes=(*observed.notes, *notes), defects=(*observed.defects, *claims(queries, "survived"))
        ),
        verdict=verdict_of(told, not_judged, seen),
        progress=(),
        findings=tuple(told),
        not_judged=not_judged,
        contract=tuple(queries.contract.lines()),
        found_note=queries.contract.found_note(),
        health=seen,
    )


def _without_scrapes(diagnosis: Diagnosis) -> Diagnosis:
    """Leave out the readings of scrapes: nothing was scraped of a server of which only a log is known."""
    symptoms, supports = (
        tuple(each for each in readings if each.condition.signal is not successful_scrapes)
        for readings in (diagnosis.symptoms, diagnosis.supports)
    )
    return diagnosis._replace(symptoms=symptoms, supports=supports)


def _is_of_load(diagnosis: Diagnosis) -> bool:
    """Return True if an incident is a matter of load: it is over when its server was stopped on purpose."""
    return not diagnosis.incident.outage and "vllm:" in " ".join(
        expanded(reading.condition.signal.promql) for reading in diagnosis.symptoms
    )


def _lacks_preemptions(suspect: Suspect) -> bool:
    """Return True if an incident is unknown only because no release logs preemptions."""
    unknown = [reading.condition.signal.promql for reading in suspect.diagnosis.symptoms if reading.holds is None]
    return all("num_preemptions" in expanded(promql) for promql in unknown)


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

    seen = [report.observed for report in reports]
    findings = tuple(sorted((finding for report in reports for finding in report.findings), key=order))
    not_judged = tuple(why for report in reports for why in report.not_judged)
    observed = seen[0]._replace(
        target=listed([each.target for each in seen]),
        start=min(each.start for each in seen),
        end=max(each.end for each in seen),
        servers=tuple(server for each in seen for server in each.servers),
        notes=tuple(note for each in seen for note in each.notes),
        defects=tuple(defect for each in seen for defect in each.defects),
        endings=tuple(ending for each in seen for ending in each.endings),
    )
    health_seen = OF_A_LOG._replace(ignored=tuple(each for report in reports for each in report.health.ignored))
    verdict = verdict_of(findings, not_judged, health_seen)
    return reports[0]._replace(
        observed=observed,
        verdict=verdict,
        findings=findings,
        not_judged=not_judged,
        health=reports[0].health._replace(ignored=health_seen.ignored),
    )


def _not_judged(findings: Sequence[Finding], queries: QueryCache, *, is_dead: bool) -> Iterator[NotJudged]:
    """Yield why incidents could not be judged: no telemetry, queries that were refused, too short an observation.

    If all servers are dead, a longer observation shows nothing new.
    """
    if not queries.unanswered.isdisjoint((INSTANCES, *PARTS.values())):
        yield NotJudged("queries refused: it is unknown which servers, engines and GPUs there are")
    diagnoses = [finding.diagnosis for finding in findings]
    ids = sorted({diagnosis.incident.id for diagnosis in diagnoses if diagnosis.unanswered})
    if ids:
        unknown = plural(len(ids), "incident")
        yield NotJudged(f"queries refused: {unknown} unknown for want of an answer ({listed(ids, most=5)})")
    brief = (diagnosis.incident for diagnosis in diagnoses if diagnosis.brief)
    windows = {incident.id: shortest_look(incident) for incident in brief}
    if windows and not is_dead:
        longest = max(*windows.values(), FEWEST_INTERVALS * queries.source.interval)
        seen, wanted = quantity(round(queries.span), "seconds"), quantity(longest, "seconds")
        unruled = plural(len(windows), "incident")
        yield NotJudged(f"too little seen: {seen} do not rule out {unruled}; observe for {wanted}")

    # without telemetry, no incident is brief, refused or decided
    told = (found for found in diagnoses if found.state != "unknown" or found.brief or found.unanswered)
    known = {*map(instance_name, (found.subject for found in told)), *queries.gone}
    servers = queries.subjects(INSTANCE)
    yield from (NotJudged(NOTHING_JUDGED, server) for server in servers if instance_name(server) not in known)
    if not servers:
        yield NotJudged(NO_SERVER)
