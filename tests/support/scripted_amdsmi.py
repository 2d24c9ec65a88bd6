"""Scripts for tests/support/native/amdsmi.c: AMD GPUs as dictionaries, so that the real amdsmi shows them.

A key is a function of the library with its arguments; its value is what the function answers, in the library's own
units: the fields of its structure (a field that is not given has the highest number of its width, as where the driver
does not have the value), a number, a text, a list of structures, or "!7" for a status. "gpu" in a text becomes the
GPU's index. A function that is not there is not supported.
"""

import ctypes
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from diag.exporter.gpu import amdsmi as binding

NATIVE = Path(__file__).parent / "native" / "amdsmi.c"
LIBRARY = "libamd_smi.so"
GIB = 2**30
STRUCTURES = {  # of what the function fills
    "amdsmi_get_gpu_device_bdf": "union_amdsmi_bdf_t",
    "amdsmi_get_gpu_metrics_info": "struct_amdsmi_gpu_metrics_t",
    "amdsmi_get_gpu_activity": "struct_amdsmi_engine_usage_t",
    "amdsmi_get_gpu_total_ecc_count": "struct_amdsmi_error_count_t",
    "amdsmi_get_gpu_xgmi_link_status": "struct_amdsmi_xgmi_link_status_t",
    "amdsmi_get_gpu_process_list": "struct_amdsmi_proc_info_t",
    "amdsmi_get_gpu_bad_page_info": "struct_amdsmi_retired_page_record_t",
    "amdsmi_get_clock_info": "struct_amdsmi_clk_info_t",
}
WIDTHS = {"amdsmi_topo_get_link_type": (8, 4), "amdsmi_get_gpu_ecc_enabled": (8,)}
EDGE, HOTSPOT, MEMORY = 0, 1, 2
NOW, CRITICAL = 0, 5
GFX, MEM = 0, 4
ZEROES = {"domain_number": 0, "device_number": 0, "function_number": 0}

MI300X: dict[str, Any] = {
    "amdsmi_get_gpu_device_bdf": {"struct_amdsmi_bdf_t": {"bus_number": 5, **ZEROES}},
    "amdsmi_get_gpu_device_uuid": "gpuff74a1-0000-1000-80d1-5a3d0f6c1e22",
    "amdsmi_get_gpu_asic_info": {
        "market_name": "AMD Instinct MI300X",
        "asic_serial": "0x50D15A3D0F6C1E2gpu",
        "target_graphics_version": 0x942,
    },
    "amdsmi_get_gpu_driver_info": {"driver_name": "amdgpu", "driver_version": "6.14.14"},
    "amdsmi_get_gpu_enumeration_info": {"hip_id": "gpu", "hip_uuid": "GPU-50d15a3d0f6c1e2gpu"},
    f"amdsmi_get_temp_metric {HOTSPOT} {NOW}": 71,
    f"amdsmi_get_temp_metric {HOTSPOT} {CRITICAL}": 100,
    f"amdsmi_get_temp_metric {MEMORY} {NOW}": 60,
    f"amdsmi_get_temp_metric {MEMORY} {CRITICAL}": 105,
    f"amdsmi_get_clock_info {GFX}": {"clk": 1400, "max_clk": 2100},
    f"amdsmi_get_clock_info {MEM}": {"clk": 1300, "max_clk": 1300},
    "amdsmi_get_power_info": {"current_socket_power": 742, "average_socket_power": 0xFFFF},
    "amdsmi_get_power_cap_info 0": {"power_cap": 750_000_000, "default_power_cap": 750_000_000, "min_power_cap": 0},
    "amdsmi_get_energy_count": (1_000_000, 15.5, 1),
    "amdsmi_get_gpu_activity": {"gfx_activity": 97, "umc_activity": 41},
    "amdsmi_get_gpu_memory_total 0": 192 * GIB,
    "amdsmi_get_gpu_memory_usage 0": 170 * GIB,
    "amdsmi_get_pcie_info": {
        "pcie_static": {"max_pcie_width": 16, "max_pcie_speed": 32000},
        "pcie_metric": {"pcie_width": 16, "pcie_speed": 32000, "pcie_replay_count": 3},
    },
    "amdsmi_get_gpu_metrics_info": {
        "accumulation_counter": 1000,
        "ppt_residency_acc": 400,
        "socket_thm_residency_acc": 10,
        "vr_thm_residency_acc": 0,
        "hbm_thm_residency_acc": 10,
        "prochot_residency_acc": 0,
        "xgmi_read_data_acc": [2000] * 7,
        "xgmi_write_data_acc": [1000] * 7,
    },
    "amdsmi_get_gpu_ecc_enabled": 0x1,
    "amdsmi_get_gpu_total_ecc_count": {"correctable_count": 2, "uncorrectable_count": 0, "deferred_count": 1},
    "amdsmi_get_gpu_bad_page_info": [{"status": 0}, {"status": 0}, {"status": 1}],
    "amdsmi_get_gpu_xgmi_link_status": {"total_links": 8, "status": [2, 1, 1, 1, 1, 1, 1, 1]},
    "amdsmi_get_gpu_process_list": [],
}
MI210: dict[str, Any] = {
    **{key: value for key, value in MI300X.items() if "bad_page" not in key},
    "amdsmi_get_gpu_asic_info": {"market_name": "AMD Instinct MI210", "target_graphics_version": 0x90A},
    f"amdsmi_get_temp_metric {EDGE} {NOW}": 55,
    "amdsmi_get_power_info": {"current_socket_power": 0xFFFF, "average_socket_power": 290},
    "amdsmi_get_gpu_metrics_info": {"indep_throttle_status": 1 << 0},
}


