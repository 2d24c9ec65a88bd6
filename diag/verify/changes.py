"""The changes between two snapshots of a server: its flags, command, version and GPUs, and a limit at the gateway.

A gateway is on no page of the server. If exactly as many requests as the doctor proposed for the gateway are in flight
all the time, the limit is recognised as the change: fewer requests in flight are then no lighter load.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from diag.core.formatting import number, quantity
from diag.core.incident import Fix
from diag.core.subjects import label_value
from diag.diagnosis.proposals import command_in, written
from diag.diagnosis.query_cache import GPU_NAMES, MODELS, VERSIONS
from diag.diagnosis.report import Finding
from diag.diagnosis.snapshot import SAME_LOAD, ServerSnapshot
from diag.knowledge.signals import RUNNING, requests_that_fit_kv_cache
from diag.verify.load import Load, direction, flat, requests_in_flight
from diag.vllm.command.command import Command

CONFIG = "max by (instance, flag) (last_over_time(diag_vllm_config[$window]))"
FACTS = (("vLLM", VERSIONS, "version"), ("models served", MODELS, "model_name"), ("GPUs", GPU_NAMES, "name"))
"""Facts that identify a server: the name in a report, the query, and the label with the answer."""
DERIVED = ("num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency")
"""Settings that vLLM derives from its flags and the memory that it finds."""
ADDRESS = ("--host", "--port")
_HIDDEN = re.compile(r"\"?\$\{\w+:\?\}\"?")
"""A variable that stands for a secret in a published launch command."""
GATEWAY_LIMIT = "gateway concurrency limit"
"""Name of the change that is on no page of the server."""
ENGINES = f"count by ($by) (last_over_time({RUNNING}[$window]))"


@dataclass(frozen=True)
class SettingChange:
    """A setting and its values; None: not set on that side.

    `derived` marks settings that vLLM computes itself. `known` is false if one side does not publish the setting at
    all.
    """

    name: str
    before: str | None
    after: str | None
    derived: bool = False
    known: bool = True


@dataclass(frozen=True)
class AppliedFix:
    """A known fix of an incident that was applied, and the value that was proposed for it, "" for none."""

    fix: Fix
    proposed: str

    @property
    def name(self) -> str:
        """The flag, variable or command that was changed, or the limit at the gateway."""
        return GATEWAY_LIMIT if limits_requests(self.fix) else self.fix.name


def changes(before: ServerSnapshot, after: ServerSnapshot) -> tuple[SettingChange, ...]:
    """Return all known differences between two snapshots of a server; settings that vLLM derives come last."""
    found = []
    for name, query, label in FACTS:
        old, new = _fact(before, query, label), _fact(after, query, label)
        if old and new and old != new:
            found.append(SettingChange(name, old, new))

    # the options of the launch commands, if both are known; the command of a process has no variables
    by_name: dict[str, SettingChange] = {}
    launches = _launch_options(before), _launch_options(after)
    if all(launches):
        variables = all(any(not name.startswith("-") for name in launch) for launch in launches)
        for name in sorted(launches[0].keys() | launches[1].keys()):
            earlier, later = (launch.get(name) for launch in launches)
            is_hidden = any(_HIDDEN.fullmatch(value or "") for value in (earlier, later))  # a secret, not its value
            if name not in ADDRESS and earlier != later and not is_hidden:
                by_name[name] = SettingChange(name, earlier, later, known=name.startswith("-") or variables)

    # settings that are numbers; one that only a single side publishes may be the default of the other
    before_by_flag, after_by_flag = (
        {flag: f"{value:.12g}" for labels, value in server.series(CONFIG) if (flag := label_value(labels, "flag"))}
        for server in (before, after)
    )
    for flag in sorted(before_by_flag.keys() | after_by_flag.keys()):
        earlier, later, derived = before_by_flag.get(flag), after_by_flag.get(flag), flag in DERIVED
        on_both = earlier is not None and later is not None
        if earlier != later and (on_both or not (all(launches) or derived)):
            name = flag if derived else f"--{flag.replace('_', '-')}"
            by_name[name] = SettingChange(name, earlier, later, derived, on_both)
    return tuple(sorted([*found, *by_name.values()], key=lambda change: change.derived))


def models(server: ServerSnapshot) -> str:
    """Return the names under which models are served, "" if no page has them."""
    return _fact(server, MODELS, "model_name")


def _fact(server: ServerSnapshot, query: str, name: str) -> str:
    counted = ((label_value(labels, name), count) for labels, count in server.series(query))
    return ", ".join(sorted(f"{count:.0f} x {text}" if query == GPU_NAMES else text for text, count in counted if text))


def _launch_options(server: ServerSnapshot) -> Mapping[str, str]:
    """Return the options and variables of the launch command; empty if it cannot be read."""
    command = command_in(server.running.launch) if server.running else None
    return options(command) if command else {}


def options(command: Command) -> dict[str, str]:
    """Return the variables and options of a command by name, "" for a switch that is on, without the program's own."""
    found = {name: value for name, value in command.environment.items() if name.isupper()}
    for given in command.given:
        on = given.option is None or given.option.on
        key = f".{given.option.key}" if given.option and given.option.key else ""
        found[given.name + key] = " ".join(given.values) if on else "False"
    return found | ({"--model": command.model} if command.model else {})


