"""Reference pages: docs/failures.md, docs/lint-rules.md, docs/paging.md, docs/preflight.md and docs/metrics.md, and the
pages of `diag explain` on a lint rule, a preflight check, a signal, popular wrong advice or a flag of vLLM.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from diag.artefacts.alerts import alerts, keeps_firing, telemetry_alerts
from diag.artefacts.names import GENERATED_MARK, alert_name, capitalized, claim
from diag.core.contract import Contract
from diag.core.declarations import PACKAGE, read
from diag.core.formatting import listed, quantity
from diag.core.incident import Incident, Part, Signal, regroup
from diag.core.log_events import LOG_EVENTS, STARTUP_PHASES
from diag.core.metric_families import families, label_meanings
from diag.knowledge.formulas import formula, parts_first, rule_set
from diag.knowledge.known_failures import FILES, PLACE, table
from diag.knowledge.signals import DECLARED
from diag.lint.removed import INEFFECTIVE, INTO, REPLACED
from diag.lint.rule import LintRule, LintTarget
from diag.lint.rules import RULES
from diag.preflight.check import GROUPS, PreflightCheck
from diag.preflight.checks import CHECKS
from diag.promql import metric_names, parse, pretty
from diag.report.settings import finding_lines
from diag.vllm.command.parse import read_all
from diag.vllm.command.writings import FORMS
from diag.vllm.flags.registry import Flag, known, release, versions

MOST_WORDS = 2_700
"""Words of a generated page, about ten minutes of reading."""


class ReferenceTexts(NamedTuple):
    """The content of reference.toml, beside this file."""

    lint_rule: str
    lint_rules: str
    preflight_check: str
    paging: str
    metrics: str
    wrong_advice: str
    severities: Mapping[str, str]
    lint_topics: Mapping[str, str]
    metric_sections: Mapping[str, str]
    units: Mapping[str, str]


@cache
def texts() -> ReferenceTexts:
    return read(PACKAGE / "artefacts" / "reference.toml", ReferenceTexts)


# -- alerts

_ROUTES: Mapping[str, str] = {"critical": "page", "warning": "ticket", "info": "no person"}


def alert_reference(incidents: Sequence[Incident]) -> str:
    """Return docs/paging.md: whom each alert reaches and how soon, and why some pages wait for nothing."""
    rows = []
    by_severity = sorted(
        (alert for incident in incidents for alert in alerts(incident)),
        key=lambda alert: [*_ROUTES].index(alert.severity),
    )
    for alert in by_severity:
        incident = alert.incident
        windows = ", ".join(dict.fromkeys(" and ".join(case.windows) for case in alert.cases))
        escalates = incident.escalates if alert.severity != incident.severity else None
        cells = (
            alert_name(incident.id),
            _ROUTES[alert.severity],
            alert.severity,
            windows,
            incident.hold,
            f"{keeps_firing(incident):.0f} s",
            claim(escalates, Contract()) if escalates else "",
        )
        rows.append(f"| {' | '.join(cells)} |")
    rows += [
        f"| {alert.name} | {_ROUTES[alert.severity]} | {alert.severity} |  | {alert.hold} | 0 s |  |"
        for alert in telemetry_alerts()
    ]
    reasons = [f"- `{incident.id}`: {incident.immediate}." for incident in incidents if incident.immediate]
    return texts().paging.format(mark=GENERATED_MARK, rows="\n".join(rows), reasons="\n".join(reasons))


# -- lint rules and preflight checks

_FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*(?:=\w+)?")


def lint_rule_page(rule: LintRule) -> str:
    """Return the page of a lint rule: what it finds, why it matters, an example, the fix, how to ignore it.

    The example is followed by the output of `diag lint`, unless it needs more than the command, and by a near miss.
    """
    example, version = rule.example, rule.example.version
    output = ""
    if not example.requires:
        *before, last = read_all(example.command, version=version)
        beside = tuple(LintTarget(command, version) for command in before)
        findings = rule.findings(LintTarget(last, version, beside=beside, text=example.command))
        lines = "\n".join(line.rstrip() for finding in findings for line in finding_lines(finding))
        output = f"\n\n```text\n{lines}\n```" if lines else ""
    return texts().lint_rule.format(
        id=rule.id,
        title=_mark_flags(rule.title),
        severity=rule.severity,
        means=texts().severities[rule.severity],
        finds=_end_sentence(rule.finds),
        why=_end_sentence(rule.why),
        version=version,
        where=f", where {example.requires}" if example.requires else "",
        command=example.command,
        output=output,
        near_miss=f", with vLLM {example.leaves_version}" if example.leaves_version else "",
        leaves=example.leaves,
        fix=_end_sentence(rule.fix),
    )


def lint_rule_reference() -> dict[str, str]:
    """Return docs/lint-rules.md, the forms of a launch and a table of all rules, and the rules' pages by topic."""
    topics: dict[str, dict[str, str]] = {}
    for rule in RULES.values():
        text = lint_rule_page(rule).replace("\n## ", "\n**").splitlines()
        body = [f"{line}**" if line.startswith("**") else line for line in text[1:]]
        section = "\n".join([f"## {rule.id}", *body]) + "\n"  # the id alone: the links of the table name it
        topics.setdefault(rule.topic, {})[rule.id] = section
    files: dict[str, str] = {}
    rows: list[str] = []
    for name, sections in topics.items():
        for file, ids, page in _in_pages(f"lint-rules/{name}", texts().lint_topics[name], sections):
            files[f"docs/{file}"] = page
            rows += [f"| [{id}]({file}#{id}) | {RULES[id].severity} | {_mark_flags(RULES[id].title)} |" for id in ids]
    index = texts().lint_rules.format(
        mark=GENERATED_MARK,
        count=len(RULES),
        forms="\n".join(f"| {form} | {what} |" for form, what in FORMS.items()),
        rules="\n".join(rows),
        **texts().severities,
    )
    return {"docs/lint-rules.md": f"{index}{_toctree(files)}", **files}


