"""What was changed between two looks at a server: its flags, its launch command, its version and its GPUs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from diag.core.incident import Fix, Incident
from diag.diagnosis.proposals import Proposal, command_in, written
from diag.diagnosis.report import Finding
from diag.knowledge.signals import RUNNING
from diag.verify.snapshot import Snapshot
from diag.vllm.command.parse import Command

CONFIG = "max by (instance, flag) (last_over_time(diag_vllm_config[$window]))"
INFO = "count by (instance, version) (last_over_time(diag_vllm_info[$window]))"
MODELS = f"count by (instance, model_name) (last_over_time({RUNNING}[$window]))"
"""By the page itself: adapters, which /v1/models lists as well, are no other model."""
GPUS = "count by (instance, name) (last_over_time(diag_gpu_info[$window]))"
FACTS = (("vLLM", INFO, "version"), ("models served", MODELS, "model_name"), ("GPUs", GPUS, "name"))
FOLLOWS = ("num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency")
"""What vLLM derives from its flags and the memory that it finds."""
WHERE = ("--host", "--port")


@dataclass(frozen=True)
class SettingChange:
    """A setting by the name that one gives it, and its values; None where that side does not have it set.

    `follows` marks what vLLM derived. `known` is false where one side does not tell whether it is set at all.
    """

    name: str
    before: str | None
    after: str | None
    follows: bool = False
    known: bool = True


@dataclass(frozen=True)
class Tried:
    """A fix of an incident that the change is, and the value that was proposed for it, "" for none."""

    fix: Fix
    proposed: str


def changes(before: Snapshot, old: str, after: Snapshot, new: str) -> tuple[SettingChange, ...]:
    """Everything known to differ between a server before (`old`) and after (`new`); what follows from it last."""
    launched = {each.name: each for each in _launched(before, old, after, new)}
    found = launched | {each.name: each for each in _configured(before, old, after, new)}
    everything = [*_described(before, old, after, new), *found.values()]
    return tuple(sorted(everything, key=lambda each: each.follows))


def models(side: Snapshot, instance: str) -> str:
    """The names under which models are served, "" where nothing tells."""
    return _fact(side, MODELS, "model_name", instance)


def tried(finding: Finding, found: tuple[SettingChange, ...]) -> tuple[Tried, ...]:
    """Which of the incident's fixes the changes are."""
    incident: Incident = finding.diagnosis.incident
    by_name = {each.name: each for each in found if each.known and not each.follows}
    matches = (fix for fix in incident.fixes if (change := by_name.get(fix.name)) and _is(fix, change))
    return tuple(Tried(fix, _proposed(fix, finding.proposals)) for fix in matches)


def _is(fix: Fix, change: SettingChange) -> bool:
    """Whether a setting moved the way the fix means."""
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
    values = (each.after for each in proposals if each.fix == fix and each.after not in (None, ""))
    return next((written(each) for each in values), "")


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _configured(before: Snapshot, old: str, after: Snapshot, new: str) -> Iterator[SettingChange]:
    """The settings that are numbers, as every source publishes them.

    What only one side publishes may be a default of the other: it counts where no launch commands tell.
    """
    one, two = _config(before, old), _config(after, new)
    told = bool(_command(before, old) and _command(after, new))
    for flag in sorted(one.keys() | two.keys()):
        both, follows = flag in one and flag in two, flag in FOLLOWS
        if one.get(flag) != two.get(flag) and (both or not (told or follows)):
            yield SettingChange(
                flag if follows else f"--{flag.replace('_', '-')}", one.get(flag), two.get(flag), follows, both
            )


def _config(side: Snapshot, instance: str) -> dict[str, str]:
    found = ((labels.get("flag"), value) for labels, value in side.series(CONFIG, instance))
    return {flag: f"{value:.12g}" for flag, value in found if flag}


def _described(before: Snapshot, old: str, after: Snapshot, new: str) -> Iterator[SettingChange]:
    for name, query, label in (
        ("vLLM", INFO, "version"),
        ("models served", MODELS, "model_name"),
        ("GPUs", GPUS, "name"),
    ):
        one, two = _fact(before, query, label, old), _fact(after, query, label, new)
        if one and two and one != two:
            yield SettingChange(name, one, two)


def _fact(side: Snapshot, query: str, label: str, instance: str) -> str:
    found = ((labels.get(label, ""), count) for labels, count in side.series(query, instance))
    times = f"{'{:.0f} x '}" if query == GPUS else ""
    return ", ".join(sorted(times.format(count) + text for text, count in found if text))


def _launched(before: Snapshot, old: str, after: Snapshot, new: str) -> Iterator[SettingChange]:
    """What two launch commands say differently, where both are known; a process' own has no variables in it."""
    one, two = _command(before, old), _command(after, new)
    if not one or not two:
        return
    variables = all(any(not name.startswith("-") for name in each) for each in (one, two))
    for name in sorted(one.keys() | two.keys()):
        if name not in WHERE and one.get(name) != two.get(name):
            yield SettingChange(name, one.get(name), two.get(name), known=name.startswith("-") or variables)


def _command(side: Snapshot, instance: str) -> Mapping[str, str]:
    """The options and variables of a launch command; empty where there is none to read."""
    known = side.running.get(instance)
    command = command_in(known.launch) if known else None
    return options(command) if command else {}


def options(command: Command) -> dict[str, str]:
    """The variables and options of a command by name, "" for a switch that is on; those of the program are left out."""
    found = {name: value for name, value in command.environment.items() if name.isupper()}
    for given in command.given:
        on = given.option is None or given.option.on
        key = f".{given.option.key}" if given.option and given.option.key else ""
        found[given.name + key] = " ".join(given.values) if on else "False"
    return found | ({"--model": command.model} if command.model else {})
