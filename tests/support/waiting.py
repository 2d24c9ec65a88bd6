"""Waiting for something that happens in another process."""

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 240.0


def until(happened: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := happened()):
        assert time.monotonic() < deadline
        time.sleep(1)
    return found
