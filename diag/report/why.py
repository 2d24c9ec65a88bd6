"""Why an incident is present, absent or unknown: every condition on every subject, with its value and threshold."""

from diag.core.formatting import plural
from diag.diagnosis.report import Report
from diag.report import sentences as words
from diag.report.layout import paragraph, table

SUBJECTS = 20
HELD = {True: "holds", False: "does not hold", None: "not measured"}


def render(report: Report, incident: str) -> str:
    """Return a paragraph and a table of conditions for each subject; the present and the unknown ones come first."""
    found = [finding.diagnosis for finding in report.findings if finding.diagnosis.incident.id == incident]
    if not found:
        return f"{incident}: nothing that it could be judged on was seen.\n"
    lines = []
    for diagnosis in found[:SUBJECTS]:
        symptoms = len(diagnosis.incident.symptoms)
        groups = {
            "symptom": diagnosis.symptoms[:symptoms],
            "required": diagnosis.symptoms[symptoms:],  # by a look-alike too
            "supports": diagnosis.supports,
            "escalates": diagnosis.escalation,
        }
        rows = [
            (role, reading.condition.signal.name, reading.shown, reading.threshold, HELD[reading.holds])
            for role, readings in groups.items()
            for reading in readings
        ]
        if diagnosis.state == "present":
            state = f"present, {words.when(diagnosis, words.time_format(report))}: all of its conditions hold"
        elif diagnosis.brief:
            state = "unknown: too little was observed to rule it out"
        else:  # the conditions that do not hold, or that have no value
            facts = (
                f"{reading.condition.signal.name} is {reading.sentence}"
                if reading.value is None
                else f"{reading.condition.signal.name} is {reading.shown}, not {reading.threshold.removeprefix('= ')}"
                for reading in diagnosis.symptoms
                if reading.holds is (False if diagnosis.state == "absent" else None)
            )
            state = f"{diagnosis.state}: {'; '.join(facts)}"
        lines += [*paragraph(f"{incident} on {words.where(diagnosis)}: {state}"), *table(rows), ""]
    if len(found) > SUBJECTS:
        lines += [f"  and {plural(len(found) - SUBJECTS, 'more subject')}", ""]
    return "\n".join(lines[:-1]) + "\n"
