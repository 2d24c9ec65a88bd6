"""Template of vLLM servers: a process that has imported vLLM once, and forks for each server that is asked for.

A vLLM imports for seven seconds of CPU in each of its three processes, a fork of this one not at all. It runs in vLLM's
environment: `python template.py SOCKET PADDING`, and ends when its standard input does. A connection to the socket is
one server: `{"arguments": [...], "environment": {...}, "log": PATH}` is answered by its PID, later by its exit status.
"""

import contextlib
import ctypes
import functools
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

MODULE = "vllm.entrypoints.openai.api_server"


def import_vllm() -> None:
    """Import what the three processes import; the other two are forked too, as vLLM does on GPUs."""
    for name in (MODULE, "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.executor.multiproc_executor"):
        __import__(name)
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415 - only vLLM's environment has it
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

    check = CpuPlatform.check_and_update_config

    def check_and_fork(config: object) -> None:
        check(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_fork)
    if not os.environ.get("DIAG_THOROUGH"):
        shm_broadcast.sched_yield = functools.partial(time.sleep, 0.001)  # who waits for another process takes no core
    del sys.modules[MODULE]  # it is run as __main__
    import setproctitle  # noqa: PLC0415

    setproctitle.getproctitle()  # it looks for the command line once, as long as this is the process's own


def show(first: int, head: str, words: Sequence[str]) -> None:
    """Overwrite the area of /proc/PID/stat's fields `first` and the next: what /proc/PID/cmdline or environ show.

    The area keeps its length: what is left of it is filled behind `head`. ValueError where it is too short.
    """
    with Path("/proc/self/stat").open(encoding="ascii") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[first - 3 : first - 1])
    tail = b"".join(b"\0" + os.fsencode(word) for word in words) + b"\0"
    text = os.fsencode(head) + tail.rjust(end - start - len(os.fsencode(head)), b"x")
    if len(text) > end - start:
        raise ValueError(f"the area of {end - start} bytes is too short")
    ctypes.memmove(start, text, len(text))


def serve(arguments: list[str], environment: dict[str, str], log: str) -> NoReturn:
    """Become the server, as `python -m vllm.entrypoints.openai.api_server` would."""
    from vllm import logger  # noqa: PLC0415

    status = 1
    try:
        written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for stream, number in ((os.open(os.devnull, os.O_RDONLY), 0), (written, 1), (written, 2)):
            os.dup2(stream, number)
        show(48, f"{sys.executable}\0-X\0", ("-m", MODULE, *arguments))
        show(50, "PADDING=", [f"{name}={value}" for name, value in environment.items()])
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
        sys.argv = [MODULE, *arguments]
        logger._configure_vllm_root_logger()  # the level is of this environment
        runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter ends
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def attend(connection: socket.socket) -> NoReturn:
    """Start the server that the connection asks for, and tell its end."""
    asked = json.loads(connection.makefile("rb").readline())
    leads, begins = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()
        for number in (connection.detach(), leads, begins):
            os.close(number)
        serve(**asked)
    os.close(begins)
    os.read(leads, 1)  # ends once it leads a process group, by which it can be killed
    connection.sendall(f"{pid}\n".encode())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def main() -> None:
    """Attend to each connection in a process of its own, until the standard input ends."""
    import_vllm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as waiting:
        listener.bind(sys.argv[1])
        listener.listen()
        waiting.register(listener, selectors.EVENT_READ)
        waiting.register(sys.stdin, selectors.EVENT_READ)
        while sys.stdin not in [key.fileobj for key, _ in waiting.select()]:
            connection, _ = listener.accept()
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                attend(connection)
            connection.close()


if __name__ == "__main__":
    main()
