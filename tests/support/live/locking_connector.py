"""A KV connector for vLLM that locks the KV cache in memory, as those over RDMA do when they register it.

An RDMA adapter's ibv_reg_mr and mlock(2) are under the same limit of the kernel, RLIMIT_MEMLOCK.
"""

import ctypes
import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class LockingConnector(KVConnectorBase_V1):
    """Locks, and transfers nothing."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        kernel = ctypes.CDLL(None, use_errno=True)
        for cache in kv_caches.values():
            if kernel.mlock(ctypes.c_void_p(cache.data_ptr()), ctypes.c_size_t(cache.nbytes)):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()
