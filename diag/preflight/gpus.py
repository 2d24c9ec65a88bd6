"""Checks of the GPUs, by their driver here or by the exporter's page of a server that runs."""

import os
from collections.abc import Iterator

from diag.core.formatting import gibibytes, listed, plural
from diag.lint.rule import LINKS
from diag.preflight.check import NotChecked, Outcome, PreflightFacts, failed, need, passed, warned
from diag.vllm.flags.registry import release

_LEAST_CAPABILITY, _LEAST_OF_CUDA_13 = 7.0, 7.5
"""CUDA 13 has no compiler for GPUs below 7.5 (Volta and older)."""
_LEAST_DRIVER = {12: (525, 60), 13: (580, 65)}
"""The oldest driver on Linux that runs any minor release of a CUDA toolkit, by the toolkit's major release."""
_LEAST_MARGIN = 25.0
"""Degrees to the slowdown temperature: a GPU under load is 25 to 50 degrees warmer than an idle one."""
_LOW_POWER = 0.95
_A_DESKTOP = 2**29
"""Bytes of GPU memory that the server of a screen may hold."""


def _is_amd(facts: PreflightFacts) -> bool:
    return facts.gpu_name.startswith(("AMD ", "Radeon "))


def _reset(facts: PreflightFacts, gpu: str) -> str:
    return f"amd-smi reset --gpureset -g {gpu}" if _is_amd(facts) else f"nvidia-smi --gpu-reset -i {gpu}"


def _gpus(numbers: list[str]) -> str:
    return f"GPU{'s' * (len(numbers) > 1)} {listed(numbers)}"


def compute_capability(facts: PreflightFacts) -> Iterator[Outcome]:
    capabilities = {
        gpu["gpu"]: float(gpu["compute_capability"]) for gpu in facts.gpu_info() if gpu.get("compute_capability")
    }
    if not capabilities:
        raise NotChecked(
            "AMD's GPUs have none" if _is_amd(facts) else "the driver does not tell the compute capability"
        )
    is_13 = release(facts.wheel.cuda) >= (13,)
    least = _LEAST_OF_CUDA_13 if is_13 else _LEAST_CAPABILITY
    old = [gpu for gpu, capability in capabilities.items() if capability < least]
    half = [gpu for gpu, capability in capabilities.items() if least <= capability < 8.0]
    wants = facts.command.get("--dtype") if facts.command else None
    lowest = min(capabilities.values())
    if old:
        message = f"{_gpus(old)}: compute capability {lowest}, and vLLM needs {least}{' with CUDA 13' * is_13}"
        yield failed(message, "Use a newer GPU" + ", or a wheel for CUDA 12" * is_13)
    elif half and wants == "bfloat16":  # auto falls back to float16
        message = f"{_gpus(half)}: compute capability {lowest}, and bfloat16 needs 8.0"
        yield failed(message, "--dtype half")
    else:
        yield passed(f"compute capability {lowest}")


def driver_for_toolkit(facts: PreflightFacts) -> Iterator[Outcome]:
    if _is_amd(facts):
        raise NotChecked("the GPUs are AMD's, and diag does not know which driver a release of ROCm needs")
    toolkit = facts.wheel.cuda
    if not facts.wheel.torch:
        raise NotChecked("no vLLM is installed beside diag (--vllm-python names another Python)")
    if not toolkit:
        yield failed(
            "the installed PyTorch is built for CPUs and does not use the GPU", "Install vLLM's wheel for CUDA"
        )
        return
    driver = facts.gpu_info()[0].get("driver_version", "")
    least, version = _LEAST_DRIVER.get((release(toolkit) or (0,))[0]), release(driver)[:2]
    if not (least and version):
        raise NotChecked(f"the least driver for CUDA {toolkit} is not known, or the driver has no version")
    needed = ".".join(map(str, least))
    if version < least:
        message = f"driver {driver} is too old for PyTorch's CUDA {toolkit}, which needs {needed}"
        yield failed(message, f"Install driver {needed} or later, or a wheel for an older CUDA")
    else:
        yield passed(f"driver {driver} runs CUDA {toolkit}")


def pcie_width(facts: PreflightFacts) -> Iterator[Outcome]:
    most, now = (facts.by_gpu("diag_gpu_pcie_link_width", which=which) for which in ("max", "current"))
    if not most.keys() & now.keys():
        raise NotChecked("the driver does not tell the PCIe width")
    narrow = [gpu for gpu, width in now.items() if width < most.get(gpu, 0)]
    for gpu in narrow:
        message = f"GPU {gpu} has {now[gpu]:g} of {most[gpu]:g} PCIe lanes"
        yield warned(message, "Seat the card and its riser anew, or use a slot with all lanes")
    if not narrow:
        yield passed(f"{min(now.values()):g} PCIe lanes")


def peer_to_peer(facts: PreflightFacts) -> Iterator[Outcome]:
    if facts.ranks("tensor", "pipeline") < 2 or facts.on_cpu:
        return
    gpus = facts.gpu_info()
    paths = {labels["path"] for labels, _ in facts.gpus.get("diag_gpu_peer_info", ())}
    if len(paths) == 1 and (link := LINKS.get(min(paths))):
        yield passed(f"{link} connects all GPUs")
        return
    machine = facts.on_host()
    bridges = need(machine.redirecting_bridges(), "the PCI bridges' settings are shown to root only")
    if bridges:
        message = f"{plural(len(bridges), 'PCI bridge')} redirect peer-to-peer traffic (ACS), the first {bridges[0]}"
        yield warned(message, "Disable ACS in the BIOS on bare metal; NCCL_P2P_DISABLE=1 avoids a hang")
    elif any(machine.is_translated(gpu.get("pci_bus_id", "")) for gpu in gpus):
        message = "an IOMMU translates the addresses of GPUs that communicate over PCIe"
        yield warned(message, "On bare metal, boot with iommu=pt")
    else:
        yield passed("no bridge redirects peer-to-peer traffic")


