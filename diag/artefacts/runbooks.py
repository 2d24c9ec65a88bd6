"""Runbooks from the declarations, to be read at three in the morning; `diag explain` prints the same text."""

import re
from collections.abc import Mapping, Sequence

from diag.artefacts.guards import GUARDS, PAGE, SERVER, asked
from diag.artefacts.names import MARK, alert_name, comparison, expression, opposite, per
from diag.core.contract import Contract
from diag.core.incident import Condition, Fix, Incident, LookAlike, Signal, Source, regroup
from diag.promql import metric_names, parse, pretty
from diag.report.sentences import released, why

EXIT = {"info": 0, "warning": 1, "critical": 2}


def runbooks(incidents: Sequence[Incident], contract: Contract) -> dict[str, str]:
    """The text of every runbook by its file, and their index."""
    pages = {each.id: runbook(each, incidents, contract) for each in incidents}
    return {
        f"runbooks/{name}.md": text
        for name, text in {**pages, PAGE: _telemetry(contract), "README": _index(incidents)}.items()
    }


def runbook(incident: Incident, incidents: Sequence[Incident], contract: Contract) -> str:
    """One incident: is it real, how to tell, what to do, how to see that it worked, and what not to do."""
    sections = {
        "Meaning": _meaning(incident, incidents),
        "Impact": [f"{_sentence(incident.impact)}"],
        "Is it real? (two minutes)": _is_it_real(incident, contract),
        "Diagnose": _diagnose(incident, contract),
        "What looks like it": _look_alikes(incident, {each.id: each for each in incidents}, contract),
        "Mitigate": _mitigate(incident),
        "Fix": _fixes(incident),
        "Verify": _verify(incident, contract),
        "Escalate": _escalate(incident),
        "Do NOT": [f"- {each}" for each in incident.do_not],
        "Where the limits come from": _provenance(incident, contract),
        "The whole of it as PromQL": _promql(incident.query(incident.window, contract.values()), contract),
    }
    head = (
        f"# {alert_name(incident.id)}: {incident.title}\n\n*{MARK}.* `{incident.id}`, {incident.severity},"
        f" judged for each {' and '.join(per(incident, contract.site))} over {incident.window}\n"
    )
    return head + "".join(f"\n## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items() if lines)


def _meaning(incident: Incident, incidents: Sequence[Incident]) -> list[str]:
    causes = [each.id for each in incidents if incident.id in each.explains]
    lines = [" ".join(incident.cause.split())]
    if causes:
        lines += ["", f"It may follow from {_linked(causes)}: look there first where that one is present, too."]
    if incident.explains:
        lines += ["", f"It explains {_linked(incident.explains)}, whose alerts it silences."]
    return lines


def _linked(names: Sequence[str]) -> str:
    return ", ".join(f"[{name}]({name}.md)" for name in names)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


# -- is it real, and why ----------------------------------------------------------------------------------------------


def _is_it_real(incident: Incident, contract: Contract) -> list[str]:
    subject = " ".join(("<instance>", *(f"{label} <{label}>" for label in incident.per if label != "instance")))
    rows = [
        f"  {'because' if not at else '':<13} {each.signal.name:<36} <value>  {comparison(each, contract)}"
        for at, each in enumerate(incident.symptoms)
    ]
    return [
        *_where(incident, contract),
        f"{incident.severity.upper()} {incident.id} on {subject}, now, since <time>: {incident.impact}",
        "",
        *rows,
        "```",
        "",
        f"Exit status {EXIT[incident.severity]}. `HEALTHY` and 0: it has ended, and the dashboard shows when."
        " `CANNOT TELL` and 3: it says what is missing and how to get it.",
    ]


def _where(incident: Incident, contract: Contract) -> list[str]:
    """The command, and from where: what a page of vLLM's does not say is seen on the server's own host."""
    names = _metrics(incident, contract)
    log = any(name.startswith(("diag_vllm_startup_", "diag_vllm_log_")) for name in names)
    here = log or any(name.startswith("diag_gpu_") for name in names)
    anywhere = "from anywhere that reaches the server; on its own host it sees GPUs and processes, too"
    at = "on the server's own host" if here else anywhere
    return [
        f"Half a minute, {at}:",
        "",
        "```console",
        f"$ diag doctor http://<instance>{' --log FILE' if log else ''}",
    ]


def _metrics(incident: Incident, contract: Contract) -> list[str]:
    """Every metric that its symptoms ask for."""
    texts = (expression(each.signal, incident, incident.window, contract) for each in incident.symptoms)
    return sorted({name for text in texts for name in metric_names(parse(text))} - {"up"})


def _diagnose(incident: Incident, contract: Contract) -> list[str]:
    """Each symptom with what Prometheus is asked and answers; then the metrics themselves, on the page."""
    parts = [line for each in incident.symptoms for line in _symptom(each, incident, contract)]
    supports = [f"- {_claim(each, contract)}" for each in incident.supports]
    return [
        *parts,
        *(["It is the likelier where:", "", *supports, ""] if supports else []),
        *_pages(incident, contract),
    ]


def _symptom(condition: Condition, incident: Incident, contract: Contract) -> list[str]:
    asked = expression(condition.signal, incident, incident.window, contract)
    says = condition.signal.sentence.format(value="<value>")
    return [
        f"**{_claim(condition, contract)}**. Ask Prometheus; it is the case where the answer is"
        f' {comparison(condition, contract)} ("{says}"):',
        "",
        "```promql",
        pretty(asked),
        "```",
        "",
    ]


def _claim(condition: Condition, contract: Contract) -> str:
    return f"{condition.signal.name} {comparison(condition, contract)}"


def _pages(incident: Incident, contract: Contract) -> list[str]:
    """The commands that show the raw samples: vLLM's page, and the exporter's for what vLLM does not say."""
    names = _metrics(incident, contract)
    pages = {
        "http://<instance>/metrics": [name for name in names if name.startswith("vllm:")],
        "http://<exporter>/metrics": [name for name in names if name.startswith("diag_")],
    }
    commands = [f"$ curl -s {url} | grep -E '^({'|'.join(found)})'" for url, found in pages.items() if found]
    if not commands:
        return []
    return [
        "The samples themselves: twice, ten seconds apart; counters (`_total`, `_count`, `_sum`) are to be compared,"
        " gauges to be read. A name that an older vLLM does not have prints nothing.",
        "",
        "```console",
        *commands,
        "```",
    ]


def _look_alikes(incident: Incident, known: Mapping[str, Incident], contract: Contract) -> list[str]:
    rows = [
        f"| {_linked([each.name]) if each.name in known else each.name} | {_cell(each.distinguish)}"
        f" | {_cell(_decides(each, known, contract))} |"
        for each in incident.looks_like
    ]
    return ["| it may be | how to tell | by which number |", "|---|---|---|", *rows] if rows else []


def _decides(look: LookAlike, known: Mapping[str, Incident], contract: Contract) -> str:
    """What rules a look-alike out; else what it would take to be it."""
    against = look.requires or look.refuted_by
    if against:
        return f"it is not where {_claim(against, contract)}"
    return f"it takes {_claim(known[look.name].symptoms[0], contract)}" if look.name in known else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- what to do -------------------------------------------------------------------------------------------------------


def _mitigate(incident: Incident) -> list[str]:
    return ["Before the cause is cured, for those who wait:", "", *(f"- {each}" for each in incident.mitigate)]


def _fixes(incident: Incident) -> list[str]:
    lines = [
        "In this order. `diag doctor` leaves out what does not apply to this server and puts in the numbers that it"
        " computes from it; `diag` itself never changes a server.",
        "",
    ]
    return lines + [line for number, fix in enumerate(incident.fixes, 1) for line in _fix(number, fix)]


def _fix(number: int, fix: Fix) -> list[str]:
    needs = "; ".join(f"{each.signal.name} {each.op} {each.limit}" for each in fix.only_if)
    told = {
        "along with it": ", ".join(f"`{flag} <computed>`" for flag, _ in fix.also),
        "in place of": f"`{fix.instead_of}`, in releases that lack it" if fix.instead_of else "",
        "applies where": needs,
        "effect": fix.effect,
        "price": fix.risk,
        "rollback": fix.rollback,
        "restart": "needed" if fix.restart else "not needed",
        "versions": released(fix),
        "why": why(fix.why),
    }
    name = f" `{_what(fix)}`:" if fix.name else ""
    return [f"{number}.{name} {_open(fix.change)}", *(f"   - {key}: {value}" for key, value in told.items() if value)]


def _open(text: str) -> str:
    """The text with what the doctor fills in named: `<computed>`."""
    return text.replace("{value}", "<computed>")


def _what(fix: Fix) -> str:
    """The change as it is typed; a number that `diag doctor` computes is named as one."""
    if fix.command:
        return re.sub(r"\{(\w+)\}", r"<\1>", fix.command)
    if fix.value is None:
        return f"remove {fix.name}" if fix.flag else fix.name
    value = "<computed>" if isinstance(fix.value, Signal) else fix.value
    return f"{fix.name}={value}" if fix.environment else f"{fix.name} {value}".strip()


def _verify(incident: Incident, contract: Contract) -> list[str]:
    """Which series must move, how far, and by when."""
    window = f"{incident.window} and two scrapes"
    return [
        f"One of these must hold within {window} of the change under the same load:",
        "",
        *(f"- {each.signal.name} {opposite(each, contract)}" for each in incident.symptoms),
        "",
        f"Then `diag doctor http://<instance>` no longer names {incident.id}, and the alert ends 5 minutes later"
        " (`keep_firing_for`). With a recording from before the change (`diag record http://<instance> BEFORE`),"
        " `diag verify BEFORE http://<instance>` says whether it is cured at the same load, and what got worse. Where"
        " nothing has moved by then, roll back and take the next fix.",
    ]


def _escalate(incident: Incident) -> list[str]:
    return [
        "Where the fixes do not help, hand over:",
        "",
        "- `diag record http://<instance> DIR --for 120 --log FILE`: what the server said, without secrets, for anybody"
        " to judge",
        *(f"- {each}" for each in incident.hand_over),
    ]


# -- where it comes from ----------------------------------------------------------------------------------------------


def _provenance(incident: Incident, contract: Contract) -> list[str]:
    rows = (
        f"| {_cell(_claim(each, contract))} | {_cell(each.why.says)} | {_reference(each.why)} |"
        for each in incident.every_condition
    )
    return ["| limit | because | source |", "|---|---|---|", *dict.fromkeys(rows)]


def _reference(source: Source) -> str:
    if source.kind == "measured":
        return f"measured: recording `{source.reference}`"
    return f"{source.kind}: <{source.reference}>" if source.reference else source.kind


def _promql(text: str, contract: Contract) -> list[str]:
    return ["```promql", pretty(regroup(text, contract.site.labels)), "```"]


# -- the other pages --------------------------------------------------------------------------------------------------


def _telemetry(contract: Contract) -> str:
    """The runbook of the alerts about the telemetry itself."""
    parts = [
        f"\n## {each.alert}\n\n{_plain(each.summary)}: {each.impact}.\n\n{each.cure}\n\n"
        f"```promql\n{pretty(asked(each, contract))}\n```\n"
        for each in GUARDS
    ]
    return f"# What cannot be seen\n\n*{MARK}.* Missing telemetry is neither health nor harm.\n" + "".join(parts)


def _plain(template: str) -> str:
    """A template of an alert with names in the place of its labels."""
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"<\1>", template.replace(SERVER, "<server>"))


def _index(incidents: Sequence[Incident]) -> str:
    rows = "".join(
        f"| {_linked([each.id])} | {alert_name(each.id)} | {each.severity} | {', '.join(each.per)} | {each.title} |\n"
        for each in incidents
    )
    return (
        f"# Runbooks\n\n*{MARK}.* One for each alert; where telemetry is missing: [{PAGE}]({PAGE}.md).\n\n"
        f"| incident | alert | severity | judged for each | |\n|---|---|---|---|---|\n{rows}"
    )
