"""Host memory that --kv-transfer-config gives to the offloading connectors of vLLM."""

from collections.abc import Mapping

from diag.vllm.command.command import Command

CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")


def connector_bytes(command: Command, ranks: int) -> float:
    """Return the bytes of one engine, whose tensor and pipeline parallel ranks are so many.

    `cpu_bytes_to_use` counts for all ranks together, `cpu_bytes_to_use_per_rank` (SimpleCPUOffloadConnector) for each.
    A MultiConnector holds the configurations of several connectors.
    """
    config = command.keys("--kv-transfer-config")
    extra = config.get("kv_connector_extra_config")
    inner = extra.get("connectors") if isinstance(extra, Mapping) else None
    return sum(_bytes(each, ranks) for each in (config, *(inner if isinstance(inner, list) else ())))


def _bytes(config: object, ranks: int) -> float:
    if not isinstance(config, Mapping) or config.get("kv_connector") not in CONNECTORS:
        return 0.0
    extra = config.get("kv_connector_extra_config")
    if not isinstance(extra, Mapping):
        return 0.0
    whole, each = (_size(extra.get(f"cpu_bytes_to_use{suffix}")) for suffix in ("", "_per_rank"))
    return each * ranks or whole


def _size(value: object) -> float:
    """Return a number above zero, or 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 < value < float("inf") else 0.0
