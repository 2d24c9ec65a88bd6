"""Load the incidents, the built-in ones and a user's own, and reject an invalid declaration in one sentence.

A user's incident file is Python and runs with the rights of `diag`, like a conftest.py: only use a trusted folder.
"""

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from diag import promql
from diag.core.contract import Contract
from diag.core.errors import BadIncident, Unsupported
from diag.core.files import exists
from diag.core.incident import RANK, Condition, Fix, Incident, Signal, seconds
from diag.knowledge import incidents as ours
from diag.knowledge.formulas import formula
from diag.vllm.flags.registry import understood


class CatalogEntry(NamedTuple):
    """An incident and the file that declares it."""

    incident: Incident
    file: Path


def load(folder: Path | None = None) -> tuple[Incident, ...]:
    """Return all incidents, ordered by id; BadIncident gives the file and the reason.

    The built-in incidents are checked by the tests (tests/unit/test_catalog.py), a user's own at every start.
    """
    users = []
    if folder:
        if not exists(folder) or not folder.is_dir():
            raise BadIncident(f"{folder}: not a folder of incident files")
        for file in sorted(folder.glob("*.py")):
            if not file.name.startswith("_"):
                users.append(CatalogEntry(_incident_of(_run(file), file), file))
    known: dict[str, CatalogEntry] = {}
    for entry in (*built_in(), *users):
        name = entry.incident.id
        if name in known:
            raise BadIncident(f"{entry.file}: incident '{name}' already exists in {known[name].file}")
        known[name] = entry
    check(users, known)
    return tuple(known[name].incident for name in sorted(known))


def check(entries: Iterable[CatalogEntry], known: Mapping[str, CatalogEntry]) -> None:
    """Raise BadIncident for the first invalid declaration; `known` are all incidents, by id."""
    for entry in entries:
        incident = entry.incident
        try:
            if incident.id != entry.file.stem:
                raise ValueError(f"the id '{incident.id}' differs from the file name")
            if incident.severity not in ("info", "warning", "critical"):
                raise ValueError(f"invalid severity '{incident.severity}': use info, warning or critical")
            if not incident.symptoms:
                raise ValueError("the incident has no symptoms")
            if "instance" not in incident.per:
                raise ValueError("`per` must include the label instance")
            for duration in (incident.window, incident.live_window, incident.hold):
                try:
                    seconds(duration)
                except (KeyError, ValueError, IndexError) as error:
                    raise ValueError(f"'{duration}' is not a duration such as 30s or 5m") from error
            _check_conditions(incident.every_condition, incident)
            for signal in filter(None, (incident.began, incident.sign)):
                _check_signal(signal, incident)
            for look in incident.looks_like:
                if look.refuted_by and look.refuted_by not in (*incident.symptoms, *incident.supports):
                    raise ValueError(
                        f"`refuted_by` of '{look.name}' must be one of the incident's symptoms or supports"
                    )
            for fix in incident.fixes:
                _check_fix(fix, incident)
            _check_explains(incident, known)
        except (ValueError, TypeError, AttributeError, RecursionError, Unsupported) as error:
            raise BadIncident(f"{entry.file}: {error}") from error


def built_in() -> Iterator[CatalogEntry]:
    for found in pkgutil.iter_modules(ours.__path__):
        module = importlib.import_module(f"{ours.__name__}.{found.name}")
        file = Path(str(module.__file__))
        yield CatalogEntry(_incident_of(module, file), file)


