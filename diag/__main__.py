"""Starts the command, also as `python -m diag`: Ctrl-C ends it without a traceback while its parts are still loaded."""

import gc
import os
import signal


def main() -> None:
    gc.set_threshold(200_000)  # a diagnosis makes 150,000 that live until its end: to look for garbage is lost time
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy starts threads for products of matrices: none are made
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from diag.cli import app

    if interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app.main()
    finally:
        gc.freeze()  # the interpreter's last collection would visit everything that a diagnosis made


if __name__ == "__main__":
    main()
