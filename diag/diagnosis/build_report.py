"""Build the report of an observation: judge progress and incidents, propose fixes, and judge logs without a server."""

import re
from collections.abc import Iterator, Mapping, Sequence

from diag.core.contract import SLOS
from diag.core.formatting import listed, plural, quantity
from diag.core.incident import RANK, Incident
from diag.core.log_events import ANSWERS, LogEnding
from diag.core.subjects import instance_name
from diag.diagnosis.decision_table import shortest_look
from diag.diagnosis.diagnose import Diagnosis, diagnose
from diag.diagnosis.health import OF_A_LOG, health
from diag.diagnosis.onset import begun, by_scrapes, dated
from diag.diagnosis.progress import INSTANCE, NotJudged, judge
from diag.diagnosis.proposals import Running, by_failure, by_search, by_subject, is_on_rocm, propose
from diag.diagnosis.query_cache import FEWEST_INTERVALS, INSTANCES, PARTS, QueryCache
from diag.diagnosis.quotes import Quote, quotes
from diag.diagnosis.relaunch import lint_findings, relaunch
from diag.diagnosis.report import Finding, Observed, Report, verdict_of
from diag.diagnosis.telemetry_checks import claims, log_alone, strays
from diag.diagnosis.vitals import ceiling_shares
from diag.knowledge import rocm
from diag.knowledge.formulas import expanded
from diag.knowledge.known_failures import known_failure

ENDS_OPEN = {
    "starting": "its log ends in the middle of the start, without an error. Whether the start goes on, hangs, or was "
    "killed from outside is not in the log: look at the container's status (OOMKilled, exit code 137) and at dmesg; of "
    "a process that still runs, py-spy dump --pid PID shows the stack. The last line: {last}",
    "stopped": "it was ended from outside (a signal, Ctrl-C, a time limit, the OOM killer), as its last line says. "
    "Look at the limits of the start script, the probe or the scheduler, and at dmesg. The last line: {last}",
    "lost": "its log shows neither a start of vLLM nor a server at work",
    "script failed": "its engine had started, and the script that used it ended with an exception; nothing in the log "
    "says that vLLM failed: {last}",
    "failed": "its start failed, and no incident fits what the log says of it. The last line: {last}",
    "dead": "its engine died, and no incident fits what the log says of it. The last line: {last}",
}
"""Reasons why a log alone does not show the health of its server, by the state in which the log ends."""
REQUEST_ALONE = "its log shows a request that failed (see the note), and nothing of the server's own state"
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
    models = {server.name: server.model for server in observed.servers}
    findings = []
    for found_here in begun(dated(diagnose(incidents, judged), judged), incidents, judged):
        if found_here.state != "present":
            findings.append(Finding(found_here))
            continue
        known = by_subject(running, found_here.subject)
        quoted = quotes(found_here, judged) or _quote_event(found_here, observed)
        diagnosis = found_here
        if is_on_rocm(found_here, judged, quoted):
            in_words = rocm.incident_in_words(found_here.incident)
            look_alikes = tuple(map(rocm.look_alike_in_words, found_here.open))
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
        failure = known_failure(texts, known.version, model, frames)
        if failure:  # what is known of the line says more than the incident's advice for any line
            own = [each for each in proposals if each.changes or each.computed or each in linted]
            commands = [each for each in proposals if each.fix.command and each not in own]
            mends = [] if any(not each.needs for each in own) else [by_failure(failure)]
            proposals = (*own, *mends, *commands)
        elif (
            quoted
            and (diagnosis.incident.lints or quoted[0].frames)
            and not any(each.changes or each.computed for each in proposals)
        ):
            proposals = (by_search(quoted[0], known.version), *proposals)
        line = relaunch(known.launch, proposals)
        findings.append(Finding(by_scrapes(diagnosis, judged), proposals, line, uncomputed, quoted, failure))
    if observed.endings:
        return _log_report(observed, findings, queries)
    ill = frozenset(instance_name(each.diagnosis.subject) for each in findings if each.diagnosis.state == "present")
    mixed = (NotJudged(MIXED.format(metric), (("instance", name),)) for name, metric in observed.mixed)
    not_judged = (*unknown, *mixed, *_not_judged(findings, judged))
    seen = health([finding.diagnosis for finding in findings], progress, queries, observed.not_measured)
    return Report(
        observed=observed._replace(
            defects=(*observed.defects, *claims(queries, "claimed"), *log_alone(ill, queries), *strays(queries))
        ),
        verdict=verdict_of(findings, not_judged, seen),
        progress=progress,
        findings=tuple(findings),
        not_judged=not_judged,
        contract=tuple(queries.contract.lines()),
        health=seen,
        slo_is_default=queries.contract.stated.isdisjoint(SLOS),
        gone=tuple(sorted(queries.gone)),
        ceilings=ceiling_shares(queries) if with_ceilings else (),
    )


