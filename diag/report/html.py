"""The report for a post-mortem: one HTML page that needs no network, no script and no other file.

Every text goes through `escape`; should one slip through, the page has forbidden itself to run or to fetch anything.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from diag import __version__
from diag.core.formatting import moment
from diag.core.incident import Source
from diag.diagnosis.diagnose import RANK, Diagnosis, Reading
from diag.diagnosis.proposals import Proposal
from diag.diagnosis.report import Finding, Report
from diag.report import fleet, svg
from diag.report import sentences as words
from diag.report.markup import element, escape

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = Path(__file__).with_suffix(".css")
VERDICTS = {"CRITICAL": "critical", "WARNING": "warning", "HEALTHY": "healthy", "CANNOT TELL": "unknown"}
MOST_SERVERS, MOST_ROWS = 50, 200
LEGEND = (
    "Each plot shows one condition around the incident: its value, the limit as a dashed line, shaded the side where it"
    " holds,"
    " a vertical line since when it has held without a break, a dot at the value that is told, and on the axis of time"
    " a bar from the first to the last look at which the whole incident was present. All times are UTC."
)


def render(report: Report) -> str:
    """The report as one page, which is XML as well; one line break at its end."""
    found = sorted(words.detailed(report), key=_weight)
    anchors = {_anchor(each.diagnosis) for each in found}
    parts = [
        _verdict(report),
        _fleet(report),
        element("p", LEGEND, class_="legend") if found else "",
        *(_finding(each, report, anchors) for each in found),
        _timeline(report, anchors),
        *_rest(report),
        element("footer", escape(f"diag {__version__}")),
    ]
    body = element("body", element("main", "\n".join(part for part in parts if part)))
    return f"<!DOCTYPE html>\n{element('html', _head(report), body, lang='en')}\n"


def _weight(finding: Finding) -> tuple[bool, int]:
    """Primary incidents first, then the worse ones."""
    return not finding.diagnosis.primary, -RANK[finding.diagnosis.severity]


def _head(report: Report) -> str:
    seen = report.observed
    title = f"{report.verdict}: {seen.target}, {moment(seen.end)}"
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", escape(title)),
        element("style", STYLE.read_text(encoding="utf-8")),
    )


def _verdict(report: Report) -> str:
    """What is wrong, and what was looked at to say so."""
    progress = words.not_busy(report)
    return element(
        "header",
        *map(_headline, words.headline(report, moment)),
        element("p", escape(f"Looked at {words.source(report, moment)}")),
        _items(map(escape, progress)),
    )


def _fleet(report: Report) -> str:
    """A line for each server of a fleet that is not healthy, the worst first."""
    if not words.is_fleet(report):
        return ""
    lines = fleet.servers(report, moment)
    rows = [
        [_badge(each.verdict), escape(each.instance), escape(each.states), escape(each.incidents), escape(each.when)]
        for each in lines
        if each.verdict != "healthy"
    ]
    table = _table("fleet", ("verdict", "server", "engines", "incidents", "when"), rows)
    return element("h2", escape(fleet.counts(lines))) + (table if rows else "")


def _headline(line: str) -> str:
    word = next(each for each in VERDICTS if line.startswith(each))
    return element("h1", _badge(word), escape(line.removeprefix(word)), class_=VERDICTS[word])


# -- one incident -----------------------------------------------------------------------------------------------------


def _finding(finding: Finding, report: Report, anchors: Collection[str]) -> str:
    one = finding.diagnosis
    parts = [
        *_what(one),
        *(_evidence(each, one) for each in words.evidence(one)),
        _list("Ruled out", (_told(each.name, each.evidence) for each in one.refuted)),
        _list("Not ruled out", (_told(each.name, each.distinguish) for each in one.open)),
        _list("What follows from it", (_consequence(each, anchors) for each in words.consequences(finding, report))),
        *_actions(finding),
        _list("Do not", map(escape, one.incident.do_not)),
        element("p", "Runbook: ", element("code", escape(f"diag explain {one.incident.id}")), class_="runbook"),
    ]
    return element("section", "\n".join(part for part in parts if part), class_=one.severity, id=_anchor(one))


def _what(one: Diagnosis) -> list[str]:
    """Which incident where and when, and what goes on; the harm that a primary one does is in the verdict."""
    cause = f"It follows from {one.explained_by}: cure that first." if one.explained_by else ""
    harm = "" if one.primary else f"Users notice: {one.incident.impact}."
    return [
        element("h2", escape(one.incident.title)),
        element(
            "p",
            _badge(one.severity),
            element("code", escape(one.incident.id)),
            escape(f" on {words.where(one)}, {_lasted(one)}"),
        ),
        element("p", element("strong", escape(cause))) if cause else "",
        element("p", escape(harm)) if harm else "",
        *(element("p", escape(" ".join(each.split()))) for each in one.incident.cause.split("\n\n")),
    ]


def _lasted(one: Diagnosis) -> str:
    """Since and until when; a page is read another day, when "now" is no more."""
    until = moment(one.instants[-1] if one.until is None else one.until)
    return f"since {words.began([one], moment)}, {'ongoing' if one.ongoing else 'ended'} at {until}"


def _evidence(reading: Reading, one: Diagnosis) -> str:
    condition = reading.condition
    value = reading.shown
    promise = f" ({condition.limit} of the contract)" if isinstance(condition.limit, str) else ""
    told = element(
        "figcaption",
        element("h3", escape(condition.signal.name)),
        element(
            "p",
            element("b", escape(value)),
            element("span", escape(f" {reading.threshold}{promise}"), class_="limit"),
        ),
        element("p", escape(reading.sentence)),
        element("p", "Why this limit: ", _why(condition.why), class_="why"),
    )
    return element("figure", told, svg.plot(reading, one))


def _consequence(one: Diagnosis, anchors: Collection[str]) -> str:
    return f"{_link(one, anchors)}{escape(f' on {words.where(one)}: {one.incident.title}')}"


def _why(source: Source) -> str:
    """Where a claim comes from, its page on the web as a link."""
    text, link = escape(words.why(source)), escape(source.reference)
    if not source.reference.startswith(("https://", "http://")):
        return text
    return text.replace(link, element("a", link, href=source.reference, rel="noreferrer"))


# -- what to do -------------------------------------------------------------------------------------------------------


def _actions(finding: Finding) -> list[str]:
    """Every fix in its order; the first complete one of a primary incident is what to do now."""
    ready = [each for each in finding.proposals if not each.needs]
    now = ready[0] if ready and finding.diagnosis.primary else None
    fixes = [_fix(each, now=each is now) for each in finding.proposals]
    relaunch = element("pre", escape(finding.relaunch)) if finding.relaunch else ""
    return [
        element("h3", "What to do") if fixes else "",
        element("ol", *fixes, class_="fixes") if fixes else "",
        element("h3", "Relaunch") + relaunch if relaunch else "",
    ]


def _fix(proposal: Proposal, *, now: bool) -> str:
    fix, change = proposal.fix, words.change(proposal)
    facts = {
        "effect": fix.effect,
        "risk": fix.risk,
        "rollback": fix.rollback,
        "restart": "needed" if fix.restart else "not needed",
        "versions": words.versions(proposal),
        "needs": ", ".join(proposal.needs),
    }
    told = {name: escape(text) for name, text in facts.items() if text}
    return element(
        "li",
        _badge("do now") if now else "",
        element("code", escape(change)) if change else "",
        element("p", escape(proposal.text)),
        _facts({**told, "why": _why(fix.why)}),
        class_="now" if now else "or",
    )


# -- the whole --------------------------------------------------------------------------------------------------------


def _timeline(report: Report, anchors: Collection[str]) -> str:
    """All that is present, the first mover first; nothing where there is but one."""
    seen = report.observed
    found = sorted((each.diagnosis for each in report.present[:MOST_ROWS]), key=lambda each: each.since or 0.0)
    rows = [
        [
            _link(each, anchors),
            escape(words.where(each)),
            escape(words.began([each], moment)),
            escape("still so" if each.ongoing or each.until is None else moment(each.until)),
            element("span", svg.bar(each, seen.start, seen.end), class_=each.severity),
        ]
        for each in found
    ]
    table = _table("timeline", ("incident", "where", "since", "until", "within what was looked at"), rows)
    return element("h2", "Timeline") + table if len(found) > 1 else ""


def _absent(report: Report) -> str:
    """Each incident that is absent somewhere, with the first number that says so."""
    where: dict[str, list[Diagnosis]] = {}
    for each in report.findings:
        if each.diagnosis.state == "absent":
            where.setdefault(each.diagnosis.incident.id, []).append(each.diagnosis)
    rows = [_absent_row(found) for _, found in sorted(where.items())]
    table = _table("absent", ("incident", "where", "what was found", "it takes", ""), rows)
    return element("h2", "Checked and absent") + table if rows else ""


def _absent_row(found: list[Diagnosis]) -> list[str]:
    one = found[0]
    against_it = next(each for each in one.symptoms if each.holds is False)
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return [
        escape(one.incident.id),
        escape(words.place(one.subject) + more),
        escape(against_it.sentence),
        escape(against_it.threshold),
        svg.spark(against_it, one),
    ]


def _rest(report: Report) -> list[str]:
    """What was checked, what cannot be told, and on what all of this rests."""
    return [
        _absent(report),
        _list("What cannot be told", map(escape, (*report.blind, *words.undecided(report))), "h2"),
        _list("What was not measured, and how to get it", map(escape, words.not_collected(report)), "h2"),
        _list("The contract", map(escape, report.contract), "h2"),
        _list("Notes", map(escape, report.observed.notes), "h2"),
        _list("Servers", map(escape, words.folded(list(report.observed.servers), MOST_SERVERS)), "h2"),
    ]


# -- shapes; what goes into them is markup ----------------------------------------------------------------------------


def _link(one: Diagnosis, anchors: Collection[str]) -> str:
    """A way to where it is told, or its name alone: of a fleet one of each kind is told."""
    name, anchor = escape(one.incident.id), _anchor(one)
    return element("a", name, href=f"#{anchor}") if anchor in anchors else element("code", name)


def _anchor(one: Diagnosis) -> str:
    text = f"{one.incident.id}-{words.place(one.subject)}"
    return "".join(each if each.isalnum() or each == "_" else "-" for each in text)


def _badge(text: str) -> str:
    return element("span", escape(text), class_="badge") + " "


def _told(name: str, text: str) -> str:
    return f"{element('b', escape(name))}: {escape(text)}"


def _list(title: str, items: Iterable[str], level: str = "h3") -> str:
    told = _items(items)
    return element(level, escape(title)) + told if told else ""


def _items(items: Iterable[str]) -> str:
    told = [element("li", each) for each in items]
    return element("ul", *told) if told else ""


def _facts(facts: Mapping[str, str]) -> str:
    """Names in a column of their own, what is told beside them."""
    return element("dl", *(element("dt", escape(name)) + element("dd", told) for name, told in facts.items()))


def _table(class_: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["".join(element("th", escape(each)) for each in head)]
    lines += ["".join(element("td", each) for each in row) for row in rows]
    return element("table", *(element("tr", each) for each in lines), class_=class_)
