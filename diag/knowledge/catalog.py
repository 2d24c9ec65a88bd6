"""Finds the incidents, ours first and then a user's own, and refuses a bad declaration in one sentence.

A user's incident file is Python and runs with the rights of `diag`, like a conftest.py: trust the folder you name.
"""

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from diag import promql
from diag.core.contract import Contract
from diag.core.errors import BadIncident, Unsupported
from diag.core.incident import Condition, Fix, Incident, Signal, fill, seconds
from diag.knowledge import incidents as ours
from diag.vllm.flags.registry import understood


@dataclass(frozen=True)
class CatalogEntry:
    """An incident and the file that declares it."""

    incident: Incident
    file: Path


def load(folder: Path | None = None) -> tuple[Incident, ...]:
    """Every incident, ordered by id; raises BadIncident naming file and reason."""
    entries = [*_ours(), *(_users(folder) if folder else ())]
    known = _by_id(entries)
    for entry in entries:
        _check(entry, known)
    return tuple(known[name].incident for name in sorted(known))


def _ours() -> Iterator[CatalogEntry]:
    for found in pkgutil.iter_modules(ours.__path__):
        module = importlib.import_module(f"{ours.__name__}.{found.name}")
        yield CatalogEntry(_incident_of(module, Path(str(module.__file__))), Path(str(module.__file__)))


def _users(folder: Path) -> Iterator[CatalogEntry]:
    if not folder.is_dir():
        raise BadIncident(f"{folder}: is not a folder of incident files")
    for file in sorted(folder.glob("*.py")):
        if not file.name.startswith("_"):
            yield CatalogEntry(_incident_of(_run(file), file), file)


def _run(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"diag_user_incidents.{file.stem}", file)
    if spec is None or spec.loader is None:
        raise BadIncident(f"{file}: cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may raise anything, which is no crash of ours
        raise BadIncident(f"{file}: {type(error).__name__}: {error}") from error
    return module


def _incident_of(module: ModuleType, file: Path) -> Incident:
    incident = getattr(module, "incident", None)
    if not isinstance(incident, Incident):
        raise BadIncident(f"{file}: needs a variable `incident` that is a diag.incident.Incident")
    return incident


def _by_id(entries: Sequence[CatalogEntry]) -> dict[str, CatalogEntry]:
    known: dict[str, CatalogEntry] = {}
    for entry in entries:
        if entry.incident.id in known:
            raise BadIncident(f"{entry.file}: incident '{entry.incident.id}' exists in {known[entry.incident.id].file}")
        known[entry.incident.id] = entry
    return known


def _check(entry: CatalogEntry, known: dict[str, CatalogEntry]) -> None:
    try:
        _check_head(entry)
        _check_conditions(entry.incident.every_condition, entry.incident)
        _check_looks(entry.incident)
        for fix in entry.incident.fixes:
            _check_fix(fix, entry.incident)
        _check_explains(entry.incident, known)
    except (ValueError, TypeError, AttributeError, Unsupported) as error:
        raise BadIncident(f"{entry.file}: {error}") from error


def _check_head(entry: CatalogEntry) -> None:
    incident = entry.incident
    if incident.id != entry.file.stem:
        raise ValueError(f"the id '{incident.id}' is not the file's name")
    if incident.severity not in ("info", "warning", "critical"):
        raise ValueError(f"severity '{incident.severity}' is none of info, warning, critical")
    if not incident.symptoms:
        raise ValueError("it has no symptoms")
    if "instance" not in incident.per:
        raise ValueError("`per` must name the label instance")
    for duration in (incident.window, incident.live_window, incident.hold):
        _check_duration(duration)


def _check_duration(duration: str) -> None:
    try:
        seconds(duration)
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(f"'{duration}' is not a duration like 30s or 5m") from error


def _check_condition(condition: Condition) -> None:
    why = condition.why
    if not why.says.strip() or (why.kind != "judged" and not why.reference.strip()):
        raise ValueError(f"the limit on '{condition.signal.name}' does not say where it comes from")
    if isinstance(condition.limit, str) and condition.limit not in Contract().values():
        raise ValueError(f"the limit '{condition.limit}' is no entry of the contract")


def _check_signal(signal: Signal, incident: Incident) -> None:
    """Of use as it stands, and one number per subject."""
    name = f"signal '{signal.name}'"
    expression = _parsed(signal.promql, name, incident)
    labels = promql.output_labels(expression)
    if labels is None or not labels <= set(incident.per) or "instance" not in labels:
        raise ValueError(f"{name} must yield one number per subject: aggregate it by ($by)")
    if signal.sentence.count("{value}") != 1:
        raise ValueError(f"{name} must contain {{value}} exactly once")
    if bool(signal.culprit_promql) != bool(signal.culprit_label):
        raise ValueError(f"{name} needs both `culprit_promql` and `culprit_label`, or neither")
    if signal.culprit_promql:
        _parsed(signal.culprit_promql, name, incident)


def _parsed(text: str, name: str, incident: Incident) -> promql.Expression:
    """The expression, supported and blind to no missed scrape."""
    try:
        expression = promql.parse(fill(text, incident.per, incident.window, Contract().values()))
    except KeyError as error:
        raise ValueError(f"{name} uses the unknown placeholder ${error.args[0]}") from error
    except Unsupported as error:
        raise Unsupported(f"{name}: {error}") from error
    bare = promql.instant_selectors(expression)
    if bare:
        raise ValueError(f"{name} reads {bare[0]} at an instant; use last_over_time({bare[0]}[$window])")
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
        raise ValueError(f"the fix '{fix.change}' must be one of a flag and an environment variable")


def _check_conditions(conditions: tuple[Condition, ...], incident: Incident) -> None:
    for condition in conditions:
        _check_condition(condition)
        _check_signal(condition.signal, incident)


def _check_looks(incident: Incident) -> None:
    for look in incident.looks_like:
        if look.refuted_by and look.refuted_by not in (*incident.symptoms, *incident.supports):
            raise ValueError(f"what refutes '{look.name}' must be one of its symptoms or supports")


def _check_explains(incident: Incident, known: dict[str, CatalogEntry], path: tuple[str, ...] = ()) -> None:
    """Every explained incident exists, is slower than its cause to show, and does not explain it back."""
    for name in incident.explains:
        if name not in known:
            raise ValueError(f"it explains '{name}', which is no incident")
        if name in (*path, incident.id):
            raise ValueError(f"it explains itself: {' -> '.join((*path, incident.id, name))}")
        _check_speed(incident, known[name].incident)
        _check_explains(known[name].incident, known, (*path, incident.id))


def _check_speed(cause: Incident, effect: Incident) -> None:
    if delay(cause) > delay(effect):
        raise ValueError(
            f"it explains '{effect.id}' but shows {delay(cause) - delay(effect):g} s later than it (window + hold)"
        )


def delay(incident: Incident) -> float:
    """How long after its onset an incident's alert can fire at the latest, in seconds."""
    return seconds(incident.window) + seconds(incident.hold)
