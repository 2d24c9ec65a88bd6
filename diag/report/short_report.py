"""The short report as plain text, which is read in ten seconds.

It has at most 20 lines, 12 if nothing is wrong, and more in a narrow window. Each of its parts has a full form and
shorter forms; if the whole is too long, the parts that matter least to the first action are shortened first.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from diag.core.declarations import PACKAGE, read
from diag.core.formatting import escaped, listed, pasted, plural, printable
from diag.core.incident import RANK
from diag.core.subjects import in_words
from diag.diagnosis.proposals import Proposal
from diag.diagnosis.report import Report
from diag.report import coverage
from diag.report import sentences as words
from diag.report.answer import (
    Actions,
    ReportAnswer,
    answers,
    count_verdicts,
    evidence_rows,
    fleet_rows,
    line_period,
    merge_by_cause,
    reading_row,
    verdicts,
)
from diag.report.layout import aligned, clipped, continued, is_wide, labelled, line_width, paragraph, shortened
from diag.report.plain_text import roll_call_lines

LINES, NARROW_LINES = 20, 32
HEALTHY_LINES = 12
LABEL = 12
"""The column of labels in the short report: the longest of them and two spaces."""
ROWS = 6
QUOTE = 3
"""Lines of the short report for a log line."""
NAMED = 8
"""Servers of one row of a fleet's table that are named, if their names are short."""
NAME = 30
"""Columns for the name of a server within a sentence."""

Lines = list[str]
Forms = list[Lines]
"""A part of the short report in full, then its shorter forms."""


@cache
def shortenings() -> Mapping[str, tuple[tuple[str, int], ...]]:
    """Return the parts to shorten `first` and `last`, in their order, and to how many lines."""
    return read(PACKAGE / "report" / "short_report.toml", dict[str, tuple[tuple[str, int], ...]])


def short_report(report: Report) -> str:
    answer = answers(report, words.time_format(report))[0]
    found_nothing = words.found_nothing(report)
    if answer.findings:
        middle = _incident_parts(answer, report)
    elif report.verdict == "warning":
        first, *others = coverage.suspected(report)
        pages = [f"diag explain {name}" for name in first.incidents[:ROWS]]
        middle = {
            "impact": [paragraph("Users are affected, and the telemetry is missing that would tell the incident.")],
            "blank": [[""]],
            "servers": _fleet_part(report),
            "evidence": _evidence([reading_row(reading) for reading in first.signs][:ROWS]),
            "why": _part("Missing", ["; ".join(first.missing)], 3),
            "also": _part("Also", [undecided.sentence for undecided in others], 3),
            "do now": _part("Do now", [f"Collect what is missing, and read: {', '.join(pages)}"], 3),
        }
    elif report.verdict == "unknown":
        middle = {
            "impact": [paragraph(f"Health could not be judged; {found_nothing}.")],
            "blank": [[""]],
            "servers": _fleet_part(report),
            "why": _part("Why", _reasons_not_judged(report), ROWS + 3 if report.observed.endings else ROWS),
            "normal": _normal_part(report),
        }
    else:
        servers = words.folded(_with_short_names(coverage.servers(report), report), 2)
        middle = {
            "impact": [paragraph(f"{found_nothing[0].upper()}{found_nothing[1:]}.")],
            "blank": [[""]],
            "unseen": _part(
                "Not shown", coverage.not_seen(report) if answer.verdict == coverage.NO_INCIDENT else [], 3
            ),
            "why": _part("Progress", _with_short_names(words.not_busy(report), report), 3),
            "server": _part("Server", servers, 3),
            "slo": _part("SLO", [words.slo_missing(report)], 1),
            "normal": _normal_part(report),
        }
    parts = {
        "verdict": [[verdicts(report)[0]]],
        "shared": _shorter_forms([line for text in words.shared(report) for line in paragraph(text)], 4),
        **middle,
        **_context_parts(report, answer),
    }

    most = HEALTHY_LINES if report.verdict in ("healthy", "no_incident") else LINES if is_wide() else NARROW_LINES
    lines = _shorten(parts, shortenings()["first"], most)
    if len(lines) > most:
        parts["relaunch"] = parts.get("relaunch", [[]])[-2:]
        lines = _shorten(parts, shortenings()["first"] + shortenings()["last"], most)
    return "\n".join([*lines, *roll_call_lines(report)]) + "\n"


