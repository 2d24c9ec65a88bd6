"""The phases of a vLLM server's start, each declared once, in the order of vLLM 0.32.

They are the label `phase` of diag_vllm_startup_phase. Which line of the log begins one is said in
diag/exporter/log/patterns.py.
"""

from typing import NamedTuple


class StartupPhase(NamedTuple):
    """One phase; `usual_seconds` is what it takes at most in what has been reported, 0 where it takes no time."""

    name: str
    meaning: str
    usual_seconds: int


CUDA_GRAPH_CAPTURE = "cuda_graph_capture"
WARM_UP = "warm_up"
READY = "ready"
STARTUP_PHASES = (
    StartupPhase("process_start", "The process is there and reads its configuration.", 120),
    StartupPhase("load_weights", "The model's weights are downloaded and loaded onto the GPUs.", 900),
    StartupPhase("compile", "torch.compile translates the model.", 300),
    StartupPhase("profile_memory", "vLLM measures what a largest batch needs.", 120),
    StartupPhase("allocate_kv_cache", "The KV cache takes what memory is left.", 60),
    StartupPhase(CUDA_GRAPH_CAPTURE, "CUDA graphs are captured for each batch size.", 180),
    StartupPhase(WARM_UP, "Kernels are compiled and warmed up, and the API server starts.", 300),
    StartupPhase(READY, "The server answers requests.", 0),
)
STARTING = tuple(phase.name for phase in STARTUP_PHASES if phase.name != READY)
"""The phases before a server answers."""
