"""A plugin of vLLM: with `--load-format slow` weights take long to load, as from a slow disk."""

import os
import time
from pathlib import Path

SECONDS = "SLOW_WEIGHTS_SECONDS"
"""The variable that says how long."""


def installed(folder: Path) -> Path:
    """A folder for PYTHONPATH from which vLLM loads this plugin."""
    described = folder / "slow_weights-1.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: slow_weights\nVersion: 1\n")
    (described / "entry_points.txt").write_text("[vllm.general_plugins]\nslow_weights = slow_weights:register\n")
    (folder / "slow_weights.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
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
