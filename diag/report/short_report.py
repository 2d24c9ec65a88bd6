"""The short report as plain text, which is read in ten seconds.

It has at most 20 lines, 12 if nothing is wrong, and more in a narrow window. Each of its parts has a full form and
shorter forms; if the whole is too long, the parts that matter least to the first action are shortened first.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from diag.core.declarations import PACKAGE, read
from diag.core.formatting import escaped, listed, pasted, plural, printable
from diag.core.incident import RANK
from diag.core.subjects import in_words
from diag.diagnosis.report import Report
from diag.report import coverage
from diag.report import sentences as words
from diag.report.answer import (
    Actions,
    ReportAnswer,
    answers,
    choose_actions,
    count_verdicts,
    evidence_rows,
    fleet_rows,
    headlines,
    line_period,
    merge_by_cause,
    reading_row,
)
from diag.report.layout import (
    aligned,
    clipped,
    continued,
    is_wide,
    labelled,
    line_width,
    paragraph,
    short_names,
    shortened,
)
from diag.report.plain_text import roll_call_lines
from diag.report.spans import ReportPart, Span, Text, joined, label, spans
from diag.report.tree import MOST_EVIDENCE, Parts, finding_parts

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

ASIDES = ("ruled_out", "not_seen", "more")
"""Parts that are read last."""

Lines = list[str]
Forms = list[Lines]
"""A part of the short report in full, then its shorter forms."""


@cache
def shortenings() -> Mapping[str, tuple[tuple[str, int], ...]]:
    """Return the parts to shorten `first` and `last`, in their order, and to how many lines."""
    return read(PACKAGE / "report" / "short_report.toml", dict[str, tuple[tuple[str, int], ...]])


def short_report(report: Report) -> list[str]:
    """Return the lines of the report."""
    with short_names(NAME):
        parts = _parts(report)
    most = HEALTHY_LINES if report.verdict in ("healthy", "no_incident") else LINES if is_wide() else NARROW_LINES
    lines = _shorten(parts, shortenings()["first"], most)
    if len(lines) > most:
        parts["relaunch"] = parts.get("relaunch", [[]])[-2:]
        lines = _shorten(parts, shortenings()["first"] + shortenings()["last"], most)
    return [*lines, *roll_call_lines(report)]


def _parts(report: Report) -> dict[str, Forms]:
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
            "why": _part("missing", [first.to_collect], 3),
            "also": _part("also", [undecided.sentence for undecided in others], 3),
            "do now": _part("do_now", [f"Collect what is missing, and read: {', '.join(pages)}"], 3),
        }
    elif report.verdict == "unknown":
        told = report.not_judged[0].told if len(report.not_judged) == 1 else None
        why = [escaped(told.seen)] if told and told.seen else _reasons_not_judged(report)
        means = f"{escaped(told.means)} " if told and told.seen else ""
        middle = {
            "impact": [paragraph(f"{means}Health could not be judged; {found_nothing}.")],
            "blank": [[""]],
            "servers": _fleet_part(report),
            "why": _part("log" if means else "why", why, ROWS + 3 if report.observed.endings else ROWS),
            "do now": _part("do_now", [escaped(told.do)] if told and means else [], ROWS),
            "sure": _part("sure", [told.basis] if told and means else [], 1),
            "normal": _normal_part(report),
        }
    else:
        over = {finding.diagnosis.incident.id: finding for finding in report.present if not finding.diagnosis.ongoing}
        actions = (choose_actions(over[name], report) for name in coverage.over(report))
        fixes = [joined(words.action(fix)) for fix in (chosen.fix or chosen.now for chosen in actions) if fix]
        unseen = coverage.not_seen(report) if answer.verdict == coverage.NO_INCIDENT else []
        middle = {
            "impact": [paragraph(f"{found_nothing[0].upper()}{found_nothing[1:]}.")],
            "blank": [[""]],
            "unseen": _part("not_shown", unseen, 3),
            "why": _part("progress", words.not_busy(report), 3),
            "server": _part("server", words.folded(coverage.servers(report), 2), 3),
            "next time": _part("next_time", fixes, 2),
            "slo": _part("slo", [words.slo_missing(report)], 1),
            "normal": _normal_part(report),
        }
    return {
        "verdict": [[headlines(report)[0].line]],
        "shared": _shorter_forms([line for text in words.shared(report) for line in paragraph(text)], 4),
        **middle,
        **_context_parts(report, answer),
    }


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


def _part(name: str, texts: Iterable[Text], most: int) -> Forms:
    """Label the texts that are not empty, in at most `most` lines and shorter forms; some are an aside."""
    most, role = most if is_wide() else 2 * most, "aside" if name in ASIDES else ""
    shown: list[Text] = [Span(joined(text), role) if role else text for text in texts if text]
    return _shorter_forms(labelled(label(name), shown, LABEL), most)


def _phrases(text: Text) -> list[str]:
    return [span.strip() for span, _ in spans(text)]


def _brief(phrases: Sequence[str]) -> str:
    """Return a text without the explanation behind its first colon."""
    colon = next((at for at, phrase in enumerate(phrases) if phrase.endswith(":")), len(phrases))
    return " ".join(phrases[: colon + 1]).rstrip(".;:")


def _fewer(label: str | None, clauses: Sequence[str], most: int) -> Forms:
    """Label clauses in at most `most` lines, the last of them left out in shorter forms; "" begins at the left."""
    forms = []
    for count in range(len(clauses), 0, -1):
        *before, last = clauses[:count]
        ended = Span(last.rstrip(";:"), getattr(last, "role", ""))
        text = (*(part for clause in before for part in (clause, " ")), ended)
        forms.append(paragraph(text, rest="") if label is None else labelled(label, [text], LABEL))
    most = most if is_wide() else 2 * most
    return [form for form in forms if len(form) <= most] or [clipped(form, most) for form in forms[-1:]] or [[]]


def _evidence(rows: Sequence[Sequence[str]]) -> Forms:
    """Lay out rows of name, value, threshold and history, without the histories if they would break a name."""

    def lines(count: int) -> Lines:
        return aligned(rows[:count], 0, label=label("evidence"), width=LABEL, right=(1,))

    if len(lines(len(rows))) > len(rows):
        rows = [(*row[:3], "") for row in rows]
    return [lines(count) for count in range(len(rows), 0, -1)] or [[]]


def _incident_parts(answer: ReportAnswer, report: Report) -> dict[str, Forms]:
    """Build the parts about the first incident: impact, evidence, actions; of a fleet, the servers that have it."""
    finding, *others = answer.findings
    headline, tree = headlines(report)[0], finding_parts(finding, report, words.time_format(report))
    diagnosis = finding.diagnosis
    where = words.place(diagnosis.subject)
    like_it = f"{where}; {plural(len(others), 'more server')} like it"
    earlier = [words.period([episode], report).full for episode in reversed(diagnosis.one_by_one[:-1])]
    period = line_period(answer.findings, report).full
    is_log = bool(report.observed.endings) and finding.failure is not None
    rows = tree["evidence"].rows
    if report.observed.endings and finding.quotes:  # the line says more than that what it shows is so
        rows = evidence_rows([read for read in words.evidence(diagnosis) if read.condition.signal.unit != "bool"])
    means = _phrases(tree["means"].texts[0]) if "means" in tree else []
    impact = paragraph(f"{answer.title}: {answer.impact}.", rest="")
    log: Forms = [[]]
    if finding.quotes:  # the shorter forms cut the line, but not its place
        quote, room = finding.quotes[0], line_width() - LABEL - 2
        file = f" ({quote.place.rpartition('/')[2]})" if quote.place else ""
        cut = [printable(quote.text, most - len(file)) + file for most in range(3 * room, room - 1, -room // 4)]
        forms = (labelled(label("log"), [text], LABEL) for text in (words.quoted(finding)[0], *cut))
        log = [form for form in forms if len(form) <= QUOTE]
    ends = words.log_endings(report, "" if len(report.observed.endings) == 1 else "ends ")
    return {
        "impact": _fewer(None, means, 4) if is_log else _shorter_forms(impact, 3),
        "blank": [[""], []],
        "servers": _fleet_part(report),
        "where": _part("example", [like_it], 2) if others else _part("where", [where][headline.has_place :], 2),
        "when": _part("when", [period][headline.has_start :], 2),
        "episodes": _part("episodes", [listed(earlier, separator="; ")], 2),
        "evidence": _evidence(rows[:MOST_EVIDENCE]),
        "normal": _normal_part(report),
        "log": log,
        "means": [[]] if is_log else _fewer(label("means"), means, 4),
        "ends": _part("ends", ends, 3),
        **_action_parts(tree, answer.actions),
        "sure": [*(_part("sure", tree["sure"].texts, 2) if "sure" in tree else []), []],
    }


def _action_parts(tree: Parts, actions: Actions) -> dict[str, Forms]:
    """Build the parts about the actions: what needs no restart, the fix, and the command to be pasted."""
    parts: dict[str, Forms] = {}

    def brief(fact: ReportPart) -> str:
        return fact._replace(texts=[_brief(_phrases(fact.texts[0]))]).sentence

    if now := tree.get("do_now"):
        texts = [*now.texts[:1], *(text for each in now.parts for text in each.texts)]
        cost = [brief(fact) for each in now.parts for fact in each.of("trade_off")]
        parts["do now"] = _shorter_forms(labelled(now.label, texts, LABEL), 5 if is_wide() else 10)
        parts["cost"] = [labelled("", cost, LABEL), []]
    if fix := actions.fix:
        drawn = tree["fix"]
        (facts,) = drawn.parts
        change = words.command(words.change(fix))
        *clauses, last = [Span(f"{change};", "command")] if change else _phrases(facts.texts[0])
        needed = facts.of("restart") if change or "start" not in fix.text else ()  # advice may say so itself
        restart = [f"{fact.label.lower()} {joined(fact.texts[0])}" for fact in needed]
        head = [*clauses, last if change or not restart else f"{last.rstrip('.')};", *restart]
        costs = [brief(fact) for name in ("trade_off", "rollback", "needs") for fact in facts.of(name)]
        purpose = [f"{_brief(_phrases(facts.texts[0])[2:])}."] if change and fix.text else []  # behind the change
        parts |= {
            "fix": _fewer(drawn.label, head, 6),
            "purpose": [labelled("", purpose, LABEL), []],
            "trade-off": _fewer("", costs, 4),
        }
    if relaunch := tree.get("relaunch"):
        lines = continued(pasted(actions.relaunch), f"  {relaunch.label:<{LABEL}}", rest=" " * 4)
        edit = words.command(words.change(actions.fix)) if actions.fix else ""
        told: list[Text] = [
            ("in the launch command: ", edit, " (--verbose prints it whole)"),
            "--verbose prints the launch command with this change",
        ]
        forms = [labelled(relaunch.label, [text], LABEL) for text in told]
        parts["relaunch"] = [*([lines] if lines else []), *forms]
    return parts


def _context_parts(report: Report, answer: ReportAnswer) -> dict[str, Forms]:
    """Build the parts below the actions: further incidents, what was ruled out, missing telemetry, where to read on."""
    ruled_out, possible = (words.titles(names, report) for names in (answer.ruled_out, answer.not_ruled_out))
    runbook = f", diag explain {answer.incident}" if answer.findings else ""

    unseen = coverage.not_seen(report)  # these have a part of their own
    is_told = bool(report.observed.endings and answer.findings and answer.findings[0].failure)
    is_whole_fleet = words.is_fleet(report) and not answer.findings
    also: Forms = [*_part("also", words.also(report), 3), []] if is_whole_fleet else [[]]
    if not words.is_fleet(report):  # a fleet has a table of its own
        first = next(iter(answer.findings), None)
        others = [other.diagnosis for other in report.present if other is not first]
        incidents = {other.diagnosis.incident.id: other.diagnosis.incident for other in report.present}
        rows = []
        for diagnosis in sorted(others, key=lambda one: (-RANK[one.severity], -RANK[one.incident.severity])):
            # line 1 has the name of the only server
            where = words.where(diagnosis, with_server=len(report.servers) > 1)
            is_whole = diagnosis.ongoing and diagnosis.since is None  # line 1 has how long the servers were observed
            period = "" if is_whole else words.period([diagnosis], report).brief
            outage = incidents.get(diagnosis.explained_by or "")
            whose = "the above" if first and outage == first.diagnosis.incident else outage and words.titled(outage)
            cause = f"a consequence of {whose}" if outage and outage.outage else ""
            text = ", ".join(filter(None, (words.titled(diagnosis.incident), where, period, cause)))
            rows.append((Span(diagnosis.severity, diagnosis.severity.upper()), text))
        brief = [(one, words.period([one], report).full) for one in report.brief]
        rows += [(Span("brief", "INFO"), f"{words.titled(one.incident)}, {held}") for one, held in brief]
        for count in range(min(len(rows), ROWS), 0, -1):
            rest = [f"and {len(rows) - count:,} more"] if count < len(rows) else []
            form = [*aligned(rows[:count], 1, label=label("also"), width=LABEL), *labelled("", rest, LABEL)]
            also = [*filter(None, also), form]

    return {
        "ceiling": [*_part("gpu_limits", words.ceilings(report)[:1], 2), []],
        "also": also,
        "ruled out": _names("ruled_out", [] if is_told else ruled_out),
        "not ruled out": _names("possible", [] if is_told else possible),
        "unknown": _part("unknown", _reasons_not_judged(report) if report.verdict != "unknown" else [], 2),
        "note": _part("note", coverage.notes(report), 7 if report.observed.endings else 2),
        "not seen": _part("not_seen", ["; ".join(each for each in answer.not_seen if each not in unseen)], 2),
        "more": _part("more", [f"--verbose, --html report.html{runbook}"], 2),
    }


def _names(name: str, names: Sequence[str]) -> Forms:
    """Label a list of names, and shorter forms that end with the number of names left out."""
    forms = [_part(name, [listed(list(names), most=count)], 9)[0] for count in range(len(names), 0, -1)]
    return [*([form for form in forms if len(form) <= 2] or forms[-1:]), []]


def _fleet_part(report: Report) -> Forms:
    """Count the verdicts of a fleet, then list the unhealthy servers with the same verdict and incidents together."""
    if not words.is_fleet(report):
        return [[]]
    written_as = words.time_format(report)
    servers = fleet_rows(report)
    ill = words.grouped(
        ((row.verdict, row.found), shortened(row.instance, NAME) if row.name else row.instance)
        for row in merge_by_cause(report, servers, written_as, most=2)
        if row.verdict != "healthy"
    )
    counts = count_verdicts([server.verdict for server in servers])
    rows = []
    for (verdict, found), names in ill.items():
        named = listed(names, most=NAMED if max(map(len, names)) < NAME // 2 else 2)
        rows.append((Span(verdict, verdict.upper()), found, named))
    forms = []
    for count in range(min(len(rows), ROWS), 0, -1):
        left = sum(map(len, list(ill.values())[count:]))
        rest = [f"  and {plural(left, 'more server')} that {'is' if left == 1 else 'are'} not healthy"] if left else []
        forms.append([counts, *aligned(rows[:count], 2), *rest, ""])
    return forms or [[counts, ""]]


def _normal_part(report: Report) -> Forms:
    return _part("normal", coverage.normality(report)[:3], 3)


def _reasons_not_judged(report: Report) -> list[str]:
    """Return the reasons why servers cannot be judged, servers with the same reason together."""
    whose = ((each.why, in_words(each.subject) if each.subject else "") for each in report.not_judged)
    reasons = words.grouped((escaped(why), shortened(escaped(name), NAME)) for why, name in whose)
    return [f"{listed(names)}: {why}" if any(names) else why for why, names in reasons.items()]
