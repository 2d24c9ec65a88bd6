"""The diagnosis of a server or a fleet as data: everything that a report prints, computed."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from diag.core.contract import SLOS
from diag.core.formatting import listed, number, plural, quantity
from diag.core.incident import RANK, Incident, Signal
from diag.core.log_events import ANSWERS, LogEnding
from diag.core.subjects import Subject, instance_name, label_value
from diag.diagnosis.decision_table import shortest_look
from diag.diagnosis.diagnose import Diagnosis, Quote, State, by_scrapes, dated, diagnose, quotes
from diag.diagnosis.progress import ENGINE, INSTANCE, NotJudged, Progress, judge
from diag.diagnosis.proposals import Proposal, Running, by_failure, by_search, by_subject, is_on_rocm, propose
from diag.diagnosis.query_cache import FEWEST_INTERVALS, GPUS, INSTANCES, PARTS, QueryCache
from diag.diagnosis.relaunch import lint_findings, relaunch
from diag.diagnosis.roll_call import RollCall
from diag.diagnosis.shared_labels import SharedLabel
from diag.diagnosis.vitals import Vitals
from diag.knowledge import rocm
from diag.knowledge.formulas import expanded
from diag.knowledge.known_failures import KnownFailure, known_failure
from diag.knowledge.signals.ceilings import FULL, all_reduce_share, bandwidth_share, batch, compute_share, nvlink_share
from diag.sources.observation import PodContainer

Verdict = Literal["healthy", "warning", "critical", "unknown"]
CLAIM_IS_NEWS = 300.0
"""Seconds before the first scrape in which a line of the log still matters."""
LOG_ALONE = (
    "max by (instance) (last_over_time(diag_vllm_log_last_line_timestamp_seconds[$window]))"
    " unless max by (instance) (max_over_time(diag_vllm_up[$window])) > 0"
    ' unless max by (instance) (last_over_time({__name__=~"diag_vllm_process(es|_cpu_seconds_total)"}[$window]))'
    " unless max by (instance) (last_over_time(diag_host_last_oom_kill_timestamp_seconds[$window]))"
)
"""Servers whose log is known, but no page, and neither the processes of the host nor the container."""
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
"""Why a log tells nothing, by the state in which it ends."""
REQUEST_ALONE = "its log shows a request that failed (see the note), and nothing of the server's own state"
TIMED = ("startup_slow",)
"""Incidents of time that goes by, which a log that has ended cannot show."""
NOTHING_JUDGED = "no incident could be judged: the telemetry that they need is missing"
MIXED = "its page has several values for one series of {}: a label is missing, so some incidents are unknown"
NO_SERVER = "no incident could be judged: no sample names a server"
HOST = "run diag on the server's host, or scrape diag exporter"


class TelemetryFamily(NamedTuple):
    """Telemetry that vLLM's own /metrics page lacks as a whole: its metrics, what they show, and how to get them.

    `usual` is one of its metrics, with few series per server, so that querying it is cheap.
    """

    metrics: str
    usual: str
    name: str
    shows: str
    hint: str


UNREAD = "xpu|tpu|hpu|neuron"
"""Devices that diag reads no telemetry of, as vLLM calls them."""
FAMILIES = {
    "gpu": TelemetryFamily("diag_gpu_.+", "diag_gpu_power_watts", "GPUs", "throttling, power, memory and faults", HOST),
    "log": TelemetryFamily(
        "diag_vllm_(startup|log)_.+",
        "diag_vllm_startup_last_progress_timestamp_seconds",
        "server log",
        "start-up phases and errors",
        "--log FILE",
    ),
    "process": TelemetryFamily(
        "diag_vllm_process_.+",
        "diag_vllm_process_cpu_seconds_total",
        "processes",
        "stopped or busy-waiting workers",
        HOST,
    ),
    "device": TelemetryFamily(
        "diag_gpu_.+",
        "diag_gpu_power_watts",
        "XPUs, TPUs",
        "throttling, power, memory and faults",
        "diag reads the GPUs of NVIDIA and AMD only",
    ),
}


DefectKind = (
    Literal["ended", "gone", "gaps", "slow"]
    | Literal["renamed", "double", "aliases"]
    | Literal["silent", "collectors", "not joined", "no gpu", "no throttling", "no start"]
    | Literal["claimed", "survived", "log alone"]
)
"""Defects of scrapes, of the names of servers, of what is collected, and of a log: contradicted or uncorroborated."""


class TelemetryDefect(NamedTuple):
    """A defect of the telemetry, with the servers that have it; `of_all` if all servers have it.

    `number` is a unix time ("ended", "gone", "claimed", "survived"), the largest share of missing scrapes ("gaps") or a
    scrape interval in seconds ("slow"). `names` are the alerts that need more scrapes ("slow"), the jobs ("double"),
    the prefix of the metrics' names and the usual one ("renamed"), or a line of the log, its place, and the events
    claimed ("claimed", "survived"). `groups` are servers by failing collector, or instances of one server.
    """

    kind: DefectKind
    servers: frozenset[str] = frozenset()
    number: float = 0.0
    names: tuple[str, ...] = ()
    groups: tuple[tuple[str, frozenset[str]], ...] = ()
    of_all: bool = False


class ObservedServer(NamedTuple):
    """A server with its vLLM release and its model, "" if unknown."""

    name: str
    version: str
    model: str


class Observed(NamedTuple):
    """The source of the evidence; `start` and `end` are unix seconds.

    `defects` are those of the telemetry; `notes` are sentences of the source. `mixed` are servers, each
    with a metric whose series lack the label that tells their parts apart. `endings` are servers of which only a log is
    known, each with how the log ends. `containers` are the running ones of servers in pods, by the server's name.
    """

    source: str
    target: str
    start: float
    end: float
    scrapes: int
    failed_scrapes: int
    servers: tuple[ObservedServer, ...] = ()
    notes: tuple[str, ...] = ()
    not_measured: tuple[str, ...] = ()
    defects: tuple[TelemetryDefect, ...] = ()
    mixed: tuple[tuple[str, str], ...] = ()
    endings: tuple[tuple[str, LogEnding], ...] = ()
    containers: tuple[tuple[str, PodContainer], ...] = ()


class NormalReading(NamedTuple):
    """The speed of a server compared with the normal speed at its load: evidence, never a verdict.

    `normal` is the median of `windows` windows at this load (`given`: texts with their numbers) and `spread` their
    robust standard deviation; `worse` is the direction that is bad for users; `against` names the baseline, `version`
    its release; `notable` is whether the difference exceeds chance and the usual spread.
    """

    subject: Subject
    measure: str
    unit: str
    worse: Literal["higher", "lower"]
    value: float
    normal: float
    spread: float
    given: tuple[tuple[str, float], ...]
    against: str
    version: str
    own_version: str
    windows: int
    notable: bool

    @property
    def ratio(self) -> float | None:
        """The value as a multiple of the normal one."""
        return self.value / self.normal if self.normal else None

    @property
    def load(self) -> str:
        """The load at which both were compared."""
        return " and ".join(text.format(number(value)) for text, value in self.given)


class Normality(NamedTuple):
    """The comparison with a baseline file, or with peers (""); `reasons` say why some servers could not be compared."""

    file: str = ""
    readings: tuple[NormalReading, ...] = ()
    reasons: tuple[str, ...] = ()


class CeilingShares(NamedTuple):
    """Shares of one engine's ceilings, 0 to 1, and the tokens that it decodes in a step; None if unknown.

    No incident, but the headroom that every reader asks for. `nvlink` and `pcie` are the shares of either link that the
    all-reduces of tensor parallelism need.
    """

    subject: Subject
    bandwidth: float | None
    compute: float | None
    nvlink: float | None
    pcie: float | None
    batch: float | None

    @property
    def nearest(self) -> float:
        """The larger share of both ceilings."""
        return max(self.bandwidth or 0.0, self.compute or 0.0)

    @property
    def bound(self) -> str:
        """The ceiling that binds the engine: "bandwidth", "compute", or "" if both have headroom."""
        if self.nearest < FULL:
            return ""
        return "bandwidth" if self.nearest == self.bandwidth else "compute"

    @property
    def sentence(self) -> str:
        """The shares in words: "38 % of the bandwidth ceiling at batch 12, 4 % of compute"."""
        batch = f" at batch {number(self.batch)}" if self.batch else ""
        named = {"the bandwidth ceiling": self.bandwidth, "compute": self.compute}
        parts = [f"{quantity(share, 'share')} of {name}" for name, share in named.items() if share is not None]
        links = {"NVLink": self.nvlink, "PCIe": self.pcie if self.nvlink is None else None}
        sent = [
            f"all-reduces {quantity(share, 'share')} of {name}" for name, share in links.items() if share is not None
        ]
        bound = f": {self.bound}-bound" if self.bound else ""
        return ", ".join([parts[0] + batch, *parts[1:], *sent]) + bound


class Finding(NamedTuple):
    """A diagnosis with its fixes, and the log lines that decide it.

    `uncomputed` are fixes whose number needs telemetry that is missing; `failure` is what is known of the
    quoted line.
    """

    diagnosis: Diagnosis
    proposals: tuple[Proposal, ...] = ()
    relaunch: str | None = None
    uncomputed: tuple[Proposal, ...] = ()
    quotes: tuple[Quote, ...] = ()
    failure: KnownFailure | None = None


class Report(NamedTuple):
    """The whole diagnosis; `gone` are vanished servers, `ceilings` how near the engines are to those of their GPUs,
    `shared` the labels that the ill servers of a fleet have and its healthy ones lack, `slo_is_default` whether the
    site has set none of its own; `vitals` are the vital signs of a few servers, `roll_calls` where their processes
    stand, if that was asked for.

    `not_judged` is why finding nothing does not mean health: engines whose forward progress is unknown, incidents that
    could not be judged because the source refused queries or the observation was too short.
    """

    observed: Observed
    verdict: Verdict
    progress: tuple[Progress, ...]
    findings: tuple[Finding, ...]
    not_judged: tuple[NotJudged, ...]
    contract: tuple[str, ...]
    gone: tuple[str, ...] = ()
    normality: Normality = Normality()
    ceilings: tuple[CeilingShares, ...] = ()
    shared: tuple[SharedLabel, ...] = ()
    slo_is_default: bool = False
    vitals: tuple[Vitals, ...] = ()
    roll_calls: tuple[RollCall, ...] = ()

    @property
    def present(self) -> tuple[Finding, ...]:
        """The incidents that hold, the primary ones first."""
        return tuple(finding for finding in self.findings if finding.diagnosis.state == "present")

    @property
    def undecided(self) -> tuple[Diagnosis, ...]:
        """The incidents that are unknown although each family of telemetry that they need was collected."""
        families = [FAMILIES[name].metrics for name in self.observed.not_measured]

        def needs_family(diagnosis: Diagnosis) -> bool:
            lacking = [reading.condition.signal for reading in diagnosis.symptoms if reading.value is None]
            formulas = [expanded(signal.promql) for signal in lacking]
            return any(re.search(rf"\b{family}", formula) for family in families for formula in formulas)

        unknown = (finding.diagnosis for finding in self.findings if finding.diagnosis.state == "unknown")
        return tuple(diagnosis for diagnosis in unknown if not needs_family(diagnosis))

    @property
    def checked(self) -> frozenset[str]:
        """The incidents that could be judged on some subject."""
        return frozenset(f.diagnosis.incident.id for f in self.findings if f.diagnosis.state != "unknown")

    @property
    def judged_servers(self) -> frozenset[str]:
        """The servers on which some incident could be judged, or that the conditions of a large fleet clear."""
        states: dict[str, set[State]] = {instance_name(each.subject): {"unknown"} for each in self.not_judged}
        for diagnosis in (finding.diagnosis for finding in self.findings):
            states.setdefault(instance_name(diagnosis.subject), set()).add(diagnosis.state)
        return frozenset(name for name in self.servers if states.get(name) != {"unknown"})

    @property
    def servers(self) -> tuple[str, ...]:
        """The sorted names of all judged servers; in a large fleet, some were judged for progress only."""
        judged = (finding.diagnosis.subject for finding in self.findings)
        seen = (*(progress.subject for progress in self.progress), *(why.subject for why in self.not_judged))
        logs = dict(self.observed.endings)
        return tuple(sorted({*map(instance_name, judged), *map(instance_name, filter(None, seen)), *self.gone, *logs}))

    @property
    def needs_telemetry(self) -> frozenset[str]:
        """The incidents that could be judged on no subject, or are unknown on one that has the telemetry."""
        known = frozenset(finding.diagnosis.incident.id for finding in self.findings)
        return (known - self.checked) | {diagnosis.incident.id for diagnosis in self.undecided}

    @property
    def absent(self) -> tuple[str, ...]:
        """The incidents that could be judged and are present on no subject."""
        return tuple(sorted(self.checked - {finding.diagnosis.incident.id for finding in self.present}))


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
    for found_here in dated(diagnose(incidents, judged), judged):
        if found_here.state != "present":
            findings.append(Finding(found_here))
            continue
        known = by_subject(running, found_here.subject)
        quoted = quotes(found_here, judged) or _lines_of_events(found_here, observed)
        diagnosis = found_here
        if is_on_rocm(found_here, judged, quoted):
            in_words = rocm.incident_in_words(found_here.incident)
            look_alikes = tuple(map(rocm.look_alike_in_words, found_here.open))
            diagnosis = found_here._replace(incident=in_words, open=look_alikes)
        found = propose(diagnosis, judged, known, quoted)
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
        return _of_logs(observed, findings, queries)
    mixed = (NotJudged(MIXED.format(metric), (("instance", name),)) for name, metric in observed.mixed)
    not_judged = (*unknown, *mixed, *_not_judged(findings, judged))
    return Report(
        observed=observed._replace(
            defects=(*observed.defects, *_claims(queries, "claimed"), *_log_alone(findings, queries))
        ),
        verdict=verdict_of(findings, not_judged),
        progress=progress,
        findings=tuple(findings),
        not_judged=not_judged,
        contract=tuple(queries.contract.lines()),
        slo_is_default=queries.contract.stated.isdisjoint(SLOS),
        gone=tuple(sorted(queries.gone)),
        ceilings=ceiling_shares(queries) if with_ceilings else (),
    )


def _lines_of_events(diagnosis: Diagnosis, observed: Observed) -> tuple[Quote, ...]:
    """Return the newest line of a log, read alone, that shows an event which the incident's symptoms count."""
    ending = dict(observed.endings).get(instance_name(diagnosis.subject))
    formulas = " ".join(expanded(reading.condition.signal.promql) for reading in diagnosis.symptoms)
    lines = [line for line in (ending.lines if ending else ()) if re.search(rf"\b{line.event}\b", formulas)]
    newest = max(lines, key=lambda line: line.at, default=None)
    return () if newest is None else (Quote(newest.text, newest.file, newest.number or None, newest.process, ""),)


