"""Regular expressions that are compiled when they are first used: most runs read neither a launch command nor a log."""

import re
from typing import Any, cast


class _LazyPattern:
    """Becomes a re.Pattern at the first use of any of its attributes."""

    def __init__(self, regex: str, flags: int) -> None:
        self._source = (regex, flags)

    def __getattr__(self, name: str) -> Any:
        """Compile (`re` remembers it) and keep what was asked for, so that the next use costs nothing."""
        value = getattr(re.compile(*self._source), name)
        setattr(self, name, value)
        return value


def lazy(regex: str, flags: int = 0) -> re.Pattern[str]:
    """Return a pattern that is compiled at its first use."""
    return cast("re.Pattern[str]", _LazyPattern(regex, flags))
