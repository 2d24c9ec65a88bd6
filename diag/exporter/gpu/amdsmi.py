"""AMD SMI, as far as this ROCm and this GPU answer (the only importer of amdsmi).

amdsmi is a part of ROCm, and each release changes some functions: they are called by name, and one that is missing or
fails costs only its own value. Requests that a GPU refuses are not repeated until `AmdDevice.forget`.
"""

import ctypes
import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from diag.exporter.gpu.driver import DriverUnavailable, GpuDevice, handle_address

_REFUSED = {1, 2, 3}
"""INVAL (a sensor or clock that it does not have), NOT_SUPPORTED, NOT_YET_IMPLEMENTED."""
_BUSY = {8, 9, 10, 11, 30}
"""TIMEOUT, RETRY, NO_PERM (also during a reset), INTERRUPT, BUSY: the GPU is there; the value may come next time."""
_SENTENCES = {
    10: "no permission to open the AMD driver (/dev/kfd, /dev/dri): join the groups video and render",
    32: "AMD SMI was shut down",
    34: "the AMD driver (amdgpu) is not loaded",
}
_AWAY = {32, 34}
_MISSING = "the Python package amdsmi is not installed: pip install 'diag[amd]', or the one in /opt/rocm/share/amd_smi"
_NO_LIBRARY = (
    "libamd_smi.so not found: ROCm's package amd-smi-lib is not installed here (ROCM_PATH names another place)"
)
_LIBRARY_OF_ROCM = {(6, 3): (24, 7), (6, 4): (25,), (7, 0): (26, 0)}
"""Releases of the library by ROCm's. PyPI numbers the package like ROCm, ROCm's own package like the library."""
_NOT_THERE = {2**32 - 1, 2**64 - 1}
_HARMLESS = (AttributeError, KeyError, IndexError, TypeError, ValueError, ctypes.ArgumentError)
"""Errors of the package itself: a function that this release lacks, an answer that it does not know."""


@cache
def _package() -> Any:
    """Return the package, which loads the library when it is imported; DriverUnavailable where that fails."""
    with redirect_stdout(io.StringIO()):  # it prints to standard output that the library is missing
        try:
            import amdsmi
        except ImportError as error:
            raise DriverUnavailable(_MISSING if error.name == "amdsmi" else _NO_LIBRARY) from error
        except (OSError, KeyError) as error:
            raise DriverUnavailable(_NO_LIBRARY) from error
        except AttributeError as error:
            raise DriverUnavailable(f"amdsmi and libamd_smi.so are of different releases: {error}") from error
    return amdsmi


@cache
def _exceptions() -> tuple[type[Exception], ...]:
    return (_package().AmdSmiException, *_HARMLESS)


def _code(error: Exception) -> int | None:
    return getattr(error, "err_code", None)


def number(value: Any) -> float | None:
    """Return a value as a number; None for "N/A" and for the highest number of 32 or 64 bits, which mean the same."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value not in _NOT_THERE else None


class AmdDevice(GpuDevice):
    """One GPU, or one partition of a GPU."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._asked: dict[tuple[Any, ...], Any] = {}

    def fell_silent(self) -> bool:
        """End a scrape: return True if none of its requests was answered."""
        self._asked.clear()
        return super().fell_silent()

    def ask(self, name: str, *args: Any) -> Any:
        """Call a function of this GPU, once a scrape; None if it is refused, missing or fails.

        An argument is the name of an enumeration and of one of its items.
        """
        request, package = (name, *args), _package()
        if request in self._asked:
            return self._asked[request]
        answer = None
        if request not in self._refused:
            try:
                answer = getattr(package, name)(self.handle, *(getattr(package, kind)[item] for kind, item in args))
                self._answers += 1
            except _exceptions() as error:
                self._failed(_code(error), request)
        self._asked[request] = answer
        return answer

    def number(self, name: str, *keys: str, args: Iterable[tuple[str, str]] = ()) -> float | None:
        """Return a number of an answer; `keys` lead to it."""
        answer = self.ask(name, *args)
        for key in keys:
            answer = answer.get(key) if isinstance(answer, Mapping) else None
        return number(answer)

    def metrics(self) -> "Metrics":
        """Read the table of the GPU's firmware, in one call; without any value if there is none.

        The table is read as it is: the package's own function makes True or False of the throttle bits.
        """
        request = ("amdsmi_get_gpu_metrics_info",)
        if request in self._refused:
            return Metrics(None)
        try:
            wrapper = _package().amdsmi_wrapper
            table = wrapper.amdsmi_gpu_metrics_t()
            code = wrapper.amdsmi_get_gpu_metrics_info(self.handle, ctypes.byref(table))
        except _HARMLESS:
            code = 2
        if code:
            self._failed(code, request)
            return Metrics(None)
        self._answers += 1
        return Metrics(table)

    def _failed(self, code: int | None, request: tuple[Any, ...]) -> None:
        if code in _AWAY:
            raise DriverUnavailable(_SENTENCES[code])
        if code is None or code in _REFUSED:
            self._refused.add(request)
            self._answers += 1
        elif code in _BUSY:
            self._answers += 1
        else:
            self._failures += 1


