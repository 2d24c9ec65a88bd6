"""The report for a machine: schema "diag.doctor/3", and "diag.health_report/1" for health checks (diag.*.schema.json).

Deterministic order, no NaN or Inf, the same bytes for the same recording.
"""

import math
from collections.abc import Mapping
from typing import Any

from diag.core.contract import Site
from diag.core.formatting import escaped, moment
from diag.core.subjects import Subject
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.proposals import FlagChange, Proposal, Value
from diag.diagnosis.report import Finding, Normality, Report
from diag.report import coverage
from diag.report import sentences as words
from diag.report.answer import ReportAnswer, answers
from diag.report.documents import fields, headed, json_text
from diag.report.spans import joined

SCHEMA, HEALTH_SCHEMA = "diag.doctor/3", "diag.health_report/1"
STATUS = {"CRITICAL": "red", "WARNING": "yellow", "INFO": "green", "HEALTHY": "green", "CANNOT TELL": "unknown"}
STATUS |= dict.fromkeys((coverage.NO_INCIDENT, coverage.NO_FAILURE), "unknown")
"""Colours of the verdicts."""
SEVERITY = {"CRITICAL": 1, "WARNING": 2, "INFO": 3}
"""Ranks of the impacts; 1 is the worst."""


def render(report: Report) -> str:
    return json_text(_finite(document(report)))


def document(report: Report) -> dict[str, Any]:
    """Build the JSON document, in the schema's order; `shared` is about fleets, `stacks` needs --stacks."""
    shared = [
        {
            **fields(label, "incident kind=property.kind property=property.name value"),
            **fields(label, "ill_with ill healthy_with healthy servers"),
            "also": [{"kind": item.kind, "property": item.name, "value": value} for item, value in label.also],
            "sentence": words.shared_sentence(label, report),
        }
        for label in report.shared
    ]
    stacks = [
        {
            **fields(call, "server conclusion next command"),
            "processes": [
                {
                    **fields(process, "pid role rank waits place moved halted problem"),
                    "suspect": process.pid in call.suspects,
                }
                for process in call.standing
            ],
        }
        for call in report.roll_calls
    ]
    content = {
        "observed": {
            **observed(report),
            "judged": {"incidents": len(report.checked), "servers": len(report.judged_servers)},
            "not_collected": list(report.observed.not_measured),
            "progress_unknown": [unjudged.sentence for unjudged in report.not_judged],
            "notes": coverage.notes(report),
        },
        "verdict": report.verdict,
        "health": health(report),
        "answers": [_answer(answer) for answer in answers(report, moment)],
        "progress": [{"subject": _subject(item.subject), **fields(item, "state reason")} for item in report.progress],
        "ceilings": [
            {**shares._asdict(), "subject": _subject(shares.subject), "bound": shares.bound}
            for shares in report.ceilings
        ],
        "diagnoses": [_diagnosis(finding) for finding in report.findings],
        "vitals": [fields(signs, "server=name launch? restarts now") for signs in report.vitals],
        "thresholds": list(report.contract),
        "normal": _normality(report.normality),
        **({"stacks": stacks} if stacks else {}),
        **({"shared": shared} if shared else {}),
    }
    return headed(SCHEMA, content)


def health(report: Report) -> dict[str, Any]:
    """Return the parts of health that were seen, what was not seen, and the incidents that cannot be told apart."""
    possible = [
        fields(suspects, "servers incidents missing_signals=missing sentence")
        for suspects in coverage.suspected(report)
    ]
    missing = [part._asdict() for part in report.health.missing]
    return {"seen": list(report.health.seen), "missing": missing, "possible": possible}


def observed(report: Report) -> dict[str, Any]:
    """Describe the judged samples: source, time range, scrapes, servers."""
    seen = report.observed
    ends = [
        {"server": name, **fields(ending, "state at errors processes last phase done")} for name, ending in seen.endings
    ]
    return {
        **fields(seen, "source target start end scrapes failed_scrapes"),
        "servers": coverage.servers(report),
        **({"log_ends": ends} if ends else {}),
    }


def _answer(answer: ReportAnswer) -> dict[str, Any]:
    """Return one answer, in the order in which every surface prints it."""
    actions = answer.actions
    return {
        **fields(answer, "verdict incident? where since when sentences=lines"),
        **fields(actions, "is_over do_now"),
        "fix": joined(words.action(actions.fix)) if actions.fix else None,
        **fields(answer, "relaunch?=actions.relaunch evidence ruled_out not_ruled_out not_seen do_not=actions.do_not"),
    }


