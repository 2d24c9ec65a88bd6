"""Work in daemon threads: neither Ctrl-C nor the end of the process waits for a server that does not respond."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def start(work: Callable[[], T]) -> Future[T]:
    """Begin to work; the future has the result or the exception."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on nobody can cancel it: its result is at worst not read

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  it is raised where the result is wanted
            future.set_exception(error)

    Thread(target=run, name="diag-http", daemon=True).start()
    return future
