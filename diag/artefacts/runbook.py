"""The runbook of one incident, written for 3 a.m.; `diag explain` prints the same text."""

import re
from collections.abc import Mapping, Sequence
from textwrap import indent

from diag.artefacts.alerts import alert_expressions, keeps_firing
from diag.artefacts.names import (
    GENERATED_MARK,
    alert_name,
    claim,
    in_words,
    opposite,
    subject_labels,
    threshold,
)
from diag.core.contract import Contract
from diag.core.incident import Condition, Fix, Incident, LookAlike, Signal, Source
from diag.knowledge.formulas import comparison, formula
from diag.knowledge.rule_set import RuleSet
from diag.promql import metric_names, parse, pretty
from diag.report.sentences import released, why

EXIT_STATUS = {"warning": 1, "critical": 2}


def runbook(incident: Incident, incidents: Sequence[Incident], contract: Contract, rules: RuleSet) -> str:
    """Return the page of an incident: confirm, distinguish, mitigate, fix, verify, hand over, what not to do.

    `rules` are the recording rules for `incidents`.
    """
    known = {other.id: other for other in incidents}
    sections = {
        "Meaning": _meaning(incident, incidents),
        "Impact": [_sentence(incident.impact)],
        "Confirm": _confirm(incident, contract),
        "Immediate mitigation": _mitigation(incident),
        "Symptoms (all must hold)": _symptoms(incident, contract, rules),
        "Supporting evidence": _supporting(incident, contract),
        "What looks like it, how to distinguish": _look_alikes(incident, known, contract),
        "Fix (remediation), trade-off, rollback": _fixes(incident, contract),
        "Verify": _verify(incident, known, contract),
        "Escalate and hand over": _escalate(incident),
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


def _meaning(incident: Incident, incidents: Sequence[Incident]) -> list[str]:
    causes = [other.id for other in incidents if incident.id in other.explains]
    lines = [" ".join(incident.cause.split())]
    if causes:
        lines += ["", f"Possible causes: {linked(causes)}. If one of them is present too, start there."]
    if incident.explains:
        muted = "While this alert fires, Alertmanager mutes those of no higher severity."
        lines += ["", f"Explains: {linked(incident.explains)}. {muted}"]
    return lines


def linked(names: Sequence[str]) -> str:
    """Links to the runbooks of these incidents."""
    return ", ".join(f"[{name}]({name}.md)" for name in names)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


# -- is it this incident ----------------------------------------------------------------------------------------------


def _confirm(incident: Incident, contract: Contract) -> list[str]:
    """The command, from where to run it, and what it prints while the incident lasts."""
    conditions = [(condition.signal.name, threshold(condition, contract)) for condition in incident.symptoms]
    width = max(len(name) for name, _ in conditions)
    return [
        *_command(incident, contract),
        "```",
        "",
        _expected_report(incident),
        "",
        "```text",
        *(f"{name:<{width}}  <value>  {limit}" for name, limit in conditions),
        "```",
        "",
        _expected_exit_status(incident, contract),
    ]


def _expected_report(incident: Incident) -> str:
    labels = [f"{label} <{label}>" for label in incident.per if label != "instance"]
    subject = " ".join(("<instance>", *labels))
    if incident.severity == "info":
        return f"While it lasts, `Also` lists `info  {incident.id}`; `--verbose` says where. Its symptoms:"
    verdict = incident.severity.upper()
    return f"While it lasts, the report begins with `{verdict}  {incident.id}   {subject}`. Its evidence:"


def _expected_exit_status(incident: Incident, contract: Contract) -> str:
    missing = "`CANNOT TELL` (exit status 3): telemetry is missing, and the report says how to get it."
    if incident.severity == "info":
        return f"The verdict stays `HEALTHY` (exit status 0): an info incident does not hurt users by itself. {missing}"
    critical = f" (`CRITICAL` and 2 when {claim(incident.escalates, contract)})" if incident.escalates else ""
    return (
        f"The exit status is {EXIT_STATUS[incident.severity]}{critical}. `HEALTHY` (exit status 0): the incident has"
        f" ended, and the dashboard shows when. {missing}"
    )


def _command(incident: Incident, contract: Contract) -> list[str]:
    """Some incidents show only on the server's own host: vLLM's page knows neither GPUs nor the log."""
    names = _metrics(incident, contract)
    log = any(name.startswith(("diag_vllm_startup_", "diag_vllm_log_")) for name in names)
    host_only = log or any(name.startswith("diag_gpu_") for name in names)
    anywhere = "from any host that reaches the server (on the server's own host it also reads GPUs and processes)"
    place = "on the server's own host" if host_only else anywhere
    return [
        f"Run this {place}; it takes 30 s:",
        "",
        "```console",
        f"$ diag doctor http://<instance>{' --log FILE' if log else ''}",
    ]


def _metrics(incident: Incident, contract: Contract) -> list[str]:
    """Every metric that its symptoms read."""
    formulas = (formula(symptom.signal, incident.per, incident.window, contract) for symptom in incident.symptoms)
    return sorted({name for found in formulas for name in metric_names(parse(found))} - {"up"})


def _symptoms(incident: Incident, contract: Contract, rules: RuleSet) -> list[str]:
    """Each symptom with its PromQL; then the raw metrics, on the page."""
    parts = [line for condition in incident.symptoms for line in _symptom(condition, incident, contract, rules)]
    return [*parts, *_raw_metrics(incident, contract)]


def _symptom(condition: Condition, incident: Incident, contract: Contract, rules: RuleSet) -> list[str]:
    series = rules.series[formula(condition.signal, incident.per, incident.windows[0], contract).name]
    reading = condition.signal.sentence.format(value="`<value>`")
    other_side = in_words(opposite(condition), contract)
    return [
        f"**{claim(condition, contract)}**: {reading}. {_capitalized(other_side)} rules the incident out.",
        "",
        "```promql",
        comparison(series, condition, contract),
        "```",
        "",
    ]


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _raw_metrics(incident: Incident, contract: Contract) -> list[str]:
    """The commands that show the raw samples: vLLM's page, and the exporter's for what vLLM does not publish."""
    names = _metrics(incident, contract)
    pages = {
        "http://<instance>/metrics": [name for name in names if name.startswith("vllm:")],
        "http://<exporter>/metrics": [name for name in names if name.startswith("diag_")],
    }
    commands = [f"$ curl -s {url} | grep -E '^({'|'.join(found)})'" for url, found in pages.items() if found]
    if not commands:
        return []
    return [
        "Raw metrics: scrape twice, 10 s apart; compare counters (`_total`, `_count`, `_sum`), read gauges. Older vLLM"
        " releases lack some of these names.",
        "",
        "```console",
        *commands,
        "```",
    ]


def _supporting(incident: Incident, contract: Contract) -> list[str]:
    lines = [f"- {claim(condition, contract)}" for condition in incident.supports]
    if incident.escalates:
        lines.append(f"- {claim(incident.escalates, contract)}: the alert becomes critical")
    return ["Not required; each one makes the diagnosis more likely or more severe:", "", *lines] if lines else []


def _look_alikes(incident: Incident, known: Mapping[str, Incident], contract: Contract) -> list[str]:
    rows = [
        f"| {linked([look.name]) if look.name in known else look.name} | {_cell(look.distinguish)}"
        f" | {_cell(_deciding_number(look, known, contract))} |"
        for look in incident.looks_like
    ]
    return ["| it could be | how to distinguish | deciding number |", "|---|---|---|", *rows] if rows else []


def _deciding_number(look: LookAlike, known: Mapping[str, Incident], contract: Contract) -> str:
    """What rules a look-alike out; else what it requires itself."""
    against = look.requires or look.refuted_by
    if against:
        return f"ruled out by {claim(against, contract)}"
    return f"requires {claim(known[look.name].symptoms[0], contract)}" if look.name in known else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- what to do -------------------------------------------------------------------------------------------------------


def _mitigation(incident: Incident) -> list[str]:
    return [f"- {step}" for step in incident.mitigate]


def _fixes(incident: Incident, contract: Contract) -> list[str]:
    lines = [
        "Try them in this order. `diag doctor` leaves out what does not apply to this server and computes the values"
        " from its measurements; `diag` never changes a server.",
        "",
    ]
    return lines + [line for number, fix in enumerate(incident.fixes, 1) for line in _fix(number, fix, contract)]


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
    change = f" `{_typed(fix)}`:" if fix.name else ""
    indent = " " * len(f"{number}. ")
    lines = [f"{indent}- {name}: {text}" for name, text in details.items() if text]
    return [f"{number}.{change} {_computed(fix.change)}", *lines]


def _computed(text: str) -> str:
    """The text with a name for what the doctor computes; in code, or Markdown takes it for a tag of HTML."""
    return text.replace("{value}", "`<computed>`")


def _typed(fix: Fix) -> str:
    """The change as it is typed."""
    if fix.command:
        return re.sub(r"\{(\w+)\}", r"<\1>", fix.command)
    if fix.value is None:
        return f"remove {fix.name}" if fix.flag else fix.name
    value = "<computed>" if isinstance(fix.value, Signal) else fix.value
    return f"{fix.name}={value}" if fix.environment else f"{fix.name} {value}".strip()


def _verify(incident: Incident, known: Mapping[str, Incident], contract: Contract) -> list[str]:
    """Which signals must move, how far, and by when."""
    minutes = keeps_firing(incident, known) / 60
    return [
        f"Under the same load, at least one of these holds within {incident.window} and two scrapes of the change:",
        "",
        *(f"- {claim(opposite(condition), contract)}" for condition in incident.symptoms),
        "",
        f"Then `diag doctor http://<instance>` no longer reports {incident.id}, and the alert resolves {minutes:.0f}"
        " minutes later (`keep_firing_for`). If you recorded the server before the change (`diag record"
        " http://<instance> BEFORE`), `diag verify BEFORE http://<instance>` checks whether the change fixed it at the"
        " same load, and what it cost. If nothing has moved by then, roll back and try the next fix.",
    ]


def _escalate(incident: Incident) -> list[str]:
    return [
        "If no fix helps, hand over:",
        "",
        "- the recording that `diag record http://<instance> DIR --for 120 --log FILE` makes (it holds no secrets)",
        *(f"- {item}" for item in incident.hand_over),
    ]


# -- where it comes from ----------------------------------------------------------------------------------------------


def _rationale(incident: Incident, contract: Contract) -> list[str]:
    rows = (
        f"| {_cell(claim(condition, contract))} | {_cell(condition.why.says)} | {_reference(condition.why)} |"
        for condition in incident.every_condition
    )
    return ["| threshold | rationale | source |", "|---|---|---|", *dict.fromkeys(rows)]


def _reference(source: Source) -> str:
    if source.kind == "measured":
        return f"measured: recording `{source.reference}`"
    return f"{source.kind}: <{source.reference}>" if source.reference else source.kind


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