def _in_pages(
    name: str, title: str, sections: Mapping[str, str], head: str = ""
) -> Iterator[tuple[str, list[str], str]]:
    """Yield pages of at most MOST_WORDS words: the file below docs/, the names of its sections, and its text."""
    pages: list[list[str]] = [[]]
    count = 0
    for section, text in sections.items():
        count += len(text.split())
        if pages[-1] and count > MOST_WORDS:
            pages.append([])
            count = len(text.split())
        pages[-1].append(section)
    for at, names in enumerate(pages, 1):
        part, file = (f" ({at} of {len(pages)})", f"{name}-{at}.md") if len(pages) > 1 else ("", f"{name}.md")
        body = "\n".join(sections[section] for section in names)
        yield file, names, f"<!-- {GENERATED_MARK} -->\n\n# {title}{part}\n\n{head}{body}"


def _toctree(files: Iterable[str]) -> str:
    """Return the pages of the site below a page."""
    return "\n".join(["\n```{toctree}", ":hidden:", "", *(file.removeprefix("docs/") for file in files), "```", ""])


def preflight_page(check: PreflightCheck) -> str:
    """Return the page of a preflight check: what it reads, why it matters, how to ignore it."""
    return texts().preflight_check.format(
        id=check.id,
        title=_mark_flags(check.title),
        group=check.group,
        reads=_end_sentence(capitalized(check.reads)),
        why=_end_sentence(capitalized(check.why)),
        source=check.source,
    )


def preflight_reference() -> str:
    """Return docs/preflight.md: how the command is used, and a table of the checks of each group."""
    parts = []
    for group in GROUPS:
        rows = [
            (
                f"`{each.id}`",
                _mark_flags(each.title),
                _for_a_page(_mark_flags(each.reads)),
                _for_a_page(_mark_flags(each.why)),
            )
            for each in CHECKS.values()
            if each.group == group
        ]
        parts += [_table(group.capitalize(), ("check", "about", "reads", "why"), rows)] if rows else []
    text = (PACKAGE / "artefacts" / "preflight.md").read_text(encoding="utf-8")
    return f"<!-- {GENERATED_MARK} -->\n\n{text.format(checks=len(CHECKS), rules=len(RULES))}" + "".join(parts)


def failure_reference() -> dict[str, str]:
    """Return docs/failures.md, how a log is read alone and how the table of failures grows, and the table by topic."""
    files: dict[str, str] = {}
    topics: list[str] = []
    for name, title in FILES.items():
        rows = {
            each.id: f"| `{each.id}` | {_for_a_page(each.means)} | {_for_a_page(each.advice)} |"
            for each in table()
            if each.file == name
        }
        head = "| kind | means | do |\n|---|---|---|\n"
        for file, kinds, text in _in_pages(f"failures/{name}", f"Known failures: {title}", rows, head):
            files[f"docs/{file}"] = text + "\n"
            topics.append(f"| [{text.partition('# Known failures: ')[2].splitlines()[0]}]({file}) | {len(kinds)} |")
    text = (PACKAGE / "artefacts" / "failures.md").read_text(encoding="utf-8").format(count=len(table()))
    index = "\n".join([f"<!-- {GENERATED_MARK} -->\n\n{text}", "| kinds of failures | number |", "|---|---|", *topics])
    return {"docs/failures.md": f"{index}\n{_toctree(files)}", **files}