def _shorten(parts: Mapping[str, Forms], order: Sequence[tuple[str, int]], most: int) -> Lines:
    """Join the lines of all parts, with parts shortened in this order until there are no more than `most`."""
    chosen = {name: forms[0] for name, forms in parts.items()}
    for name, least in order:
        for form in parts.get(name, []):
            if sum(map(len, chosen.values())) > most and least <= len(form) < len(chosen[name]):
                chosen[name] = form
    return [line for lines in chosen.values() for line in lines]


def _shorter_forms(lines: Lines, most: int) -> Forms:
    """Clip the lines to `most`, to one less, and so on down to one."""
    return [clipped(lines, count) for count in range(min(len(lines), most), 0, -1)] or [[]]


def _part(label: str, texts: Iterable[str], most: int) -> Forms:
    """Label the texts that are not empty, in at most `most` lines and shorter forms."""
    most = most if is_wide() else 2 * most
    return _shorter_forms(labelled(label, [text for text in texts if text], LABEL), most)


def _whole_sentences(label: str | None, text: str, most: int) -> Forms:
    """Label a text in at most `most` lines, and in shorter forms that end where a sentence or a clause does.

    Without a label it begins at the left.
    """
    clauses = re.split(r"(?<=[.;]) ", text)
    forms = [
        labelled(label, [" ".join(clauses[:count]).rstrip(";")], LABEL)
        if label is not None
        else paragraph(" ".join(clauses[:count]).rstrip(";"), rest="")
        for count in range(len(clauses), 0, -1)
    ]
    most = most if is_wide() else 2 * most
    return [form for form in forms if len(form) <= most] or [clipped(forms[-1], most)]


def _evidence(rows: Sequence[tuple[str, str, str, str]]) -> Forms:
    """Lay out rows of name, value, threshold and history, without the histories if they would break a name."""
    lines = aligned(rows, 0, label="Evidence", width=LABEL, right=(1,))
    if len(lines) > len(rows):
        rows = [(*row[:3], "") for row in rows]
    return [
        aligned(rows[:count], 0, label="Evidence", width=LABEL, right=(1,)) for count in range(len(rows), 0, -1)
    ] or [[]]


