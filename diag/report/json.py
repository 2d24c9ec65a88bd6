"""The report for a machine: schema "diag.doctor/3", and "diag.health_report/1" for health checks (diag.*.schema.json).

Deterministic order, no NaN or Inf, the same bytes for the same recording.
"""

from diag.core.contract import Site
from diag.core.formatting import escaped, moment
from diag.diagnosis.report import Report
from diag.report import coverage
from diag.report import sentences as words
from diag.report.answer import answers
from diag.report.documents import Document, json_text
from diag.report.spans import joined

HEALTH_SCHEMA = "diag.health_report/1"
STATUS = {"CRITICAL": "red", "WARNING": "yellow", "INFO": "green", "HEALTHY": "green", "CANNOT TELL": "unknown"}
STATUS |= dict.fromkeys((coverage.NO_INCIDENT, coverage.NO_FAILURE), "unknown")
"""Colours of the verdicts."""
SEVERITY = {"CRITICAL": 1, "WARNING": 2, "INFO": 3}
"""Ranks of the impacts; 1 is the worst."""


DOCTOR = Document(
    "doctor",
    {
        "Report": {
            "server_lines": coverage.servers,
            "judged_incidents": lambda report: len(report.checked),
            "judged_count": lambda report: len(report.judged_servers),
            "notes": coverage.notes,
            "suspected": coverage.suspected,
            "answers": lambda report: answers(report, moment),
            "shared_labels": lambda report: [(label, words.shared_sentence(label, report)) for label in report.shared],
        },
        "RollCall": {"processes": lambda call: [(process, process.pid in call.suspects) for process in call.standing]},
        "ReportAnswer": {"fix": lambda answer: answer.actions.fix and words.action(answer.actions.fix)},
        "Diagnosis": {"ruled_out": words.ruled_out},
        "NormalReading": {"sentence": coverage.normal_sentence},
        "Proposal": {
            "rationale": lambda proposal: words.why(proposal.fix.why),
            "releases": lambda proposal: words.released(proposal.fix),
        },
    },
)
"""`shared` is about fleets, `stacks` needs --stacks."""


def render(report: Report) -> str:
    return DOCTOR.text(report)


# -- the health report


def render_health(report: Report, site: Site) -> str:
    """Return the report about one server in the form of Elasticsearch's health report: status, indicators, impacts.

    It has one indicator for each incident that is present.
    """
    first, *_ = every_answer = answers(report, moment)
    indicators = {}
    for answer in every_answer:
        if answer.findings:
            finding, actions = answer.findings[0], answer.actions
            action = [*actions.do_now, *([joined(words.action(actions.fix))] if actions.fix else [])]
            impact = {"severity": SEVERITY[answer.verdict], "description": answer.impact, "impact_areas": ["serving"]}
            diagnosis = {
                "id": answer.incident,
                "cause": " ".join(finding.diagnosis.incident.cause.split()),
                "action": " ".join(map(escaped, action)),
                "affected_resources": [words.where(server.diagnosis) for server in answer.findings],
                "help_url": site.runbook_url(answer.incident),
            }
            indicators[answer.incident] = {
                "status": STATUS[answer.verdict],
                "symptom": answer.lines[0],
                "details": {"since": answer.since, "ongoing": not actions.is_over, "evidence": list(answer.evidence)},
                "impacts": [{"id": answer.incident, **impact}],
                "diagnosis": [diagnosis],
            }
    content = {
        "schema": HEALTH_SCHEMA,
        "server": report.observed.target,
        "at": report.observed.end,
        "status": STATUS[first.verdict],
        "symptom": " ".join(first.lines),
        "indicators": indicators,
    }
    return json_text(content)


def health_without_data(server: str, why: str) -> str:
    """Return the health report about a server that has not been judged yet."""
    head = {"schema": HEALTH_SCHEMA, "server": server, "at": None, "status": "unknown"}
    return json_text({**head, "symptom": why, "indicators": {}})
