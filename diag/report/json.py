"""The report for a machine: schema "diag.doctor/3", held by diag.doctor.schema.json beside this file.

Deterministic order, no NaN or Inf, the same bytes for the same recording.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from diag import __version__
from diag.core.formatting import moment
from diag.core.subjects import Subject
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.proposals import Proposal, Value
from diag.diagnosis.report import Finding, Normality, Report
from diag.report import coverage, unshown
from diag.report import sentences as words
from diag.report.answer import ReportAnswer, answers

SCHEMA = "diag.doctor/3"


def render(report: Report) -> str:
    return json.dumps(_finite(document(report)), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def document(report: Report) -> dict[str, Any]:
    """Build the JSON document, in the schema's order; `shared` is about fleets, `stacks` needs --stacks."""
    shared = [
        {
            "incident": found.incident,
            "kind": found.property.kind,
            "property": found.property.name,
            "value": found.value,
            "ill_with": found.ill_with,
            "ill": found.ill,
            "healthy_with": found.healthy_with,
            "healthy": found.healthy,
            "servers": list(found.servers),
            "also": [{"kind": item.kind, "property": item.name, "value": value} for item, value in found.also],
            "sentence": words.shared_sentence(found, report),
        }
        for found in report.shared
    ]
    names = ("pid", "role", "rank", "waits", "place", "moved", "halted", "problem")
    stacks = [
        {
            "server": call.server,
            "conclusion": call.conclusion,
            "next": call.next,
            "command": call.command,
            "processes": [
                {**{name: getattr(each, name) for name in names}, "suspect": each.pid in call.suspects}
                for each in call.standing
            ],
        }
        for call in report.roll_calls
    ]
    return {
        "schema": SCHEMA,
        "diag": __version__,
        "observed": {
            **observed(report),
            "judged": {"incidents": len(report.checked), "servers": len(report.judged_servers)},
            "not_collected": list(report.observed.not_measured),
            "progress_unknown": [unjudged.sentence for unjudged in report.not_judged],
            "notes": coverage.notes(report),
        },
        "verdict": report.verdict,
        "health": health(report),
        "answers": [answer(found) for found in answers(report, moment)],
        "progress": [
            {"subject": _subject(progress.subject), "state": progress.state, "reason": progress.reason}
            for progress in report.progress
        ],
        "ceilings": [
            {**shares._asdict(), "subject": _subject(shares.subject), "bound": shares.bound}
            for shares in report.ceilings
        ],
        "diagnoses": [_diagnosis(finding) for finding in report.findings],
        "vitals": [
            {"server": signs.name, "launch": signs.launch or None, "restarts": list(signs.restarts), "now": signs.now}
            for signs in report.vitals
        ],
        "thresholds": list(report.contract),
        "normal": _normality(report.normality),
        **({"stacks": stacks} if stacks else {}),
        **({"shared": shared} if shared else {}),
    }


def health(report: Report) -> dict[str, Any]:
    """Return the parts of health that were seen, what was not seen, and the incidents that cannot be told apart."""
    possible = [
        {
            "servers": list(each.servers),
            "incidents": list(each.incidents),
            "missing_signals": list(each.missing),
            "sentence": each.sentence,
        }
        for each in unshown.undecided(report)
    ]
    return {
        "seen": list(report.health.seen),
        "missing": [missing._asdict() for missing in report.health.missing],
        "possible": possible,
    }


def observed(report: Report) -> dict[str, Any]:
    """Describe the judged samples: source, time range, scrapes, servers."""
    seen = report.observed
    names = ("source", "target", "start", "end", "scrapes", "failed_scrapes")
    names_of_end = ("state", "at", "errors", "processes", "last", "phase", "done")
    ends = [{"server": name, **{each: getattr(ending, each) for each in names_of_end}} for name, ending in seen.endings]
    logs = {"log_ends": ends} if ends else {}
    return {name: getattr(seen, name) for name in names} | {"servers": coverage.servers(report)} | logs


