"""What is read of a GPU: families, NVML's fields and functions, their units. Numbers and units: nvml.h 13.5.

Each function gives the same readings, with the labels of a GPU, for the same arguments: they are planned once.
"""

from collections.abc import Iterable
from functools import cache

from diag.exporter.gpu import nvml
from diag.exporter.gpu.nvml import Field, NvmlCall, NvmlReading

E3, E6, E9 = 1_000, 1_000_000, 1_000_000_000
THROTTLED = {  # counters in nanoseconds: field values, then the policy of nvmlDeviceGetViolationStatus
    "sw_power_cap": ((74,), (0,)),
    "sw_thermal": ((269, 75), (1,)),  # a driver without 269 and 270 counts both kinds of heat in 75: they go here
    "hw_thermal": ((270,), ()),
    "hw_power_brake": ((271,), ()),
    "sync_boost": ((76,), (2,)),
    "board_limit": ((77,), (3,)),
    "reliability": ((79,), (5,)),
}
NVLINK_ERRORS = {"crc_flit": 38, "crc_data": 45, "replay": 52, "recovery": 59, "ecc_data": 160}
"""Of all links at once."""
NVLINK_ERRORS_PER_LINK = {
    "replay": 161,
    "recovery": 162,
    "crc": 163,
    "malformed_packet": 206,  # from here on Blackwell and later, which refuse the three above
    "buffer_overrun": 207,
    "receive": 208,
    "receive_remote": 209,
    "receive_general": 210,
    "link_integrity": 211,
    "transmit_discard": 212,
    "link_recovery_failed": 214,
    "link_recovery": 215,
}
PCIE_BYTES = {"tx": (197, 0), "rx": (198, 1)}
RATE = "diag_gpu_pcie_throughput_bytes_per_second"

NVLINK_BYTES = "diag_gpu_nvlink_bytes_total"
NVLINK_ERRORS_TOTAL = "diag_gpu_nvlink_errors_total"
TEMPERATURE = "diag_gpu_temperature_celsius"
MARGIN = "diag_gpu_temperature_margin_celsius"
THROTTLING = "diag_gpu_throttle_active"
PCIE_BYTES_TOTAL = "diag_gpu_pcie_bytes_total"
ALL_LINKS = 0xFFFFFFFF
"""nvml.h: a link of UINT_MAX is the sum over all of them."""
MEMORY = ("nvmlDeviceGetMemoryInfo", (nvml.MEMORY_V2,))
CLOCKS = {"sm": 1, "memory": 2}
_EACH_TIME = (
    NvmlReading(
        TEMPERATURE,
        ("gpu",),
        (NvmlCall("nvmlDeviceGetTemperatureV", (0,)), NvmlCall("nvmlDeviceGetTemperature", (0,))),
    ),
    NvmlReading(TEMPERATURE, ("memory",), (Field(82),)),
    NvmlReading(MARGIN, (), (NvmlCall("nvmlDeviceGetMarginTemperature"),)),
    NvmlReading(
        THROTTLING,
        (),
        (NvmlCall("nvmlDeviceGetCurrentClocksEventReasons"), NvmlCall("nvmlDeviceGetCurrentClocksThrottleReasons")),
    ),
    *(
        NvmlReading(
            "diag_gpu_throttle_seconds_total",
            (reason,),
            (
                *(Field(field, per=E9) for field in fields),
                *(NvmlCall("nvmlDeviceGetViolationStatus", (policy,), "violationTime", per=E9) for policy in policies),
            ),
        )
        for reason, (fields, policies) in THROTTLED.items()
    ),
    *(
        NvmlReading("diag_gpu_clock_hertz", (name,), (NvmlCall("nvmlDeviceGetClockInfo", (clock,), times=E6),))
        for name, clock in CLOCKS.items()
    ),
    NvmlReading(  # the mean of a second where there is one, as nvmlDeviceGetPowerUsage gives it since Ampere
        "diag_gpu_power_watts",
        (),
        (Field(185, per=E3), NvmlCall("nvmlDeviceGetPowerUsage", per=E3), Field(186, per=E3)),
    ),
    NvmlReading(
        "diag_gpu_power_limit_watts", (), (Field(190, per=E3), NvmlCall("nvmlDeviceGetEnforcedPowerLimit", per=E3))
    ),
    NvmlReading(
        "diag_gpu_energy_joules_total", (), (Field(83, per=E3), NvmlCall("nvmlDeviceGetTotalEnergyConsumption", per=E3))
    ),
    NvmlReading("diag_gpu_utilization_ratio", (), (NvmlCall("nvmlDeviceGetUtilizationRates", (), "gpu", per=100),)),
    NvmlReading("diag_gpu_memory_busy_ratio", (), (NvmlCall("nvmlDeviceGetUtilizationRates", (), "memory", per=100),)),
    *(
        NvmlReading(f"diag_gpu_memory_{what}_bytes", (), (NvmlCall(*MEMORY, what), NvmlCall(MEMORY[0], (), what)))
        for what in ("total", "used", "free")
    ),
    NvmlReading("diag_gpu_memory_reserved_bytes", (), (NvmlCall(*MEMORY, "reserved"),)),
    *(NvmlReading(PCIE_BYTES_TOTAL, (way,), (Field(field),)) for way, (field, _) in PCIE_BYTES.items()),
    NvmlReading("diag_gpu_pcie_link_generation", ("current",), (NvmlCall("nvmlDeviceGetCurrPcieLinkGeneration"),)),
    NvmlReading("diag_gpu_pcie_link_width", ("current",), (NvmlCall("nvmlDeviceGetCurrPcieLinkWidth"),)),
    NvmlReading("diag_gpu_pcie_replays_total", (), (Field(94), NvmlCall("nvmlDeviceGetPcieReplayCounter"))),
    NvmlReading(NVLINK_BYTES, ("tx",), (Field(138, ALL_LINKS, times=1024),)),
    NvmlReading(NVLINK_BYTES, ("rx",), (Field(139, ALL_LINKS, times=1024),)),
    *(NvmlReading(NVLINK_ERRORS_TOTAL, (kind,), (Field(field),)) for kind, field in NVLINK_ERRORS.items()),
    NvmlReading(
        "diag_gpu_ecc_errors_total", ("corrected",), (Field(3), NvmlCall("nvmlDeviceGetTotalEccErrors", (0, 0)))
    ),
    NvmlReading(
        "diag_gpu_ecc_errors_total", ("uncorrected",), (Field(4), NvmlCall("nvmlDeviceGetTotalEccErrors", (1, 0)))
    ),
    NvmlReading("diag_gpu_remapped_rows", ("corrected",), (Field(142), NvmlCall("nvmlDeviceGetRemappedRows", (), 0))),
    NvmlReading("diag_gpu_remapped_rows", ("uncorrected",), (Field(143), NvmlCall("nvmlDeviceGetRemappedRows", (), 1))),
    NvmlReading("diag_gpu_remap_failure", (), (Field(145), NvmlCall("nvmlDeviceGetRemappedRows", (), 3))),
)
_UNCHANGING = (
    *(
        NvmlReading("diag_gpu_clock_max_hertz", (name,), (NvmlCall("nvmlDeviceGetMaxClockInfo", (clock,), times=E6),))
        for name, clock in CLOCKS.items()
    ),
    NvmlReading(
        "diag_gpu_power_limit_min_watts",
        (),
        (Field(187, per=E3), NvmlCall("nvmlDeviceGetPowerManagementLimitConstraints", (), 0, per=E3)),
    ),
    NvmlReading(
        "diag_gpu_power_limit_default_watts",
        (),
        (Field(189, per=E3), NvmlCall("nvmlDeviceGetPowerManagementDefaultLimit", per=E3)),
    ),
    NvmlReading("diag_gpu_pcie_link_generation", ("max",), (NvmlCall("nvmlDeviceGetMaxPcieLinkGeneration"),)),
    NvmlReading("diag_gpu_pcie_link_width", ("max",), (NvmlCall("nvmlDeviceGetMaxPcieLinkWidth"),)),
)


