"""Options of a launch that a GPU's compute capability lacks, by devices.toml, for lint and ledger."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.vllm.command.command import Command
from diag.vllm.flags.registry import release
from diag.vllm.gpus import capability, is_amd


class GpuOption(NamedTuple):
    """Values of a flag that GPUs of these capabilities have; AMD's lack what is `cuda`; `latent` None is any model."""

    flag: str
    values: tuple[str, ...]
    capabilities: tuple[tuple[float, ...], ...] = ()
    latent: bool | None = None
    cuda: bool = False
    since: str = "0.0.0"
    instead: str = "Remove it: vLLM chooses one that the GPU has"


@cache
def _options() -> tuple[GpuOption, ...]:
    return read(PACKAGE / "vllm" / "devices.toml", tuple[GpuOption, ...], "option")


def options(command: Command, method: str | None, version: str) -> Iterator[tuple[GpuOption, str, str]]:
    """Yield the options of a launch, their values, and who names them; `method` is the checkpoint's quantization."""
    for option in _options():
        value, by = command.get(option.flag), option.flag
        if value is None and by == "--quantization":
            value, by = method, "The checkpoint's quantization"
        names = {name.lower() for name in option.values}
        if value and value.lower() in names and release(version) >= release(option.since):
            yield option, value, by


def lacking(command: Command, method: str | None, gpu: str, version: str) -> Iterator[tuple[GpuOption, str]]:
    """Yield the options that a GPU lacks, with the sentence; of a GPU whose capability is unknown none but AMD's."""
    level, amd = capability(gpu), is_amd(gpu)
    for option, value, by in options(command, method, version) if level or amd else ():
        if option.cuda if amd else not any(first <= level <= last for first, last in option.capabilities):
            yield option, f"{by} {value} on {gpu}, {'with ROCm' if amd else f'whose compute capability is {level}'}"
