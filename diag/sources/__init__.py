"""Sources of telemetry: live servers and recordings, both as pages laid out in samples."""
