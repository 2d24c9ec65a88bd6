"""Starts the command, also as `python -m diag`: Ctrl-C ends it without a traceback while its parts are still loaded."""

import atexit
import gc
import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Run the command line."""
    gc.set_threshold(100_000)  # a diagnosis makes 70,000 that live until its end: to look for garbage is lost time
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from diag.cli import app

    if interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app.main()
    except SystemExit as ended:
        _end(ended.code)


def _end(status: object) -> None:
    """End without taking apart one by one what is in memory, which takes some hundredths of a second."""
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # closed; whoever wrote to it has said what is to be said
            stream.flush()
    os._exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
