"""Line 1 of a report, which `--quiet` prints alone: severity, incident, where, since when and for how long."""

from collections.abc import Sequence

from diag.core.formatting import escaped, plural, quantity
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report
from diag.report import sentences as words
from diag.report.layout import WIDTH, line_width, shortened

LEAST_NAME = 20
"""Columns that the name of a server gets in line 1."""


def verdicts(report: Report) -> list[str]:
    """One line for each primary incident, the worst first; else one line for all that was looked at."""
    written_as = words.time_format(report)
    groups = [[finding.diagnosis for finding in group] for group in words.alike(report)]
    lines = [
        line(
            f"{group[0].severity.upper()}  {group[0].incident.id}   ",
            place(group, report),
            [period(group, written_as), period(group, written_as, duration=False)],
        )
        for group in groups
    ]
    return lines or [_nothing_found(report, written_as)]


def line(start: str, where: str, ends: Sequence[str]) -> str:
    """At most 100 columns: the first of the ends that leaves the name of the place some room, which is shortened."""
    name = escaped(where)
    least = min(len(name), LEAST_NAME * line_width() // WIDTH)
    room = [line_width() - len(f"{start}   {end}") for end in ends]
    at = next((at for at, columns in enumerate(room) if columns >= least), len(ends) - 1)
    return shortened(f"{start}{shortened(name, max(room[at], least))}   {ends[at]}", line_width())


def place(diagnoses: Sequence[Diagnosis], report: Report) -> str:
    """Where an incident is: its subject, or how many servers of a fleet."""
    if len(diagnoses) == 1:
        return words.place(diagnoses[0].subject)
    return f"{len(diagnoses):,} of {len(words.instances(report)):,} servers"


def period(diagnoses: Sequence[Diagnosis], written_as: words.TimeFormat, *, duration: bool = True) -> str:
    """Since when and for how long, as far as it was seen: "since before 02:16:07 UTC (over 32 s)".

    Of several episodes of one diagnosis, the last one; of several diagnoses, from the first begin to the last end.
    """
    episodes = len(diagnoses[0].episodes) if len(diagnoses) == 1 else 1
    shown = diagnoses[0].one_by_one[-1:] if episodes > 1 else diagnoses
    since = [diagnosis.watched_since if diagnosis.since is None else diagnosis.since for diagnosis in shown]
    start, before = min(since), "before " if any(diagnosis.since is None for diagnosis in shown) else ""
    ongoing = any(diagnosis.ongoing for diagnosis in shown)
    until = max(d.instants[-1] if d.ongoing or d.until is None else d.until for d in shown)
    when = f"since {before}{written_as(start)}"
    if not ongoing:
        when = before + span(start, until, written_as)
    lasted = f"{'over ' if before else ''}{quantity(until - start, 'seconds')}" if until > start else ""
    times = f"episode {episodes}" if episodes > 1 else ""
    remarks = ", ".join(filter(None, (lasted, "" if ongoing else "ended", times)))
    return f"{when} ({remarks})" if duration and remarks else when


def span(start: float, end: float, written_as: words.TimeFormat) -> str:
    """Two times with what they share written once: "02:30:22 - 02:30:34 UTC"."""
    first, last = written_as(start).removesuffix(" UTC"), written_as(end)
    date, _, time = last.rpartition(" UTC")[0].rpartition(" ")
    return f"{first} - {f'{time} UTC' if date and first.startswith(date) else last}"


def _nothing_found(report: Report, written_as: words.TimeFormat) -> str:
    seen, names = report.observed, words.instances(report)
    verdict = "CANNOT TELL" if report.verdict == "unknown" else "HEALTHY"
    where = names[0] if len(names) == 1 else plural(len(names), "server") if names else seen.target
    when = span(seen.start, seen.end, written_as)
    states = words.states(report)
    lasted = quantity(seen.end - seen.start, "seconds")
    return line(f"{verdict}  ", where, [f"{states}   {when} ({lasted})", f"{states}   {when}", when])
