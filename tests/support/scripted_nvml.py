"""Scripts for tests/support/native/nvml.c: GPUs as dictionaries, so that the real nvidia-ml-py shows them.

A GPU has, as far as it has them, in NVML's own units:

uuid name pci capability                what it is; "gpu" in a uuid becomes its index
temperature memory_temperature margin slowdown      degrees Celsius
utilization memory_busy                 percent
power limit limit_min limit_default     milliwatts
energy                                  millijoules
clock_sm clock_memory max_sm max_memory megahertz
total reserved free used                bytes
reasons                                 the mask of clock event reasons
pcie_tx pcie_rx                         kilobytes per second
throttled_sw_thermal throttled_hw_thermal throttled_sw_power_cap throttled_hw_power_brake     nanoseconds
generation width max_generation max_width replays
links nvlink_tx nvlink_rx               NVLinks, and kibibytes of each
corrected uncorrected remapped remap_failed
processes                               {pid: bytes}
process_utilization                     {pid: percent}
also                                    {a line's key: its value} for anything else

A value may be "!15" for a return code; None, or a key that is not there, is not supported.
"""

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pynvml
import pytest

NATIVE = Path(__file__).parent / "native" / "nvml.c"
LIBRARY = "libnvidia-ml.so.1"
GIB = 2**30
FIELDS = {  # our words: NVML's field
    "memory_temperature": 82,
    "energy": 83,
    "throttled_sw_power_cap": 74,
    "throttled_sw_thermal": 269,
    "throttled_hw_thermal": 270,
    "throttled_hw_power_brake": 271,
    "links": 91,
}
CALLS = {
    "uuid": ("nvmlDeviceGetUUID",),
    "name": ("nvmlDeviceGetName",),
    "pci": ("nvmlDeviceGetPciInfo",),
    "capability": ("nvmlDeviceGetCudaComputeCapability",),
    "temperature": ("nvmlDeviceGetTemperatureV 0", "nvmlDeviceGetTemperature 0"),
    "margin": ("nvmlDeviceGetMarginTemperature",),
    "slowdown": ("nvmlDeviceGetTemperatureThreshold 1",),
    "power": ("nvmlDeviceGetPowerUsage",),
    "limit": ("nvmlDeviceGetEnforcedPowerLimit",),
    "limit_default": ("nvmlDeviceGetPowerManagementDefaultLimit",),
    "clock_sm": ("nvmlDeviceGetClockInfo 1",),
    "clock_memory": ("nvmlDeviceGetClockInfo 2",),
    "max_sm": ("nvmlDeviceGetMaxClockInfo 1",),
    "max_memory": ("nvmlDeviceGetMaxClockInfo 2",),
    "reasons": ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
    "generation": ("nvmlDeviceGetCurrPcieLinkGeneration",),
    "width": ("nvmlDeviceGetCurrPcieLinkWidth",),
    "max_generation": ("nvmlDeviceGetMaxPcieLinkGeneration",),
    "max_width": ("nvmlDeviceGetMaxPcieLinkWidth",),
    "pcie_tx": ("nvmlDeviceGetPcieThroughput 0",),
    "pcie_rx": ("nvmlDeviceGetPcieThroughput 1",),
    "replays": ("nvmlDeviceGetPcieReplayCounter",),
    "corrected": ("nvmlDeviceGetTotalEccErrors 0 0",),
    "uncorrected": ("nvmlDeviceGetTotalEccErrors 1 0",),
}
TUPLES = {
    "nvmlDeviceGetUtilizationRates": ("utilization", "memory_busy"),
    "nvmlDeviceGetPowerManagementLimitConstraints": ("limit_min", "limit_default"),
    "nvmlDeviceGetMemoryInfo_v2": ("total", "reserved", "free", "used"),
    "nvmlDeviceGetMemoryInfo": ("total", "free", "used"),
}

