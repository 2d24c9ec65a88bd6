"""A plugin of vLLM: once a file is there, the next step of the engine raises torch's out-of-memory error."""

import os
from pathlib import Path

WHEN = "MEMORY_RUNS_OUT_WHEN"
"""The variable that names the file."""
SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.04 GiB is free."
)


def register() -> None:
    """Called by vLLM in each of its processes."""
    import torch  # noqa: PLC0415 - only vLLM's environment has it
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: PLC0415

    execute = GPUModelRunner.execute_model

    def execute_model(self: object, *what: object, **named: object) -> object:
        if Path(os.environ[WHEN]).exists():
            raise torch.OutOfMemoryError(SAID)
        return execute(self, *what, **named)

    GPUModelRunner.execute_model = execute_model
