"""Plays the processes of a vLLM server: `vllm serve MODEL --port N`, its children started and titled as vLLM does it.

FAKE_VLLM in the environment says as JSON what the first process is; "method" is "spawn" or "fork", and before the file
"wait" exists nobody opens a port or sets a title. A process is {"title", "port", "children": [...]}, all as may be,
"spin" true for one that computes, "reap" for one that takes note of its children's end, "hidden" for one whose
environment and sockets only root may see.
"""

import ctypes
import json
import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

PLAY = json.loads(os.environ.get("FAKE_VLLM", "{}"))


def play(node: dict[str, Any]) -> None:
    """Be that process for ever."""
    listener = _listen(node) if Path(PLAY["wait"]).exists() else None
    for child in node.get("children", ()):
        multiprocessing.get_context(PLAY["method"]).Process(target=play, args=(child,)).start()
    while not Path(PLAY["wait"]).exists():
        time.sleep(0.01)
    _entitle(node.get("title", ""))
    listener = listener or _listen(node)
    if node.get("hidden"):
        ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE
    while True:
        time.sleep(0 if node.get("spin") else 0.02)
        if node.get("reap"):
            multiprocessing.active_children()


def _listen(node: dict[str, Any]) -> socket.socket | None:
    return socket.create_server(("127.0.0.1", node["port"])) if node.get("port") else None


def _entitle(name: str) -> None:
    """Write over the command line and fill it up with zeros, as setproctitle does."""
    if name:
        start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
        ctypes.memmove(start, name.encode().ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    play(PLAY)
