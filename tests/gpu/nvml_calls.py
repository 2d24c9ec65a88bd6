"""Part a: every NVML call of the exporter on every GPU of this host: its value or its refusal, and the time it took."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pynvml

from diag.exporter.gpu import nvidia
from diag.exporter.gpu.nvml import Field, NvmlCall, NvmlReading

ALONE = (
    NvmlCall("nvmlDeviceGetUUID"),
    NvmlCall("nvmlDeviceGetName"),
    NvmlCall("nvmlDeviceGetPciInfo", (), "busId"),
    NvmlCall("nvmlDeviceGetCudaComputeCapability"),
    NvmlCall("nvmlDeviceGetMigMode"),
    NvmlCall("nvmlDeviceGetMaxMigDeviceCount"),
    NvmlCall("nvmlDeviceGetTemperatureThreshold", (1,)),
    NvmlCall("nvmlDeviceGetNvLinkState", (0,)),
    NvmlCall("nvmlDeviceGetComputeRunningProcesses_v3"),
    NvmlCall("nvmlDeviceGetComputeRunningProcesses_v2"),
)
"""Calls of the exporter that are no reading of a family."""


def every_call() -> list[dict[str, Any]]:
    """Return one row for each call and GPU: family, labels, call, value or error code, microseconds."""
    pynvml.nvmlInit()
    try:
        rows = [row for index in range(pynvml.nvmlDeviceGetCount()) for row in _calls(index)]
        rows.append(
            {"gpu": "-", "family": "driver", "call": "driver version", "value": pynvml.nvmlSystemGetDriverVersion()}
        )
        return rows
    finally:
        pynvml.nvmlShutdown()


def _calls(index: int) -> Iterator[dict[str, Any]]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    gpu = (str(index), "")
    asked: list[NvmlReading] = [
        *nvidia.each_time(gpu),
        *nvidia.constant(gpu),
        *nvidia.LINKS,
        *nvidia.link_traffic(gpu, 1),
        *nvidia.slow(gpu, 1, frozenset()),
        *(NvmlReading("", (), (call,)) for call in ALONE),
    ]
    for reading in asked:
        for source in reading.sources:
            shown = f"field {source.id} {source.scope}" if isinstance(source, Field) else f"{source.name}{source.args}"
            answer = _timed(lambda source=source: _ask(handle, source))
            yield {
                "gpu": str(index),
                "family": reading.family,
                "labels": list(reading.labels[2:]),
                "call": shown,
                **answer,
            }


def _ask(handle: Any, source: Field | NvmlCall) -> object:
    if isinstance(source, Field):
        (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [(source.id, source.scope)])
        if value.nvmlReturn:
            raise pynvml.NVMLError(value.nvmlReturn)
        return _number(value)
    answer = getattr(pynvml, source.name)(handle, *source.args)
    if source.pick == "":
        return len(answer) if source.name.startswith("nvmlDeviceGetComputeRunning") else answer
    return answer[source.pick] if isinstance(source.pick, int) else getattr(answer, source.pick)


def _number(value: Any) -> object:
    names = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
    return getattr(value.value, names[value.valueType])


def _timed(ask: Callable[[], object]) -> dict[str, object]:
    """Return the value or the error of a call; the time is the shortest of three.

    The first call may set something up, and a busy host may hold up any of them.
    """
    found: dict[str, object] = {}
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        try:
            found = {"value": ask()}
        except pynvml.NVMLError as error:
            found = {"error": error.value, "means": str(error)}
        except AttributeError as error:
            found = {"error": "missing", "means": str(error)}
        times.append(time.perf_counter() - begun)
    return {**found, "microseconds": round(min(times) * 1e6)}
