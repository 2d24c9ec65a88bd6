"""Runbooks: one per incident, of two pages at most, one about missing telemetry, their index, and the on-call card.

A runbook says what to do; thresholds with their rationale and every definition of a series are on one page of their
own (`promql_page`). `diag explain` prints the runbook of an incident and its part of that page.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from textwrap import indent

from diag.artefacts.alerts import TELEMETRY_RUNBOOK, alert_expressions, keeps_firing, telemetry_alerts
from diag.artefacts.inhibitions import muting_sentences, severities
from diag.artefacts.names import (
    CARD,
    COMPUTED,
    GENERATED_MARK,
    alert_name,
    capitalized,
    claim,
    fix_in_markdown,
    server_board_url,
    subject_labels,
)
from diag.core.contract import Contract
from diag.core.declarations import PACKAGE, read
from diag.core.incident import OF_ONE_SERVER, Condition, Incident
from diag.knowledge.formulas import RecordedSeries, RuleSet, formula, rule_set
from diag.knowledge.platforms import rocm_commands_in
from diag.promql import metric_names, parse, pretty
from diag.report.sentences import released, why
from diag.report.spans import joined, label, labels

PLATFORMS = ("Kubernetes", "compose", "systemd")
EXIT_STATUS = {"warning": 1, "critical": 2}
PROMQL_PAGE = "promql"
"""The page of all definitions; the heading of an incident's part is its id."""


@cache
def operations() -> Mapping[str, Mapping[str, str]]:
    """Return what each operation is for (`what`), and its command on each platform."""
    return read(PACKAGE / "artefacts" / "operations.toml", dict[str, dict[str, str]])


def runbooks(incidents: Sequence[Incident], contract: Contract) -> dict[str, str]:
    """Return the text of every runbook by its file, their index, the on-call card and the page of definitions."""
    rules = rule_set(incidents, contract)
    rows = "".join(
        f"| {_links([incident.id])} | {alert_name(incident.id)} | {incident.severity} | {', '.join(incident.per)}"
        f" | {incident.title} |\n"
        for incident in incidents
    )
    index = (
        f"# Runbooks\n\n*{GENERATED_MARK}.* One runbook per alert. For the wall: [the on-call card]({CARD}.md). Alerts"
        f" about missing telemetry: [{TELEMETRY_RUNBOOK}]({TELEMETRY_RUNBOOK}.md). Thresholds with their rationale, and"
        f" the definition of every series: [PromQL]({PROMQL_PAGE}.md).\n\n"
        f"| incident | alert | severity | evaluated per | title |\n|---|---|---|---|---|\n{rows}"
    )
    telemetry = f"# Missing telemetry\n\n*{GENERATED_MARK}.* Missing telemetry means unknown, not healthy.\n"
    for alert in telemetry_alerts():
        summary = alert.summary.format(server="`<server>`", collector="`<collector>`")
        telemetry += (
            f"\n## {alert.name}\n\n{summary}. Impact: {alert.impact}.\n\n{alert.action}\n\n"
            f"```promql\n{pretty(alert.expression(contract))}\n```\n"
        )
    pages = {incident.id: runbook(incident, incidents, contract, rules) for incident in incidents}
    pages |= {TELEMETRY_RUNBOOK: telemetry, "README": index, CARD: card(incidents)}
    pages[PROMQL_PAGE] = promql_page(incidents, contract, rules)
    return {f"runbooks/{name}.md": text for name, text in pages.items()}


def card(incidents: Sequence[Incident]) -> str:
    """Return the on-call card: the first action, without its reason, and the runbook of each page and each ticket."""
    text = (
        f"# On-call card\n\n*{GENERATED_MARK}.* Find the alert, do the first action, open its runbook. First, for any"
        " alert: `diag doctor http://<instance>`.\n"
    )
    for severity, heading in (("critical", "Pages, and tickets that may become pages"), ("warning", "Tickets")):
        text += f"\n## {heading}\n\n| alert | first action | runbook |\n|---|---|---|\n"
        for incident in incidents:
            if severities(incident)[-1] == severity:
                first = incident.mitigate[0].partition(":")[0].rstrip(".") if incident.mitigate else "Read the runbook"
                text += f"| {alert_name(incident.id)} | {first} | {_links([incident.id])} |\n"
    return text


