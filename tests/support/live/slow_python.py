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

TURN = 0.25
"""Seconds of running and being stopped together."""


def main() -> int:
    """Run the interpreter with these arguments; its status."""
    python, share = os.environ["SLOW_PYTHON"], float(os.environ["SLOW_SHARE"])
    child = subprocess.Popen([python, *sys.argv[1:]], start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(child.pid, signal.SIGKILL))
    while child.poll() is None:
        with suppress(ProcessLookupError):
            for number, seconds in ((signal.SIGCONT, share * TURN), (signal.SIGSTOP, (1 - share) * TURN)):
                os.killpg(child.pid, number)
                time.sleep(seconds)
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())
