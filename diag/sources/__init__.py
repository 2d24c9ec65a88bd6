"""Sources of telemetry: live servers and recordings, both as pages laid out in samples."""

from diag.sources.observation import Observation

__all__ = ["Observation"]