def power_limit(facts: PreflightFacts) -> Iterator[Outcome]:
    usual, limits = (facts.by_gpu(f"diag_gpu_power_limit{which}_watts") for which in ("_default", ""))
    now = {gpu: watts for gpu, watts in limits.items() if gpu in usual}
    if not now:
        raise NotChecked("the driver does not tell the power limit")
    low = [gpu for gpu, watts in now.items() if watts < _LOW_POWER * usual[gpu]]
    for gpu in low:
        message = f"GPU {gpu} is limited to {now[gpu]:.0f} W, its default is {usual[gpu]:.0f} W"
        yield warned(message, f"nvidia-smi -i {gpu} -pl {usual[gpu]:.0f}")
    if not low:
        yield passed(f"power limit {min(now.values()):.0f} W")


def persistence_mode(facts: PreflightFacts) -> Iterator[Outcome]:
    modes = facts.by_gpu("diag_gpu_persistence_mode")
    if not modes:
        raise NotChecked("the driver does not tell the persistence mode")
    off = [gpu for gpu, value in modes.items() if not value]
    do = "nvidia-smi -pm 1, or run nvidia-persistenced"
    yield warned(f"persistence mode is off on {_gpus(off)}", do) if off else passed("persistence mode is on")


def idle_temperature(facts: PreflightFacts) -> Iterator[Outcome]:
    busy = [gpu for gpu, ratio in facts.by_gpu("diag_gpu_utilization_ratio").items() if ratio > 0]
    margins = facts.by_gpu("diag_gpu_temperature_margin_celsius")
    idle = {gpu: margin for gpu, margin in margins.items() if gpu not in busy}
    if not idle:
        raise NotChecked("every GPU is busy" if busy else "the driver does not tell the slowdown temperature")
    warm = [gpu for gpu, margin in idle.items() if margin < _LEAST_MARGIN]
    for gpu in warm:
        message = f"GPU {gpu} is idle and {idle[gpu]:.0f} °C below its slowdown temperature"
        yield warned(message, "Check fans, inlet and room temperature before any load")
    if not warm:
        yield passed(f"{min(idle.values()):.0f} °C below the slowdown temperature")


def memory_errors(facts: PreflightFacts) -> Iterator[Outcome]:
    remaps = (facts.by_gpu(f"diag_gpu_remap_{state}") for state in ("failure", "pending"))
    failures, pending = ([gpu for gpu, value in remap.items() if value] for remap in remaps)
    errors = facts.by_gpu("diag_gpu_ecc_errors_total", kind="uncorrected")
    if not (errors or facts.gpus.get("diag_gpu_remap_failure")):
        raise NotChecked("the GPU counts no memory errors, or ECC is off")
    for gpu in failures:
        yield failed(f"GPU {gpu} has a memory row that could not be replaced", "Take the GPU out of service (RMA)")
    for gpu in pending:
        yield warned(f"GPU {gpu} has a memory row that waits to be replaced", _reset(facts, gpu))
    for gpu, count in errors.items():
        if count and gpu not in (*failures, *pending):
            message = f"GPU {gpu} has {plural(int(count), 'uncorrected memory error')} since the driver was loaded"
            yield warned(message, _reset(facts, gpu))
    if not (failures or pending or any(errors.values())):
        yield passed("no uncorrected memory error")


def other_processes(facts: PreflightFacts) -> Iterator[Outcome]:
    roles = ("other", "unknown") if facts.running else ("other", "unknown", "worker", "engine", "api_server")
    samples = facts.gpus.get("diag_gpu_process_memory_bytes", ())
    holders = [(of, size) for of, size in samples if of.get("role") in roles and size >= _A_DESKTOP]
    for of, size in holders:
        pid, name = of["pid"], facts.machine.process_name(of["pid"]) if facts.machine else ""
        message = f"process {pid}{f' ({name})' * bool(name)} holds {gibibytes(size, 1)} of GPU {of['gpu']}"
        yield warned(message, f"ps -fp {pid}: end it if nobody needs it")
    if not holders:
        yield passed("no other process holds GPU memory")


def cpus_beside_gpus(facts: PreflightFacts) -> Iterator[Outcome]:
    machine, allowed = facts.on_host(), os.sched_getaffinity(0)
    local = {gpu["gpu"]: machine.local_cpus(gpu["pci_bus_id"]) for gpu in facts.gpu_info() if gpu.get("pci_bus_id")}
    if not any(local.values()):
        raise NotChecked("the kernel does not tell which CPUs are near a GPU")
    far = [gpu for gpu, cpus in local.items() if cpus and allowed.isdisjoint(cpus)]
    if far:
        message = f"no CPU that this process may use is on the NUMA node of {_gpus(far)}"
        yield warned(message, "Widen the CPU set (taskset, cpuset), or add --numa-bind")
    else:
        yield passed("CPUs of the GPUs' own NUMA nodes may be used")
