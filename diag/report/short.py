"""The report that is read in ten seconds: at most 20 lines of 100 columns, 12 where nothing is wrong.

Each part is made in full and in shorter forms. Where the whole is too long, the parts that matter least to the first
action are shortened first. `--verbose` has everything.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

from diag.core.formatting import escaped, listed, pasted, plural, printable
from diag.core.incident import RANK
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.progress import scope
from diag.diagnosis.proposals import Proposal
from diag.diagnosis.report import FAMILIES, Finding, Report
from diag.report import evidence, fleet
from diag.report import sentences as words
from diag.report.actions import Actions, actions
from diag.report.layout import WIDTH, clipped, continued, labelled, one_line_each, paragraph, shortened
from diag.report.verdict import period, verdicts

LINES = 20
HEALTHY_LINES = 12
LABEL = 12
"""The column of labels: the longest of them and two spaces."""
ROOM = WIDTH - LABEL - 2
ROWS = 6
QUOTE = 3
"""Lines of a line of the log."""
NAME = 30
"""Columns for the name of a server within a sentence."""

Lines = list[str]
Forms = list[Lines]
"""A part of the report in full, then its shorter forms."""
FIRST = (
    ("evidence", 3),
    ("also", 3),
    ("note", 1),
    ("not seen", 1),
    ("ruled out", 1),
    ("normal", 1),
    ("shared", 2),
    ("cost", 0),
    ("purpose", 0),
    ("log", 1),
    ("ceiling", 0),
)
"""Which parts are shortened where there is no room, in this order, and to how many lines."""
LAST = (
    ("do now", 2),
    ("also", 1),
    ("unknown", 1),
    ("servers", 5),
    ("trade-off", 1),
    ("impact", 1),
    ("where", 1),
    ("normal", 0),
    ("episodes", 1),
    ("why", 3),
    ("server", 1),
    ("why", 1),
    ("fix", 1),
    ("do now", 1),
    ("shared", 1),
)
"""And which where the launch command has been left out, and there is no room still."""


def render(report: Report) -> str:
    """The report as plain text, one line break at its end."""
    groups = words.alike(report)
    parts = {
        "verdict": [[verdicts(report)[0]]],
        "shared": _clips([line for text in words.shared(report) for line in paragraph(text)], 4),
        **(_incident(groups[0], report) if groups else _no_incident(report)),
        **_context(report, groups[0][0] if groups else None),
    }
    return "\n".join(fitted(parts, HEALTHY_LINES if report.verdict == "healthy" else LINES)) + "\n"


def fitted(parts: Mapping[str, Forms], most: int) -> Lines:
    """The lines of all parts, some of them shortened until there are no more than `most`."""
    whole = _shorten(parts, FIRST, most)
    if len(whole) <= most:
        return whole
    return _shorten({**parts, "relaunch": parts.get("relaunch", [[]])[-1:]}, FIRST + LAST, most)


def _shorten(parts: Mapping[str, Forms], order: Sequence[tuple[str, int]], most: int) -> Lines:
    chosen = {name: forms[0] for name, forms in parts.items()}
    for name, least in order:
        for form in parts.get(name, []):
            if sum(map(len, chosen.values())) > most and least <= len(form) < len(chosen[name]):
                chosen[name] = form
    return [line for lines in chosen.values() for line in lines]


def _incident(group: Sequence[Finding], report: Report) -> dict[str, Forms]:
    """What is wrong, how that is known, and what to do about it."""
    finding = group[0]
    incident = finding.diagnosis.incident
    chosen = actions(finding)
    return {
        "impact": _clips(paragraph(f"{incident.title}: {incident.impact}.", rest=""), 2),
        "blank": [[""]],
        "servers": _servers(report),
        "where": _where(group, report),
        "episodes": _text("Episodes", [_episodes(finding.diagnosis, report)], 2),
        "evidence": _evidence(finding.diagnosis),
        "normal": _normal(report),
        "log": _log(finding),
        **_do_now(chosen),
        **(_fix(chosen.fix) if chosen.fix else {}),
        "relaunch": _relaunch(finding.relaunch),
    }


def _no_incident(report: Report) -> dict[str, Forms]:
    """That nothing was found, or why nothing can be said."""
    if report.verdict == "unknown":
        head = f"Health could not be judged; {words.found_nothing(report)}."
        why = _text("Why", _not_judged(report), ROWS)
        return {
            "impact": [paragraph(head)],
            "blank": [[""]],
            "servers": _servers(report),
            "why": why,
            "normal": _normal(report),
        }
    head = words.found_nothing(report)
    return {
        "impact": [paragraph(f"{head[0].upper()}{head[1:]}.")],
        "blank": [[""]],
        "why": _text("Progress", _named_shortly(words.not_busy(report), report), 3),
        "server": _text("Server", words.folded(_named_shortly(report.observed.servers, report), 2), 3),
        "normal": _normal(report),
    }


def _context(report: Report, finding: Finding | None) -> dict[str, Forms]:
    """What else is there, what was ruled out, what was not seen, and where to read on."""
    ruled_out = _ruled_out(finding.diagnosis) if finding else ""
    runbook = f", diag explain {finding.diagnosis.incident.id}" if finding else ""
    return {
        "ceiling": [*_text("Ceiling", words.ceilings(report)[:1], 2), []],
        "also": _also(report, finding),
        "ruled out": _text("Ruled out", [ruled_out], 2),
        "unknown": _text("Unknown", _not_judged(report) if finding else [], 2),
        "note": _text("Note", _named_shortly(report.observed.notes, report), 2),
        "not seen": _text("Not seen", [_not_seen(report)], 2),
        "more": _text("More", [f"--verbose, --html report.html{runbook}"], 1),
    }


def _clips(lines: Lines, most: int) -> Forms:
    """So many lines and fewer, down to one."""
    return [clipped(lines, count) for count in range(min(len(lines), most), 0, -1)] or [[]]


def _text(label: str, texts: Iterable[str], most: int) -> Forms:
    return _clips(labelled(label, [text for text in texts if text], LABEL), most)


def _servers(report: Report) -> Forms:
    """Of a fleet, how many servers have which verdict; then what those have that are not healthy, the worst first."""
    if not words.is_fleet(report):
        return [[]]
    written_as = words.time_format(report)
    servers = fleet.servers(report, written_as)
    ill = words.grouped(
        ((row.verdict, row.incidents or row.states), shortened(row.instance, NAME) if row.name else row.instance)
        for row in fleet.causes(report, servers, written_as, most=2)
        if row.verdict != "healthy"
    )
    rows = [(verdict, incidents, listed(names, most=2)) for (verdict, incidents), names in ill.items()]
    return [
        [fleet.counts([server.verdict for server in servers]), *form, ""]
        for form in _fewer(one_line_each(rows, 2), "  ")
    ]


def _where(group: Sequence[Finding], report: Report) -> Forms:
    """The long name that line 1 has no room for; of many servers the one that the evidence is about."""
    where = words.place(group[0].diagnosis.subject)
    if len(group) > 1:
        return _text("Example", [f"{where}; {plural(len(group) - 1, 'more server')} like it"], 2)
    return _text("Where", [where], 2) if where not in verdicts(report)[0] else [[]]


def _episodes(diagnosis: Diagnosis, report: Report) -> str:
    """When it held before, where there was health between; the latest first."""
    written_as = words.time_format(report)
    before = reversed(diagnosis.one_by_one[:-1])
    return listed([period([episode], written_as) for episode in before], separator="; ")


def _evidence(diagnosis: Diagnosis) -> Forms:
    """Five rows, and fewer."""
    lines = one_line_each(evidence.rows(diagnosis, culprits=True), 0, label="Evidence", width=LABEL, right=(1,))
    return [lines[:count] for count in range(len(lines), 0, -1)] or [[]]


def _normal(report: Report) -> Forms:
    """What is unlike normal, in at most three lines, then in one."""
    return _text("Normal", _named_shortly(words.normality(report)[:3], report), 3)


def _log(finding: Finding) -> Forms:
    """The line of the log that decides and its place; in fewer lines, as much of it as there is room for."""
    if not finding.quotes:
        return [[]]
    quote = finding.quotes[0]
    place = f" ({quote.place.rpartition('/')[2]})" if quote.place else ""
    texts = [words.quoted(finding)[0]]
    texts += [printable(quote.text, most - len(place)) + place for most in range(3 * ROOM, ROOM - 1, -ROOM // 4)]
    forms = [labelled("Log", [text], LABEL) for text in texts]
    return [form for form in forms if len(form) <= QUOTE]


def _do_now(chosen: Actions) -> dict[str, Forms]:
    """What needs no restart: advice, a command, a limit and its cost."""
    now, texts = chosen.now, list(chosen.advice[:1])
    cost = _trade_off(now) if now else ""
    if now:
        texts.append(f"{words.change(now)}   {now.text}" if now.fix.command else now.text)
    label = "Next time" if chosen.is_over else "Do now"
    return {"do now": _text(label, texts, 5), "cost": [labelled("", [cost], LABEL), []] if cost else [[]]}


def _fix(proposal: Proposal) -> dict[str, Forms]:
    """The change; what it is for; its trade-off and the way back."""
    fix = proposal.fix
    head = words.change(proposal) or proposal.text.rstrip(".")
    if fix.name or "start" not in head:
        head += "; restart needed" if fix.restart else "; no restart"
    rollback = f"Rollback: {fix.rollback.removesuffix(' and restart')}." if fix.rollback else ""
    rest = " ".join(filter(None, (_trade_off(proposal), rollback, words.needs(proposal))))
    purpose = f"{_gist(proposal.text)}." if fix.name else ""
    return {
        "fix": _text("Fix", [head], 3),
        "purpose": [labelled("", [purpose], LABEL), []] if purpose else [[]],
        "trade-off": _text("", [rest], 4),
    }


def _trade_off(proposal: Proposal) -> str:
    return f"Trade-off: {_gist(proposal.fix.risk)}." if proposal.fix.risk else ""


def _gist(text: str) -> str:
    """A sentence up to its colon: what follows are details."""
    return text.partition(": ")[0].rstrip(".")


def _relaunch(command: str | None) -> Forms:
    """The command over several lines, to be pasted; where there is no room, where to find it."""
    if not command:
        return [[]]
    start = f"  {'Relaunch':<{LABEL}}"
    lines = continued(pasted(command), start, rest=" " * 4)
    elsewhere = labelled("Relaunch", ["the launch command with this change in it: --verbose"], LABEL)
    return [lines, elsewhere] if lines else [elsewhere]


def _also(report: Report, finding: Finding | None) -> Forms:
    """A line for each further incident, the worst first: causes, consequences and infos; a fleet has its own table."""
    if words.is_fleet(report):
        return [[]]
    written_as = words.time_format(report)
    rest = sorted((f.diagnosis for f in report.present if f is not finding), key=lambda d: -RANK[d.severity])
    rows = [(d.severity, d.incident.id, _within(report, d), period([d], written_as, duration=False)) for d in rest]
    return _fewer(one_line_each(rows, 2, label="Also", width=LABEL), " " * (LABEL + 2))


def _within(report: Report, diagnosis: Diagnosis) -> str:
    """Where an incident is; the name of the only server is in line 1 already."""
    where, instance = words.where(diagnosis), printable(words.instance(diagnosis.subject))
    return (where.removeprefix(instance).strip() or where) if len(words.instances(report)) == 1 else where


def _fewer(lines: Lines, indent: str) -> Forms:
    """At most so many lines, then fewer, each of those with how many were left out."""
    shorter = [[*lines[:count], f"{indent}and {len(lines) - count:,} more"] for count in range(ROWS - 1, 0, -1)]
    return [form for form in ([lines] if len(lines) <= ROWS else []) + shorter if len(form) <= max(len(lines), 1)]


def _not_judged(report: Report) -> list[str]:
    """Why servers cannot be judged, those with the same reason together."""
    whose = ((each.why, scope(each.subject) if each.subject else "") for each in report.not_judged)
    reasons = words.grouped((escaped(why), shortened(escaped(name), NAME)) for why, name in whose)
    return [f"{listed(names)}: {why}" if any(names) else why for why, names in reasons.items()]


def _named_shortly(texts: Iterable[str], report: Report) -> list[str]:
    """The texts with the long names of servers shortened."""
    short = {name: shortened(name, NAME) for name in words.instances(report) if len(name) > NAME}
    return [reduce(lambda text, name: text.replace(name, short[name]), short, text) for text in texts]


def _ruled_out(diagnosis: Diagnosis) -> str:
    ruled_out = ", ".join(refuted.name for refuted in diagnosis.refuted)
    possible = ", ".join(look_alike.name for look_alike in diagnosis.open)
    return f"{ruled_out or 'none'}; not ruled out: {possible}" if possible else ruled_out


def _not_seen(report: Report) -> str:
    """The telemetry that was not collected, and how to get it: "GPUs, processes (run diag on the server's host)"."""
    hints: dict[str, list[str]] = {}
    for name in report.observed.not_measured:
        hints.setdefault(FAMILIES[name].hint, []).append(FAMILIES[name].name)
    return "; ".join(f"{', '.join(names)} ({hint})" for hint, names in hints.items())
