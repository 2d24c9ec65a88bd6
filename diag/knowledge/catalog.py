"""Load the incidents, the built-in ones and a user's own, and reject an invalid declaration in one sentence.

A user's folder may also have incidents in Python, which run with the rights of `diag`, like a conftest.py: only use a
trusted folder.
"""

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from diag import promql
from diag.core.contract import Contract
from diag.core.declarations import PACKAGE, Mistake, did_you_mean, executed, python_line, shown_path, typed
from diag.core.errors import BadDeclaration, Unsupported
from diag.core.files import exists
from diag.core.formatting import in_python
from diag.core.incident import RANK, Condition, Incident, Signal, seconds
from diag.knowledge.formulas import formula
from diag.knowledge.incident_files import FOLDER, SHARED, read
from diag.knowledge.signals import DECLARED
from diag.vllm.flags.registry import known as known_flags
from diag.vllm.flags.registry import understood


class CatalogEntry(NamedTuple):
    """An incident and the file that declares it."""

    incident: Incident
    file: Path


def load(folder: Path | None = None, check_all: bool = False) -> tuple[Incident, ...]:
    """Return all incidents, ordered by id; BadDeclaration gives the file and the reason.

    A user's own incidents are checked at every start, the built-in ones too if `check_all`: that takes 0.4 s.
    """
    users = []
    if folder:
        if not exists(folder) or not folder.is_dir():
            raise BadDeclaration(f"{folder}: not a folder of incident files")
        for file in sorted(folder.iterdir()):
            if file.suffix == ".incident":
                users.append(CatalogEntry(read(file), file))
            elif file.suffix == ".py" and not file.name.startswith("_"):
                users.append(CatalogEntry(_run(file), file))
    by_id: dict[str, CatalogEntry] = {}
    for entry in (*built_in(), *users):
        name = entry.incident.id
        if name in by_id:
            raise BadDeclaration(f"{entry.file}: incident '{name}' already exists in {by_id[name].file}")
        by_id[name] = entry
    check(by_id.values() if check_all else users, by_id)
    return tuple(by_id[name].incident for name in sorted(by_id))


def check(entries: Iterable[CatalogEntry], by_id: Mapping[str, CatalogEntry]) -> None:
    """Raise BadDeclaration for the first invalid declaration; `by_id` are all incidents, by id."""
    chosen = tuple(entries)
    for entry, is_alone in [*((entry, True) for entry in chosen), *((entry, False) for entry in chosen)]:
        try:
            if is_alone:
                _check_alone(entry.incident, entry.file)
            else:  # these read other incidents, whose own mistakes come first
                for look in entry.incident.looks_like:
                    if look.incident and look.incident not in by_id:
                        near = did_you_mean(look.incident, by_id)
                        reason = f"it looks like '{look.incident}', which is not an incident{near}"
                        raise Mistake(reason, word=look.incident)
                    if look.name in by_id and not look.incident and entry.file.suffix == ".incident":
                        raise Mistake(f"'{look.name}' is an incident: write `incident: {look.name}`", word=look.name)
                _check_explains(entry.incident, by_id)
        except (ValueError, TypeError, AttributeError, RecursionError, Unsupported) as error:
            raise BadDeclaration(f"{_place(entry.file, getattr(error, 'word', ''))}: {error}") from error