def runbook(incident: Incident, incidents: Sequence[Incident], contract: Contract, rules: RuleSet) -> str:
    """Return the page of an incident, without its empty sections. `rules` are the recording rules for `incidents`."""
    site = contract.site
    board = f"dashboard *vLLM / Server* with `incident` = `{incident.id}`"
    if url := server_board_url(incident.id, site):
        board = f"[dashboard]({url})"
    server = ",".join(f'{label}="<{label}>"' for label in site.labels)
    flags = dict.fromkeys(fix.flag for fix in incident.fixes if fix.flag)
    moves = incident.ended_by or incident.symptoms[0].signal
    recovered = next(condition.opposite for condition in incident.symptoms if condition.signal == moves)
    recording = "the recording of `diag record http://<instance> DIR --for 120 --log FILE` (it holds no secrets)"
    texts = [*incident.mitigate, *incident.hand_over, *incident.do_not]
    texts += [text for fix in incident.fixes for text in (fix.command, fix.change, fix.rollback)]
    pairs = rocm_commands_in("\n".join(texts)).items()
    on_rocm = [re.sub(r"\{(\w+)\}", r"<\1>", f"`{theirs}` instead of `{ours}`") for ours, theirs in pairs]
    by_id, look_alikes = {other.id: other for other in incidents}, []
    for look in incident.looks_like:
        against = look.requires or look.refuted_by
        deciding = f" Ruled out by {claim(against, contract)}." if against else ""
        if not against and look.name in by_id:
            deciding = f" Requires {claim(by_id[look.name].symptoms[0], contract)}."
        name = _links([look.name]) if look.name in by_id else look.name
        look_alikes.append(f"- {capitalized(name)}: {look.distinguish}{deciding}")
    # a silence has labels that outlast a restart
    lasting = [label for label in site.labels if label not in OF_ONE_SERVER and label != "model"]
    text = (PACKAGE / "artefacts" / "runbook.md").read_text(encoding="utf-8")
    page = text.format(
        labels=labels(),
        **_is_it_real(incident, contract, rules),
        alert=alert_name(incident.id),
        title=incident.title,
        mark=GENERATED_MARK,
        severity=capitalized(incident.severity),
        id=incident.id,
        subject=" and ".join(subject_labels(incident, site)),
        window=incident.window,
        board=board,
        promql_page=PROMQL_PAGE,
        impact=capitalized(incident.impact),
        meaning=_meaning(incident, incidents, contract),
        do_now=_do_now(incident),
        look_alikes="\n".join(look_alikes),
        fixes=_fixes(incident, contract),
        recovered=claim(recovered, contract),
        keeps_firing=keeps_firing(incident),
        hand_over="; ".join((recording, *incident.hand_over)),
        do_not="\n".join(f"- {warning}" for warning in incident.do_not),
        matchers=" ".join(f"{label}=<{label}>" for label in (*lasting, "model")),
        flags=f"- Flags that decide here: {', '.join(f'`{flag}`' for flag in flags)}.\n" if flags else "",
        server=server,
        on_rocm=f"Run {'; '.join(on_rocm)}." if on_rocm else "",
    )
    return re.sub(r"\n## .+\n\n\n", "", page)


def _meaning(incident: Incident, incidents: Sequence[Incident], contract: Contract) -> str:
    causes = [other.id for other in incidents if incident.id in other.explains]
    possible = [_links(causes)] if causes else []
    for other in incidents:
        for edge in other.may_explain:
            if edge.incident == incident.id:
                conditions = ["it began first"] if edge.began_first else []
                conditions += [claim(condition, contract) for condition in edge.where]
                possible.append(f"{_links([other.id])} (if {' and '.join(conditions)})")
    text = " ".join(incident.cause.split())
    if possible:
        text += f"\n\n**Start with its cause** if one of these is present too: {', '.join(possible)}."
    if muted := muting_sentences(incident, incidents, contract.site):
        text += f"\n\n{' '.join(muted)}"
    return text


def _links(names: Sequence[str]) -> str:
    """Link to the runbooks of incidents."""
    return ", ".join(f"[{name}]({name}.md)" for name in names)


def _is_it_real(incident: Incident, contract: Contract, rules: RuleSet) -> dict[str, str]:
    """Return the parts of the section with two commands, and what they print while the incident lasts."""
    formulas = [formula(symptom.signal, incident.per, incident.window, contract) for symptom in incident.symptoms]
    metrics = {name for read_formula in formulas for name in metric_names(parse(read_formula))}
    log = any(name.startswith(("diag_vllm_startup_", "diag_vllm_log_")) for name in metrics)
    host_only = log or any(name.startswith("diag_gpu_") for name in metrics)
    subject = " ".join(("<instance>", *(f"{label} <{label}>" for label in incident.per if label != "instance")))
    if incident.severity == "info":
        report = f"lists `info  {incident.title} ({incident.id})` under `Also`, and the verdict stays `HEALTHY`"
    else:
        report = f"begins with `{incident.severity.upper()}  {incident.id}   {subject}`"
        report += f" (exit status {EXIT_STATUS[incident.severity]}"
        report += f"; an info without an alert unless {claim(incident.serious, contract)}" if incident.serious else ""
        report += f"; `CRITICAL` when {claim(incident.escalates, contract)})" if incident.escalates else ")"
    shown = incident.alerting[: len(incident.symptoms)]
    recorded = (formula(symptom.signal, incident.per, incident.windows[0], contract) for symptom in shown)
    names = [*dict.fromkeys(rules.series[series.name] for series in recorded)]
    server = ",".join(f'{label}="<{label}>"' for label in contract.site.labels)
    selector = f'{{__name__=~"{"|".join(names)}",{server}}}' if names[1:] else f"{names[0]}{{{server}}}"
    supports = [condition for condition in incident.supports if condition != incident.serious]
    return {
        "log": " --log FILE" if log else "",
        "selector": shlex.quote(selector),
        "place": ", run on the server's own host," if host_only else "",
        "report": report,
        "symptoms": ". Or these: ".join(_claims(case.symptoms, contract) for case in (incident, *incident.rising)),
        "supports": f" Not required, but likelier with: {_claims(supports, contract)}." if supports else "",
    }


