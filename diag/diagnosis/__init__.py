"""Telemetry -> the data of a report: decisions per subject, onsets, forward progress, proposals, fleets."""