def _for_a_page(text: str) -> str:
    """Return a text of the table of failures with its places as words: {divisors(heads)} is "<heads>"."""
    return re.sub(r"[<>]", lambda sign: {"<": "&lt;", ">": "&gt;"}[sign[0]], re.sub(PLACE, r"<\g<names>>", text))


def _end_sentence(text: str) -> str:
    return _mark_flags(text if text.endswith(".") else f"{text}.")


def _mark_flags(text: str) -> str:
    """Mark each flag in Markdown as code: elsewhere two dashes become one."""
    parts = text.split("`")
    return "`".join(part if at % 2 else _FLAG.sub(r"`\g<0>`", part) for at, part in enumerate(parts))


# -- signals

_PLACEHOLDER = re.compile(r"\$(\w+)")


def declared(incidents: Iterable[Incident]) -> dict[str, Part | Signal]:
    """Return every signal and part by its id: the built-in ones, and those that only an incident declares."""
    own = {condition.signal.id: condition.signal for incident in incidents for condition in incident.every_condition}
    return {**own, **DECLARED}


def signal_page(asked: Part | Signal, incidents: Sequence[Incident], contract: Contract) -> str:
    """Return the definition of a signal or a part, in Markdown."""
    users = [
        incident for incident in incidents if any(found.signal.id == asked.id for found in incident.every_condition)
    ]
    per, window = (users[0].per, users[0].windows[0]) if users else (("instance", "engine"), "5m")
    found = formula(asked, per, window, contract)
    series = rule_set(incidents, contract).series
    unit = asked.unit or "none"
    parts = dict.fromkeys(name for name in _PLACEHOLDER.findall(asked.promql) if name in DECLARED)
    uses = []
    for incident in users:
        claims = (claim(used, contract) for used in incident.every_condition if used.signal.id == asked.id)
        uses.append(f"- incident `{incident.id}`: {'; '.join(dict.fromkeys(claims))}")
    readers = (other for other in DECLARED.values() if asked.id in _PLACEHOLDER.findall(other.promql))
    uses += [f"- `{other.id}`" for other in readers if other.id != asked.id]
    # the formula over named series, and before it the definition of each of them
    definitions: list[str] = []
    for name, part in parts_first([found]).items():
        definitions += [f"# {name}", *pretty(regroup(part.text, contract.site.labels)).splitlines()]
    sections = {
        "Formula": ["```promql", asked.promql, "```"],
        "Parts": [f"- `${name}`: `{DECLARED[name].promql}`" for name in parts],
        "Used by": uses or ["nothing"],
        f"Over {window} per {' and '.join(per)}": [
            *([f"Recorded as `{series[found.name]}`.", ""] if found.name in series else []),
            "```promql",
            *definitions,
            "```",
        ],
    }
    sentence = f" {asked.sentence.format(value='`<value>`')}." if isinstance(asked, Signal) else ""
    group = f" Of a group: {asked.group}." if asked.group else ""
    head = f"# {asked.name}\n\n*{GENERATED_MARK}.* Id `{asked.id}`, unit: {unit}.{sentence}{group}\n"
    return head + "".join(f"\n## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items() if lines)


# -- metrics of the exporter

BY_THE_DOCTOR = "`diag doctor` reads it to describe a server."


def metric_reference(incidents: Sequence[Incident], dashboards: Mapping[str, str]) -> str:
    """Return docs/metrics.md: a table of metrics per section, then the values of labels.

    `dashboards` are their texts by file.
    """
    # the signals and incidents that read a metric: for conditions, and to compute fixes
    readers: dict[str, list[tuple[Signal, Incident]]] = {}
    for incident in incidents:
        conditions = [*incident.every_condition, *(look.refuted_by for look in incident.looks_like if look.refuted_by)]
        read = [condition.signal for condition in conditions]
        for fix in incident.fixes:
            read += [*fix.signals, *(condition.signal for condition in (*fix.only_if, *fix.expects))]
        if incident.quotes:
            read.append(incident.quotes)
        for signal in dict.fromkeys(read):
            formulas = [
                formula(text, ("instance",), "5m", Contract())
                for text in (signal.promql, signal.culprit_promql)
                if text
            ]
            for name in {name for read_formula in formulas for name in metric_names(parse(read_formula))}:
                readers.setdefault(name, []).append((signal, incident))
    sections: dict[str, list[tuple[str, ...]]] = {}
    for name, family in families().items():
        section = next(title for prefix, title in texts().metric_sections.items() if name.startswith(prefix))
        signals = sorted({signal.name for signal, _ in readers.get(name, [])})
        use = ", ".join(f"`{reader}`" for reader in sorted({incident.id for _, incident in readers.get(name, [])}))
        # in the text of a dashboard the name of a metric is followed by its matchers
        drawn_by = [file for file, text in dashboards.items() if f"{name}{{" in text]
        if drawn_by and not use:
            pages = (file.removeprefix("dashboards/").removesuffix(".json") for file in drawn_by)
            use = f"dashboards: {', '.join(pages)}"
        otherwise = "count" if family.kind == "counter" else ""
        stem = name.removesuffix("_total")
        cells = (
            f"`{name}`",
            family.kind,
            ", ".join(f"`{label}`" for label in family.labels),
            next((unit for suffix, unit in texts().units.items() if stem.endswith(suffix)), otherwise),
            family.help,
            listed(signals, "; "),
            use or family.unread or BY_THE_DOCTOR,
        )
        sections.setdefault(section, []).append(cells)
    columns = ("metric", "type", "labels", "unit", "meaning", "signals", "incidents, or what it is for")
    tables = [_table(title, columns, rows) for title, rows in sections.items()]
    labels = [(f"`{name}`", meaning) for name, meaning in label_meanings().items()]
    phases = [
        (f"`{phase.name}`", phase.meaning, quantity(phase.usual_seconds, "seconds") if phase.usual_seconds else "")
        for phase in STARTUP_PHASES
    ]
    events = [(f"`{event.name}`", event.meaning, ", ".join(event.fields)) for event in LOG_EVENTS]
    tables += [
        _table("Labels", ("label", "value"), labels),
        _table("Start-up phases (label `phase`)", ("phase", "meaning", "takes at most, as reported"), phases),
        _table("Log events (label `event`)", ("event", "meaning", "fields of `diag_vllm_log_value`"), events),
    ]
    return texts().metrics.format(mark=GENERATED_MARK) + "".join(tables)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return f"\n## {title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


# -- wrong advice and flags of vLLM


class WrongAdvice(NamedTuple):
    """A claim that is wrong, what is true, what to use `instead`, and the source; the first name is the title."""

    names: tuple[str, ...]
    claim: str
    truth: str
    instead: str
    source: str


@cache
def wrong_advice() -> Mapping[str, WrongAdvice]:
    """Return each piece of advice by its names, spelled as `spelled` does."""
    all_advice = read(PACKAGE / "knowledge" / "advice.toml", tuple[WrongAdvice, ...], "advice")
    return {spelled(name): advice for advice in all_advice for name in advice.names}


def spelled(name: str) -> str:
    """Return the one spelling of a flag or a claim: --swap-space, swap_space and SWAP_SPACE are swap_space."""
    return name.strip().lstrip("-").lower().replace("-", "_").replace(" ", "_")


def flag_page(flag: Flag) -> str:
    """Return the page of a flag: the releases that have it, and what replaces it."""
    newest = versions()[-1]
    removed = release(flag.last) < release(newest)
    until = f"to {flag.last}; vLLM {newest} exits with `unrecognized arguments`" if removed else "on"
    lines = [f"# {flag.name}", "", f"A flag of vLLM from {flag.first} {until}."]
    if flag.name in INTO and removed:
        name, key, why = INTO[flag.name]
        lines += ["", f"{why}: it is the key `{key}` of `{name}`."]
    elif flag.name in REPLACED and removed:
        replaced = REPLACED[flag.name]
        words = " ".join(part or "VALUE" for part in replaced.flags)
        lines += ["", f"{replaced.why}." + (f" Use `{words}`." if words else f" {replaced.advice}".rstrip())]
    elif flag.name in INEFFECTIVE:
        lines += ["", f"It has no effect since {INEFFECTIVE[flag.name].first}: {INEFFECTIVE[flag.name].why}."]
    return "\n".join([*lines, "", "`diag lint` checks the flags of a whole command.", ""])


def advice_or_flag(name: str) -> str:
    """Return the page of the advice or flag with that name, "" if there is none.

    A flag is found in the spellings of the command line, of Python and of a YAML file.
    """
    key = spelled(name)
    if key in wrong_advice():
        advice = wrong_advice()[key]
        return texts().wrong_advice.format(title=advice.names[0], **advice._asdict())
    flag = known().get("--" + key.replace("_", "-"))
    return flag_page(known()[flag.alias] if flag.alias else flag) if flag else ""
