"""What was changed between two snapshots of a server: its flags, its launch command, its version and its GPUs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from diag.core.incident import Fix, Incident
from diag.diagnosis.proposals import Proposal, command_in, written
from diag.diagnosis.report import Finding
from diag.knowledge.signals import RUNNING, requests_that_fit_kv_cache
from diag.verify.snapshot import ServerSnapshot
from diag.vllm.command.command import Command

CONFIG = "max by (instance, flag) (last_over_time(diag_vllm_config[$window]))"
INFO = "count by (instance, version) (last_over_time(diag_vllm_info[$window]))"
MODELS = f"count by (instance, model_name) (last_over_time({RUNNING}[$window]))"
"""By the page itself: LoRA adapters, which /v1/models lists as well, are no other model."""
GPUS = "count by (instance, name) (last_over_time(diag_gpu_info[$window]))"
FACTS = (("vLLM", INFO, "version"), ("models served", MODELS, "model_name"), ("GPUs", GPUS, "name"))
"""What identifies a server: how a report names it, the query, and the label with the answer."""
DERIVED = ("num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency")
"""What vLLM derives from its flags and the memory that it finds."""
ADDRESS = ("--host", "--port")
GATEWAY_LIMIT = "gateway concurrency limit"
"""The change that is on no page of the server (diag/verify/gateway_limit.py)."""


@dataclass(frozen=True)
class SettingChange:
    """A setting and its values; None where it is not set on that side.

    `derived` marks what vLLM computes itself. `known` is false where one side does not publish the setting at all.
    """

    name: str
    before: str | None
    after: str | None
    derived: bool = False
    known: bool = True


@dataclass(frozen=True)
class AppliedFix:
    """A known fix of an incident that the change is, and the value that was proposed for it, "" for none."""

    fix: Fix
    proposed: str

    @property
    def name(self) -> str:
        """The flag, variable or command that was changed, or the limit at the gateway."""
        return GATEWAY_LIMIT if limits_requests(self.fix) else self.fix.name


def changes(before: ServerSnapshot, after: ServerSnapshot) -> tuple[SettingChange, ...]:
    """Everything known to differ between two snapshots of a server; what vLLM derives from it comes last."""
    launched = {change.name: change for change in _launch_changes(before, after)}
    by_name = launched | {change.name: change for change in _config_changes(before, after)}
    everything = [*_fact_changes(before, after), *by_name.values()]
    return tuple(sorted(everything, key=lambda change: change.derived))


def models(server: ServerSnapshot) -> str:
    """The names under which models are served, "" where no page tells."""
    return _fact(server, MODELS, "model_name")


def limits_requests(fix: Fix) -> bool:
    """Whether a fix is a limit on requests in flight that the gateway keeps, not the server."""
    return not fix.name and fix.value == requests_that_fit_kv_cache


def applied_fixes(finding: Finding, found: tuple[SettingChange, ...]) -> tuple[AppliedFix, ...]:
    """Which of the incident's known fixes the changes are."""
    incident: Incident = finding.diagnosis.incident
    by_name = {change.name: change for change in found if change.known and not change.derived}
    known = (AppliedFix(fix, _proposed(fix, finding.proposals)) for fix in incident.fixes)
    return tuple(fix for fix in known if (change := by_name.get(fix.name)) and _is_fix(fix.fix, change))


def _is_fix(fix: Fix, change: SettingChange) -> bool:
    """Whether a setting moved in the direction of the fix."""
    if fix.value is None:
        return change.after is None
    if change.after is None:
        return False
    if not fix.direction:
        return fix.value in ("", change.after) or not isinstance(fix.value, str)
    old, new = _number(change.before), _number(change.after)
    if new is None or old is None:
        return new is not None
    return (new < old or old == 0) if fix.direction == "lower" else new > old


def _proposed(fix: Fix, proposals: tuple[Proposal, ...]) -> str:
    values = (proposal.after for proposal in proposals if proposal.fix == fix and proposal.after not in (None, ""))
    return next((written(value) for value in values), "")


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _config_changes(before: ServerSnapshot, after: ServerSnapshot) -> Iterator[SettingChange]:
    """The settings that are numbers, as every source publishes them.

    What only one side publishes may be the default of the other: it counts only where no launch commands are known.
    """
    old, new = _config(before), _config(after)
    has_commands = bool(_command(before) and _command(after))
    for flag in sorted(old.keys() | new.keys()):
        on_both, derived = flag in old and flag in new, flag in DERIVED
        if old.get(flag) != new.get(flag) and (on_both or not (has_commands or derived)):
            name = flag if derived else f"--{flag.replace('_', '-')}"
            yield SettingChange(name, old.get(flag), new.get(flag), derived, on_both)


def _config(server: ServerSnapshot) -> dict[str, str]:
    published = ((labels.get("flag"), value) for labels, value in server.series(CONFIG))
    return {flag: f"{value:.12g}" for flag, value in published if flag}


def _fact_changes(before: ServerSnapshot, after: ServerSnapshot) -> Iterator[SettingChange]:
    for name, query, label in FACTS:
        old, new = _fact(before, query, label), _fact(after, query, label)
        if old and new and old != new:
            yield SettingChange(name, old, new)


def _fact(server: ServerSnapshot, query: str, label: str) -> str:
    counted = ((labels.get(label, ""), count) for labels, count in server.series(query))
    return ", ".join(sorted(f"{count:.0f} x {text}" if query == GPUS else text for text, count in counted if text))


def _launch_changes(before: ServerSnapshot, after: ServerSnapshot) -> Iterator[SettingChange]:
    """Where two launch commands differ, if both are known; that of a process has no environment variables in it."""
    old, new = _command(before), _command(after)
    if not old or not new:
        return
    variables = all(any(not name.startswith("-") for name in command) for command in (old, new))
    for name in sorted(old.keys() | new.keys()):
        if name not in ADDRESS and old.get(name) != new.get(name):
            yield SettingChange(name, old.get(name), new.get(name), known=name.startswith("-") or variables)


def _command(server: ServerSnapshot) -> Mapping[str, str]:
    """The options and variables of a launch command; empty where there is none to read."""
    command = command_in(server.running.launch) if server.running else None
    return options(command) if command else {}


def options(command: Command) -> dict[str, str]:
    """The variables and options of a command by name, "" for a switch that is on; those of the program are left out."""
    found = {name: value for name, value in command.environment.items() if name.isupper()}
    for given in command.given:
        on = given.option is None or given.option.on
        key = f".{given.option.key}" if given.option and given.option.key else ""
        found[given.name + key] = " ".join(given.values) if on else "False"
    return found | ({"--model": command.model} if command.model else {})
