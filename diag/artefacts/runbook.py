"""Runbooks: one per incident, written for 3 a.m., one about missing telemetry, and their index.

`diag explain` prints the runbook of an incident.
"""

import re
from collections.abc import Mapping, Sequence
from textwrap import indent

from diag.artefacts.alerts import alert_expressions, keeps_firing
from diag.artefacts.inhibitions import muting_sentences
from diag.artefacts.names import (
    GENERATED_MARK,
    alert_name,
    capitalized,
    claim,
    fix_in_markdown,
    in_words,
    subject_labels,
    threshold,
)
from diag.artefacts.telemetry_alerts import RUNBOOK_PAGE, SERVER, TELEMETRY_ALERTS, telemetry_expression
from diag.core.contract import Contract
from diag.core.incident import Fix, Incident
from diag.knowledge import rocm
from diag.knowledge.formulas import RuleSet, comparison, formula, rule_set
from diag.promql import metric_names, parse, pretty
from diag.report.sentences import released, why

EXIT_STATUS = {"warning": 1, "critical": 2}


def runbooks(incidents: Sequence[Incident], contract: Contract) -> dict[str, str]:
    """Return the text of every runbook by its file, and their index."""
    rules = rule_set(incidents, contract)
    rows = "".join(
        f"| {_links([incident.id])} | {alert_name(incident.id)} | {incident.severity} | {', '.join(incident.per)}"
        f" | {incident.title} |\n"
        for incident in incidents
    )
    index = (
        f"# Runbooks\n\n*{GENERATED_MARK}.* One runbook per alert. Alerts about missing telemetry:"
        f" [{RUNBOOK_PAGE}]({RUNBOOK_PAGE}.md).\n\n"
        f"| incident | alert | severity | evaluated per | title |\n|---|---|---|---|---|\n{rows}"
    )
    telemetry = f"# Missing telemetry\n\n*{GENERATED_MARK}.* Missing telemetry means unknown, not healthy.\n"
    for alert in TELEMETRY_ALERTS:
        summary = re.sub(r"\{\{ \$labels\.(\w+) .*?\}\}", r"`<\1>`", alert.summary.replace(SERVER, "`<server>`"))
        telemetry += (
            f"\n## {alert.name}\n\n{summary}. Impact: {alert.impact}.\n\n{alert.action}\n\n"
            f"```promql\n{pretty(telemetry_expression(alert, contract))}\n```\n"
        )
    pages = {incident.id: runbook(incident, incidents, contract, rules) for incident in incidents}
    pages |= {RUNBOOK_PAGE: telemetry, "README": index}
    return {f"runbooks/{name}.md": text for name, text in pages.items()}


