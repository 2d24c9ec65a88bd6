"""vLLM's KV offloading with tiers on the CPU: its scheduler, tier manager and disk tier, without the copies of a GPU.

The tier for host memory reports each of its copies as done and copies nothing: weights are random, and so is the text.
"""

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

BYTES = 65_536
SECONDS = 0.001


class _NoCopies(OffloadingWorker):
    def __init__(self) -> None:
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._done.append(TransferResult(job_id, True, BYTES * len(src_spec.block_ids), SECONDS))
        return True

    submit_load = submit_store

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Wait for nothing: each job is done at once."""


class TiersOnCpu(TieringOffloadingSpec):
    """The specification that --kv-transfer-config names."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return _NoCopies()
