"""Checks of the GPUs, by their driver here or by the exporter's page of a server that runs."""

import os
from collections.abc import Iterator

from diag.core.formatting import gibibytes, listed, plural
from diag.lint.rule import LINKS
from diag.preflight.check import NotChecked, Outcome, PreflightFacts, check, failed, passed, warned
from diag.vllm.flags.registry import release

_NVIDIA = "https://docs.nvidia.com/deploy"
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


@check(
    "host",
    "The GPU's compute capability",
    reads="diag_gpu_info of every GPU",
    why="vLLM's wheels have no kernels for older GPUs, and --dtype bfloat16 needs capability 8.0",
    source="https://docs.vllm.ai/en/stable/getting_started/installation/gpu/",
)
def compute_capability(facts: PreflightFacts) -> Iterator[Outcome]:
    facts.need_gpus()
    capabilities = {
        labels["gpu"]: float(labels["compute_capability"])
        for labels, _ in facts.gpus["diag_gpu_info"]
        if labels.get("compute_capability")
    }
    if not capabilities:
        raise NotChecked(
            "AMD's GPUs have none" if _is_amd(facts) else "the driver does not tell the compute capability"
        )
    is_13 = release(facts.wheel.cuda) >= (13,)
    least = _LEAST_OF_CUDA_13 if is_13 else _LEAST_CAPABILITY
    old = [gpu for gpu, found in capabilities.items() if found < least]
    half = [gpu for gpu, found in capabilities.items() if least <= found < 8.0]
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


@check(
    "host",
    "The driver against the CUDA toolkit of the installed PyTorch",
    reads="the driver's version in diag_gpu_info, and torch/version.py of the Python that has vLLM",
    why='a wheel for CUDA 13 does not start with a driver for CUDA 12: "the NVIDIA driver on your system is too old"',
    source=f"{_NVIDIA}/cuda-compatibility/",
)
def driver_for_toolkit(facts: PreflightFacts) -> Iterator[Outcome]:
    facts.need_gpus()
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
    driver = next(labels.get("driver_version", "") for labels, _ in facts.gpus["diag_gpu_info"])
    major = (release(toolkit) or (0,))[0]
    least, found = _LEAST_DRIVER.get(major), release(driver)[:2]
    if not (least and found):
        raise NotChecked(f"the least driver for CUDA {toolkit} is not known, or the driver has no version")
    shown = ".".join(map(str, least))
    if found < least:
        message = f"driver {driver} is too old for PyTorch's CUDA {toolkit}, which needs {shown}"
        yield failed(message, f"Install driver {shown} or later, or a wheel for an older CUDA")
    else:
        yield passed(f"driver {driver} runs CUDA {toolkit}")


@check(
    "host",
    "The width of the PCIe links",
    reads="diag_gpu_pcie_link_width, now and at most; the generation falls when idle and is not judged",
    why="a card with half of its lanes loads weights, offloads and talks to its peers at half the rate; a worn riser or"
    " the wrong slot shows like this",
    source=f"{_NVIDIA}/nvml-api/",
)
def pcie_width(facts: PreflightFacts) -> Iterator[Outcome]:
    facts.need_gpus()
    most = dict(facts.each_gpu("diag_gpu_pcie_link_width", which="max"))
    now = dict(facts.each_gpu("diag_gpu_pcie_link_width", which="current"))
    if not most.keys() & now.keys():
        raise NotChecked("the driver does not tell the PCIe width")
    narrow = {gpu: width for gpu, width in now.items() if width < most.get(gpu, 0)}
    for gpu, width in narrow.items():
        message = f"GPU {gpu} has {width:g} of {most[gpu]:g} PCIe lanes"
        yield warned(message, "Seat the card and its riser anew, or use a slot with all lanes")
    if not narrow:
        yield passed(f"{min(now.values()):g} PCIe lanes")