def _quote_event(diagnosis: Diagnosis, observed: Observed) -> tuple[Quote, ...]:
    """Return the newest line of a log, read alone, that shows an event which the incident's symptoms count."""
    ending = dict(observed.endings).get(instance_name(diagnosis.subject))
    formulas = " ".join(expanded(reading.condition.signal.promql) for reading in diagnosis.symptoms)
    lines = [line for line in (ending.lines if ending else ()) if re.search(rf"\b{line.event}\b", formulas)]
    newest = max(lines, key=lambda line: line.at, default=None)
    return () if newest is None else (Quote(newest.text, newest.file, newest.number or None, newest.process, ""),)


def _why_unknown(ending: LogEnding) -> str:
    known = known_failure([ending.last], "", "") if ending.state in ("starting", "script failed") else None
    if known and ending.state == "script failed":
        return f"{ENDS_OPEN[ending.state].format(last=ending.last.removesuffix('.'))}. {known.means} {known.do}"
    if known:
        return f"its log ends in the middle of the start, at the line {ending.last!r}. {known.means} {known.do}"
    if ending.state == "lost" and any(line.event == ANSWERS for line in ending.lines):
        return REQUEST_ALONE
    return ENDS_OPEN[ending.state].format(last=ending.last)


def _failed_requests(ending: LogEnding, observed: Observed, name: str) -> Iterator[str]:
    """Yield a note with the last exception that ended a request: the server goes on, so that it is no incident."""
    for line in ending.lines:
        if line.event == ANSWERS and ending.state in ("serving", "lost", "shut down"):
            server = next((each for each in observed.servers if each.name == name), None)
            known = known_failure([line.text], server.version if server else "", "", line.frames)
            place = f" (line {line.number})" if line.number else ""
            advice = f" {known.do}" if known else ""
            yield f"a request failed{place}: {line.text.removesuffix('.')}.{advice}"


def _log_report(observed: Observed, findings: Sequence[Finding], queries: QueryCache) -> Report:
    """Return the report on logs without a server: the incidents that they show, and how they end."""
    lost = {name for name, ending in observed.endings if ending.state == "lost"}
    told = [
        each
        for each in findings
        if each.diagnosis.state != "unknown"
        and each.diagnosis.incident.id not in TIMED
        and instance_name(each.diagnosis.subject) not in lost
    ]
    ill = {instance_name(found.diagnosis.subject) for found in told if found.diagnosis.state == "present"}
    not_judged = tuple(
        NotJudged(_why_unknown(ending), (("instance", name),))
        for name, ending in observed.endings
        if ending.state in ENDS_OPEN and name not in ill
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
        verdict=verdict_of(told, not_judged, OF_A_LOG),
        progress=(),
        findings=tuple(told),
        not_judged=not_judged,
        contract=tuple(queries.contract.lines()),
        health=OF_A_LOG,
    )


def merge_log_reports(reports: Sequence[Report]) -> Report:
    """Merge the reports on logs, each judged at its own end: the worst first, then the first that gives a reason.

    The logs may be those of the ranks or nodes of one server, whose other processes only notice that a peer is gone.
    """
    if len(reports) == 1:
        return reports[0]
    from diag.exporter.log.trackers import informativeness  # noqa: PLC0415  # compiles the patterns of a log

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
    verdict = verdict_of(findings, not_judged, OF_A_LOG)
    return reports[0]._replace(observed=observed, verdict=verdict, findings=findings, not_judged=not_judged)


def _not_judged(findings: Sequence[Finding], queries: QueryCache) -> Iterator[NotJudged]:
    """Yield why incidents could not be judged: no telemetry, queries that were refused, too short an observation."""
    if not queries.unanswered.isdisjoint((INSTANCES, *PARTS.values())):
        yield NotJudged("queries refused: it is unknown which servers, engines and GPUs there are")
    diagnoses = [finding.diagnosis for finding in findings]
    ids = sorted({diagnosis.incident.id for diagnosis in diagnoses if diagnosis.unanswered})
    if ids:
        unknown = plural(len(ids), "incident")
        yield NotJudged(f"queries refused: {unknown} unknown for want of an answer ({listed(ids, most=5)})")
    brief = (diagnosis.incident for diagnosis in diagnoses if diagnosis.brief)
    windows = {incident.id: shortest_look(incident) for incident in brief}
    if windows:
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
