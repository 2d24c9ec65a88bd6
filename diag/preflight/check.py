"""The declaration of a preflight check, the facts that it reads, and its outcomes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from diag.core.contract import Contract
from diag.core.incident import Incident
from diag.lint.rule import LintReport, number
from diag.preflight.machine import Machine, Wheel
from diag.sources.kept_ramp import RampResult
from diag.vllm.command.command import Command
from diag.vllm.flags.registry import release
from diag.vllm.memory.ledger import Ledger

Group = Literal["launch", "memory", "host", "network", "telemetry", "capacity"]
GROUPS: tuple[Group, ...] = get_args(Group)
State = Literal["fail", "warn", "not checked", "pass"]
STATES: tuple[State, ...] = get_args(State)
"""The worst first. A fail: the server does not start, or harms others. A warn: it starts, and something is at risk."""
GpuSamples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]
"""Samples of the exporter's GPU families: labels and value, by family."""
PORT = 8000
_MOST_COUNT = 2**16
T = TypeVar("T")
Ask = Callable[[str], Any]
"""Gets a path of an HTTP API and returns its decoded answer; raises Unreachable."""


class NotChecked(Exception):
    """A fact that a check reads is missing; the message completes "not checked, because"."""


def need(fact: T | None, unless: str) -> T:
    """Return a fact that a check reads; NotChecked with the reason if it is missing."""
    if fact is None:
        raise NotChecked(unless)
    return fact


class Outcome(NamedTuple):
    """One outcome of a check: a sentence with its number, and the one command or flag to use, "" if there is none."""

    state: State
    message: str
    do: str = ""


passed, warned, failed = partial(Outcome, "pass"), partial(Outcome, "warn"), partial(Outcome, "fail")


@dataclass(frozen=True)
class PreflightFacts:
    """The facts of one launch, or of a server that runs already.

    `command` and `lint` are None for a server whose launch command is unknown. `machine` is this host if the launch
    starts here, else None, with the reason in `elsewhere`; `gpus` are the samples of this host or of the exporter's
    page, with the reason in `no_gpus` if there are none. `ledger` is the estimate of GPU memory, with the reason in
    `no_ledger`, and `fitting` are flags with which it fits. `running` is True for a URL: the port and the memory are
    the server's own. `weight_files` are on this host, `missing_files` should be; `no_folder` is a model's folder that
    does not exist. `instance` is the server's host and port as Prometheus names it, "" if unknown. `prometheus` and
    `alertmanager` ask their HTTP APIs, None if no URL is given. `bench` allows a measurement that makes load.
    """

    contract: Contract
    incidents: Sequence[Incident]
    version: str
    command: Command | None = None
    lint: LintReport | None = None
    ledger: Ledger | None = None
    no_ledger: str = ""
    fitting: Sequence[str] = ()
    machine: Machine | None = None
    elsewhere: str = ""
    gpus: GpuSamples = field(default_factory=dict)
    no_gpus: str = ""
    running: bool = False
    instance: str = ""
    weight_files: Sequence[str] = ()
    missing_files: Sequence[str] = ()
    no_folder: str = ""
    wheel: Wheel = field(default_factory=Wheel)
    prometheus: Ask | None = None
    alertmanager: Ask | None = None
    ramp: RampResult | None = None
    python: str = ""
    bench: bool = False

    def on_host(self) -> Machine:
        """Return this host; NotChecked if the launch starts elsewhere."""
        return need(self.machine, self.elsewhere)

    def launch(self) -> Command:
        """Return the launch command; NotChecked if it is unknown."""
        return need(self.command, "the server's launch command is not known: give it with --launch")

    def by_gpu(self, family: str, **labels: str) -> dict[str, float]:
        """Return the values of a family by GPU, of the samples that have these labels."""
        return {of.get("gpu", ""): value for of, value in self.gpus.get(family, ()) if labels.items() <= of.items()}

    def gpu_info(self) -> Sequence[Mapping[str, str]]:
        """Return the properties of each GPU; NotChecked if there is no GPU to look at."""
        return need([labels for labels, _ in self.gpus.get("diag_gpu_info", ())] or None, self.no_gpus)

    def ranks(self, *kinds: str) -> int:
        """Return the product of the parallel sizes of these kinds, such as "tensor"; 1 if no command is known."""
        return math.prod(self.count(f"--{kind}-parallel-size") for kind in kinds)

    def count(self, flag: str, usual: int = 1) -> int:
        """Return the number that a flag gives, at least 1; `usual` if it gives none, or more than any server has."""
        value = number(self.command.get(flag)) if self.command else None
        return max(1, int(value)) if value is not None and value <= _MOST_COUNT else usual

    @property
    def gpu_name(self) -> str:
        """The name of the first GPU, "" if there is none."""
        return next((labels.get("name", "") for labels, _ in self.gpus.get("diag_gpu_info", ())), "")

    @property
    def nodes(self) -> int:
        return self.count("--nnodes")

    @property
    def port(self) -> int:
        return int(number(self.command.get("--port")) or PORT) if self.command else PORT

    @property
    def on_cpu(self) -> bool:
        """True if vLLM runs on the CPU: by its variable, or by the wheel that is installed."""
        named = self.command is not None and "VLLM_CPU_KVCACHE_SPACE" in self.command.environment
        return named or self.wheel.torch.endswith("+cpu")

    def since(self, version: str) -> bool:
        return release(self.version) >= release(version)


class PreflightCheck(NamedTuple):
    """A check as checks.toml declares it: what it reads, why it matters with the source of that, and when it looks."""

    id: str
    group: Group
    title: str
    reads: str
    why: str
    source: str
    of_launch: bool = False
    needs: tuple[Literal["host", "gpus"], ...] = ()


@dataclass(frozen=True)
class CheckResult:
    """One outcome of a check or of a lint rule with the id `id`."""

    id: str
    group: Group
    state: State
    message: str
    why: str = ""
    do: str = ""
