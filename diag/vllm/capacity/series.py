"""The work of a running server and the data sheets of its GPUs as samples, from which PromQL makes shares of ceilings.

Everything is of one GPU, and what cannot be avoided.
"""

import math
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from diag.core.errors import BadUsage
from diag.core.metric_families import Sample
from diag.vllm import gpus
from diag.vllm.capacity import work
from diag.vllm.capacity.roofline import matrix_rate, matrix_type
from diag.vllm.command.parse import parse
from diag.vllm.memory.model import Model, find, read
from diag.vllm.memory.setup import GpuSpec, Setup, setup
from diag.vllm.memory.usage import NotCovered, layer_bytes
from diag.vllm.running_config import SET, RunningConfig, ServerFacts

DTYPES = ("bf16", "fp8", "fp4", "int8", "int4", "mxfp4")
"""What `matrix_type` calls weights."""
_WORDS = ("dtype", "kv_cache_dtype")
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
Known = tuple[tuple[str, float | str], ...]


def of_gpu(name: str, labels: tuple[str, ...]) -> Iterator[Sample]:
    """The data sheet of a GPU by its product name; nothing where the name is not known."""
    gpu = gpus.find(name)
    if gpu is None:
        return
    yield "diag_gpu_memory_bandwidth_max_bytes_per_second", labels, gpu.bandwidth
    for dtype in DTYPES:
        yield "diag_gpu_flops_max", (*labels, dtype), matrix_rate(gpu, dtype)
    if gpu.nvlink:
        yield "diag_gpu_nvlink_max_bytes_per_second", labels, gpu.nvlink / 2


def of_server(config: RunningConfig, facts: ServerFacts) -> tuple[Sample, ...]:
    """The work of a server, where its command and its model's config.json are here; else nothing."""
    command = facts.process or facts.launch or (f"vllm serve {shlex.quote(facts.root)}" if facts.root else "")
    settings = config.settings
    known = tuple((name, settings[name].value) for name in (*_SIZES, *_WORDS) if name in settings)
    if config.incomplete or not command or any(value == SET for _, value in known):
        return ()
    return _of_command(command, facts.version.partition("+")[0], known)


@lru_cache(maxsize=64)  # an exporter asks at every scrape
def _of_command(command: str, version: str, known: Known) -> tuple[Sample, ...]:
    try:
        started = parse(command, version)
        folder = find(started.model, started.environment, started.get("--revision") or "")
        model = read(folder, started.model, version)
        planned = _as_it_runs(setup(started, model, GpuSpec(), version), dict(known))
        return () if started.elsewhere or planned.savings else tuple(_samples(model, planned))
    except (BadUsage, NotCovered, ArithmeticError):
        return ()


def _as_it_runs(planned: Setup, known: dict[str, float | str]) -> Setup:
    """The setup with what sources other than the command know better."""
    tensor, pipeline, data = (int(known.get(name, 0)) for name in _SIZES)
    dtype, kv_dtype = (str(known.get(name, "auto")) for name in ("dtype", "kv_cache_dtype"))
    return replace(
        planned,
        tensor=tensor or planned.tensor,
        pipeline=pipeline or planned.pipeline,
        data=data or planned.data,
        float32=planned.float32 or dtype.removeprefix("torch.") in ("float32", "float"),
        kv_dtype=planned.kv_dtype if kv_dtype == "auto" else kv_dtype,
    )


def _samples(model: Model, planned: Setup) -> Iterator[Sample]:
    stages = planned.pipeline
    every, experts = work.weights(model, planned)
    token = work.prefill(model, planned, 1, 1)
    share = work.experts_share(model)
    if experts and planned.data > 1:
        return  # they are spread over all engines, in one of several ways
    yield "diag_vllm_weight_bytes", ("every_step",), every / stages
    yield "diag_vllm_weight_bytes", ("experts",), experts / stages
    yield "diag_vllm_experts_per_token_ratio", (), share
    yield "diag_vllm_flops_per_token", (matrix_type(model, planned),), token.matrix_flops / stages
    yield "diag_vllm_all_reduce_bytes_per_token", (), token.sent_bytes / stages
    full = sum(math.isinf(work.reach(model, at, math.inf)) for at in range(model.layers))
    if full:
        yield "diag_vllm_kv_cache_bytes_per_token", (), full * layer_bytes(model, planned) / stages