def _check_alone(incident: Incident, file: Path) -> None:
    typed(incident, Incident)
    if incident.id != file.stem:
        raise Mistake(f"the id '{incident.id}' differs from the file name", word=incident.id)
    if not incident.symptoms:
        raise Mistake("the incident has no symptoms", word="symptoms")
    if "instance" not in incident.per:
        raise Mistake("`per` must include the label instance", word="per")
    for duration in (incident.window, incident.live_window, incident.hold):
        try:
            seconds(duration)
        except (KeyError, ValueError, IndexError) as error:
            raise Mistake(f"'{duration}' is not a duration such as 30s or 5m", word=duration) from error
    pages_at_once = seconds(incident.hold) == 0 and (incident.severity == "critical" or bool(incident.escalates))
    if pages_at_once != bool(incident.immediate.strip()):
        reason = "a critical alert with a `hold` of 0s needs the reason as `immediate`, and no other alert has one"
        raise Mistake(reason, word="hold")
    _check_conditions(incident.every_condition, incident)
    for signal in filter(None, (incident.began, incident.ended, incident.sign)):
        _check_signal(signal, incident)
    if incident.ended_by and incident.ended_by not in (symptom.signal for symptom in incident.symptoms):
        raise Mistake("`ended_by` must be the signal of one of the incident's symptoms", word="ended_by")
    is_graded = incident.serious in incident.supports and incident.mild in incident.symptoms
    if (incident.serious or incident.mild) and not is_graded:
        reason = "`serious` must be one of the supports, and `mild` the symptom of which it is the stronger form"
        raise Mistake(reason, word="serious" if incident.serious else "mild")
    for look in incident.looks_like:
        if look.refuted_by and look.refuted_by not in (*incident.symptoms, *incident.supports):
            reason = f"`refuted_by` of '{look.name}' must be one of the incident's symptoms or supports"
            raise Mistake(reason, word=look.name)
    for fix in incident.fixes:
        _check_conditions(fix.only_if, incident)
        _check_conditions(fix.expects, incident)
        for signal in fix.signals:
            _check_signal(signal, incident)
        for flag in (fix.flag, fix.instead_of, *(name for name, _ in fix.also)):
            if flag and not (flag.startswith("--") and understood(flag)):
                near = did_you_mean(flag, known_flags())
                raise Mistake(f"no vLLM release has the flag '{flag}'{near}", word=flag)
        if fix.flag and fix.environment:
            reason = f"the fix '{fix.change}' must set either a flag or an environment variable, not both"
            raise Mistake(reason, word=fix.change)


def _place(file: Path, word: object) -> str:
    """Return the file and the line with a word of an incident: its own file, or that of a signal or a shared fix."""
    for declaring in sorted((PACKAGE / "knowledge" / "signals").glob("*.promql")):
        for number, text in enumerate(declaring.read_text(encoding="utf-8").splitlines(), 1):
            if word and text.startswith(f"{word}: "):
                return f"{shown_path(declaring)}:{number}"
    for declaring in (file, SHARED):
        if word and declaring.is_file():
            if declaring.suffix == ".py":
                line = python_line(declaring, word)
            else:
                lines = declaring.read_text(encoding="utf-8").splitlines()
                line = next((number for number, text in enumerate(lines, 1) if str(word) in text), 0)
            if line:
                return f"{shown_path(declaring)}:{line}"
    return str(shown_path(file))


@lru_cache(maxsize=1)
def built_in() -> tuple[CatalogEntry, ...]:
    return tuple(CatalogEntry(read(file), file) for file in sorted(FOLDER.glob("*.incident")))