def answer(found: ReportAnswer) -> dict[str, Any]:
    """Return one answer, in the order in which every surface prints it."""
    actions = found.actions
    return {
        "verdict": found.verdict,
        "incident": found.incident or None,
        "where": found.where,
        "since": found.since,
        "when": found.when,
        "sentences": found.lines,
        "is_over": actions.is_over,
        "do_now": actions.do_now,
        "fix": words.action(actions.fix) if actions.fix else None,
        "relaunch": actions.relaunch or None,
        "evidence": list(found.evidence),
        "ruled_out": list(found.ruled_out),
        "not_ruled_out": list(found.not_ruled_out),
        "not_seen": list(found.not_seen),
        "do_not": list(actions.do_not),
    }


def _normality(found: Normality) -> dict[str, Any]:
    names = ("measure", "unit", "worse", "value", "normal", "spread", "ratio", "load", "windows")
    return {
        "baseline": found.file or None,
        "readings": [
            {
                "subject": _subject(reading.subject),
                **{name: getattr(reading, name) for name in names},
                "vllm": reading.version,
                "notable": reading.notable,
                "sentence": coverage.normal_sentence(reading),
            }
            for reading in found.readings
        ],
        "not_compared": list(found.reasons),
    }


def _subject(subject: Subject) -> dict[str, str]:
    return dict(sorted(subject))


FAILURE = ("id", "means", "do", "source", "basis")


def _diagnosis(finding: Finding) -> dict[str, Any]:
    diagnosis = finding.diagnosis
    return {
        "incident": diagnosis.incident.id,
        "state": diagnosis.state,
        "severity": diagnosis.severity,
        "subject": _subject(diagnosis.subject),
        "primary": diagnosis.primary,
        "explained_by": diagnosis.explained_by,
        "since": diagnosis.since,
        "until": diagnosis.until,
        "episodes": [{"since": since, "until": until} for since, until in diagnosis.episodes],
        "ongoing": diagnosis.ongoing,
        "symptoms": [_reading(reading) for reading in diagnosis.symptoms],
        "supporting_evidence": [_reading(reading) for reading in diagnosis.supports],
        "ruled_out": [{"look_alike": name, "evidence": evidence} for name, evidence in words.ruled_out(diagnosis)],
        "not_ruled_out": [
            {"look_alike": look_alike.name, "distinguish": look_alike.distinguish} for look_alike in diagnosis.open
        ],
        "missing_signals": list(diagnosis.missing),
        "quotes": [
            {name: getattr(quote, name) for name in ("text", "file", "line", "process", "cause")}
            for quote in finding.quotes
        ],
        "fixes": [_fix(proposal) for proposal in finding.proposals],
        "fixes_not_computed": [
            {"name": proposal.name, "change": proposal.fix.change, "check_first": list(proposal.needs)}
            for proposal in finding.uncomputed
        ],
        "relaunch": finding.relaunch,
        **({"basis": finding.basis} if finding.basis else {}),
        **({"failure": {name: getattr(finding.failure, name) for name in FAILURE}} if finding.failure else {}),
    }


def _reading(reading: Reading) -> dict[str, Any]:
    signal = reading.condition.signal
    return {
        "signal": signal.name,
        "value": reading.value,
        "comparison": reading.condition.op,
        "threshold": reading.limit,
        "unit": signal.unit,
        "holds": reading.holds,
        "sentence": reading.sentence,
        "culprits": list(reading.culprits),
    }


def _fix(proposal: Proposal) -> dict[str, Any]:
    fix = proposal.fix
    return {
        "kind": fix.kind,
        "name": proposal.name,
        "before": _whole(proposal.before),
        "after": _whole(proposal.after),
        "change": proposal.text,
        "rationale": words.why(fix.why),
        "expected_effect": fix.effect,
        "trade_off": fix.risk,
        "restart": fix.restart,
        "rollback": fix.rollback,
        "vllm_versions": words.released(proposal.fix),
        "check_first": list(proposal.needs),
        "changes": [
            {
                "name": change.name,
                "before": _whole(change.before),
                "after": _whole(change.after),
                "before_is_default": change.assumed,
            }
            for change in proposal.changes
        ],
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
