"""The debug log of `--log-level debug`: each source, collector, request and query, and how long it took.

It holds names, metric queries and times; never headers, credentials or the values of labels that a URL carries.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("diag")


def print_log(level: str) -> None:
    logging.basicConfig(format="%(asctime)s.%(msecs)03d %(name)s: %(message)s", datefmt="%H:%M:%S")
    log.setLevel(level.upper())


@contextmanager
def timed(kind: str, name: object) -> Iterator[None]:
    """Log how long a block took, whether it succeeded or not."""
    if not log.isEnabledFor(logging.DEBUG):
        yield
        return
    begun = time.perf_counter()
    try:
        yield
    except BaseException as error:
        log.debug("%s %s: %.1f ms, %s", kind, name, 1000 * (time.perf_counter() - begun), type(error).__name__)
        raise
    log.debug("%s %s: %.1f ms", kind, name, 1000 * (time.perf_counter() - begun))