def _ends_open(ending: LogEnding) -> str:
    known = known_failure([ending.last], "", "") if ending.state in ("starting", "script failed") else None
    if known and ending.state == "script failed":
        return f"{ENDS_OPEN[ending.state].format(last=ending.last.removesuffix('.'))}. {known.means} {known.do}"
    if known:
        return f"its log ends in the middle of the start, at the line {ending.last!r}. {known.means} {known.do}"
    if ending.state == "lost" and any(line.event == ANSWERS for line in ending.lines):
        return REQUEST_ALONE
    return ENDS_OPEN[ending.state].format(last=ending.last)


def _of_requests(ending: LogEnding, observed: Observed, name: str) -> Iterator[str]:
    """Yield what is known of the last exception that ended a request; the server went on, so that it is no incident."""
    for line in ending.lines:
        if line.event == ANSWERS and ending.state in ("serving", "lost", "shut down"):
            server = next((each for each in observed.servers if each.name == name), None)
            known = known_failure([line.text], server.version if server else "", "", line.frames)
            place = f" (line {line.number})" if line.number else ""
            advice = f" {known.do}" if known else ""
            yield f"a request failed{place}: {line.text.removesuffix('.')}.{advice}"


def _of_logs(observed: Observed, findings: Sequence[Finding], queries: QueryCache) -> Report:
    """Return the report on logs alone: of incidents that they show, and of how they end."""
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
        NotJudged(_ends_open(ending), (("instance", name),))
        for name, ending in observed.endings
        if ending.state in ENDS_OPEN and name not in ill
    )
    notes = tuple(
        note for name, ending in observed.endings if name not in ill for note in _of_requests(ending, observed, name)
    )
    return Report(
        observed=observed._replace(
            notes=(*observed.notes, *notes), defects=(*observed.defects, *_claims(queries, "survived"))
        ),
        verdict=verdict_of(told, not_judged),
        progress=(),
        findings=tuple(told),
        not_judged=not_judged,
        contract=tuple(queries.contract.lines()),
    )


