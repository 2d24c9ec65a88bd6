"""Runbooks: one per incident, of two pages at most, one about missing telemetry, their index, and the on-call card.

A runbook says what to do; thresholds with their rationale and every definition of a series are on one page of their
own (`promql_page`). `diag explain` prints the runbook of an incident and its part of that page.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache

from diag.artefacts.alerts import TELEMETRY_RUNBOOK, keeps_firing, telemetry_alerts
from diag.artefacts.inhibitions import muting_sentences
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
from diag.artefacts.promql_page import PROMQL_PAGE, promql_page
from diag.core.contract import Contract, Site
from diag.core.declarations import PACKAGE, read
from diag.core.incident import OF_ONE_SERVER, Condition, Fix, Incident
from diag.knowledge import rocm
from diag.knowledge.formulas import RuleSet, formula, rule_set
from diag.promql import metric_names, parse, pretty
from diag.report.sentences import released

PLATFORMS = ("Kubernetes", "compose", "systemd")
EXIT_STATUS = {"warning": 1, "critical": 2}


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
        f" about missing telemetry: [{TELEMETRY_RUNBOOK}]({TELEMETRY_RUNBOOK}.md). Thresholds with their rationale, and the"
        f" definition of every series: [PromQL]({PROMQL_PAGE}.md).\n\n"
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
    """Return the on-call card: the first action and the runbook of each alert that pages or is a ticket."""
    text = (
        f"# On-call card\n\n*{GENERATED_MARK}.* Find the alert, do the first action, open its runbook. First, for any"
        " alert: `diag doctor http://<instance>`.\n"
    )
    for severity, heading in (("critical", "Pages"), ("warning", "Tickets")):
        rows = [
            f"| {alert_name(incident.id)} | {_first_action(incident)} | {_links([incident.id])} |\n"
            for incident in incidents
            if incident.severity == severity
        ]
        text += f"\n## {heading}\n\n| alert | first action | runbook |\n|---|---|---|\n" + "".join(rows)
    return text


def _first_action(incident: Incident) -> str:
    """Return the first step of the mitigation, without its reason."""
    return incident.mitigate[0].partition(":")[0].rstrip(".") if incident.mitigate else "Read the runbook"


def runbook(incident: Incident, incidents: Sequence[Incident], contract: Contract, rules: RuleSet) -> str:
    """Return the page of an incident. `rules` are the recording rules for `incidents`."""
    known = {other.id: other for other in incidents}
    site = contract.site
    sections = {
        "Impact": [f"{capitalized(incident.impact)}."],
        "Meaning": _meaning(incident, incidents, contract),
        "Is it real": _is_it_real(incident, contract, rules),
        "Do now": _do_now(incident),
        "What else it could be": _look_alikes(incident, known, contract),
        "Fix": _fixes(incident, contract),
        "Verify": _verify(incident, contract),
        "Escalate": _escalate(incident),
        "Do not": [f"- {warning}" for warning in incident.do_not],
        "Silence": _silence(incident, site),
        "Recent changes": _recent_changes(incident, site),
        "On AMD GPUs": _on_rocm(incident),
    }
    subject = " and ".join(subject_labels(incident, site))
    board = f"dashboard *vLLM / Server* with `incident` = `{incident.id}`"
    if url := server_board_url(incident.id, site):
        board = f"[dashboard]({url})"
    alert = alert_name(incident.id)
    head = (
        f"# {alert}: {incident.title}\n\n*{GENERATED_MARK}.* **{capitalized(incident.severity)}** alert `{alert}`,"
        f" incident `{incident.id}`, evaluated per {subject} over {incident.window}. See the {board};"
        f" [thresholds and PromQL]({PROMQL_PAGE}.md#{incident.id}).\n"
    )
    return head + "".join(f"\n## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items() if lines)


def _meaning(incident: Incident, incidents: Sequence[Incident], contract: Contract) -> list[str]:
    causes = [other.id for other in incidents if incident.id in other.explains]
    edges = [(other.id, edge) for other in incidents for edge in other.may_explain if edge.incident == incident.id]
    under = []
    for name, edge in edges:
        conditions = ["it began first"] if edge.began_first else []
        conditions += [claim(condition, contract) for condition in edge.where]
        under.append(f"{_links([name])} (if {' and '.join(conditions)})")
    lines = [" ".join(incident.cause.split())]
    if causes or under:
        listed = ", ".join([*([_links(causes)] if causes else []), *under])
        lines += ["", f"**Start with its cause** if one of these is present too: {listed}."]
    if muted := muting_sentences(incident, incidents, contract.site):
        lines += ["", " ".join(muted)]
    return lines


def _on_rocm(incident: Incident) -> list[str]:
    texts = [*incident.mitigate, *incident.hand_over, *incident.do_not]
    texts += [text for fix in incident.fixes for text in (fix.command, fix.change, fix.rollback)]
    pairs = rocm.commands_in("\n".join(texts)).items()
    commands = [re.sub(r"\{(\w+)\}", r"<\1>", f"`{theirs}` instead of `{ours}`") for ours, theirs in pairs]
    return [f"Run {'; '.join(commands)}."] if commands else []


def _links(names: Sequence[str]) -> str:
    """Link to the runbooks of incidents."""
    return ", ".join(f"[{name}]({name}.md)" for name in names)


# -- is it this incident ----------------------------------------------------------------------------------------------


def _is_it_real(incident: Incident, contract: Contract, rules: RuleSet) -> list[str]:
    """Return two commands, and what they print while the incident lasts."""
    names = _metrics(incident, contract)
    log = any(name.startswith(("diag_vllm_startup_", "diag_vllm_log_")) for name in names)
    host_only = log or any(name.startswith("diag_gpu_") for name in names)
    place = ", run on the server's own host," if host_only else ""
    subject = " ".join(("<instance>", *(f"{label} <{label}>" for label in incident.per if label != "instance")))
    if incident.severity == "info":
        report = f"lists `info  {incident.title} ({incident.id})` under `Also`, and the verdict stays `HEALTHY`"
    else:
        report = f"begins with `{incident.severity.upper()}  {incident.id}   {subject}`"
        report += f" (exit status {EXIT_STATUS[incident.severity]}"
        report += f"; `CRITICAL` when {claim(incident.escalates, contract)})" if incident.escalates else ")"
    series = [
        rules.series[formula(condition.signal, incident.per, incident.windows[0], contract).name]
        for condition in incident.symptoms
    ]
    lines = [
        "```console",
        f"$ diag doctor http://<instance>{' --log FILE' if log else ''}",
        f"$ promtool query instant http://<prometheus>:9090 {shlex.quote(_selector(series, contract.site))}",
        "```",
        "",
        f"The first{place} takes 30 s and {report}. If it says `HEALTHY` without this incident, the incident has ended;"
        " `CANNOT TELL` and `NO INCIDENT FOUND` name the telemetry that is missing. The second reads what the alert"
        f" reads. All of these must hold: {_claims(incident.symptoms, contract)}.",
    ]
    if incident.supports:
        lines[-1] += f" Not required, but likelier with: {_claims(incident.supports, contract)}."
    return lines


def _look_alikes(incident: Incident, known: Mapping[str, Incident], contract: Contract) -> list[str]:
    """Return how to distinguish each look-alike, with the condition that rules it out or one that it requires."""
    lines = []
    for look in incident.looks_like:
        against = look.requires or look.refuted_by
        deciding = f" Ruled out by {claim(against, contract)}." if against else ""
        if not against and look.name in known:
            deciding = f" Requires {claim(known[look.name].symptoms[0], contract)}."
        name = _links([look.name]) if look.name in known else look.name
        lines.append(f"- {capitalized(name)}: {look.distinguish}{deciding}")
    return lines


def _claims(conditions: Sequence[Condition], contract: Contract) -> str:
    return "; ".join(claim(condition, contract) for condition in conditions)


def _selector(series: Sequence[str], site: Site) -> str:
    """Return a selector of recorded series of one server."""
    server = ",".join(f'{label}="<{label}>"' for label in site.labels)
    (first, *others) = dict.fromkeys(series)
    return f'{{__name__=~"{"|".join((first, *others))}",{server}}}' if others else f"{first}{{{server}}}"


def _metrics(incident: Incident, contract: Contract) -> list[str]:
    """Return the names of all metrics that the symptoms read."""
    formulas = (formula(symptom.signal, incident.per, incident.window, contract) for symptom in incident.symptoms)
    return sorted({name for found in formulas for name in metric_names(parse(found))} - {"up"})


# -- what to do -------------------------------------------------------------------------------------------------------


def _do_now(incident: Incident) -> list[str]:
    """Return the mitigation, and the commands of its operations on each platform."""
    lines = [f"- {step}" for step in incident.mitigate]
    if not incident.operations:
        return lines
    lines += ["", "```bash"]
    for platform in PLATFORMS:
        lines.append(f"# {platform}")
        for name in incident.operations:
            operation = operations()[name]
            command, _, comment = operation[platform].partition("   # ")
            note = f"{operation['what']} ({comment})" if comment else operation["what"]
            lines.append(command if command.startswith("#") else f"{command}   # {note}")
    return [*lines, "```"]


def _fixes(incident: Incident, contract: Contract) -> list[str]:
    intro = "Try them in this order; `diag doctor` leaves out what does not apply to this server"
    intro += f" and computes {COMPUTED}." if any(fix.signals for fix in incident.fixes) else "."
    if any(fix.restart and fix.kind in ("vllm_flag", "environment") for fix in incident.fixes):
        commands = ", ".join(f"`{operations()['change'][platform]}` ({platform})" for platform in PLATFORMS)
        intro += f" To change a flag: {commands}."
    return [intro, "", *(_fix(number, fix, contract) for number, fix in enumerate(incident.fixes, 1))]


def _fix(number: int, fix: Fix, contract: Contract) -> str:
    also = ", ".join(f"`{flag} {COMPUTED}`" for flag, _ in fix.also)
    rollback = re.sub(r"<[^>]+>", r"`\g<0>`", fix.rollback)  # code, or Markdown takes it for an HTML tag
    parts = [
        f"Together with {also}." if also else "",
        f"Instead of `{fix.instead_of}` in releases without it." if fix.instead_of else "",
        f"Needs {released(fix)}." if released(fix) else "",
        f"*Effect*: {fix.effect}.",
        f"*Trade-off*: {fix.risk}." if fix.risk else "",
        f"*Rollback*: {rollback}." if rollback else "",
        "Needs a restart." if fix.restart else "No restart.",
    ]
    condition = f"*If {_claims(fix.only_if, contract)}*: " if fix.only_if else ""
    return f"{number}. {condition}{fix_in_markdown(fix)} {' '.join(filter(None, parts))}"


def _verify(incident: Incident, contract: Contract) -> list[str]:
    """Return the signal that must move, how far, and by when."""
    signal = incident.ended_by or incident.symptoms[0].signal
    over = next(condition.opposite for condition in incident.symptoms if condition.signal == signal)
    return [
        f"Under the same load, within {incident.window} and two scrapes: {claim(over, contract)}. The alert resolves"
        f" {keeps_firing(incident):.0f} s later. `diag verify BEFORE http://<instance>` compares with a recording from"
        " before the change (`diag record http://<instance> BEFORE`). If nothing has moved, roll back and try the next"
        " fix.",
    ]


def _escalate(incident: Incident) -> list[str]:
    recording = "the recording of `diag record http://<instance> DIR --for 120 --log FILE` (it holds no secrets)"
    return [f"If no fix helps, hand over {'; '.join((recording, *incident.hand_over))}."]


def _silence(incident: Incident, site: Site) -> list[str]:
    """Return the command that silences the incident for a model, by labels that outlast a restart."""
    labels = [label for label in site.labels if label not in OF_ONE_SERVER and label != "model"]
    matchers = " ".join(f"{label}=<{label}>" for label in (*labels, "model"))
    return [
        "```console",
        "$ amtool silence add --alertmanager.url=http://<alertmanager>:9093 --duration=2h --comment='<ticket>'"
        f" incident={incident.id} {matchers}",
        "```",
    ]


def _recent_changes(incident: Incident, site: Site) -> list[str]:
    """Return where to look for what changed: flags that decide, restarts, releases, load."""
    flags = dict.fromkeys(fix.flag for fix in incident.fixes if fix.flag)
    server = ",".join(f'{label}="<{label}>"' for label in site.labels)
    lines = [f"- Flags that decide here: {', '.join(f'`{flag}`' for flag in flags)}."] if flags else []
    return [
        *lines,
        f"- Restarts, in Prometheus: `changes(process_start_time_seconds{{{server}}}[1d])`. Rollouts: `kubectl -n"
        " <namespace> rollout history deployment/<deployment>`, `docker compose images`, `journalctl -u vllm | grep"
        " 'non-default args'`.",
        "- Load: on the dashboard, requests and tokens in the hour before it began.",
    ]
