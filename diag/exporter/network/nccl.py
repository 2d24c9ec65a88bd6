"""The ranks that NCCL's RAS service reports as behind or missing, as samples (`diag exporter --nccl-ras ADDRESS`).

Every process of an NCCL job (2.24 and later) listens on `localhost:28028` (NCCL_RAS_ADDR); each of them answers for the
ranks of all hosts. A query is a message to every process of the job: it is sent at most every five seconds and only
while vLLM's own page answers, because some releases of NCCL crash if they are asked while a communicator is set up
(NVIDIA/nccl#1669, #2346). The page never waits for an answer: it shows the last one.
"""

import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

from diag.core.errors import BadUsage
from diag.core.formatting import printable
from diag.core.metric_families import Collected, Sample
from diag.exporter.network.nccl_status import NcclRank, NcclStatus, NotRas, read_status

QUERY_EVERY, TOO_OLD, LISTENERS_EVERY = 5.0, 60.0, 60.0
"""Seconds between two queries, after which a status is no longer shown, and between two searches of the listeners."""
LEG_SECONDS = 2
"""Seconds for which NCCL waits for its other processes; it adds five (RAS_COLLECTIVE_EXTRA_TIMEOUT_SEC)."""
ANSWER_SECONDS = 10.0
MOST_BYTES = 2**24
"""A status of 1,024 ranks in ten communicators has about 7 MB."""
MOST_NAMED = 16
"""Ranks that are named: a stall has one culprit, and every name is a series."""
_Missing = tuple[NcclRank, str, str, int, int]
"""A rank, how it is missing, the collective and the number of the operation that it has not launched, and its lag."""
_LONGEST_LINE = 256
_HOST = re.compile(r"[\w.-]{1,63}|\[[\w:.%]{1,60}\]", re.ASCII)
_HANDSHAKE = "SERVER PROTOCOL "


