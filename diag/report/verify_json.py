"""The comparison before and after a change, for a machine: schema "diag.verify/2" (diag.verify.schema.json)."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from diag import __version__
from diag.diagnosis.diagnose import Diagnosis
from diag.report.json import observed
from diag.report.verify import headlines
from diag.verify.compare import IncidentOutcome, ServerComparison, Verification
from diag.verify.deltas import Bounds, SignalDelta, UserMetric
from diag.verify.load import Lengths, Load

SCHEMA = "diag.verify/2"


def render(verification: Verification) -> str:
    """The comparison as indented JSON, one line break at its end; no NaN or Inf."""
    return json.dumps(document(verification), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def document(verification: Verification) -> dict[str, Any]:
    """The comparison as plain values, in the schema's order."""
    return {
        "schema": SCHEMA,
        "diag": __version__,
        "verdict": verification.verdict,
        "headlines": headlines(verification),
        "before": {**observed(verification.before), "verdict": verification.before.verdict},
        "after": {**observed(verification.after), "verdict": verification.after.verdict},
        "servers": [_server(server) for server in verification.servers],
        "unmatched": list(verification.unmatched),
    }


def _server(server: ServerComparison) -> Mapping[str, Any]:
    before, after = server.loads
    return {
        "before": server.before,
        "after": server.after,
        "comparable": not server.reasons,
        "reasons": list(server.reasons),
        "load": {"before": _load(before), "after": _load(after)},
        "changes": [asdict(change) for change in server.changes],
        "incidents": [_outcome(outcome) for outcome in server.outcomes],
        "new_incidents": [_diagnosis(diagnosis) for diagnosis in server.new_incidents],
        "user_metrics": [_metric(metric) for metric in server.user_metrics],
        "notes": list(server.notes),
    }


def _load(load: Load) -> Mapping[str, Any]:
    numbers = {name: getattr(load, name) for name in ("in_flight", "arrivals", "finished", "seconds", "idle")}
    return {**numbers, "prompts": _lengths(load.prompts), "outputs": _lengths(load.outputs)}


def _lengths(lengths: Lengths) -> Mapping[str, Any]:
    return {name: getattr(lengths, name) for name in ("mean", "error", "longest", "per_second")}


def _diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "incident": diagnosis.incident.id,
        "severity": diagnosis.severity,
        "subject": dict(diagnosis.subject),
    }


def _outcome(outcome: IncidentOutcome) -> Mapping[str, Any]:
    return {
        **_diagnosis(outcome.before),
        "primary": outcome.before.primary,
        "verdict": outcome.verdict,
        "because": outcome.because,
        "after": outcome.after.state if outcome.after else None,
        "signals": [_signal(delta) for delta in outcome.signal_deltas],
        "fixes": [
            {"name": applied.name, "effect": applied.fix.effect, "proposed": applied.proposed or None}
            for applied in outcome.applied_fixes
        ],
    }


def _signal(delta: SignalDelta) -> Mapping[str, Any]:
    return {
        "signal": delta.condition.signal.name,
        "unit": delta.condition.signal.unit,
        "op": delta.condition.op,
        "threshold": delta.threshold,
        "before": delta.before,
        "after": delta.after,
        "met": delta.met,
    }


def _metric(metric: UserMetric) -> Mapping[str, Any]:
    sides = {"before": _bounds(metric.before), "after": _bounds(metric.after)}
    return {"name": metric.name, "unit": metric.unit, **sides, "change": metric.change}


def _bounds(bounds: Bounds | None) -> Mapping[str, Any] | None:
    if bounds is None:
        return None
    return {"from": bounds.lower, "to": None if math.isinf(bounds.upper) else bounds.upper}
