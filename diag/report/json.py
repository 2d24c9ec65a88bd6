"""The report for a machine: schema "diag.doctor/1", held by diag.doctor.schema.json beside this file.

Deterministic order, no NaN or Inf, the same bytes for the same recording.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from diag import __version__
from diag.core.subjects import Subject
from diag.diagnosis.diagnose import Reading
from diag.diagnosis.proposals import FlagChange, Proposal, Value
from diag.diagnosis.report import Finding, Report
from diag.report import sentences as words

SCHEMA = "diag.doctor/1"


def render(report: Report) -> str:
    """The report as indented JSON, one line break at its end."""
    return json.dumps(_finite(document(report)), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def document(report: Report) -> dict[str, Any]:
    """The report as plain values, in the schema's order."""
    return {
        "schema": SCHEMA,
        "diag": __version__,
        "observed": _observed(report),
        "verdict": report.verdict,
        "progress": [
            {"subject": _subject(each.subject), "state": each.state, "because": each.reason} for each in report.progress
        ],
        "diagnoses": [_diagnosis(each) for each in report.findings],
        "contract": list(report.contract),
    }


def looked(report: Report) -> dict[str, Any]:
    """What was looked at, where and when."""
    seen = report.observed
    return {
        "source": seen.source,
        "target": seen.target,
        "from": seen.start,
        "to": seen.end,
        "scrapes": seen.scrapes,
        "failed_scrapes": seen.failed_scrapes,
        "servers": list(seen.servers),
    }


def _observed(report: Report) -> dict[str, Any]:
    seen = report.observed
    return {
        **looked(report),
        "not_measured": list(seen.not_measured),
        "not_judgeable": list(report.blind),
        "notes": list(seen.notes),
    }


def _subject(subject: Subject) -> dict[str, str]:
    return dict(sorted(subject))


def _diagnosis(finding: Finding) -> dict[str, Any]:
    one = finding.diagnosis
    return {
        "incident": one.incident.id,
        "state": one.state,
        "severity": one.severity,
        "subject": _subject(one.subject),
        "primary": one.primary,
        "explained_by": one.explained_by,
        "since": one.since,
        "until": one.until,
        "ongoing": one.ongoing,
        "symptoms": [_reading(each) for each in one.symptoms],
        "supports": [_reading(each) for each in one.supports],
        "refuted": [{"looks_like": each.name, "because": each.evidence} for each in one.refuted],
        "not_ruled_out": [{"looks_like": each.name, "tell": each.distinguish} for each in one.open],
        "missing": list(one.missing),
        "fixes": [_fix(each) for each in finding.proposals],
        "relaunch": finding.relaunch,
    }


def _reading(reading: Reading) -> dict[str, Any]:
    signal = reading.condition.signal
    return {
        "signal": signal.name,
        "value": reading.value,
        "op": reading.condition.op,
        "limit": reading.limit,
        "holds": reading.holds,
        "unit": signal.unit,
        "says": reading.sentence,
        "which": list(reading.culprits),
    }


def _fix(proposal: Proposal) -> dict[str, Any]:
    fix = proposal.fix
    return {
        "kind": fix.kind,
        "name": proposal.name,
        "from": _whole(proposal.before),
        "to": _whole(proposal.after),
        "change": proposal.text,
        "why": words.why(fix.why),
        "effect": fix.effect,
        "risk": fix.risk,
        "restart": fix.restart,
        "rollback": fix.rollback,
        "versions": words.versions(proposal),
        "needs": list(proposal.needs),
        "changes": [_change(each) for each in proposal.changes],
    }


def _change(change: FlagChange) -> dict[str, Any]:
    return {
        "name": change.name,
        "from": _whole(change.before),
        "to": _whole(change.after),
        "from_is_default": change.assumed,
    }


def _whole(value: Value) -> int | Value:
    """A count without a fraction, as one writes it for a flag."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _finite(value: Any) -> Any:
    """The value with every number that JSON cannot hold made null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list) else value