def _run(file: Path) -> Incident:
    """Return the incident of a user's Python file."""
    if not file.is_file():
        raise BadDeclaration(f"{file}: is not a regular file")
    spec = importlib.util.spec_from_file_location(f"diag_user_incidents.{file.stem}", file)
    if spec is None or spec.loader is None:
        raise BadDeclaration(f"{file}: cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's file may raise anything, which is no crash of ours
        sentence = executed(error, file.parent.resolve()) or f"{file}: {type(error).__name__}: {error}"
        raise BadDeclaration(sentence) from error
    incident = getattr(module, "incident", None)
    if not isinstance(incident, Incident):
        raise BadDeclaration(f"{shown_path(file)}: must define a variable `incident` of type diag.incident.Incident")
    if not isinstance(incident.id, str):
        raise BadDeclaration(f"{shown_path(file)}: id must be a text, not {in_python(incident.id)}")
    return incident


def _check_signal(signal: Signal, incident: Incident) -> None:
    """Raise ValueError unless the signal is complete and yields one number per subject."""
    name = f"signal '{signal.name}'"
    expression = _parsed(signal.promql, signal.name, incident)
    labels = promql.output_labels(expression)
    if labels is None or not labels <= set(incident.per) or "instance" not in labels:
        raise Mistake(f"{name} must yield one number per subject: aggregate it by ($by)", word=signal.name)
    if signal.sentence.count("{value}") != 1:
        raise Mistake(f"the sentence of {name} must contain {{value}} exactly once", word=signal.name)
    if bool(signal.culprit_promql) != bool(signal.culprit_label):
        raise Mistake(f"{name} needs both `culprit_promql` and `culprit_label`, or neither", word=signal.name)
    if signal.culprit_promql:
        _parsed(signal.culprit_promql, signal.name, incident)


def _parsed(text: str, name: str, incident: Incident) -> promql.Expression:
    """Return the expression of a signal, which must be supported and must not depend on a single scrape."""
    signal = f"signal '{name}'"
    try:
        expression = promql.parse(formula(text, incident.per, incident.window, Contract()))
    except KeyError as error:
        near = did_you_mean(str(error.args[0]), [*DECLARED, *Contract().values(), "window", "by"])
        raise Mistake(f"{signal} uses the unknown placeholder ${error.args[0]}{near}", word=name) from error
    except Unsupported as error:
        raise Mistake(f"{signal}: {error}", word=name) from error
    bare = promql.instant_selectors(expression)
    if bare:
        reason = f"uses the instant selector {bare[0]}: use last_over_time({bare[0]}[$window])"
        raise Mistake(f"{signal} {reason}", word=name)
    return expression


def _check_conditions(conditions: tuple[Condition, ...], incident: Incident) -> None:
    for condition in conditions:
        why = condition.why
        if not why.says.strip() or (why.kind != "judged" and not why.reference.strip()):
            reason = f"the threshold of '{condition.signal.name}' has no rationale or no reference"
            raise Mistake(reason, word=condition.signal.name)
        if isinstance(condition.limit, str) and condition.limit not in Contract().values():
            near = did_you_mean(condition.limit, Contract().values())
            reason = f"the threshold '{condition.limit}' is not an entry of the measurement contract{near}"
            raise Mistake(reason, word=condition.limit)
        _check_signal(condition.signal, incident)


def _check_explains(incident: Incident, by_id: Mapping[str, CatalogEntry], path: tuple[str, ...] = ()) -> None:
    """Raise ValueError unless each explained incident exists, is not detected sooner and does not explain its cause."""
    for name in incident.explains:
        if name not in by_id:
            raise Mistake(f"it explains '{name}', which is not an incident{did_you_mean(name, by_id)}", word=name)
        if name in (*path, incident.id):
            raise Mistake(f"it explains itself: {' -> '.join((*path, incident.id, name))}", word=name)
        effect = by_id[name].incident
        late = delay(incident) - delay(effect)
        if RANK[incident.severity] >= RANK[effect.severity] and late > 0:  # its alert has to mute that of the effect
            raise Mistake(f"it explains '{name}' but is detected {late:g} s later (window + hold)", word=name)
        _check_explains(effect, by_id, (*path, incident.id))
    for edge in incident.may_explain:
        if edge.incident not in by_id:
            near = did_you_mean(edge.incident, by_id)
            raise Mistake(f"it may explain '{edge.incident}', which is not an incident{near}", word=edge.incident)
        other = by_id[edge.incident].incident
        for condition in edge.where:
            if condition.signal not in {one.signal for either in (incident, other) for one in either.every_condition}:
                where = f"where '{condition.signal.name}', which neither of them reads"
                raise Mistake(f"it may explain '{edge.incident}' {where}", word=edge.incident)


def delay(incident: Incident) -> float:
    """Return the longest time from an incident's onset to its alert, in seconds."""
    return seconds(incident.window) + seconds(incident.hold)