def _installed() -> Path:
    """Return the folder of the package, without its modules: they load the library."""
    spec = find_spec("amdsmi")
    if spec is None or spec.origin is None:
        pytest.skip("amdsmi is not installed: pip install -e '.[test]'")
    return Path(spec.origin).parent


def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the real amdsmi over the library in a folder; the one that was imported before is forgotten."""
    _installed()
    monkeypatch.setenv("ROCM_PATH", str(folder))
    monkeypatch.delenv("ROCM_HOME", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "amdsmi"]:
        monkeypatch.delitem(sys.modules, name)
    binding._package.cache_clear()
    binding._exceptions.cache_clear()
    return importlib.import_module("amdsmi")


def build(folder: Path, *without: str) -> Path:
    """Put the library into a folder as ROCm has it, without some symbols, as of another release."""
    library = folder / "lib" / LIBRARY
    library.parent.mkdir(parents=True)
    library.write_bytes(_compiled(without))
    return folder


@cache
def _compiled(without: tuple[str, ...]) -> bytes:
    wrapper = (_installed() / "amdsmi_wrapper.py").read_text(encoding="utf-8")
    symbols = set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", wrapper)).difference(without)
    with tempfile.TemporaryDirectory() as folder:
        stubs, library = Path(folder) / "stubs.c", Path(folder) / LIBRARY
        stubs.write_text("".join(f"__attribute__((weak)) int {name}(void) {{ return 2; }}\n" for name in symbols))
        hidden = [f"-D{name}=static_{name}" for name in without]
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", *hidden, "-o", library, NATIVE, stubs], check=True)
        return library.read_bytes()


def write(script: Path, gpus: Sequence[Mapping[str, Any]], **library: object) -> None:
    """Let the GPUs be these from now on; `library` are lines about none of them, amdsmi_init="!34" for one."""
    lines = [f"- amdsmi_get_processor_handles = {len(gpus)}", f"- amdsmi_get_lib_version = {_library()}"]
    lines += [f"- {name} = {value}" for name, value in library.items()]
    lines += [
        f"{at} {call} = {_bytes(call, answer, at)}" for at, gpu in enumerate(gpus) for call, answer in gpu.items()
    ]
    new = script.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n", encoding="utf-8")
    new.replace(script)


def _library() -> str:
    """Return the release of the library that the installed package fits."""
    major, minor = (int(part) for part in version("amdsmi").split(".")[:2])
    return ".".join(map(str, (*binding._LIBRARY_OF_ROCM.get((major, minor), (major, minor)), 0)[:2]))


def _bytes(call: str, answer: Any, gpu: int) -> str:
    symbol = call.partition(" ")[0]
    if (isinstance(answer, str) and answer.startswith("!")) or symbol in ("*", "sleep"):
        return str(answer)
    if isinstance(answer, str):
        return (answer.replace("gpu", str(gpu)).encode() + b"\0").hex()
    if symbol == "amdsmi_get_energy_count":
        energy, tick, time = answer
        return (bytes(ctypes.c_uint64(energy)) + bytes(ctypes.c_float(tick)) + bytes(ctypes.c_uint64(time))).hex()
    if isinstance(answer, int | tuple):
        numbers = answer if isinstance(answer, tuple) else (answer,)
        widths = WIDTHS.get(symbol, (8,))
        return "".join(int(n).to_bytes(width, "little").hex() for n, width in zip(numbers, widths, strict=True))
    wrapper = sys.modules["amdsmi"].amdsmi_wrapper
    kind = getattr(wrapper, STRUCTURES.get(symbol, f"struct_{symbol.replace('_get', '').replace('_gpu', '')}_t"))
    if isinstance(answer, list):
        return f"{len(answer)}:{''.join(_filled(kind, one, gpu).hex() for one in answer)}"
    return _filled(kind, answer, gpu).hex()


def _filled(kind: type[Any], fields: Mapping[str, Any], gpu: int) -> bytes:
    made = kind()
    ctypes.memset(ctypes.byref(made), 0xFF, ctypes.sizeof(made))
    for name, type_, *_ in kind._fields_:
        value = fields.get(name)
        if isinstance(value, str):
            value = value.replace("gpu", str(gpu))
        if issubclass(type_, ctypes.Array) and type_._type_ is ctypes.c_char:
            setattr(made, name, (value or "").encode())
        elif isinstance(value, Mapping):
            part = getattr(made, name)
            ctypes.memmove(ctypes.byref(part), _filled(type_, value, gpu), ctypes.sizeof(part))
        elif isinstance(value, list):
            for at, item in enumerate(value):
                getattr(made, name)[at] = item
        elif value is not None:
            setattr(made, name, int(value))
    return bytes(made)
