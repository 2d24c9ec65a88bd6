"""NCCL's RAS service on a socket: it speaks the protocol of client_support.cc and replays statuses in both layouts."""

import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from support.bad_servers import talking

ALL_REDUCE, HASH, NODES = "AllReduce", "cf264af53edbe986", ("10.0.0.1", "10.0.0.2")
RUNNING = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}


def place(rank: int) -> dict[str, object]:
    """Eight ranks on each node; the process of rank 11 is 4011."""
    return {"rank": rank, "host": NODES[rank // 8], "pid": 4000 + rank, "cuda_dev": rank % 8, "nvml_dev": rank % 8}


def status(
    counts: Sequence[int],
    missing: Mapping[int, bool] | None = None,
    changes: Mapping[str, object] | None = None,
    version: str = "2.28.9",
) -> dict[str, object]:
    """The JSON of a job with one communicator: all-reduces by rank, and missing ranks with True for a dead one.

    `changes` are those of the status of rank 0.
    """
    gone = missing or {}
    ranks = [
        place(rank)
        | {"status": RUNNING | (dict(changes or {}) if rank == 0 else {})}
        | {"collective_counts": {"Broadcast": 7, "Reduce": 0, "AllGather": 40, "ReduceScatter": 0, ALL_REDUCE: count}}
        for rank, count in enumerate(counts)
        if rank not in gone
    ]
    lost = [place(rank) | {"status": {"unresponsive": True, "considered_dead": dead}} for rank, dead in gone.items()]
    communicator = {
        "hash": f"0x{HASH}",
        "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
        "size": len(counts),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(lost),
        "ranks": ranks,
        "missing_ranks": lost,
    }
    return {
        "nccl_version": version,
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2026-11-26 08:00:00",
        "communicators_count": 1,
        "communicators": [communicator],
        "ras": {"collection_time_sec": 0.001, "timeouts_count": 0},
    }


def text(warnings: str = "", errors: str = "", version: str = "2.27.5") -> str:
    """The text of VERBOSE STATUS for 16 ranks on two nodes, with these parts."""
    return f"""NCCL version {version} compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          8            1         16       16

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         8        16        16   RUNNING  MISMATCH

Errors
======

{errors}Warnings
========

{warnings}"""


@dataclass
class RasServer:
    """The address, and the commands that came."""

    address: tuple[str, int]
    commands: list[str] = field(default_factory=list)


@contextmanager
def answering(*statuses: Mapping[str, object] | str) -> Iterator[RasServer]:
    """Answer with these statuses in turn, the last one for ever; a text is that of a release without JSON."""
    count = 0

    def talk(connection: socket.socket, over: threading.Event) -> None:
        nonlocal count
        reader = connection.makefile("r", encoding="ascii", newline="\n")
        for line in reader:
            command = line.strip()
            server.commands.append(command)
            chosen = statuses[min(count, len(statuses) - 1)]
            if command.startswith("CLIENT PROTOCOL"):
                answer = "SERVER PROTOCOL 2\n"
            elif command.startswith("TIMEOUT ") or (command == "SET FORMAT json" and not isinstance(chosen, str)):
                answer = "OK\n"
            elif command in ("STATUS", "VERBOSE STATUS"):
                count += 1
                connection.sendall((chosen if isinstance(chosen, str) else json.dumps(chosen, indent=2)).encode())
                return
            else:
                answer = f"ERROR: Unknown command {command}\n"
            connection.sendall(answer.encode())

    with talking(talk) as listener:
        server = RasServer(("127.0.0.1", listener.port))
        yield server