def _normality(normality: Normality) -> dict[str, Any]:
    return {
        "baseline": normality.file or None,
        "readings": [
            {
                "subject": _subject(reading.subject),
                **fields(reading, "measure unit worse value normal spread ratio load windows vllm=version notable"),
                "sentence": coverage.normal_sentence(reading),
            }
            for reading in normality.readings
        ],
        "not_compared": list(normality.reasons),
    }


def _subject(subject: Subject) -> dict[str, str]:
    return dict(sorted(subject))


def _diagnosis(finding: Finding) -> dict[str, Any]:
    diagnosis = finding.diagnosis
    return {
        **fields(diagnosis, "incident=incident.id state severity"),
        "subject": _subject(diagnosis.subject),
        **fields(diagnosis, "primary explained_by since until"),
        "episodes": [{"since": since, "until": until} for since, until in diagnosis.episodes],
        "ongoing": diagnosis.ongoing,
        "symptoms": [_reading(reading) for reading in diagnosis.symptoms],
        "supporting_evidence": [_reading(reading) for reading in diagnosis.supports],
        "ruled_out": [{"look_alike": name, "evidence": evidence} for name, evidence in words.ruled_out(diagnosis)],
        "not_ruled_out": [fields(look_alike, "look_alike=name distinguish") for look_alike in diagnosis.open],
        "missing_signals": list(diagnosis.missing),
        "quotes": [fields(quote, "text file line process cause") for quote in finding.quotes],
        "fixes": [_fix(proposal) for proposal in finding.proposals],
        "fixes_not_computed": [
            fields(proposal, "name change=fix.change check_first=needs") for proposal in finding.uncomputed
        ],
        "relaunch": finding.relaunch,
        **({"basis": finding.basis} if finding.basis else {}),
        **({"failure": fields(finding.failure, "id means do source basis")} if finding.failure else {}),
    }


def _reading(reading: Reading) -> dict[str, Any]:
    return fields(
        reading,
        "signal=condition.signal.name value comparison=condition.op threshold=limit unit=condition.signal.unit"
        " holds sentence culprits",
    )


def _fix(proposal: Proposal) -> dict[str, Any]:
    fix = proposal.fix

    def values(change: Proposal | FlagChange) -> dict[str, Any]:
        return {"name": change.name, "before": _whole(change.before), "after": _whole(change.after)}

    return {
        "kind": fix.kind,
        **values(proposal),
        "change": proposal.text,
        "rationale": joined(words.why(fix.why)),
        **fields(fix, "expected_effect=effect trade_off=risk restart rollback"),
        "vllm_versions": words.released(fix),
        "check_first": list(proposal.needs),
        "changes": [{**values(change), "before_is_default": change.assumed} for change in proposal.changes],
    }


def _whole(value: Value) -> int | Value:
    """Turn a whole number into an integer, as it is written for a flag."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _finite(value: Any) -> Any:
    """Replace every number that JSON cannot hold by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list) else value


# -- the health report


def render_health(report: Report, site: Site) -> str:
    """Return the report about one server in the form of Elasticsearch's health report: status, indicators, impacts.

    It has one indicator for each incident that is present.
    """
    first, *_ = found = answers(report, moment)
    content = {
        "schema": HEALTH_SCHEMA,
        "server": report.observed.target,
        "at": report.observed.end,
        "status": STATUS[first.verdict],
        "symptom": " ".join(first.lines),
        "indicators": {answer.incident: _indicator(answer, site) for answer in found if answer.findings},
    }
    return json_text(content)


def health_without_data(server: str, why: str) -> str:
    """Return the health report about a server that has not been judged yet."""
    head = {"schema": HEALTH_SCHEMA, "server": server, "at": None, "status": "unknown"}
    return json_text({**head, "symptom": why, "indicators": {}})


def _indicator(answer: ReportAnswer, site: Site) -> dict[str, Any]:
    finding, actions = answer.findings[0], answer.actions
    action = [*actions.do_now, *([joined(words.action(actions.fix))] if actions.fix else [])]
    impact = {"severity": SEVERITY[answer.verdict], "description": answer.impact, "impact_areas": ["serving"]}
    return {
        "status": STATUS[answer.verdict],
        "symptom": answer.lines[0],
        "details": {"since": answer.since, "ongoing": not actions.is_over, "evidence": list(answer.evidence)},
        "impacts": [{"id": answer.incident, **impact}],
        "diagnosis": [
            {
                "id": answer.incident,
                "cause": " ".join(finding.diagnosis.incident.cause.split()),
                "action": " ".join(map(escaped, action)),
                "affected_resources": [words.where(server.diagnosis) for server in answer.findings],
                "help_url": site.runbook_url(answer.incident),
            }
        ],
    }