def runbook(incident: Incident, incidents: Sequence[Incident], contract: Contract, rules: RuleSet) -> str:
    """Return the page of an incident: confirm, distinguish, mitigate, fix, verify, hand over, what not to do.

    `rules` are the recording rules for `incidents`.
    """
    known = {other.id: other for other in incidents}
    supports = [f"- {claim(condition, contract)}" for condition in incident.supports]
    if incident.escalates:
        supports.append(f"- {claim(incident.escalates, contract)}: the alert becomes critical")
    if supports:
        supports = ["Not required; each one makes the diagnosis more likely or more severe:", "", *supports]
    sections = {
        "Meaning": _meaning(incident, incidents, contract),
        "Impact": [f"{capitalized(incident.impact)}."],
        "Confirm": _confirm(incident, contract),
        "Immediate mitigation": [f"- {step}" for step in incident.mitigate],
        "Symptoms (all must hold)": _symptoms(incident, contract, rules),
        "Supporting evidence": supports,
        "What looks like it, how to distinguish": _look_alikes(incident, known, contract),
        "Fix (remediation), trade-off, rollback": [
            "Try them in this order. `diag doctor` leaves out what does not apply to this server and computes the"
            " values from its measurements; `diag` never changes a server.",
            "",
            *(line for number, fix in enumerate(incident.fixes, 1) for line in _fix(number, fix, contract)),
        ],
        "Verify": _verify(incident, contract),
        "Escalate and hand over": [
            "If no fix helps, hand over:",
            "",
            "- the recording that `diag record http://<instance> DIR --for 120 --log FILE` makes (it holds no secrets)",
            *(f"- {item}" for item in incident.hand_over),
        ],
        "On AMD GPUs": _on_rocm(incident),
        "Do NOT": [f"- {warning}" for warning in incident.do_not],
        "Threshold rationale": _rationale(incident, contract),
        "Alert expression": _alert_expression(incident, incidents, contract, rules),
    }
    subject = " and ".join(subject_labels(incident, contract.site))
    head = (
        f"# {alert_name(incident.id)}: {incident.title}\n\n*{GENERATED_MARK}.* Incident `{incident.id}`, severity"
        f" {incident.severity}, evaluated per {subject} over {incident.window}.\n"
    )
    return head + "".join(f"\n## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items() if lines)


def _meaning(incident: Incident, incidents: Sequence[Incident], contract: Contract) -> list[str]:
    causes = [other.id for other in incidents if incident.id in other.explains]
    edges = [(other.id, edge) for other in incidents for edge in other.may_explain if edge.incident == incident.id]
    lines = [" ".join(incident.cause.split())]
    if causes:
        lines += ["", f"Possible causes: {_links(causes)}. If one of them is present too, start there."]
    if edges:
        lines += ["", "Possible causes under a condition:", ""]
    for name, edge in edges:
        conditions = ["it began first"] if edge.began_first else []
        conditions += [claim(condition, contract) for condition in edge.where]
        lines.append(f"- {_links([name])}, if {' and '.join(conditions)}")
    if incident.explains:
        lines += ["", f"Explains: {_links(incident.explains)}."]
    if muted := muting_sentences(incident, incidents, contract.site):
        lines += ["", " ".join(muted)]
    if incident.may_explain:
        effects = _links([edge.incident for edge in incident.may_explain])
        lines += ["", f"May explain, under a condition that their runbooks name: {effects}. It mutes none of them."]
    return lines


def _on_rocm(incident: Incident) -> list[str]:
    texts = [*incident.mitigate, *incident.hand_over, *incident.do_not]
    texts += [text for fix in incident.fixes for text in (fix.command, fix.change, fix.rollback)]
    pairs = rocm.commands_in("\n".join(texts)).items()
    rows = [re.sub(r"\{(\w+)\}", r"<\1>", f"| `{_escape_cell(a)}` | `{_escape_cell(b)}` |") for a, b in pairs]
    return ["| instead of | run |", "|---|---|", *rows] if rows else []


def _links(names: Sequence[str]) -> str:
    """Link to the runbooks of incidents."""
    return ", ".join(f"[{name}]({name}.md)" for name in names)


# -- is it this incident ----------------------------------------------------------------------------------------------


def _confirm(incident: Incident, contract: Contract) -> list[str]:
    """Return the command, the host to run it on, and the output while the incident lasts."""
    names = _metrics(incident, contract)
    log = any(name.startswith(("diag_vllm_startup_", "diag_vllm_log_")) for name in names)
    host_only = log or any(name.startswith("diag_gpu_") for name in names)
    anywhere = "from any host that reaches the server (on the server's own host it also reads GPUs and processes)"
    place = "on the server's own host" if host_only else anywhere
    subject = " ".join(("<instance>", *(f"{label} <{label}>" for label in incident.per if label != "instance")))
    missing = (
        "`CANNOT TELL` (exit status 3), or `NO INCIDENT FOUND` (exit status 0): telemetry is missing, and the report "
        "says which."
    )
    if incident.severity == "info":
        report = f"While it lasts, `Also` lists `info  {incident.id}`; `--verbose` says where. Its symptoms:"
        status = (
            "The verdict stays `HEALTHY` (exit status 0): an info incident does not hurt users by itself. " + missing
        )
    else:
        verdict = f"{incident.severity.upper()}  {incident.id}   {subject}"
        report = f"While it lasts, the report begins with `{verdict}`. Its evidence:"
        critical = f" (`CRITICAL` and 2 when {claim(incident.escalates, contract)})" if incident.escalates else ""
        status = (
            f"The exit status is {EXIT_STATUS[incident.severity]}{critical}. `HEALTHY` (exit status 0): the incident"
            f" has ended, and the dashboard shows when. {missing}"
        )
    conditions = [(condition.signal.name, threshold(condition, contract)) for condition in incident.symptoms]
    width = max(len(name) for name, _ in conditions)
    return [
        f"Run this {place}; it takes 30 s:",
        "",
        "```console",
        f"$ diag doctor http://<instance>{' --log FILE' if log else ''}",
        "```",
        "",
        report,
        "",
        "```text",
        *(f"{name:<{width}}  <value>  {limit}" for name, limit in conditions),
        "```",
        "",
        status,
    ]


def _metrics(incident: Incident, contract: Contract) -> list[str]:
    """Return the names of all metrics that the symptoms read."""
    formulas = (formula(symptom.signal, incident.per, incident.window, contract) for symptom in incident.symptoms)
    return sorted({name for found in formulas for name in metric_names(parse(found))} - {"up"})


def _symptoms(incident: Incident, contract: Contract, rules: RuleSet) -> list[str]:
    """Return each symptom with its PromQL, then the commands that show the raw samples."""
    lines = []
    for condition in incident.symptoms:
        series = rules.series[formula(condition.signal, incident.per, incident.windows[0], contract).name]
        reading = condition.signal.sentence.format(value="`<value>`")
        other_side = capitalized(in_words(condition.opposite, contract))
        lines += [
            f"**{claim(condition, contract)}**: {reading}. {other_side} rules the incident out.",
            "",
            "```promql",
            comparison(series, condition, contract),
            "```",
            "",
        ]
    names = _metrics(incident, contract)
    pages = {
        "http://<instance>/metrics": [name for name in names if name.startswith(("vllm:", "http_"))],
        "http://<exporter>/metrics": [name for name in names if name.startswith("diag_")],
    }
    commands = [f"$ curl -s {url} | grep -E '^({'|'.join(found)})'" for url, found in pages.items() if found]
    if commands:
        lines += [
            "Raw metrics: scrape twice, 10 s apart; compare counters (`_total`, `_count`, `_sum`), read gauges. Older"
            " vLLM releases lack some of these names.",
            "",
            "```console",
            *commands,
            "```",
        ]
    return lines


def _look_alikes(incident: Incident, known: Mapping[str, Incident], contract: Contract) -> list[str]:
    """Return a row for each look-alike: the condition that rules it out, otherwise one that it requires."""
    rows = []
    for look in incident.looks_like:
        against = look.requires or look.refuted_by
        deciding = f"ruled out by {claim(against, contract)}" if against else ""
        if not against and look.name in known:
            deciding = f"requires {claim(known[look.name].symptoms[0], contract)}"
        name = _links([look.name]) if look.name in known else look.name
        rows.append(f"| {name} | {_escape_cell(look.distinguish)} | {_escape_cell(deciding)} |")
    return ["| it could be | how to distinguish | deciding number |", "|---|---|---|", *rows] if rows else []


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- what to do -------------------------------------------------------------------------------------------------------


def _fix(number: int, fix: Fix, contract: Contract) -> list[str]:
    details = {
        "together with": ", ".join(f"`{flag} <computed>`" for flag, _ in fix.also),
        "replaces": f"`{fix.instead_of}`, in releases without it" if fix.instead_of else "",
        "applies if": "; ".join(claim(condition, contract) for condition in fix.only_if),
        "expected effect": fix.effect,
        "trade-off": fix.risk,
        "rollback": re.sub(r"<[^>]+>", r"`\g<0>`", fix.rollback),
        "restart": "needed" if fix.restart else "not needed",
        "versions": released(fix),
        "rationale": why(fix.why),
    }
    margin = " " * len(f"{number}. ")
    lines = [f"{margin}- {name}: {text}" for name, text in details.items() if text]
    return [f"{number}. {fix_in_markdown(fix)}", *lines]


def _verify(incident: Incident, contract: Contract) -> list[str]:
    """Return the signals that must move, how far, and by when."""
    return [
        f"Under the same load, at least one of these holds within {incident.window} and two scrapes of the change:",
        "",
        *(f"- {claim(condition.opposite, contract)}" for condition in incident.symptoms),
        "",
        f"Then `diag doctor http://<instance>` no longer reports {incident.id}, and the alert resolves"
        f" {keeps_firing(incident):.0f} s later (`keep_firing_for`). If you recorded the server before the change"
        " (`diag record http://<instance> BEFORE`), `diag verify BEFORE http://<instance>` checks whether the change"
        " fixed it at the same load, and what it cost. If nothing has moved by then, roll back and try the next fix.",
    ]


# -- where it comes from ----------------------------------------------------------------------------------------------


def _rationale(incident: Incident, contract: Contract) -> list[str]:
    rows = []
    for condition in incident.every_condition:
        source = condition.why
        reference = f"{source.kind}: <{source.reference}>" if source.reference else source.kind
        if source.kind == "measured":
            reference = f"measured: recording `{source.reference}`"
        rows.append(f"| {_escape_cell(claim(condition, contract))} | {_escape_cell(source.says)} | {reference} |")
    return ["| threshold | rationale | source |", "|---|---|---|", *dict.fromkeys(rows)]


def _alert_expression(
    incident: Incident, incidents: Sequence[Incident], contract: Contract, rules: RuleSet
) -> list[str]:
    """Return the alert as its rule has it, and the definition of every series that it reads, each once."""
    expressions = alert_expressions(incident, incidents, contract, rules)
    read = [series for series in rules.rules if any(series in text for text in expressions)]
    for series in read:
        read += [other for other in rules.rules[series].reads if other not in read]
    definitions = [rule for series, rule in rules.rules.items() if series in read]
    return [
        f"The alert {alert_name(incident.id)} in `alerts/diag.rules.yaml`:",
        "",
        *(line for text in expressions for line in ("```promql", *text.splitlines(), "```", "")),
        "The recording rules there define its series:",
        "",
        "```text",
        *(line for rule in definitions for line in (f"{rule.series} =", indent(pretty(rule.promql), "  "))),
        "```",
    ]
