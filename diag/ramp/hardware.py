"""What the hardware of a server can do at most, where its GPU and its model are known, against what a step reached."""

from contextlib import suppress
from typing import NamedTuple

from diag.core.errors import BadUsage
from diag.core.formatting import quantity
from diag.ramp.step import Step
from diag.sources.observation import Observation
from diag.sources.samples import SampleSource
from diag.vllm.capacity import roofline
from diag.vllm.capacity.roofline import Replica
from diag.vllm.command import parse as command
from diag.vllm.flags.registry import versions
from diag.vllm.hardware import gpus
from diag.vllm.memory import model
from diag.vllm.memory.setup import GpuSpec, setup

GPU_NAMES = "count by (name) (last_over_time(diag_gpu_info[1h]))"
RESOURCES = {"weights": "memory bandwidth", "KV cache": "memory bandwidth", "compute": "compute"}


class Reached(NamedTuple):
    """The share of the ceilings of decode and prefill that a step reached, and what binds the one with more."""

    decode: float
    prefill: float
    binds: str

    @property
    def sentence(self) -> str:
        """With both shares."""
        decode, prefill = (quantity(share, "share") for share in (self.decode, self.prefill))
        return f"decode is at {decode} of its ceiling by the data sheet, prefill at {prefill} of its"


def replica(seen: Observation) -> Replica | None:
    """The one server on its GPUs; None where its launch command, its model or its GPU is not known."""
    launch, version = (found.get(seen.instances[0], "") for found in (seen.launch, seen.versions))
    source = SampleSource(seen.samples, seen.instants[-1:], seen.interval)
    names = [dict(labels)["name"] for labels in source.ask(GPU_NAMES, source.instants) if "name" in dict(labels)]
    gpu = gpus.find(names[0]) if len(names) == 1 else None
    if not launch or gpu is None:
        return None
    release = version.partition("+")[0] or versions()[-1]
    with suppress(BadUsage):
        started = command.read(launch, version=release)
        folder = model.find(started.model, started.environment, started.get("--revision") or "")
        found = model.read(folder, started.model, release)
        return Replica(found, setup(started, found, GpuSpec(gpu.memory, gpu.name), release), gpu)
    return None


def reached(server: Replica, step: Step) -> Reached | None:
    """By the step's mean lengths and running requests; None where it finished nothing, or the work is not known."""
    if not (step.requests_per_second and step.running):
        return None
    rates = step.output_tokens_per_second, step.prompt_tokens_per_second
    output, prompt = (rate / step.requests_per_second for rate in rates)
    with suppress(BadUsage):
        decode = roofline.decode(server, max(1, round(step.running)), max(1, round(prompt + output / 2)))
        prefill = roofline.prefill(server, max(1, round(prompt)))
        shares = rates[0] / decode.tokens_per_second, rates[1] / prefill.tokens_per_second
        binds = decode.binds if shares[0] >= shares[1] else prefill.binds
        return Reached(*shares, RESOURCES.get(binds, binds))
    return None