@check(
    "host",
    "Peer-to-peer access between the GPUs",
    reads="diag_gpu_peer_info; the access control (ACS) of the PCI bridges, and the type of the GPUs' IOMMU groups",
    why="ACS, or an IOMMU that translates addresses, sends peer-to-peer traffic through the CPU: NCCL gets slow or"
    " hangs on bare metal",
    source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
)
def peer_to_peer(facts: PreflightFacts) -> Iterator[Outcome]:
    ranks = facts.ranks("tensor", "pipeline")
    if ranks < 2 or facts.on_cpu:
        return
    facts.need_gpus()
    paths = {labels["path"] for labels, _ in facts.gpus.get("diag_gpu_peer_info", ())}
    if len(paths) == 1 and (link := LINKS.get(min(paths))):
        yield passed(f"{link} connects all GPUs")
        return
    machine = facts.on_host()
    bridges = machine.redirecting_bridges()
    if bridges is None:
        raise NotChecked("the PCI bridges' settings are shown to root only")
    if bridges:
        message = f"{plural(len(bridges), 'PCI bridge')} redirect peer-to-peer traffic (ACS), the first {bridges[0]}"
        yield warned(message, "Disable ACS in the BIOS on bare metal; NCCL_P2P_DISABLE=1 avoids a hang")
    elif any(machine.is_translated(labels.get("pci_bus_id", "")) for labels, _ in facts.gpus["diag_gpu_info"]):
        message = "an IOMMU translates the addresses of GPUs that communicate over PCIe"
        yield warned(message, "On bare metal, boot with iommu=pt")
    else:
        yield passed("no bridge redirects peer-to-peer traffic")


@check(
    "host",
    "The power limit",
    reads="diag_gpu_power_limit_watts and diag_gpu_power_limit_default_watts",
    why="a GPU below its default limit prefills slower, and a ramp made at another limit does not hold",
    source=f"{_NVIDIA}/nvml-api/",
)
def power_limit(facts: PreflightFacts) -> Iterator[Outcome]:
    facts.need_gpus()
    usual = dict(facts.each_gpu("diag_gpu_power_limit_default_watts"))
    now = {gpu: watts for gpu, watts in facts.each_gpu("diag_gpu_power_limit_watts") if gpu in usual}
    if not now:
        raise NotChecked("the driver does not tell the power limit")
    low = {gpu: watts for gpu, watts in now.items() if watts < _LOW_POWER * usual[gpu]}
    for gpu, watts in low.items():
        message = f"GPU {gpu} is limited to {watts:.0f} W, its default is {usual[gpu]:.0f} W"
        yield warned(message, f"nvidia-smi -i {gpu} -pl {usual[gpu]:.0f}")
    if not low:
        yield passed(f"power limit {min(now.values()):.0f} W")


@check(
    "host",
    "Persistence mode",
    reads="diag_gpu_persistence_mode",
    why="without it the driver unloads when the last process ends: the next start takes seconds longer, and limits that"
    " were set are gone",
    source=f"{_NVIDIA}/driver-persistence/",
)
def persistence_mode(facts: PreflightFacts) -> Iterator[Outcome]:
    facts.need_gpus()
    modes = dict(facts.each_gpu("diag_gpu_persistence_mode"))
    if not modes:
        raise NotChecked("the driver does not tell the persistence mode")
    off = [gpu for gpu, value in modes.items() if not value]
    if off:
        yield warned(f"persistence mode is off on {_gpus(off)}", "nvidia-smi -pm 1, or run nvidia-persistenced")
    else:
        yield passed("persistence mode is on")


