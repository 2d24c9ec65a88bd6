"""The report as a health report for machines, in the form of Elasticsearch's: status, indicators, impacts, diagnoses.

The schema "diag.health_report/1" is diag.health_report.schema.json beside this file.
"""

import json
from collections.abc import Mapping
from typing import Any

from diag.core.contract import Site
from diag.core.formatting import escaped, moment
from diag.diagnosis.report import Report
from diag.report import sentences as words
from diag.report.answer import ReportAnswer, answers
from diag.report.unshown import NO_FAILURE, NO_INCIDENT

SCHEMA = "diag.health_report/1"
STATUS = {"CRITICAL": "red", "WARNING": "yellow", "INFO": "green", "HEALTHY": "green", "CANNOT TELL": "unknown"}
STATUS |= dict.fromkeys((NO_INCIDENT, NO_FAILURE), "unknown")
"""Colours of the verdicts."""
SEVERITY = {"CRITICAL": 1, "WARNING": 2, "INFO": 3}
"""Ranks of the impacts; 1 is the worst."""


def render(report: Report, site: Site) -> str:
    """Return the JSON document about one server, with one indicator for each incident that is present."""
    found = answers(report, moment)
    indicators = {answer.incident: _indicator(answer, site) for answer in found if answer.findings}
    status, symptom = STATUS[found[0].verdict], " ".join(found[0].lines)
    return _document(report.observed.target, status, symptom, report.observed.end, indicators)


def without_data(server: str, why: str) -> str:
    """Return the JSON document about a server that has not been judged yet."""
    return _document(server, "unknown", why, None, {})


def _document(server: str, status: str, symptom: str, at: float | None, indicators: Mapping[str, Any]) -> str:
    content = {
        "schema": SCHEMA,
        "server": server,
        "at": at,
        "status": status,
        "symptom": symptom,
        "indicators": indicators,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _indicator(answer: ReportAnswer, site: Site) -> dict[str, Any]:
    finding, actions = answer.findings[0], answer.actions
    action = [*actions.do_now, *([words.action(actions.fix)] if actions.fix else [])]
    return {
        "status": STATUS[answer.verdict],
        "symptom": answer.lines[0],
        "details": {"since": answer.since, "ongoing": not actions.is_over, "evidence": list(answer.evidence)},
        "impacts": [
            {
                "id": answer.incident,
                "severity": SEVERITY[answer.verdict],
                "description": answer.impact,
                "impact_areas": ["serving"],
            }
        ],
        "diagnosis": [
            {
                "id": answer.incident,
                "cause": " ".join(finding.diagnosis.incident.cause.split()),
                "action": " ".join(map(escaped, action)),
                "affected_resources": [words.where(each.diagnosis) for each in answer.findings],
                "help_url": site.runbook_url(answer.incident),
            }
        ],
    }
