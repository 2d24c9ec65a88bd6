"""NVML, as far as this driver and this GPU answer (the only importer of pynvml).

Functions are called by name: an older nvidia-ml-py or an older driver may lack them. Requests that a GPU refuses are
not repeated, since some refusals are as slow as an answer, until `Device.forget`.
"""

import struct
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pynvml

from diag.exporter.gpu.driver import DriverUnavailable, GpuDevice, GpuLost, handle_address

WAIT = 500
"""Milliseconds to wait for an event, during which NVML cannot be shut down."""

LATELY = 5.0
"""Seconds for which the computing of a process counts; the driver samples it up to six times a second."""

_LOST = {15, 16, 28}  # GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND
_AWAY = {1, 9}  # UNINITIALIZED, DRIVER_NOT_LOADED
_REFUSED = {2, 3, 4, 13, 25, 26}
"""INVALID_ARGUMENT (a field or link it does not know), NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND,
ARGUMENT_VERSION_MISMATCH, DEPRECATED."""
_NOT_FOUND = 6
_TIMEOUT = 10
_NO_PIDS = {0, 0xFFFFFFFF}
_XID = 0x8
_SENTENCES = {
    1: "NVML was shut down",
    4: "no permission to open the NVIDIA driver (/dev/nvidia*)",
    9: "the NVIDIA driver is not loaded",
    12: "libnvidia-ml.so.1 not found: no NVIDIA driver here",
    18: "NVML and the loaded NVIDIA driver differ in version: the driver was updated, reboot or reload its modules",
}
_VALUES = struct.Struct("=24xii8s")
"""nvmlFieldValue_t: field, scope, timestamp and latency, then valueType, nvmlReturn and the value."""
_TYPES = {0: "=d", 1: "=I4x", 2: "=Q", 3: "=Q", 4: "=q", 5: "=i4x", 6: "=H6x"}
_DECODE = {kind: struct.Struct(form).unpack for kind, form in _TYPES.items()}


class Field(NamedTuple):
    """A field value, read in a batch; `scope` is the link if NVML counts by link. The number is value * times / per."""

    id: int
    scope: int = 0
    times: int = 1
    per: int = 1


class NvmlCall(NamedTuple):
    """A function of the device; `pick` is the attribute or index of an answer that is more than a number."""

    name: str
    args: tuple[int, ...] = ()
    pick: str | int = ""
    times: int = 1
    per: int = 1


Source = Field | NvmlCall
Request = tuple[Any, ...]
"""The first two items of a source, which identify what NVML is asked."""


class NvmlReading(NamedTuple):
    """A family, its labels and its sources, the first of which that is not refused counts."""

    family: str
    labels: tuple[str, ...]
    sources: tuple[Source, ...]
    link: int | None = None
    """The link of this part of a sample that is a sum over all links; None for any other sample."""


class ReadPlan(NamedTuple):
    """Requests for some readings; valid until more than `refused` requests have been refused."""

    readings: Sequence[NvmlReading]
    refused: int
    sources: Sequence[tuple[NvmlReading, Source, int]]
    """Reading, source and index of its answer: the answers of all fields, then of all calls."""
    fields: Sequence[Request]
    calls: Sequence[Request]


