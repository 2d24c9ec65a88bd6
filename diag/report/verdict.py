"""Line 1 of a report, which `--quiet` prints alone: severity, incident, where, since when and for how long."""

from collections.abc import Sequence

from diag.core.formatting import escaped, plural, quantity
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report
from diag.report import sentences as words
from diag.report.layout import WIDTH, shortened


def verdicts(report: Report) -> list[str]:
    """One line for each primary incident, the worst first; else one line for all that was looked at."""
    written_as = words.time_format(report)
    groups = [[finding.diagnosis for finding in group] for group in words.alike(report)]
    lines = [
        line(group[0].severity.upper(), group[0].incident.id, place(group, report), period(group, written_as), at=1)
        for group in groups
    ]
    return lines or [_nothing_found(report, written_as)]


def line(severity: str, *fields: str, at: int) -> str:
    """The fields side by side in at most 100 columns: the one at this place, a server's name, is shortened."""
    cells = [escaped(field) for field in fields]
    room = WIDTH - len(severity) - 2 - len("   ".join(cells)) + len(cells[at])
    cells[at] = shortened(cells[at], room)
    return f"{severity}  {'   '.join(cells)}"


def place(diagnoses: Sequence[Diagnosis], report: Report) -> str:
    """Where an incident is: its subject, or how many servers of a fleet."""
    if len(diagnoses) == 1:
        return words.place(diagnoses[0].subject)
    return f"{len(diagnoses):,} of {len(words.instances(report)):,} servers"


def period(diagnoses: Sequence[Diagnosis], written_as: words.TimeFormat, *, duration: bool = True) -> str:
    """Since when and for how long, as far as it was seen: "since before 02:16:07 UTC (over 32 s)".

    Of several diagnoses, the time from the first one's begin to the last one's end.
    """
    since = [diagnosis.instants[0] if diagnosis.since is None else diagnosis.since for diagnosis in diagnoses]
    start, before = min(since), "before " if any(diagnosis.since is None for diagnosis in diagnoses) else ""
    ongoing = any(diagnosis.ongoing for diagnosis in diagnoses)
    until = max(d.instants[-1] if d.ongoing or d.until is None else d.until for d in diagnoses)
    when = f"since {before}{written_as(start)}"
    if not ongoing:
        when = f"{before}{_range(written_as(start), written_as(until))}"
    lasted = f"{'over ' if before else ''}{quantity(until - start, 'seconds')}" if until > start else ""
    remarks = ", ".join(filter(None, (lasted, "" if ongoing else "ended")))
    return f"{when} ({remarks})" if duration and remarks else when


def _nothing_found(report: Report, written_as: words.TimeFormat) -> str:
    seen, names = report.observed, words.instances(report)
    span = _range(written_as(seen.start), written_as(seen.end))
    when = f"{span} ({quantity(seen.end - seen.start, 'seconds')})"
    where = names[0] if len(names) == 1 else plural(len(names), "server") if names else seen.target
    return line("CANNOT TELL" if report.verdict == "unknown" else "HEALTHY", where, words.states(report), when, at=0)


def _range(start: str, end: str) -> str:
    """Two times with what they share written once: "02:30:22 - 02:30:34 UTC"."""
    date, _, time = end.rpartition(" UTC")[0].rpartition(" ")
    same_day = bool(date) and start.startswith(date)
    return f"{start.removesuffix(' UTC')} - {time + ' UTC' if same_day else end}"