GpuLabels = tuple[str, str]
"""Index and UUID."""


def _labelled(gpu: GpuLabels, readings: Iterable[NvmlReading]) -> tuple[NvmlReading, ...]:
    return tuple(reading._replace(labels=gpu + reading.labels) for reading in readings)


@cache
def each_time(gpu: GpuLabels) -> tuple[NvmlReading, ...]:
    """What is read at each look."""
    return _labelled(gpu, _EACH_TIME)


@cache
def unchanging(gpu: GpuLabels) -> tuple[NvmlReading, ...]:
    """What does not change while the driver is loaded."""
    return _labelled(gpu, _UNCHANGING)


@cache
def of_links(gpu: GpuLabels, links: int) -> tuple[NvmlReading, ...]:
    """NVLink traffic of each link, where a driver does not add them up."""
    kinds = {"tx": (138, 202), "rx": (139, 204)}  # the second ones are there from the fifth generation on
    return tuple(
        NvmlReading(NVLINK_BYTES, (*gpu, way), (Field(kibibytes, link, times=1024), Field(count, link)), link)
        for way, (kibibytes, count) in kinds.items()
        for link in range(links)
    )


@cache
def seldom(gpu: GpuLabels, links: int, without: frozenset[str], sampled: bool) -> tuple[NvmlReading, ...]:
    """What is slow: NVLink errors of each link, but for kinds known as a whole, and PCIe rates if `sampled`."""
    errors = {kind: field for kind, field in NVLINK_ERRORS_PER_LINK.items() if kind not in without}
    return (
        *(
            NvmlReading(NVLINK_ERRORS_TOTAL, (*gpu, kind), (Field(field, link),), link)
            for kind, field in errors.items()
            for link in range(links)
        ),
        *(
            NvmlReading(RATE, (*gpu, way), (NvmlCall("nvmlDeviceGetPcieThroughput", (counter,), times=E3),))
            for way, (_, counter) in PCIE_BYTES.items()
            if sampled
        ),
    )