def parse_address(text: str) -> tuple[str, int] | None:
    """Parse "host:port" or "[::1]:port", as NCCL_RAS_ADDR has it; None for "", BadUsage for any other text."""
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if not (colon and _HOST.fullmatch(host) and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
        raise BadUsage(f"--nccl-ras takes host:port (NCCL's default is localhost:28028), not {text[:100]!r}")
    return host.strip("[]"), int(port)


def query(address: tuple[str, int], seconds: float) -> str:
    """Return the status of the job that listens at an address, as JSON if it can; OSError or NotRas without one."""
    deadline = time.monotonic() + seconds
    with closing(socket.create_connection(address, min(seconds, 1.0))) as connection:

        def receive(most: int) -> bytes:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no complete status within {seconds:g} s")
            connection.settimeout(left)
            return connection.recv(most)

        def ask(command: str) -> str:
            connection.sendall(f"{command}\n".encode())
            line = b""
            while not line.endswith(b"\n"):
                part = receive(_LONGEST_LINE - len(line))
                line += part
                if not part or (len(line) >= _LONGEST_LINE and not line.endswith(b"\n")):
                    raise NotRas("it does not speak NCCL's protocol")
            return line.decode(errors="replace").strip()

        if not ask("CLIENT PROTOCOL 2").upper().startswith(_HANDSHAKE):
            raise NotRas("it does not speak NCCL's protocol")
        if ask(f"TIMEOUT {LEG_SECONDS}").upper() != "OK":
            raise NotRas("it does not take a timeout")
        as_json = ask("SET FORMAT json").upper() == "OK"  # an error before 2.28.7
        connection.sendall(b"STATUS\n" if as_json else b"VERBOSE STATUS\n")
        parts: list[bytes] = []
        size = 0
        while part := receive(2**16):  # NCCL closes the connection after the status
            parts.append(part)
            size += len(part)
            if size > MOST_BYTES:
                raise NotRas(f"a status of more than {MOST_BYTES >> 20} MiB")
        return b"".join(parts).decode(errors="replace")


class NcclCollector:
    """Asks NCCL's RAS service in a thread of its own, and compares each status with the one before.

    A rank is behind if its count is below that of its peers and unchanged since the last status: in a server at work,
    ranks differ by a few operations for an instant. A rank is missing if two statuses in a row lack it.
    `is_others` returns True if a process that listens at the address is not of this server: the kernel then gives the
    connection to any one of them.
    """

    name = "nccl"

    def __init__(self, address: tuple[str, int], is_others: Callable[[int], bool] = lambda _: False) -> None:
        self._address = address
        self._is_others = is_others
        self._serving = self._is_shared = False
        self._asking: threading.Thread | None = None
        self._asked_at = self._searched_at = float("-inf")
        self._status: tuple[float, NcclStatus, NcclStatus | None] | None = None
        self._problem = ""

    def page_answered(self, answered: bool) -> None:
        """Receive whether vLLM's page answers: it does once all communicators are set up."""
        self._serving = answered

    def collect(self) -> Collected:
        """Return what the last two statuses show, and begin the next query if it is due."""
        now = time.monotonic()
        idle = self._asking is None or not self._asking.is_alive()
        if self._serving and idle and now - self._asked_at >= QUERY_EVERY:
            self._asked_at = now
            self._asking = threading.Thread(target=self._ask, name="diag-nccl-ras", daemon=True)
            self._asking.start()
        status = self._status
        if status is None or now - status[0] > TOO_OLD:
            return Collected((), self._problem)
        return Collected(list(nccl_samples(status[1], status[2])), self._problem)

    def wait(self, seconds: float) -> None:
        """Wait for the query under way, at most so many seconds."""
        if self._asking:
            self._asking.join(seconds)

    def _ask(self) -> None:
        try:
            if time.monotonic() - self._searched_at >= LISTENERS_EVERY:
                self._is_shared, self._searched_at = self._is_others(self._address[1]), time.monotonic()
            if self._is_shared:
                raise NotRas("another NCCL job listens there too: start each with a NCCL_RAS_ADDR of its own")
            status = read_status(query(self._address, ANSWER_SECONDS))
        except (OSError, ValueError) as error:
            host, port = self._address
            self._problem = f"NCCL's RAS service at {host}:{port}: {printable(str(error), 200)}"
            return
        self._status = time.monotonic(), status, self._status[1] if self._status else None
        self._problem = ""


def nccl_samples(now: NcclStatus, before: NcclStatus | None) -> Iterator[Sample]:
    """Yield what two statuses in a row show; nothing for a single one."""
    if before is None:
        return
    still = {each[:3] for each in before.behind}
    behind = _one_for_each_process(
        (each.who, "behind", each.collective, each.launched + 1, each.most - each.launched)
        for each in sorted(now.behind, key=lambda each: (-each.size, each))
        if each[:3] in still
    )
    missing = _one_for_each_process(
        (who, "dead" if now.missing[who] else "unresponsive", "", 0, 0)
        for who in sorted(now.missing.keys() & before.missing.keys())
    )
    count = Counter(state for _, state, *_ in (*behind, *missing))
    yield "diag_nccl_processes", ("answering",), float(now.answering)
    for state in ("behind", "unresponsive", "dead"):
        yield "diag_nccl_processes", (state,), float(count[state])
    for who, state, collective, operation, lag in (*behind[:MOST_NAMED], *missing[:MOST_NAMED]):
        labels = (who.communicator, str(who.rank), who.host, state, collective, str(operation or ""))
        yield "diag_nccl_missing_rank_operations", labels, float(lag)


def _one_for_each_process(found: Iterable[_Missing]) -> list[_Missing]:
    """Return the first one of each process: it hangs once, and is missing in all of its communicators."""
    first: dict[object, _Missing] = {}
    for each in found:
        who = each[0]
        first.setdefault((who.host, who.pid) if who.pid else who, each)
    return list(first.values())
