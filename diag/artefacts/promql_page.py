"""The reference page of PromQL: thresholds with their rationale, alert expressions, definitions of recorded series."""

from collections.abc import Sequence
from itertools import groupby
from textwrap import indent

from diag.artefacts.alerts import alert_expressions
from diag.artefacts.names import GENERATED_MARK, alert_name, capitalized, claim, fix_in_markdown
from diag.core.contract import Contract
from diag.core.incident import Incident
from diag.knowledge.formulas import RecordedSeries, RuleSet
from diag.promql import pretty
from diag.report.sentences import why

PROMQL_PAGE = "promql"
"""The page of all definitions; the heading of an incident's part is its id."""


def promql_page(incidents: Sequence[Incident], contract: Contract, rules: RuleSet) -> str:
    """Return the thresholds and the alert expression of each incident, then every recorded series, folded."""
    text = (
        f"# PromQL: thresholds, alerts, recorded series\n\n*{GENERATED_MARK}.* The rules themselves:"
        " `alerts/diag.rules.yaml`. `diag explain NAME` prints a signal or part, its formula and its users.\n"
    )
    for incident in incidents:
        text += f"\n## {incident.id}\n" + _folded(
            alert_name(incident.id), judgement(incident, incidents, contract, rules)
        )
    text += "\n## Recorded series\n\nBy the labels of their subject; each reads only series before it.\n"
    levels = sorted(rules.rules.values(), key=_level)
    for level, records in groupby(levels, key=_level):
        text += _folded(level, definitions([rule.series for rule in records], rules))
    return text


def judgement(incident: Incident, incidents: Sequence[Incident], contract: Contract, rules: RuleSet) -> str:
    """Return the thresholds of an incident with their rationale, and its alert expressions."""
    rows = []
    for condition in incident.every_condition:
        source = condition.why
        reference = f"{source.kind}: <{source.reference}>" if source.reference else source.kind
        if source.kind == "measured":
            reference = f"measured: recording `{source.reference}`"
        rows.append(f"| {_escape_cell(claim(condition, contract))} | {_escape_cell(source.says)} | {reference} |")
    rows = ["| threshold | rationale | source |", "|---|---|---|", *dict.fromkeys(rows)]
    fixes = [
        f"{number}. {fix_in_markdown(fix)} {capitalized(why(fix.why))}." for number, fix in enumerate(incident.fixes, 1)
    ]
    expressions = alert_expressions(incident, incidents, contract, rules)
    blocks = [line for text in expressions for line in ("```promql", *text.splitlines(), "```", "")]
    at_once = [f"The alert has no `for`: {incident.immediate}.", ""] if incident.immediate else []
    return "\n".join([*rows, "", *at_once, "Rationale of the fixes:", "", *fixes, "", *blocks])


def definitions(series: Sequence[str], rules: RuleSet) -> str:
    """Return the definitions of recorded series."""
    lines = [line for name in series for line in (f"{name} =", indent(pretty(rules.rules[name].promql), "  "))]
    return "\n".join(["```text", *lines, "```", ""])


def _level(rule: RecordedSeries) -> str:
    return rule.series.partition(":")[0]


def _folded(summary: str, content: str) -> str:
    return f"\n<details><summary>{summary}</summary>\n\n{content}\n</details>\n"


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|")
