"""A plugin of vLLM: with `--load-format slow` weights take long to load, as from a slow disk."""

import os
import time
from pathlib import Path

SECONDS = "SLOW_WEIGHTS_SECONDS"
"""The variable that says how long."""


def installed(folder: Path, plugin: Path = Path(__file__)) -> Path:
    """A folder for PYTHONPATH from which vLLM loads this plugin, or that of another file."""
    name = plugin.stem
    described = folder / f"{name}-1.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (described / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    (folder / plugin.name).write_text(plugin.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.model_executor.model_loader import register_model_loader  # noqa: PLC0415 - only vLLM has it
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader  # noqa: PLC0415

    @register_model_loader("slow")
    class SlowLoader(DummyModelLoader):
        def load_weights(self, *what: object) -> None:
            time.sleep(float(os.environ[SECONDS]))
            super().load_weights(*what)