def of_several_logs(reports: Sequence[Report]) -> Report:
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
    verdict = verdict_of(findings, not_judged)
    return reports[0]._replace(observed=observed, verdict=verdict, findings=findings, not_judged=not_judged)


def _claims(queries: QueryCache, kind: Literal["claimed", "survived"]) -> Iterator[TelemetryDefect]:
    """Yield for each server the events of the span that its log claims, and that are contradicted now.

    What is measured contradicts what is "claimed"; a server's own work, logged later, what it "survived".
    """
    query = (
        "max by (instance, event, file, line, text) (last_over_time(diag_vllm_log_claim_timestamp_seconds[$window]))"
    )
    claimed: dict[str, list[tuple[float, Mapping[str, str]]]] = {}
    now = queries.holding(queries.source.interval)
    for subject, row in queries.ask(query, INSTANCE, now, queries.source.instants[-1:]).items():
        labels = dict(subject)
        if row[0] >= queries.source.first / 1000 - CLAIM_IS_NEWS:
            claimed.setdefault(instance_name(subject), []).append((float(row[0]), labels))
    for name, lines in sorted(claimed.items()):
        at, first = min(lines, key=lambda line: (line[0], label_value(line[1], "line").zfill(12)))
        place = ":".join(filter(None, (label_value(first, "file"), label_value(first, "line"))))
        events = sorted({label_value(labels, "event") for _, labels in lines})
        yield TelemetryDefect(kind, frozenset({name}), at, (label_value(first, "text"), place, *events))


