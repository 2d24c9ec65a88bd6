"""Two snapshots -> a verdict for each incident that was present before, and one for the change as a whole.

Each snapshot is judged by the doctor's own machinery; diag/verify/verdict.py compares the two diagnoses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Finding
from diag.verify import gateway_limit
from diag.verify.changes import applied_fixes, changes, models
from diag.verify.comparison import WORST, IncidentOutcome, ServerComparison, Verdict, Verification
from diag.verify.load import Load, load
from diag.verify.same_load import differences
from diag.verify.signal_deltas import expected, signal_deltas
from diag.verify.snapshot import ServerSnapshot, Snapshot
from diag.verify.user_metrics import user_metrics
from diag.verify.verdict import judge

RESTARTS = (
    "max by (instance) (changes(process_start_time_seconds[$window]))"
    " + max by (instance) (resets(vllm:generation_tokens_total[$window]))"
    " or max by (instance) (resets(vllm:generation_tokens_total[$window]))"
)
STARTED = "max by (instance) (last_over_time(process_start_time_seconds[$window]))"
COLD = 60.0
"""Seconds after its start for which a server's caches are cold (judged)."""


def compare(before: Snapshot, after: Snapshot) -> Verification:
    """Compare two snapshots, server by server: by name, or whatever their names where each side has only one."""
    pairs = list(_pairs(before.instances, after.instances))
    servers = [_server(before.server(old), after.server(new)) for old, new in pairs]
    missing = set(before.instances) - {old for old, _ in pairs}
    new = set(after.instances) - {name for _, name in pairs}
    relevant = [server for server in servers if not server.is_bystander]
    verdicts: list[Verdict] = [server.verdict for server in relevant or servers]
    if missing or not pairs:
        verdicts.append("not comparable")
    unmatched = [f"{name} is missing after the change" for name in missing]
    unmatched += [f"{name} was missing before the change" for name in new]
    return Verification(
        before.report,
        after.report,
        min(verdicts, key=WORST.index),
        tuple(sorted(servers, key=lambda server: (server.is_bystander, WORST.index(server.verdict)))),
        tuple(sorted(unmatched)),
    )


def _pairs(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, str]]:
    if len(before) == len(after) == 1:
        yield before[0], after[0]
        return
    yield from ((name, name) for name in before if name in after)


def _server(before: ServerSnapshot, after: ServerSnapshot) -> ServerComparison:
    loads = load(before), load(after)
    down = _down(after, loads[0])
    limit = gateway_limit.gateway_limit(before, after, loads[0])
    compared = ServerComparison(
        before=before.instance,
        after=after.instance,
        loads=loads,
        down=down,
        differences=(*_differences(before, after), *(() if down else differences(*loads, limited=bool(limit)))),
        changes=(*changes(before, after), *((limit,) if limit else ())),
        user_metrics=user_metrics(before, after, loads),
        outcomes=(),
        new_incidents=tuple(_new_incidents(before, after)),
        unknown_before=_unknown(before),
        notes=(*_notes(before, after), *(gateway_limit.notes(limit, after, loads) if limit else ())),
    )
    return replace(compared, outcomes=tuple(_outcomes(before, after, compared)))


def _unknown(server: ServerSnapshot) -> tuple[str, ...]:
    """Why the state of a server cannot be judged, where nothing is known of its forward progress."""
    if any(server.owns(progress.subject) for progress in server.report.progress):
        return ()
    return tuple(each.sentence for each in server.report.not_judged if server.owns(each.subject))


def _down(after: ServerSnapshot, load_before: Load) -> str:
    """Why a server does no work after the change; that it is idle matters only where it had load before."""
    states = [progress for progress in after.report.progress if after.owns(progress.subject)]
    if not states:
        return "the state of the server after the change is unknown: " + "; ".join(_unknown(after))
    stopped = [progress for progress in states if progress.state in ("dead", "starting", "stalled", "asleep")]
    if not stopped and load_before.measured and all(progress.state == "idle" for progress in states):
        return "the server is idle after the change: no request is in flight; observe it under the load of BEFORE"
    return f"the server is {stopped[0].state} after the change: {stopped[0].reason}" if stopped else ""


def _differences(before: ServerSnapshot, after: ServerSnapshot) -> Iterator[str]:
    """What makes two snapshots of a server incomparable, whatever their loads."""
    served = models(before), models(after)
    if all(served) and served[0] != served[1]:
        yield f"a different model is served: {served[0]} -> {served[1]}"
    for server, when in ((before, "before"), (after, "after")):
        if server.value(RESTARTS):
            yield f"the server restarted during the observation {when} the change: observe it again once it is up"


def _notes(before: ServerSnapshot, after: ServerSnapshot) -> Iterator[str]:
    began, start = after.report.observed.start, after.value(STARTED)
    if began < before.report.observed.start:
        yield "AFTER was observed earlier than BEFORE: check the order of the two arguments"
    if start and began - start < COLD:
        yield f"the server was up for only {max(began - start, 0):.0f} s when AFTER began: caches were still cold"


def _new_incidents(before: ServerSnapshot, after: ServerSnapshot) -> Iterator[Diagnosis]:
    """What is present now and was certainly absent before, without what another incident explains."""
    for diagnosis in (finding.diagnosis for finding in after.report.present):
        if after.owns(diagnosis.subject) and diagnosis.severity != "info" and diagnosis.explained_by is None:
            earlier = _counterpart(diagnosis, before)
            if earlier is None or earlier.state == "absent":
                yield diagnosis


def _counterpart(diagnosis: Diagnosis, other: ServerSnapshot) -> Diagnosis | None:
    """The diagnosis of the same incident on the same engine or GPU of the other snapshot."""
    incident, subject = diagnosis.incident.id, other.renamed(diagnosis.subject)
    candidates = (finding.diagnosis for finding in other.report.findings)
    return next((found for found in candidates if found.incident.id == incident and found.subject == subject), None)


def _outcomes(before: ServerSnapshot, after: ServerSnapshot, server: ServerComparison) -> Iterator[IncidentOutcome]:
    """What became of every incident that was present; of infos only where there was nothing else."""
    present = [finding for finding in before.report.present if before.owns(finding.diagnosis.subject)]
    harmful = [finding for finding in present if finding.diagnosis.severity != "info"]
    return (_outcome(finding, before, after, server) for finding in harmful or present)


def _outcome(
    finding: Finding, before: ServerSnapshot, after: ServerSnapshot, server: ServerComparison
) -> IncidentOutcome:
    diagnosis = finding.diagnosis
    later = _counterpart(diagnosis, after)
    fixes = applied_fixes(finding, server.changes)
    signals = signal_deltas(diagnosis, expected(diagnosis.incident, fixes), before, after)
    return IncidentOutcome(diagnosis, later, *judge(diagnosis, later, signals, server), signals, fixes)
