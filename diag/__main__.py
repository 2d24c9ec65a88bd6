"""Starts the command, also as `python -m diag`: Ctrl-C ends it without a traceback while its parts are still loaded."""

import atexit
import gc
import os
import signal
import sys
import threading
from contextlib import suppress


def main() -> None:
    gc.set_threshold(200_000)  # a diagnosis makes 150,000 that live until its end: to look for garbage is lost time
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from diag.cli import app

    if interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app.main()
    except SystemExit as end:
        if threading.active_count() == 1:
            atexit._run_exitfuncs()
            with suppress(OSError):
                for stream in filter(None, (sys.stdout, sys.stderr)):
                    stream.flush()
                os._exit(int(end.code or 0))  # Python would first take everything apart that a diagnosis made
        raise
    finally:
        gc.freeze()  # the interpreter's last collection would visit all of it


if __name__ == "__main__":
    main()
