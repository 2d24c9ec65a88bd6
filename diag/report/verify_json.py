"""The report on a change for a machine: schema "diag.verify/1", held by diag.verify.schema.json beside this file."""

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
from diag.verify.load import Load
from diag.verify.signal_deltas import SignalDelta
from diag.verify.user_metrics import Bounds, UserMetric

SCHEMA = "diag.verify/1"


def render(found: Verification) -> str:
    """The comparison as indented JSON, one line break at its end; no NaN or Inf."""
    return json.dumps(document(found), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def document(found: Verification) -> dict[str, Any]:
    """The comparison as plain values, in the schema's order."""
    return {
        "schema": SCHEMA,
        "diag": __version__,
        "verdict": found.verdict,
        "headlines": headlines(found),
        "before": {**observed(found.before), "verdict": found.before.verdict},
        "after": {**observed(found.after), "verdict": found.after.verdict},
        "servers": [_server(each) for each in found.servers],
        "alone": list(found.alone),
    }


def _server(server: ServerComparison) -> Mapping[str, Any]:
    return {
        "before": server.before,
        "after": server.after,
        "comparable": not server.reasons,
        "reasons": list(server.reasons),
        "load": {"before": _load(server.load[0]), "after": _load(server.load[1])},
        "changes": [
            {
                "name": each.name,
                "before": each.before,
                "after": each.after,
                "follows": each.follows,
                "known": each.known,
            }
            for each in server.changes
        ],
        "incidents": [_outcome(each) for each in server.outcomes],
        "came": [_diagnosis(each) for each in server.came],
        "users_feel": [_line(each) for each in server.user_metrics],
        "notes": list(server.notes),
    }


def _load(load: Load) -> Mapping[str, Any]:
    numbers = {name: getattr(load, name) for name in ("in_flight", "arrivals", "finished", "seconds")}
    return {**numbers, "prompts": asdict(load.prompts), "answers": asdict(load.answers)}


def _diagnosis(one: Diagnosis) -> dict[str, Any]:
    return {"incident": one.incident.id, "severity": one.severity, "subject": dict(one.subject)}


def _outcome(outcome: IncidentOutcome) -> Mapping[str, Any]:
    return {
        **_diagnosis(outcome.before),
        "primary": outcome.before.primary,
        "verdict": outcome.verdict,
        "because": outcome.because,
        "after": outcome.after.state if outcome.after else None,
        "signals": [_signal(each) for each in outcome.signal_deltas],
        "fixes": [
            {"name": each.fix.name, "effect": each.fix.effect, "proposed": each.proposed or None}
            for each in outcome.tried
        ],
    }


def _signal(each: SignalDelta) -> Mapping[str, Any]:
    condition = each.condition
    told = {"signal": condition.signal.name, "unit": condition.signal.unit, "op": condition.op, "limit": each.limit}
    return {**told, "before": each.before, "after": each.after, "met": each.met}


def _line(each: UserMetric) -> Mapping[str, Any]:
    sides = {"before": _edges(each.before), "after": _edges(each.after)}
    return {"name": each.name, "unit": each.unit, **sides, "change": each.change}


def _edges(span: Bounds | None) -> Mapping[str, Any] | None:
    if span is None:
        return None
    return {"from": span.least, "to": None if math.isinf(span.most) else span.most}