def _claims(conditions: Sequence[Condition], contract: Contract) -> str:
    return "; ".join(claim(condition, contract) for condition in conditions)


def _do_now(incident: Incident) -> str:
    """Return the mitigation, and the commands of its operations on each platform."""
    lines = [f"- {step}" for step in incident.mitigate]
    if not incident.operations:
        return "\n".join(lines)
    lines += ["", "```bash"]
    for platform in PLATFORMS:
        lines.append(f"# {platform}")
        for name in incident.operations:
            operation = operations()[name]
            command, _, comment = operation[platform].partition("   # ")
            note = f"{operation['what']} ({comment})" if comment else operation["what"]
            lines.append(command if command.startswith("#") else f"{command}   # {note}")
    return "\n".join([*lines, "```"])


def _fixes(incident: Incident, contract: Contract) -> str:
    intro = "Try them in this order; `diag doctor` leaves out what does not apply to this server"
    intro += f" and computes {COMPUTED}." if any(fix.signals for fix in incident.fixes) else "."
    if any(fix.restart and fix.kind in ("vllm_flag", "environment") for fix in incident.fixes):
        commands = ", ".join(f"`{operations()['change'][platform]}` ({platform})" for platform in PLATFORMS)
        intro += f" To change a flag: {commands}."
    lines = [intro, ""]
    for number, fix in enumerate(incident.fixes, 1):
        also = ", ".join(f"`{flag} {COMPUTED}`" for flag, _ in fix.also)
        rollback = re.sub(r"<[^>]+>", r"`\g<0>`", fix.rollback)  # code, or Markdown takes it for an HTML tag
        parts = [
            f"Together with {also}." if also else "",
            f"Instead of `{fix.instead_of}` in releases without it." if fix.instead_of else "",
            f"Needs {released(fix)}." if released(fix) else "",
            f"*{label('effect')}*: {fix.effect}.",
            f"*{label('trade_off')}*: {fix.risk}." if fix.risk else "",
            f"*{label('rollback')}*: {rollback}." if rollback else "",
            "Needs a restart." if fix.restart else "No restart.",
        ]
        condition = f"*If {_claims(fix.only_if, contract)}*: " if fix.only_if else ""
        lines.append(f"{number}. {condition}{fix_in_markdown(fix)} {' '.join(filter(None, parts))}")
    return "\n".join(lines)


# -- the page of all thresholds and definitions


def promql_page(incidents: Sequence[Incident], contract: Contract, rules: RuleSet) -> str:
    """Return the thresholds and the alert expression of each incident, then every recorded series, folded."""
    text = (
        f"# PromQL: thresholds, alerts, recorded series\n\n*{GENERATED_MARK}.* The rules themselves:"
        " `alerts/diag.rules.yaml`. `diag explain NAME` prints a signal or part, its formula and its users.\n"
    )
    for incident in incidents:
        content = judgement(incident, incidents, contract, rules)
        text += f"\n## {incident.id}\n" + _folded(alert_name(incident.id), content)
    text += "\n## Recorded series\n\nBy the labels of their subject; each reads only series before it.\n"

    def level(rule: RecordedSeries) -> str:
        return rule.series.partition(":")[0]

    for title, records in groupby(sorted(rules.rules.values(), key=level), key=level):
        pairs = [(record.series, indent(pretty(record.promql), "  ")) for record in records]
        lines = [line for name, definition in pairs for line in (f"{name} =", definition)]
        text += _folded(title, "\n".join(["```text", *lines, "```", ""]))
    return text


def judgement(incident: Incident, incidents: Sequence[Incident], contract: Contract, rules: RuleSet) -> str:
    """Return the thresholds of an incident with their rationale, and its alert expressions."""
    rows = []
    for condition in incident.every_condition:
        source = condition.why
        reference = f"{source.kind}: <{source.reference}>" if source.reference else source.kind
        if source.kind == "measured":
            reference = f"measured: recording `{source.reference}`"
        cells = [text.replace("|", "\\|") for text in (claim(condition, contract), source.says)]
        rows.append(f"| {' | '.join(cells)} | {reference} |")
    rows = ["| threshold | rationale | source |", "|---|---|---|", *dict.fromkeys(rows)]
    fixes = [
        f"{number}. {fix_in_markdown(fix)} {capitalized(joined(why(fix.why)))}."
        for number, fix in enumerate(incident.fixes, 1)
    ]
    expressions = alert_expressions(incident, incidents, contract, rules)
    blocks = [line for text in expressions for line in ("```promql", *text.splitlines(), "```", "")]
    at_once = [f"The alert has no `for`: {incident.immediate}.", ""] if incident.immediate else []
    return "\n".join([*rows, "", *at_once, "Rationale of the fixes:", "", *fixes, "", *blocks])


def _folded(summary: str, content: str) -> str:
    return f"\n<details><summary>{summary}</summary>\n\n{content}\n</details>\n"
