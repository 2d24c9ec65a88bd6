"""From telemetry to a report's data: decisions per subject, onsets, forward progress, proposals, fleets."""