class Device(GpuDevice):
    """One GPU or MIG instance."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._plans: dict[int, ReadPlan] = {}

    def forget(self) -> None:
        """Repeat requests that were refused."""
        super().forget()
        self._plans.clear()

    def ask(self, name: str, *args: Any) -> Any:
        """Call a function; None if it is refused or fails."""
        request = (name, args)
        return None if request in self._refused else self._call(request)

    def _call(self, request: Request) -> Any:
        name, args = request
        try:
            answer = _function(name)(self.handle, *args)
        except pynvml.NVMLError as error:
            self._failed(error.value, (request,))
            return None
        self._answers += 1
        return answer

    def read(self, readings: Sequence[NvmlReading]) -> list[tuple[NvmlReading, float]]:
        """Return the readings that have a value; a tuple of readings that the caller keeps is planned once."""
        while True:
            plan, refused = self._plans.get(id(readings)), len(self._refused)
            if plan is None or plan.readings is not readings or plan.refused != refused:
                sources = []  # the first one of each reading that has not been refused
                for reading in readings:
                    usable = [source for source in reading.sources if source[:2] not in self._refused]
                    sources += [(reading, usable[0])] if usable else []
                fields, calls = (
                    list(dict.fromkeys(source[:2] for _, source in sources if isinstance(source, kind)))
                    for kind in (Field, NvmlCall)
                )
                places = {request: at for at, request in enumerate([*fields, *calls])}
                placed = [(reading, source, places[source[:2]]) for reading, source in sources]
                plan = self._plans[id(readings)] = ReadPlan(readings, refused, placed, fields, calls)
            answers = [*self._fields(plan.fields), *map(self._call, plan.calls)]
            if len(self._refused) == refused:
                break
        values = []
        for reading, source, place in plan.sources:
            answer = answers[place]
            if answer is not None:
                if isinstance(source, NvmlCall) and source.pick != "":
                    answer = answer[source.pick] if isinstance(source.pick, int) else getattr(answer, source.pick)
                values.append((reading, float(answer * source.times / source.per)))
        return values

    def processes(self) -> dict[int, int | None]:
        """Return bytes by PID, None if unknown. Never skipped as refused: the call shows a lost GPU."""
        answer = None
        for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
            self._refused.discard((name, ()))
            if (answer := self.ask(name)) is not None:
                break
        used: dict[int, int | None] = {}
        for process in answer or ():
            if process.pid not in _NO_PIDS:  # a process may be listed once per MIG instance
                sizes = [size for size in (used.get(process.pid), process.usedGpuMemory) if size is not None]
                used[process.pid] = sum(sizes) if sizes else None
        return used

    def utilization(self) -> dict[int, float] | None:
        """Return the share of the SMs' time by PID over the last seconds; None if the driver does not tell.

        A process that computed nothing has no sample, and NVML answers "not found" if no process has one.
        """
        since = int((time.time() - LATELY) * 1e6)
        name = "nvmlDeviceGetProcessUtilization"
        if (name, ()) in self._refused:
            return None
        try:
            samples = _function(name)(self.handle, since)
        except pynvml.NVMLError as error:
            if error.value == _NOT_FOUND:
                return {}
            self._failed(error.value, ((name, ()),))
            return None
        return {sample.pid: sample.smUtil / 100 for sample in samples if sample.pid not in _NO_PIDS}

    def instances(self) -> list["Device"]:
        mode = self.ask("nvmlDeviceGetMigMode")
        if not mode or mode[0] != 1:
            return []
        slots = range(self.ask("nvmlDeviceGetMaxMigDeviceCount") or 0)
        handles = (self.ask("nvmlDeviceGetMigDeviceHandleByIndex", slot) for slot in slots)
        return [Device(handle) for handle in handles if handle is not None]

    def _fields(self, wanted: Sequence[Request]) -> Iterator[float | None]:
        """Yield the answer to each field, None if there is none."""
        try:
            values = _function("nvmlDeviceGetFieldValues")(self.handle, wanted) if wanted else b""
        except pynvml.NVMLError as error:
            self._failed(error.value, wanted)
            yield from (None for _ in wanted)
            return
        for request, (kind, code, value) in zip(wanted, _VALUES.iter_unpack(values), strict=True):
            if code:
                self._failed(code, (request,))
            has_value = not code and kind in _DECODE
            self._answers += has_value
            yield _DECODE[kind](value)[0] if has_value else None

    def _failed(self, code: int, requests: Collection[Request]) -> None:
        if code in _AWAY:
            raise DriverUnavailable(_SENTENCES[code])
        if code in _LOST:
            raise GpuLost
        if code in _REFUSED:
            self._refused.update(requests)
            self._answers += 1
        else:
            self._failures += 1


class Events:
    """Xid errors of these GPUs from now on (NVML keeps no history). Raises DriverUnavailable without events."""

    def __init__(self, devices: Iterable[Device]) -> None:
        self._set = _or_unavailable("nvmlEventSetCreate")
        self._uuids: dict[int | None, str] = {}
        for device in devices:
            with suppress(pynvml.NVMLError):
                _function("nvmlDeviceRegisterEvents")(device.handle, _XID, self._set)
                self._uuids[handle_address(device.handle)] = _function("nvmlDeviceGetUUID")(device.handle)

    @property
    def watched(self) -> Collection[str]:
        """UUIDs of the GPUs that report their Xid errors."""
        return self._uuids.values()

    def wait(self) -> tuple[str, int] | None:
        """Return UUID and Xid of the next error, None if there is none for `WAIT`. GpuLost if a GPU is lost."""
        try:
            event = _function("nvmlEventSetWait_v2")(self._set, WAIT)
        except pynvml.NVMLError as error:
            if error.value == _TIMEOUT:
                return None
            raise (GpuLost if error.value in _LOST else DriverUnavailable(_sentence(error))) from error
        uuid = self._uuids.get(handle_address(event.device))
        return (uuid, int(event.eventData)) if uuid is not None else None

    def close(self) -> None:
        with suppress(pynvml.NVMLError):
            _function("nvmlEventSetFree")(self._set)


def start() -> None:
    """Start NVML; each start needs a stop, since NVML counts its users. Raises DriverUnavailable."""
    _or_unavailable("nvmlInit")


def stop() -> None:
    """Stop NVML for one of its users."""
    with suppress(pynvml.NVMLError):
        _function("nvmlShutdown")()


def count() -> int:
    """Return the number of GPUs that the driver lists; it may list a lost one. Raises DriverUnavailable."""
    return int(_or_unavailable("nvmlDeviceGetCount"))


def devices() -> list[Device | None]:
    """Return the GPUs in the order of the PCI bus; None for one that does not answer. Raises DriverUnavailable."""
    gpus: list[Device | None] = []
    for index in range(count()):
        try:
            gpus.append(Device(_function("nvmlDeviceGetHandleByIndex")(index)))
        except pynvml.NVMLError:
            gpus.append(None)
    return gpus


def driver_version() -> str:
    """Return the driver's version such as "580.95.05"; "" if unknown."""
    with suppress(pynvml.NVMLError):
        return str(_function("nvmlSystemGetDriverVersion")())
    return ""


def uuid_of_instance(uuid: str) -> str:
    """Return the UUID of the GPU that has this MIG instance; "" if there is none."""
    with suppress(pynvml.NVMLError):
        instance = _function("nvmlDeviceGetHandleByUUID")(uuid)
        return str(_function("nvmlDeviceGetUUID")(_function("nvmlDeviceGetDeviceHandleFromMigDeviceHandle")(instance)))
    return ""


def between(name: str, one: Device, other: Device, *args: int) -> Any:
    """Call a function of a pair of GPUs; None if it fails."""
    with suppress(pynvml.NVMLError):
        return _function(name)(one.handle, other.handle, *args)
    return None


def _function(name: str) -> Any:
    """Return a function of pynvml; one that raises "function not found" if this release lacks it."""

    def missing(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    return getattr(pynvml, name, missing)


def _or_unavailable(name: str) -> Any:
    try:
        return _function(name)()
    except pynvml.NVMLError as error:
        raise DriverUnavailable(_sentence(error)) from error


def _sentence(error: Any) -> str:
    return _SENTENCES.get(error.value, f"NVML does not start: {error}")
