"""Why a GPU lowers its clocks: the `reason` label of diag_gpu_throttle_*, and NVML's bit of each."""

THROTTLE_REASONS = {
    "gpu_idle": 0x1,
    "applications_clocks": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "display_clocks": 0x100,
    "board_limit": 0x200,
    "reliability": 0x400,
}
"""nvmlClocksEventReasons of nvml.h 13.5; DCGM passes the same bits on."""