def _incident_parts(answer: ReportAnswer, report: Report) -> dict[str, Forms]:
    """Build the parts about the first incident: impact, evidence, actions; of a fleet, the servers that have it."""
    finding, *others = answer.findings
    diagnosis = finding.diagnosis
    where = words.place(diagnosis.subject)
    if others:
        place = _part("Example", [f"{where}; {plural(len(others), 'more server')} like it"], 2)
    else:
        place = _part("Where", [where], 2) if where not in verdicts(report)[0] else [[]]  # too long a name for line 1

    earlier = [words.period([episode], report)[0] for episode in reversed(diagnosis.one_by_one[:-1])]
    period = line_period(answer.findings, report)[0]
    is_told = period in verdicts(report)[0] or "since" in verdicts(report)[0]
    worse = f"; with it, {answer.worse}" if answer.worse else ""
    is_log = bool(report.observed.endings) and finding.failure is not None
    rows = evidence_rows(diagnosis, culprits=True)
    if is_log:  # the cause says more than what every incident of its kind is
        rows = [row for row in rows if row[1] not in ("yes", "no")]
    evidence = _evidence(rows)

    log: Forms = [[]]
    if finding.quotes:  # the shorter forms cut the log line, but not its place
        quote = finding.quotes[0]
        file = f" ({quote.place.rpartition('/')[2]})" if quote.place else ""
        texts = [words.quoted(finding)[0]]
        room = line_width() - LABEL - 2
        texts += [printable(quote.text, most - len(file)) + file for most in range(3 * room, room - 1, -room // 4)]
        log = [form for text in texts if len(form := labelled("Log", [text], LABEL)) <= QUOTE]
    sure = f"{finding.basis}{f' (line {finding.quotes[0].line})' if finding.quotes and finding.quotes[0].line else ''}"
    means = finding.failure.means if finding.failure else ""
    if finding.failure and finding.failure.seen:
        sure += f", with: {finding.failure.seen}"
    return {
        "impact": _whole_sentences(None, means, 4)
        if is_log
        else _shorter_forms(paragraph(f"{answer.title}: {answer.impact}{worse}.", rest=""), 3 if worse else 2),
        "blank": [[""], []],
        "servers": _fleet_part(report),
        "where": place,
        "when": _part("When", ["" if is_told else period], 2),
        "episodes": _part("Episodes", [listed(earlier, separator="; ")], 2),
        "evidence": evidence,
        "normal": _normal_part(report),
        "log": log,
        "means": [[]] if is_log else _whole_sentences("Means", means, 4),
        "ends": _part("Ends", words.log_endings(report, "" if len(report.observed.endings) == 1 else "ends "), 3),
        **_action_parts(answer.actions),
        "sure": [*_part("Sure", [sure if finding.basis else ""], 2), []],
    }


def _action_parts(actions: Actions) -> dict[str, Forms]:
    """Build the parts about the actions: what needs no restart, the fix, and the command to be pasted."""
    now, texts, cost = actions.now, list(actions.advice[:1]), ""
    if now:
        texts.append(f"{words.change(now)}   {now.text}" if now.fix.command else now.text)
        cost = _trade_off(now)
    parts = {
        "do now": _part("Next time" if actions.is_over else "Do now", texts, 5),
        "cost": [labelled("", [cost] if cost else [], LABEL), []],
    }

    if proposal := actions.fix:
        fix = proposal.fix
        head = words.change(proposal) or proposal.text.rstrip(".")
        if fix.name or "start" not in head:
            head += "; restart needed" if fix.restart else "; no restart"
        rest = (_trade_off(proposal), words.effects(fix).get("Rollback", ""), words.needs(proposal))
        purpose = f"{_before_colon(proposal.text)}." if fix.name else ""
        parts |= {
            "fix": _whole_sentences("Fix" if texts or proposal.changes else "Do now", head, 6),
            "purpose": [labelled("", [purpose] if purpose else [], LABEL), []],
            "trade-off": _whole_sentences("", " ".join(text for text in rest if text), 4),
        }

    if actions.relaunch:
        lines = continued(pasted(actions.relaunch), f"  {'Relaunch':<{LABEL}}", rest=" " * 4)
        edit = words.change(actions.fix) if actions.fix else ""
        elsewhere = labelled("Relaunch", [f"in the launch command: {edit} (--verbose prints it whole)"], LABEL)
        shortest = labelled("Relaunch", ["--verbose prints the launch command with this change"], LABEL)
        parts["relaunch"] = [*([lines] if lines else []), elsewhere, shortest]
    return parts


def _context_parts(report: Report, answer: ReportAnswer) -> dict[str, Forms]:
    """Build the parts below the actions: further incidents, what was ruled out, missing telemetry, where to read on."""
    ruled_out, possible = (words.titles(names, report) for names in (answer.ruled_out, answer.not_ruled_out))
    runbook = f", diag explain {answer.incident}" if answer.findings else ""

    unseen = coverage.not_seen(report)  # these have a part of their own
    is_told = bool(report.observed.endings and answer.findings and answer.findings[0].failure)
    also: Forms = [[]]
    if not words.is_fleet(report):  # a fleet has a table of its own
        first = next(iter(answer.findings), None)
        others = [other.diagnosis for other in report.present if other is not first]
        rows = []
        for diagnosis in sorted(others, key=lambda diagnosis: -RANK[diagnosis.severity]):
            # line 1 has the name of the only server
            where = words.where(diagnosis, with_server=len(report.servers) > 1)
            is_whole = diagnosis.ongoing and diagnosis.since is None  # line 1 has how long the servers were observed
            period = "" if is_whole else words.period([diagnosis], report)[1]
            text = ", ".join(filter(None, (words.titled(diagnosis.incident), where, period)))
            rows.append((diagnosis.severity, text))
        for count in range(min(len(rows), ROWS), 0, -1):
            rest = [f"and {len(rows) - count:,} more"] if count < len(rows) else []
            form = [*aligned(rows[:count], 1, label="Also", width=LABEL), *labelled("", rest, LABEL)]
            also = [*filter(None, also), form]

    return {
        "ceiling": [*_part("GPU limits", words.ceilings(report)[:1], 2), []],
        "also": also,
        "ruled out": _names("Ruled out", [] if is_told else ruled_out),
        "not ruled out": _names("Possible", [] if is_told else possible),
        "unknown": _part("Unknown", _reasons_not_judged(report) if report.verdict != "unknown" else [], 2),
        "note": _part("Note", _with_short_names(coverage.notes(report), report), 4 if report.observed.endings else 2),
        "not seen": _part("Not seen", ["; ".join(each for each in answer.not_seen if each not in unseen)], 2),
        "more": _part("More", [f"--verbose, --html report.html{runbook}"], 2),
    }


def _names(label: str, names: Sequence[str]) -> Forms:
    """Label a list of names, and shorter forms that end with the number of names left out."""
    forms = [labelled(label, [listed(list(names), most=count)], LABEL) for count in range(len(names), 0, -1)]
    return [*([form for form in forms if len(form) <= 2] or forms[-1:]), []]


def _fleet_part(report: Report) -> Forms:
    """Count the verdicts of a fleet, then list the unhealthy servers with the same verdict and incidents together."""
    if not words.is_fleet(report):
        return [[]]
    written_as = words.time_format(report)
    servers = fleet_rows(report)
    ill = words.grouped(
        ((row.verdict, row.incidents or row.states), shortened(row.instance, NAME) if row.name else row.instance)
        for row in merge_by_cause(report, servers, written_as, most=2)
        if row.verdict != "healthy"
    )
    counts = count_verdicts([server.verdict for server in servers])
    rows = []
    for (verdict, incidents), names in ill.items():
        titles = ", ".join(words.titles(incidents.split(", "), report))
        rows.append((verdict, titles, listed(names, most=NAMED if max(map(len, names)) < NAME // 2 else 2)))
    forms = []
    for count in range(min(len(rows), ROWS), 0, -1):
        left = sum(map(len, list(ill.values())[count:]))
        rest = [f"  and {plural(left, 'more server')} that {'is' if left == 1 else 'are'} not healthy"] if left else []
        forms.append([counts, *aligned(rows[:count], 2), *rest, ""])
    return forms or [[counts, ""]]


def _normal_part(report: Report) -> Forms:
    return _part("Normal", _with_short_names(coverage.normality(report)[:3], report), 3)


def _trade_off(proposal: Proposal) -> str:
    return f"Trade-off: {_before_colon(proposal.fix.risk)}." if proposal.fix.risk else ""


def _before_colon(text: str) -> str:
    """Return a sentence up to its colon, without the details behind it."""
    return text.partition(": ")[0].rstrip(".")


def _reasons_not_judged(report: Report) -> list[str]:
    """Return the reasons why servers cannot be judged, servers with the same reason together."""
    whose = ((each.why, in_words(each.subject) if each.subject else "") for each in report.not_judged)
    reasons = words.grouped((escaped(why), shortened(escaped(name), NAME)) for why, name in whose)
    return [f"{listed(names)}: {why}" if any(names) else why for why, names in reasons.items()]


def _with_short_names(texts: Iterable[str], report: Report) -> list[str]:
    shown = list(texts)
    for name in report.servers:
        if len(name) > NAME:
            shown = [text.replace(name, shortened(name, NAME)) for text in shown]
    return shown