def _log_alone(findings: Sequence[Finding], queries: QueryCache) -> Iterator[TelemetryDefect]:
    """Yield the servers with an incident of which nothing but their log is known."""
    ill = {instance_name(found.diagnosis.subject) for found in findings if found.diagnosis.state == "present"}
    alone = ill and ill & set(map(instance_name, queries.ask(LOG_ALONE, INSTANCE, queries.whole)))
    if alone:
        yield TelemetryDefect("log alone", frozenset(alone))


def ceiling_shares(queries: QueryCache) -> tuple[CeilingShares, ...]:
    """Return the shares of every engine whose GPU and work are known, over the last live window; ordered by subject."""

    def last(signal: Signal) -> dict[Subject, float]:
        rows = queries.ask(signal, ENGINE, queries.live("30s"), queries.source.instants[-1:])
        return {subject: float(row[-1]) for subject, row in rows.items() if np.isfinite(row[-1])}

    first = last(bandwidth_share), last(compute_share)
    if not any(first):
        return ()
    columns = (*first, *map(last, (nvlink_share, all_reduce_share, batch)))
    subjects = sorted(subject for subject in {**first[0], **first[1]} if not queries.is_gone(subject))
    return tuple(CeilingShares(subject, *(column.get(subject) for column in columns)) for subject in subjects)


