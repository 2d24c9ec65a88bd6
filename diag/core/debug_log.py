"""The debug log of `--log-level debug`: each source, collector, request and query, and how long it took.

It holds names, metric queries and times; never headers, credentials or the values of labels that a URL carries.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_writers: list[Callable[[str], None]] = []


def print_log() -> None:
    """Print the log on standard error. Without it, the report alone names problems."""
    import logging  # noqa: PLC0415  2 ms of each start

    logging.basicConfig(format="%(asctime)s.%(msecs)03d %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("diag").setLevel(logging.DEBUG)
    _writers[:] = [logging.getLogger("diag").debug]


def took(kind: str, name: object, seconds: float, outcome: str = "") -> None:
    """Log how long a part of the work took."""
    for write in _writers:
        write(f"{kind} {name}: {1000 * seconds:.1f} ms{outcome}")


@contextmanager
def timed(kind: str, name: object) -> Iterator[None]:
    """Log how long a block took, whether it succeeded or not."""
    begun = time.perf_counter()
    try:
        yield
    except BaseException as error:
        took(kind, name, time.perf_counter() - begun, f", {type(error).__name__}")
        raise
    took(kind, name, time.perf_counter() - begun)