H100: dict[str, object] = {
    "uuid": "GPU-gpu0aaaa-bbbb-cccc-dddd-eeeeeeeeeeee",
    "name": "NVIDIA H100 80GB HBM3",
    "pci": "00000000:0gpu:00.0",
    "capability": "9 0",
    "temperature": 55,
    "memory_temperature": 60,
    "margin": 32,
    "utilization": 90,
    "memory_busy": 60,
    "power": 400_000,
    "limit": 700_000,
    "limit_min": 200_000,
    "limit_default": 700_000,
    "energy": 123_456_000,
    "clock_sm": 1980,
    "clock_memory": 2619,
    "max_sm": 1980,
    "max_memory": 2619,
    "total": 80 * GIB,
    "reserved": GIB,
    "free": 9 * GIB,
    "used": 70 * GIB,
    "reasons": 0x4,
    "throttled_sw_power_cap": 5_000_000_000,
    "throttled_sw_thermal": 0,
    "throttled_hw_thermal": 0,
    "throttled_hw_power_brake": 0,
    "generation": 5,
    "width": 16,
    "max_generation": 5,
    "max_width": 16,
    "pcie_tx": 1_000,
    "pcie_rx": 2_000,
    "replays": 0,
    "links": 18,
    "nvlink_tx": 1000,
    "nvlink_rx": 2000,
    "corrected": 1,
    "uncorrected": 0,
    "remapped": "0 0 0 0",
    "processes": {},
}
T4: dict[str, object] = {
    **dict.fromkeys(("margin", "memory_temperature", "links", "nvlink_tx", "nvlink_rx", "remapped")),
    "uuid": "GPU-gpu4aaaa-bbbb-cccc-dddd-eeeeeeeeeeee",
    "name": "Tesla T4",
    "pci": "00000000:0gpu:1E.0",
    "capability": "7 5",
    "temperature": 60,
    "slowdown": 93,
    "utilization": 95,
    "memory_busy": 40,
    "power": 66_000,
    "limit": 70_000,
    "limit_min": 60_000,
    "limit_default": 70_000,
    "energy": 9_000,
    "clock_sm": 1590,
    "clock_memory": 5000,
    "max_sm": 1590,
    "max_memory": 5001,
    "total": 15 * GIB,
    "free": 2 * GIB,
    "used": 13 * GIB,
    "reserved": 0,
    "reasons": 0x4,
    "throttled_sw_power_cap": 1_000_000_000,
    "throttled_sw_thermal": 0,
    "throttled_hw_thermal": 0,
    "throttled_hw_power_brake": 0,
    "generation": 3,
    "width": 8,
    "max_generation": 3,
    "max_width": 16,
    "replays": 0,
    "corrected": 0,
    "uncorrected": 0,
    "processes": {},
}
LOST: dict[str, object] = {"also": {"*": "!15"}}
"""It is listed, and every call on it says that it is lost."""


def build(folder: Path, *defines: str) -> Path:
    """The library in a folder of its own, compiled with these macros: a file of its own has a state of its own."""
    place = folder / ("nvml" + "".join(f"-{define}" for define in defines))
    library = place / LIBRARY
    if not library.exists():
        place.mkdir()
        library.write_bytes(_compiled(defines))
    return library


@cache
def _compiled(defines: tuple[str, ...]) -> bytes:
    """Compiled once in a run: it takes seconds, and a test of GPUs takes less."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / LIBRARY
        macros = [f"-D{define}" for define in defines]
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", *macros, "-o", library, NATIVE], check=True)
        return library.read_bytes()


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the nvidia-ml-py of this process read the library, and return the script that it reads."""
    script = folder / "script"
    monkeypatch.setenv("DIAG_NVML_SCRIPT", str(script))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(build(folder))))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return script


def write(script: Path, gpus: Sequence[Mapping[str, object]], **driver: object) -> None:
    """Let the GPUs be these from now on; `driver` are lines about none of them, nvmlInit="!9" for one."""
    lines = [f"- nvmlDeviceGetCount = {len(gpus)}", "- nvmlSystemGetDriverVersion = 580.95.05"]
    lines += [f"- {name} = {value}" for name, value in driver.items()]
    lines += [line for index, gpu in enumerate(gpus) for line in _gpu(index, gpu)]
    new = script.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n", encoding="utf-8")
    new.replace(script)


def _gpu(index: int, gpu: Mapping[str, object]) -> list[str]:
    said = {key: str(value).replace("gpu", str(index)) for key, value in gpu.items() if value is not None}
    found = {call: said[word] for word, calls in CALLS.items() if word in said for call in calls}
    found |= {f"field {number} 0": said[word] for word, number in FIELDS.items() if word in said}
    found |= {call: " ".join(said[w] for w in words) for call, words in TUPLES.items() if set(words) <= said.keys()}
    if "remapped" in said:
        found["nvmlDeviceGetRemappedRows"] = said["remapped"]
    links = int(said.get("links", 0))
    for field, word in ((138, "nvlink_tx"), (139, "nvlink_rx")) if links else ():
        found |= {f"field {field} {link}": said[word] for link in range(links)}
        found[f"field {field} {2**32 - 1}"] = str(links * int(said[word]))
    for link in range(links):
        found[f"nvmlDeviceGetNvLinkState {link}"] = "1"
    users = gpu.get("processes")
    if isinstance(users, Mapping):
        found["processes"] = str(len(users))
        found |= {f"process {at}": f"{pid} {used}" for at, (pid, used) in enumerate(users.items())}
    if isinstance(shares := gpu.get("process_utilization"), Mapping):
        found["process_utilization"] = " ".join(f"{pid} {percent}" for pid, percent in shares.items()) or "none"
    also = gpu.get("also")
    return [
        f"{index} {key} = {value}" for key, value in {**found, **(also if isinstance(also, Mapping) else {})}.items()
    ]


def environment(folder: Path, script: Path) -> dict[str, str]:
    """Return the variables that point a program to the library in that folder and to its script."""
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": ":".join(paths), "DIAG_NVML_SCRIPT": str(script)}


def load_into_process(library: Path) -> None:
    """Let the nvidia-ml-py of this process read the library for good; its script is that of the environment."""
    pynvml.nvmlLib = ctypes.CDLL(str(library))
    pynvml._nvmlGetFunctionPointer_cache = {}
