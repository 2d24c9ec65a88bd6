"""All preflight checks, their outcomes for a launch, and the answer: go, warnings, no go, or nothing decisive."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from diag.core.declarations import PACKAGE, read
from diag.core.errors import DiagError
from diag.core.formatting import printable
from diag.lint.rules import RULES
from diag.preflight import capacity, gpus, host, network, telemetry
from diag.preflight.check import (
    GROUPS,
    STATES,
    CheckResult,
    Group,
    NotChecked,
    Outcome,
    PreflightCheck,
    PreflightFacts,
    State,
)
from diag.vllm.command.free_text import hidden

CHECKS = read(PACKAGE / "preflight" / "checks.toml", dict[str, PreflightCheck])
"""All checks by id, in the order in which they run."""
_LOOKS: Mapping[str, Callable[[PreflightFacts], Iterator[Outcome]]] = {
    id: next(vars(module)[id] for module in (capacity, host, gpus, network, telemetry) if id in vars(module))
    for id in CHECKS
}
Answer = Literal["go", "warnings", "no go", "cannot tell"]
STATUS: Mapping[Answer, int] = {"go": 0, "warnings": 1, "no go": 2, "cannot tell": 3}
_STATES: Mapping[str, State] = {"error": "fail", "warning": "warn"}
_NOW = frozenset({"gpu_is_shared", "fewer_gpus_than_ranks"})
"""Lint rules about this host as it is now: vLLM refuses to start on it."""
_MEMORY = frozenset({"gpu_is_shared", "little_memory_left", "kv_cache_size_pinned", "utilization_is_overridden"})
_COVERED = frozenset({"offloading_above_the_host"})
"""Lint rules whose question a check answers more exactly: `host_memory` reads what is free."""
_DECISIVE: tuple[Group, ...] = ("memory",)
_DECISIVE_OF_A_SERVER: tuple[Group, ...] = ("launch", "host", *_DECISIVE)
"""Groups one of which has to be looked at: good flags do not start a server, and one that runs has started."""
RULES_AS_A_WHOLE = "lint"
"""The id of the result that stands for all lint rules that found nothing."""


@dataclass(frozen=True)
class Preflight:
    """The results for one launch, the worst first; `ignored` are reasons by the id of results that were dropped.

    One check of the groups `decisive` has to pass for a go.
    """

    target: str
    version: str
    results: tuple[CheckResult, ...]
    ignored: Mapping[str, str]
    decisive: tuple[Group, ...]

    @property
    def answer(self) -> Answer:
        states = {result.state for result in self.results}
        if "fail" in states:
            return "no go"
        if not any(result.state == "pass" and result.group in self.decisive for result in self.results):
            return "cannot tell"
        return "warnings" if "warn" in states else "go"

    def of(self, state: State) -> tuple[CheckResult, ...]:
        return tuple(result for result in self.results if result.state == state)


def preflight(facts: PreflightFacts, target: str) -> Preflight:
    """Run every check; results that diag.toml ignores are dropped."""
    chosen = [check for check in CHECKS.values() if not (facts.on_cpu and "gpus" in check.needs)]
    every: list[CheckResult] = []
    if facts.lint is not None:  # errors and warnings of its rules, and one result for all others
        failing: set[str] = set()
        for finding in facts.lint.findings:
            state = "fail" if finding.rule in _NOW else _STATES.get(finding.severity)
            if state and not (facts.machine and finding.rule in _COVERED):
                failing.add(finding.rule)
                group: Group = "memory" if finding.rule in _MEMORY else "launch"
                every.append(CheckResult(finding.rule, group, state, finding.message, finding.why, finding.fix))
        hints = len({finding.rule for finding in facts.lint.findings} - failing)
        also = f", {hints} more to consider (diag lint)" if hints else ""
        passed = f"{len(RULES) - len(failing)} of {len(RULES)} lint rules{also}"
        every.append(CheckResult(RULES_AS_A_WHOLE, "launch", "pass", passed))
        # what a check of the memory or the GPUs could not look at either is left to that check
        told = [reason for reason in (facts.no_ledger, facts.no_gpus) if reason]
        for reason in facts.lint.not_checked:
            if not any(text in reason for text in told):
                every.append(CheckResult(RULES_AS_A_WHOLE, "launch", "not checked", reason))
    every += (result for check in chosen for result in results(check, facts))
    ignore = facts.contract.preflight.ignore
    kept = [result for result in every if result.id not in ignore]
    ignored = {result.id: ignore[result.id] for result in every if result.id in ignore}
    order = sorted(kept, key=lambda result: (STATES.index(result.state), GROUPS.index(result.group)))
    decisive = _DECISIVE_OF_A_SERVER if facts.running else _DECISIVE
    return Preflight(target, facts.version, tuple(order), ignored, decisive)


def results(check: PreflightCheck, facts: PreflightFacts) -> Iterator[CheckResult]:
    """Yield what a check finds; nothing if it does not concern this launch."""
    if check.of_launch and facts.running:
        return
    try:
        if "host" in check.needs:
            facts.on_host()
        if "gpus" in check.needs:
            facts.gpu_info()
        outcomes = list(_LOOKS[check.id](facts))
    except NotChecked as reason:
        outcomes = [Outcome("not checked", str(reason))]
    except (DiagError, OSError) as error:
        text = (error.strerror if isinstance(error, OSError) else "") or str(error)
        outcomes = [Outcome("not checked", printable(text, 300))]
    for state, message, do in outcomes:
        yield CheckResult(check.id, check.group, state, hidden(message), check.why, hidden(do))