@check(
    "host",
    "The temperature before any load",
    reads="diag_gpu_temperature_margin_celsius: degrees below the slowdown temperature",
    why="a GPU that is warm while idle has no room for load: a hot room, a dead fan or a blocked inlet",
    source=f"{_NVIDIA}/nvml-api/",
)
def idle_temperature(facts: PreflightFacts) -> Iterator[Outcome]:
    facts.need_gpus()
    busy = {gpu for gpu, ratio in facts.each_gpu("diag_gpu_utilization_ratio") if ratio > 0}
    margins = {gpu: margin for gpu, margin in facts.each_gpu("diag_gpu_temperature_margin_celsius") if gpu not in busy}
    if not margins:
        raise NotChecked("every GPU is busy" if busy else "the driver does not tell the slowdown temperature")
    warm = {gpu: margin for gpu, margin in margins.items() if margin < _LEAST_MARGIN}
    for gpu, margin in warm.items():
        message = f"GPU {gpu} is idle and {margin:.0f} °C below its slowdown temperature"
        yield warned(message, "Check fans, inlet and room temperature before any load")
    if not warm:
        yield passed(f"{min(margins.values()):.0f} °C below the slowdown temperature")


@check(
    "host",
    "Memory errors of the GPUs",
    reads="diag_gpu_ecc_errors_total (uncorrected), diag_gpu_remap_failure and diag_gpu_remap_pending",
    why="an uncorrected error ends the processes on the GPU, and a row that cannot be replaced will fail again",
    source=f"{_NVIDIA}/a100-gpu-mem-error-mgmt/",
)
def memory_errors(facts: PreflightFacts) -> Iterator[Outcome]:
    facts.need_gpus()
    failures = [gpu for gpu, value in facts.each_gpu("diag_gpu_remap_failure") if value]
    pending = [gpu for gpu, value in facts.each_gpu("diag_gpu_remap_pending") if value]
    errors = dict(facts.each_gpu("diag_gpu_ecc_errors_total", kind="uncorrected"))
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


@check(
    "host",
    "Other processes on the GPUs",
    reads="diag_gpu_process_memory_bytes",
    why="a process that an earlier server left behind keeps its memory and its NCCL connections",
    source="https://docs.vllm.ai/en/stable/usage/troubleshooting/",
)
def other_processes(facts: PreflightFacts) -> Iterator[Outcome]:
    facts.need_gpus()
    roles = ("other", "unknown") if facts.running else ("other", "unknown", "worker", "engine", "api_server")
    found = [
        (labels["gpu"], labels["pid"], value)
        for labels, value in facts.gpus.get("diag_gpu_process_memory_bytes", ())
        if labels.get("role") in roles and value >= _A_DESKTOP
    ]
    for gpu, pid, size in found:
        name = facts.machine.process_name(pid) if facts.machine else ""
        message = f"process {pid}{f' ({name})' * bool(name)} holds {gibibytes(size, 1)} of GPU {gpu}"
        yield warned(message, f"ps -fp {pid}: end it if nobody needs it")
    if not found:
        yield passed("no other process holds GPU memory")


@check(
    "host",
    "The CPUs beside the GPUs",
    reads="local_cpulist of each GPU's PCI device, and the CPUs that this process may use",
    why="an engine that may only run on the other socket copies every tensor across sockets",
    source="https://docs.kernel.org/admin-guide/mm/numa_memory_policy.html",
)
def cpus_beside_gpus(facts: PreflightFacts) -> Iterator[Outcome]:
    if facts.running:
        return
    facts.need_gpus()
    machine, allowed = facts.on_host(), os.sched_getaffinity(0)
    local = {
        labels["gpu"]: machine.local_cpus(labels["pci_bus_id"])
        for labels, _ in facts.gpus["diag_gpu_info"]
        if labels.get("pci_bus_id")
    }
    if not any(local.values()):
        raise NotChecked("the kernel does not tell which CPUs are near a GPU")
    far = [gpu for gpu, cpus in local.items() if cpus and allowed.isdisjoint(cpus)]
    if far:
        message = f"no CPU that this process may use is on the NUMA node of {_gpus(far)}"
        yield warned(message, "Widen the CPU set (taskset, cpuset), or add --numa-bind")
    else:
        yield passed("CPUs of the GPUs' own NUMA nodes may be used")


CHECKS = (
    compute_capability,
    driver_for_toolkit,
    pcie_width,
    peer_to_peer,
    power_limit,
    persistence_mode,
    idle_temperature,
    memory_errors,
    other_processes,
    cpus_beside_gpus,
)