# -- which of them are fixes ------------------------------------------------------------------------------------------


def limits_requests(fix: Fix) -> bool:
    """Return True if a fix is a limit on requests in flight that the gateway keeps, not the server."""
    return not fix.name and fix.value == requests_that_fit_kv_cache


def applied_fixes(finding: Finding, found: tuple[SettingChange, ...]) -> tuple[AppliedFix, ...]:
    """Return the known fixes of the incident that are among the changes."""
    by_name = {change.name: change for change in found if change.known and not change.derived}
    applied = []
    for fix in finding.diagnosis.incident.fixes:
        values = (proposal.after for proposal in finding.proposals if proposal.fix == fix)
        proposed = next((written(value) for value in values if value not in (None, "")), "")
        known = AppliedFix(fix, proposed)
        change = by_name.get(known.name)
        if change is None:
            continue
        old, new = _number(change.before), _number(change.after)
        if fix.value is None or change.after is None:
            is_applied = fix.value is None and change.after is None
        elif not fix.direction:
            is_applied = fix.value in ("", change.after) or not isinstance(fix.value, str)
        elif new is None or old is None:
            is_applied = new is not None
        else:
            is_applied = (new < old or old == 0) if fix.direction == "lower" else new > old
        if is_applied:
            applied.append(known)
    return tuple(applied)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


# -- the limit at the gateway -----------------------------------------------------------------------------------------


def gateway_limit(before: ServerSnapshot, after: ServerSnapshot, load_before: Load) -> SettingChange | None:
    """Return the proposed limit as a change, if the requests in flight are held at it; else None.

    The queue of before may still be in the server when it is observed, so the second half of the scrapes counts. The
    limits that the doctor proposed are those of one engine.
    """
    in_flight = requests_in_flight(after)
    settled = in_flight[len(in_flight) // 2 :]
    if np.isnan(settled).all():
        return None
    mean, most = float(np.nanmean(settled)), float(np.nanmax(settled))
    if not flat(mean, float(np.nanvar(settled))) or direction(SAME_LOAD, load_before.in_flight, mean) != -1:
        return None
    engines = before.value(ENGINES) or 1.0
    limits = (
        engines * proposal.after
        for finding in before.report.present
        if before.owns(finding.diagnosis.subject)
        for proposal in finding.proposals
        if limits_requests(proposal.fix) and isinstance(proposal.after, float)
    )
    held = any(not direction(SAME_LOAD, limit, most) for limit in limits)
    return SettingChange(GATEWAY_LIMIT, None, number(most)) if held else None


def gateway_notes(limit: SettingChange, after: ServerSnapshot, loads: tuple[Load, Load]) -> Iterator[str]:
    """Yield what is assumed about a gateway limit, and which requests wait where no page of the server shows them."""
    yield (
        f"requests in flight stay at {limit.after}, as proposed for the gateway: that is taken as the change. What"
        " waits there is on no page of the server, nor in its TTFT: see the gateway's own queue"
    )
    in_flight, most = requests_in_flight(after), float(limit.after or 0)
    if drained := after.queries.source.interval * int((in_flight > most).sum()):
        yield f"the queue of before was in the server for the first {quantity(drained, 'seconds')} of AFTER"
    yield from gateway_queue(most, *loads)


def gateway_queue(limit: float, before: Load, after: Load) -> Iterator[str]:
    """Yield how much waits at the gateway, as far as the load before the change tells."""
    if before.in_flight is None or not before.arrivals or not after.arrivals:
        return
    if before.closed_loop:
        waiting = before.in_flight - limit
        yield (
            f"the {before.in_flight:.0f} requests of before were always in flight (closed-loop clients): {waiting:.0f}"
            f" of them wait at the gateway now, {quantity(waiting / after.arrivals, 'seconds')} each by Little's law"
        )
    elif direction(SAME_LOAD, before.arrivals, after.arrivals) == -1:
        yield (
            f"{number(before.arrivals)} requests / s arrived before, {number(after.arrivals)} / s are served at the"
            " limit: the difference waits at the gateway or is refused there"
        )
