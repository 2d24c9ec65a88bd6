"""Part b: loads of one card, how long each is recorded, and the values that are right for the exporter's page.

A check is PromQL over the recording of its stage.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

AWAITED = 60.0
"""Seconds to wait for the exporter to read a value that it reads seldom, on however busy a host."""
NOT_READ = "not_read"
"""File in the folder of a stage whose `awaits` was not read meanwhile."""


class Check(NamedTuple):
    """A value of the page; `low` and `high` are the bounds between which it is right."""

    name: str
    promql: str
    low: float = -math.inf
    high: float = math.inf


class HostStage(NamedTuple):
    """A load of one card without vLLM: arguments of torch_load.py, and the seconds that are recorded.

    `scripted` are the values of the scripted library for this stage, by its own words. The recording begins when the
    exporter's page has another value of the family `awaits` than before the load.
    """

    name: str
    load: tuple[str, ...]
    seconds: float
    what: str
    checks: Sequence[Check] = ()
    scripted: Mapping[str, object] = {}
    awaits: str = ""


HELD = 76 * 2**30


def peak(family: str, labels: str = "") -> str:
    return f"max by (instance) (max_over_time({family}{labels}[$window]))"


def mean(family: str, labels: str = "") -> str:
    return f"max by (instance) (avg_over_time({family}{labels}[$window]))"


def rate(family: str, labels: str = "") -> str:
    return f"sum by (instance) (rate({family}{labels}[$window]))"


UTILISATION = mean("diag_gpu_utilization_ratio")
MEMORY_BUSY = mean("diag_gpu_memory_busy_ratio")
POWER = "max by (instance) (avg_over_time(diag_gpu_power_watts[$window]) / diag_gpu_power_limit_watts)"
USED = "max by (instance) (max_over_time(diag_gpu_memory_used_bytes[$window]) / diag_gpu_memory_total_bytes)"
CAPPED = rate("diag_gpu_throttle_seconds_total", '{reason="sw_power_cap"}')
HEAT = rate("diag_gpu_throttle_seconds_total", '{reason=~"sw_thermal|hw_thermal"}')
PCIE = "sum by (instance) (max_over_time(diag_gpu_pcie_throughput_bytes_per_second[$window]))"
SPEED = (
    'max by (instance) (avg_over_time(diag_gpu_clock_hertz{clock="sm"}[$window])'
    ' / ignoring (clock) diag_gpu_clock_max_hertz{clock="sm"})'
)
LISTED = f"{peak('diag_gpu_process_memory_bytes')} / {peak('diag_gpu_memory_used_bytes')}"
LAST = "max by (instance) (last_over_time(diag_gpu_utilization_ratio[$window]))"
PCIE_RATE = Check("PCIe bytes per second", PCIE, 5e9, 1.4e11)
NO_HEAT = Check("seconds throttled by heat, per second", HEAT, high=0.01)

HOST_STAGES = (
    HostStage(
        "idle",
        (),
        12,
        "nothing runs on the card",
        (
            Check("utilisation", UTILISATION, 0, 0.02),
            Check("power / limit", POWER, 0.01, 0.4),
            Check("memory used", USED, 0, 0.03),
            NO_HEAT,
        ),
        {"utilization": 0, "memory_busy": 0, "power": 70_000, "used": 2**29, "reasons": 1, "clock_sm": 345},
    ),
    HostStage(
        "power",
        ("matmul",),
        20,
        "a bf16 matrix product without a pause",
        (
            Check("utilisation", UTILISATION, 0.9, 1),
            Check("power / limit", POWER, 0.8, 1.1),
            Check("seconds limited by the power cap, per second", CAPPED, 0.05, 1.1),
            Check("clock / maximum", SPEED, 0.4, 1),
            NO_HEAT,
        ),
        {"utilization": 100, "memory_busy": 30, "power": 697_000, "reasons": 4, "clock_sm": 1410, "used": 2**30},
    ),
    HostStage(
        "memory",
        ("copy",),
        12,
        "copies within device memory",
        (
            Check("utilisation", UTILISATION, 0.9, 1),
            Check("memory busy", MEMORY_BUSY, 0.5, 1),
            NO_HEAT,
        ),
        {"utilization": 100, "memory_busy": 95, "power": 450_000, "reasons": 0, "clock_sm": 1980, "used": 5 * 2**30},
    ),
    HostStage(
        "held",
        ("hold", "0.95"),
        10,
        "95 % of the free memory taken by a process that computes nothing",
        (
            Check("memory used", USED, 0.9, 1),
            Check("utilisation", UTILISATION, 0, 0.05),
            Check("memory by process / memory used", LISTED, 0.9, 1.01),
            NO_HEAT,
        ),
        {
            "utilization": 0,
            "memory_busy": 0,
            "power": 110_000,
            "reasons": 1,
            "used": 76 * 2**30,
            "processes": {1: 76 * 2**30},
        },
    ),
    HostStage(
        "pcie",
        ("pcie",),
        4,
        "host memory copied to the card and back",
        (PCIE_RATE, NO_HEAT),
        {"utilization": 100, "pcie_tx": 45_000_000, "pcie_rx": 45_000_000},
        awaits="diag_gpu_pcie_throughput_bytes_per_second",
    ),
    HostStage(
        "cooling",
        (),
        15,
        "nothing runs any more",
        (
            Check("utilisation at the end", LAST, 0, 0.02),
            NO_HEAT,
        ),
        {"utilization": 0, "memory_busy": 0, "power": 90_000, "reasons": 1, "clock_sm": 345},
    ),
)