class Metrics:
    """The table that the GPU's firmware fills; the highest number of a field's width means that it has no value."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._types = dict(table._fields_) if table is not None else {}

    def all(self, name: str) -> list[int]:
        """Return the values of a field that is an array, without those that are not there."""
        kind = self._types.get(name)
        if kind is None:
            return []
        is_array = issubclass(kind, ctypes.Array)
        width = ctypes.sizeof(kind._type_ if is_array else kind)
        values = list(getattr(self._table, name)) if is_array else [getattr(self._table, name)]
        return [value for value in values if value != 2 ** (8 * width) - 1]

    def __getitem__(self, name: str) -> int | None:
        return next(iter(self.all(name)), None)


class Resets:
    """Announcements of a GPU reset, which the driver keeps until they are read."""

    def __init__(self, devices: Sequence[AmdDevice]) -> None:
        self._readers = {}
        package = _package()
        for device in devices:
            with suppress(*_exceptions()):
                kinds = [package.AmdSmiEvtNotificationType.GPU_PRE_RESET]
                self._readers[handle_address(device.handle)] = package.AmdSmiEventReader(device.handle, kinds)

    def watches(self, device: AmdDevice) -> bool:
        return handle_address(device.handle) in self._readers

    def new(self) -> list[int | None]:
        """Return the addresses of the GPUs that were reset since the last call, one for each reset."""
        with suppress(*_exceptions()):
            for reader in self._readers.values():  # any of them reads the events of all
                resets = (event for event in reader.read(0) if event["event"] == "GPU_PRE_RESET")
                return [handle_address(event["processor_handle"]) for event in resets]
        return []

    def is_of(self, address: int | None, device: AmdDevice) -> bool:
        return handle_address(device.handle) == address

    def close(self) -> None:
        for reader in self._readers.values():
            with suppress(*_exceptions()):
                reader.stop()


def start() -> None:
    """Start AMD SMI. Raises DriverUnavailable."""
    package = _package()
    try:
        package.amdsmi_init()
        answer = package.amdsmi_get_lib_version()
        library = (int(answer["major"]), int(answer["minor"]))
    except _exceptions() as error:
        sentence = f"AMD SMI does not start: {' '.join(str(error).split())}"
        raise DriverUnavailable(_SENTENCES.get(_code(error) or 0, sentence)) from error
    with suppress(PackageNotFoundError, ValueError, AttributeError):
        release = version("amdsmi")
        major, minor, *_ = (int(part) for part in release.split(".")[:2])
        fitting = _LIBRARY_OF_ROCM.get((major, minor), (major, minor))
        if library[: len(fitting)] != fitting:
            stop()
            raise DriverUnavailable(
                f"amdsmi {release} does not fit libamd_smi.so {library[0]}.{library[1]}, so that it would misread it:"
                " install the package of this ROCm (/opt/rocm/share/amd_smi)"
            )


def stop() -> None:
    with suppress(*_exceptions()):
        _package().amdsmi_shut_down()


def devices() -> list[AmdDevice]:
    """Return the GPUs in the order of amd-smi. Raises DriverUnavailable."""
    try:
        return [AmdDevice(handle) for handle in _package().amdsmi_get_processor_handles()]
    except _exceptions() as error:
        raise DriverUnavailable(f"AMD SMI lists no GPUs: {' '.join(str(error).split())}") from error


def link_type(one: AmdDevice, other: AmdDevice) -> int | None:
    """Return the type of the link between two GPUs, 2 for XGMI; None if it is unknown."""
    with suppress(*_exceptions()):
        return int(_package().amdsmi_topo_get_link_type(one.handle, other.handle)["type"])
    return None