def _run(file: Path) -> ModuleType:
    if not file.is_file():
        raise BadIncident(f"{file}: is not a regular file")
    spec = importlib.util.spec_from_file_location(f"diag_user_incidents.{file.stem}", file)
    if spec is None or spec.loader is None:
        raise BadIncident(f"{file}: cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's file may raise anything, which is no crash of ours
        raise BadIncident(f"{file}: {type(error).__name__}: {error}") from error
    return module


def _incident_of(module: ModuleType, file: Path) -> Incident:
    incident = getattr(module, "incident", None)
    if not isinstance(incident, Incident):
        raise BadIncident(f"{file}: must define a variable `incident` of type diag.incident.Incident")
    return incident


def _check_signal(signal: Signal, incident: Incident) -> None:
    """Raise ValueError unless the signal is complete and yields one number per subject."""
    name = f"signal '{signal.name}'"
    expression = _parsed(signal.promql, name, incident)
    labels = promql.output_labels(expression)
    if labels is None or not labels <= set(incident.per) or "instance" not in labels:
        raise ValueError(f"{name} must yield one number per subject: aggregate it by ($by)")
    if signal.sentence.count("{value}") != 1:
        raise ValueError(f"the sentence of {name} must contain {{value}} exactly once")
    if bool(signal.culprit_promql) != bool(signal.culprit_label):
        raise ValueError(f"{name} needs both `culprit_promql` and `culprit_label`, or neither")
    if signal.culprit_promql:
        _parsed(signal.culprit_promql, name, incident)


def _parsed(text: str, name: str, incident: Incident) -> promql.Expression:
    """Return the expression, which must be supported and must not depend on a single scrape."""
    try:
        expression = promql.parse(formula(text, incident.per, incident.window, Contract()))
    except KeyError as error:
        raise ValueError(f"{name} uses the unknown placeholder ${error.args[0]}") from error
    except Unsupported as error:
        raise Unsupported(f"{name}: {error}") from error
    bare = promql.instant_selectors(expression)
    if bare:
        raise ValueError(f"{name} uses the instant selector {bare[0]}: use last_over_time({bare[0]}[$window])")
    return expression


def _check_fix(fix: Fix, incident: Incident) -> None:
    _check_conditions(fix.only_if, incident)
    _check_conditions(fix.expects, incident)
    for signal in fix.signals:
        _check_signal(signal, incident)
    for flag in (fix.flag, fix.instead_of, *(name for name, _ in fix.also)):
        if flag and not (flag.startswith("--") and understood(flag)):
            raise ValueError(f"no vLLM release has the flag '{flag}'")
    if sum(map(bool, (fix.flag, fix.environment))) > 1:
        raise ValueError(f"the fix '{fix.change}' must set either a flag or an environment variable, not both")


def _check_conditions(conditions: tuple[Condition, ...], incident: Incident) -> None:
    for condition in conditions:
        why = condition.why
        if not why.says.strip() or (why.kind != "judged" and not why.reference.strip()):
            raise ValueError(f"the threshold of '{condition.signal.name}' has no rationale or no reference")
        if isinstance(condition.limit, str) and condition.limit not in Contract().values():
            raise ValueError(f"the threshold '{condition.limit}' is not an entry of the measurement contract")
        _check_signal(condition.signal, incident)


def _check_explains(incident: Incident, known: Mapping[str, CatalogEntry], path: tuple[str, ...] = ()) -> None:
    """Raise ValueError unless each explained incident exists, is not detected sooner and does not explain its cause."""
    for name in incident.explains:
        if name not in known:
            raise ValueError(f"it explains '{name}', which is not an incident")
        if name in (*path, incident.id):
            raise ValueError(f"it explains itself: {' -> '.join((*path, incident.id, name))}")
        effect = known[name].incident
        late = delay(incident) - delay(effect)
        if RANK[incident.severity] >= RANK[effect.severity] and late > 0:  # its alert has to mute that of the effect
            raise ValueError(f"it explains '{name}' but is detected {late:g} s later (window + hold)")
        _check_explains(effect, known, (*path, incident.id))
    for edge in incident.may_explain:
        if edge.incident not in known:
            raise ValueError(f"it may explain '{edge.incident}', which is not an incident")
        other = known[edge.incident].incident
        for condition in edge.where:
            if condition.signal not in {one.signal for each in (incident, other) for one in each.every_condition}:
                raise ValueError(
                    f"it may explain '{edge.incident}' where '{condition.signal.name}', which neither of them reads"
                )


def delay(incident: Incident) -> float:
    """Return the longest time from an incident's onset to its alert, in seconds."""
    return seconds(incident.window) + seconds(incident.hold)