def not_measured(queries: QueryCache) -> tuple[str, ...]:
    """Return the families of telemetry that no server has; a family whose query was refused may be there."""
    absent = []
    for name, family in FAMILIES.items():
        if name == "device":  # known by its servers alone
            continue
        usual = f"count by (instance) (last_over_time({family.usual}[$window]))"
        if queries.ask(usual, (), queries.whole):
            continue
        query = f'count by (instance) (last_over_time({{__name__=~"{family.metrics}"}}[$window]))'
        query = GPUS if name == "gpu" else query  # which servers have GPUs is queried anyway
        if not queries.ask(query, (), queries.whole) and query not in queries.unanswered:
            absent.append(name)
    unread = f'count by (instance) (last_over_time(diag_vllm_info{{device=~"{UNREAD}"}}[$window]))'
    if "gpu" in absent and queries.ask(unread, (), queries.whole):
        absent[absent.index("gpu")] = "device"
    return tuple(absent)


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


def verdict_of(findings: Sequence[Finding], not_judged: Sequence[NotJudged]) -> Verdict:
    """Return the worst severity that is present; if none is, "unknown" if anything could not be judged."""
    present = (finding.diagnosis for finding in findings if finding.diagnosis.state == "present")
    worst = max((RANK[diagnosis.severity] for diagnosis in present), default=0)
    if worst:
        return "critical" if worst == RANK["critical"] else "warning"
    return "unknown" if not_judged else "healthy"
