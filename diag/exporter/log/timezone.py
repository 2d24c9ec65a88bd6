"""The time zone of a log whose lines say none."""

from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from diag.core.errors import BadUsage


def zone(name: str) -> ZoneInfo | None:
    """The time zone of that name; None for this host's own."""
    try:
        return ZoneInfo(name) if name else None
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise BadUsage(f"--log-timezone {name!r} is no time zone; try UTC or Europe/Berlin") from error
