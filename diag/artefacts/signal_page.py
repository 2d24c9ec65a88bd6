"""The page of a signal or a part: its formula, what the formula is made of, and what uses it."""

import re
from collections.abc import Iterable, Mapping, Sequence

from diag.artefacts.names import GENERATED_MARK, claim
from diag.core.contract import Contract
from diag.core.incident import Incident, Part, Signal, regroup
from diag.knowledge.formulas import formula
from diag.knowledge.rule_set import rule_set
from diag.knowledge.signals import DECLARED
from diag.promql import Formula, pretty

_PLACEHOLDER = re.compile(r"\$(\w+)")


def declared(incidents: Iterable[Incident]) -> dict[str, Part | Signal]:
    """Return every signal and part by its id: the built-in ones, and those that only an incident declares."""
    own = {condition.signal.id: condition.signal for incident in incidents for condition in incident.every_condition}
    return {**own, **DECLARED}


def signal_page(asked: Part | Signal, incidents: Sequence[Incident], contract: Contract) -> str:
    """Return the definition of a signal or a part, in Markdown."""
    users = [
        incident for incident in incidents if any(found.signal.id == asked.id for found in incident.every_condition)
    ]
    per, window = (users[0].per, users[0].windows[0]) if users else (("instance", "engine"), "5m")
    found = formula(asked, per, window, contract)
    series = rule_set(incidents, contract).series
    unit = asked.unit or "none"
    sections = {
        "Formula": ["```promql", asked.promql, "```"],
        "Parts": _parts(asked),
        "Used by": [*(_use(asked, incident, contract) for incident in users), *_readers(asked)] or ["nothing"],
        f"Over {window} per {' and '.join(per)}": [
            *([f"Recorded as `{series[found.name]}`.", ""] if found.name in series else []),
            "```promql",
            *_definitions(found, contract),
            "```",
        ],
    }
    sentence = f" {asked.sentence.format(value='`<value>`')}." if isinstance(asked, Signal) else ""
    head = f"# {asked.name}\n\n*{GENERATED_MARK}.* Id `{asked.id}`, unit: {unit}.{sentence}\n"
    return head + "".join(f"\n## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items() if lines)


def _parts(asked: Part | Signal) -> list[str]:
    """Return a line for each part that the formula names."""
    names = dict.fromkeys(name for name in _PLACEHOLDER.findall(asked.promql) if name in DECLARED)
    return [f"- `${name}`: `{DECLARED[name].promql}`" for name in names]


def _use(asked: Part | Signal, incident: Incident, contract: Contract) -> str:
    claims = (claim(found, contract) for found in incident.every_condition if found.signal.id == asked.id)
    return f"- incident `{incident.id}`: {'; '.join(dict.fromkeys(claims))}"


def _readers(asked: Part | Signal) -> list[str]:
    readers = (other for other in DECLARED.values() if asked.id in _PLACEHOLDER.findall(other.promql))
    return [f"- `{other.id}`" for other in readers if other.id != asked.id]


def _definitions(found: Formula, contract: Contract) -> list[str]:
    """Return the formula over named series, and before it the definition of each of them."""
    definitions: dict[str, Formula] = {}

    def collect(part: Formula) -> None:
        for inner in part.parts.values():
            collect(inner)
        definitions[part.name] = part

    collect(found)
    texts: Mapping[str, str] = {name: regroup(part.text, contract.site.labels) for name, part in definitions.items()}
    return [line for name, text in texts.items() for line in (f"# {name}", *pretty(text).splitlines())]
