"""Options of single commands, as records that both the command line and the command's own file import.

A field with a row in diag/cli/options.toml is an option of the command line. Each is "", None or empty if not given.
"""

from pathlib import Path
from typing import NamedTuple

from diag.core.errors import BadUsage


class BudgetOptions(NamedTuple):
    """A launch command or a model, and GPUs; for a `foreign` text, such as an agent's, no file is opened."""

    target: str = ""
    gpu: str = ""
    gpu_memory: str = ""
    log: str = ""
    version: str = ""
    config: str = ""
    all_gpus: bool = False
    context: str = ""
    concurrency: int | None = None
    prices: list[str] | None = None
    utilisation: str = ""
    foreign: bool = False

    @property
    def compares(self) -> bool:
        """True if GPUs are to be compared; BadUsage for options that have no effect otherwise, or exclude others."""
        has_load = self.concurrency is not None or bool(self.context or self.prices or self.utilisation)
        compares = self.all_gpus or has_load or "," in self.gpu
        if self.all_gpus and self.gpu:
            raise BadUsage("--gpu and --all-gpus exclude each other: give one of them")
        if compares and not (self.all_gpus or self.gpu):
            raise BadUsage("--context, --concurrency, --price and --utilisation need --gpu NAME or --all-gpus")
        if compares and (self.log or self.gpu_memory):
            raise BadUsage("--log and --gpu-memory are of one server: leave them out to compare GPUs")
        return compares


class PreflightOptions(NamedTuple):
    """A launch or the URL of a server, and what else is asked about it."""

    target: str
    vllm_version: str = ""
    vllm_python: str = ""
    launch: str = ""
    gpu: str = ""
    prometheus: str = ""
    alertmanager: str = ""
    ramp: str = ""
    bench: bool = False


class RampOptions(NamedTuple):
    """The load of a ramp: generated, observed, or that of a load tool; times in seconds, lengths in tokens."""

    python: str = ""
    tokenizer: str = ""
    model: str = ""
    attach: bool = False
    results: list[Path] | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    step_seconds: float = 30.0
    first: int = 1
    most: int = 1024
    rates: int = 2
    yes: bool = False
