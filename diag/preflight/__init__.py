"""Checks before a launch: the command, GPU memory, the host, the network, the telemetry and the measured capacity."""
