"""Sentences about the telemetry behind a report: source, what was judged, what is missing, defects and their repair.

Where health was not shown, the verdict is NO INCIDENT FOUND (NO FAILURE FOUND of a log alone), or a WARNING between
several incidents that cannot be told apart.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.core.formatting import TimeFormat, escaped, listed, moment, number, plural, printable, quantity
from diag.core.incident import RANK
from diag.core.metric_prefix import relabelling
from diag.core.subjects import instance_name
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import NormalReading, Report
from diag.diagnosis.telemetry_checks import FAMILIES, DefectKind, TelemetryDefect
from diag.diagnosis.vitals import MEASURES, Vitals
from diag.report import sentences as words

MANY = 5
"""The most unknown incidents of one subject that are listed with the signals that they lack."""
NO_INCIDENT, NO_FAILURE = "NO INCIDENT FOUND", "NO FAILURE FOUND"
MOST_NAMED = 3
"""Incidents, missing signals and readings that one sentence names."""
FEW = 3
"""Servers above which a defect of every server is reported as one of "all servers"."""


@cache
def sentences() -> Mapping[DefectKind | Literal["port"], str]:
    """Return the sentences about defects by their kind."""
    return read(PACKAGE / "report" / "defects.toml", dict[DefectKind | Literal["port"], str])


def source(report: Report, written_as: TimeFormat) -> str:
    """Return source, target, number of scrapes and time range of the judged samples."""
    scan = report.observed
    failed = f", {scan.failed_scrapes} of them failed" if scan.failed_scrapes else ""
    if scan.endings:
        return f"log {escaped(scan.target)}, up to {written_as(scan.end)}; no server was asked"
    span = f"{written_as(scan.start)} - {written_as(scan.end)} ({quantity(scan.end - scan.start, 'seconds')})"
    return f"{scan.source} {escaped(scan.target)}: {scan.scrapes:,} scrapes{failed}, {span}"


def vitals(report: Report) -> list[str]:
    """List for each server its load, latency, KV cache and GPUs: "requests running: 3; KV cache usage: 12 %"."""
    lines = []
    for signs in report.vitals:
        name = "" if len(report.vitals) == 1 else f"{printable(signs.name)}: "
        shown = [f"{title}: {value}" for title, value, _ in vital_signs(signs)]
        lines += [name + "; ".join(shown)] if shown else []
    return lines


def vital_signs(signs: Vitals) -> list[tuple[str, str, Sequence[float | None]]]:
    """Return title, last value and history of each known measure of a server."""
    known = [(measure, signs.now[key], signs.histories[key]) for key, measure in MEASURES.items() if key in signs.now]
    return [(measure.title, quantity(value, measure.unit), history) for measure, value, history in known]


def servers(report: Report) -> list[str]:
    """List the servers, each with its release and its model."""
    return [
        f"{name}: vLLM {version or '(version unknown)'}, {model or 'model unknown'}"
        for name, version, model in report.observed.servers
    ]


def checked(report: Report, verbose: bool) -> list[str]:
    """Return engine states and number of checked incidents; `verbose` names the absent and unknown ones."""
    is_ill = report.verdict in ("warning", "critical") and not report.observed.endings
    told = f"incidents found ({words.number_checked(report)})" if is_ill else words.found_nothing(report)
    lines = [f"{listed(words.log_endings(report)) or words.states(report)}; {told}"]
    names = {"absent": report.absent, "need more telemetry": sorted(report.needs_telemetry)}
    return lines + [f"{what}: {', '.join(words.titles(ids, report))}" for what, ids in names.items() if ids and verbose]


def not_collected(report: Report) -> list[str]:
    """List each missing family of telemetry, and how to get it."""
    families = (FAMILIES[name] for name in report.observed.not_measured)
    return [f"{family.name}: {family.shows} ({family.hint})" for family in families]


def notes(report: Report) -> list[str]:
    """List the notes: thresholds that nobody named, defects of the telemetry, then those of the source."""
    found = [report.found_note] if report.found_note else []
    return [*found, *map(defect_sentence, report.observed.defects), *report.observed.notes]


def not_judged(report: Report) -> list[str]:
    """List the servers of unknown health with the reason; [] if the headline has them."""
    unjudged = [] if report.verdict == "unknown" else report.not_judged
    return words.folded([escaped(one.sentence) for one in unjudged])


def normality(report: Report) -> list[str]:
    """List the readings that deviate from a baseline or the peers; or report that all are as usual, or not compared."""
    comparison = report.normality
    alone = len(report.servers) == 1
    unlike = [reading for reading in comparison.readings if reading.notable]
    lines = [f"{'' if alone else f'{words.place(reading.subject)}: '}{normal_sentence(reading)}" for reading in unlike]
    if comparison.readings and not unlike:
        names = listed(list(dict.fromkeys(reading.measure for reading in comparison.readings)), most=5)
        lines = [f"{names}: as usual at this load ({printable(comparison.file)})"]
    return [*lines, *(f"not compared with {printable(comparison.file)}: {reason}" for reason in comparison.reasons)]


def normal_sentence(reading: NormalReading) -> str:
    """Return the comparison of a reading with the normal value, with the load and the release."""
    times = "" if reading.ratio is None else f"{number(reading.ratio)}x "
    now = f" (now {printable(reading.own_version)})" if reading.own_version not in ("", reading.version) else ""
    version = f", vLLM {printable(reading.version)}{now}" if reading.version else ""
    usual = f"{quantity(reading.normal, reading.unit)} ± {quantity(reading.spread, reading.unit)}"
    load = f" at {reading.load}" if reading.given else ""
    value = quantity(reading.value, reading.unit)
    return f"{reading.measure} {value}: {times}{reading.against} ({usual}){load}{version}"


def undecided(report: Report) -> list[str]:
    """List the incidents that could not be judged, by subject, with the missing signals; in a fleet, by incident."""
    if words.is_fleet(report):
        counts = Counter(diagnosis.subject for diagnosis in report.undecided)
        nearly = sorted(words.place(subject) for subject, count in counts.items() if count > MANY)
        few = (d for d in report.undecided if counts[d.subject] <= MANY)
        without = words.grouped(
            ((words.titled(d.incident), "; ".join(lacking(d))), words.place(d.subject)) for d in few
        )
        lines = [f"{name} on {listed(sorted(places))}: {missing}" for (name, missing), places in without.items()]
        return [*([f"nearly all incidents on {listed(nearly)}"] if nearly else []), *words.folded(lines)]

    lines = []
    for subject, diagnoses in words.grouped((diagnosis.subject, diagnosis) for diagnosis in report.undecided).items():
        if len(diagnoses) > MANY:
            names = ", ".join(words.titled(diagnosis.incident) for diagnosis in diagnoses)
            lines.append(f"{len(diagnoses)} incidents on {words.place(subject)}: {names}")
        else:
            lines += [
                f"{words.titled(d.incident)} on {words.place(subject)}: {'; '.join(lacking(d))}" for d in diagnoses
            ]
    return lines


def lacking(diagnosis: Diagnosis) -> list[str]:
    """List the conditions that have no value at the reported instant, each in a few words."""
    readings = (reading for reading in diagnosis.symptoms if reading.value is None)
    return [f"{reading.condition.signal.name} {reading.sentence}" for reading in readings]


def defect_sentence(defect: TelemetryDefect) -> str:
    """Return the defect and the servers that have it, and what to change."""
    groups = [f"{printable(name)} on {listed(sorted(map(printable, servers)))}" for name, servers in defect.groups]
    if defect.kind == "aliases":
        same = [sorted(map(printable, names)) for _, names in defect.groups]
        groups = [" = ".join([*names[:FEW], *(["..."] if len(names) > FEW else [])]) for names in same]
    prefix, usual = defect.names if defect.kind == "renamed" else ("", "")
    line, place, *claims = (
        map(printable, defect.names) if defect.kind in ("claimed", "unproven", "survived") else ("", "")
    )
    is_port = defect.kind == "claimed" and "ddress already in use" in line
    are_all = defect.of_all and len(defect.servers) > FEW
    return sentences()["port" if is_port else defect.kind].format(
        servers=f"all {len(defect.servers):,} servers"
        if are_all
        else listed(list(map(printable, sorted(defect.servers)))),
        time=moment(defect.number),
        percent=100 * defect.number,
        number=defect.number,
        names=listed(list(map(printable, defect.names))),
        line=line,
        place=f" at {place}" if place else "",
        claims=listed(claims, most=FEW),
        jobs=f" (jobs {listed(sorted(map(printable, defect.names)))})" if len(defect.names) > 1 else "",
        prefix=prefix,
        usual=usual,
        relabelling=relabelling(prefix) if prefix else "",
        groups=listed(groups) if defect.kind == "aliases" else "; ".join(groups),
    )


# -- health that was not shown


class Undecided(NamedTuple):
    """Servers on which users are affected by one of several incidents, which the missing signals would tell apart."""

    servers: tuple[str, ...]
    where: str
    incidents: tuple[str, ...]
    missing: tuple[str, ...]
    metrics: tuple[str, ...]
    signs: tuple[Reading, ...]
    in_words: str

    @property
    def question(self) -> str:
        """The incidents between which nothing decides, as in line 1; `in_words` has their titles."""
        return question(self.incidents)

    @property
    def lacking(self) -> str:
        return f"missing {listed(list(self.missing), most=MOST_NAMED)}"

    @property
    def to_collect(self) -> str:
        """The missing signals, and the metrics that the page lacks for them."""
        metrics = f" (no {listed(list(self.metrics), most=MOST_NAMED)})" if self.metrics else ""
        return f"{'; '.join(self.missing)}{metrics}"

    @property
    def measured(self) -> str:
        """The readings of the impact on users and of the incidents, each with its threshold."""
        shown = (f"{each.condition.signal.name} {each.shown} ({each.threshold})" for each in self.signs[:MOST_NAMED])
        return ", ".join(shown)

    @property
    def sentence(self) -> str:
        return f"{self.where}: {self.in_words}; missing {self.to_collect}; measured: {self.measured}"


def question(incidents: Sequence[str]) -> str:
    """Return the incidents between which nothing decides: "cannot tell which: kv_cascade or kv_pool_saturated"."""
    named = list(incidents[:MOST_NAMED])
    if len(named) == 1:
        return f"cannot tell whether it is {named[0]}"
    more = f" or {len(incidents) - MOST_NAMED} more" if len(incidents) > MOST_NAMED else ""
    return f"cannot tell which: {', '.join(named[:-1])} or {named[-1]}{more}"


def suspected(report: Report) -> list[Undecided]:
    """Return what cannot be told of servers whose users are affected; servers with the same incidents together."""
    by_server = words.grouped((instance_name(suspect.diagnosis.subject), suspect) for suspect in report.health.suspects)
    alike = words.grouped(
        (
            ("" if words.is_fleet(report) else name, *dict.fromkeys(each.diagnosis.incident.id for each in suspects)),
            name,
        )
        for name, suspects in by_server.items()
    )
    undecided = []
    for (_, *incidents), names in alike.items():
        suspects = by_server[names[0]]
        signs: dict[str, Reading] = {}
        for sign in (sign for suspect in suspects for sign in suspect.signs):
            signs.setdefault(sign.condition.signal.name, sign)
        subjects = {suspect.diagnosis.subject for suspect in suspects}
        alone = words.place(suspects[0].diagnosis.subject) if len(subjects) == 1 else printable(names[0])
        undecided.append(
            Undecided(
                servers=tuple(names),
                where=alone if len(names) == 1 else f"{len(names):,} of {plural(len(report.servers), 'server')}",
                incidents=tuple(incidents),
                missing=tuple(dict.fromkeys(name for suspect in suspects for name in suspect.missing)),
                metrics=tuple(dict.fromkeys(name for suspect in suspects for name in suspect.metrics)),
                signs=tuple(signs.values()),
                in_words=question(words.titles(incidents, report)),
            )
        )
    return undecided


def ignored(report: Report) -> list[str]:
    """List the incidents that are present and that diag.toml accepts."""
    return list(dict.fromkeys(each.incident.id for each in report.health.ignored))


def over(report: Report) -> list[str]:
    """List the incidents with an impact that were seen and have ended."""
    ended = (finding.diagnosis.incident for finding in report.present if not finding.diagnosis.ongoing)
    return list(dict.fromkeys(incident.id for incident in ended if RANK[incident.severity]))


def in_brackets(**lists: list[str]) -> str:
    """Return lists of names behind a verdict: "  (ignored: kv_pool_saturated; not seen: queue)", "" without names."""
    named = "; ".join(f"{head}: {listed(names, most=MOST_NAMED)}" for head, names in lists.items() if names)
    return f"  ({named})" if named else ""


def not_seen(report: Report) -> list[str]:
    """List what health needs and was not seen, each with the telemetry that lacks and the servers."""
    servers = words.grouped(((missing.name, missing.lacks), missing.server) for missing in report.health.missing)
    lines = []
    for (name, lacks), names in servers.items():
        where = f" on {listed(list(map(printable, names)))}" if len(report.servers) > 1 and names[0] else ""
        lines.append(f"{words.titles([name], report)[0]}, for lack of {lacks}{where}")
    return lines
