#!/usr/bin/env python3
"""vLLM's Python at a crawl: all that it runs is stopped for most of the time, as on a client host that is too small.

What ends this process ends the other one. SLOW_SHARE is the share of the time in which it may run.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

TURN = 0.25
"""Seconds of running and being stopped together."""


def _has_child(pid: int) -> bool:
    """Return True if it has started a process that stays, as for a step of load."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    before = children.read_text() if children.exists() else ""
    time.sleep(TURN)
    return bool(before) and children.exists() and children.read_text() == before


def main() -> int:
    """Run the interpreter with these arguments; its status."""
    python, share = os.environ["SLOW_PYTHON"], float(os.environ["SLOW_SHARE"])
    child = subprocess.Popen([python, *sys.argv[1:]], start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(child.pid, signal.SIGKILL))
    while child.poll() is None and not _has_child(child.pid):
        time.sleep(TURN)  # to load its modules takes long enough
    while child.poll() is None:
        with suppress(ProcessLookupError):
            for number, seconds in ((signal.SIGCONT, share * TURN), (signal.SIGSTOP, (1 - share) * TURN)):
                os.killpg(child.pid, number)
                time.sleep(seconds)
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())
