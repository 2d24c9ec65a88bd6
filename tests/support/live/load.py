"""Closed-loop clients: each sends a request, waits for the whole answer, and sends the next."""

import fcntl
import http.client
import json
import random
import string
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.waiting import until

UNLIMITED = 1000
"""Requests that a gateway without a limit lets through at a time."""
LETTERS = string.ascii_lowercase + " "


@dataclass(frozen=True)
class Clients:
    """So many clients; prompt and answer lengths in tokens, drawn evenly; a pause in seconds between two requests.

    With `stream` each token is sent when it is there, and timed; that alone is work for the server's front end.
    `key` is the API key that they send, `parameters` are further ones of each request, as JSON.
    """

    count: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    pause: float = 0.0
    start: float = 0.0
    stream: bool = False
    key: str = ""
    parameters: str = "{}"


class Gateway:
    """Lets so many requests through at a time; who has waited longest goes next, which a semaphore does not promise."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()

    def acquire(self) -> None:
        """Take a place, as soon as there is one."""
        turn = threading.Event()
        with self._lock:
            self._waiting.append(turn)
            self._let_in()
        turn.wait()

    def release(self) -> None:
        """Leave a place to the next one."""
        with self._lock:
            self._free += 1
            self._let_in()

    def _let_in(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            self._waiting.popleft().set()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass
class Load:
    """Results of the clients so far, in seconds: `latencies` of whole requests; of streams, of each client group,
    the times to the `first` token, with the wait at the `gateway`, and the `gaps` between two tokens of one stream.
    `answered` counts the requests of each client group.
    """

    gateway: Gateway
    stop: threading.Event = field(default_factory=threading.Event)
    latencies: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    first: dict[Clients, list[float]] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    answered: Counter[Clients] = field(default_factory=Counter)

    def wait_for(self, answers: int, clients: Clients) -> None:
        """Until so many of these clients' requests were answered, however busy the machine is."""
        until(lambda: self.answered[clients] >= answers)


HEALTHY = (Clients(6, (30, 300), (20, 80), pause=0.3),)
STEADY = (Clients(6, (30, 300), (200, 400)),)
"""Always some in flight: a server that is stopped between two requests shows an idle page, and nobody could tell."""
CASCADE = (Clients(20, (16, 64), (200, 600)), Clients(8, (600, 1000), (200, 400)))
UNCOMPILABLE = Clients(
    *(3, (5, 5), (8, 8), 0.12),
    parameters=json.dumps(
        {
            "structured_outputs": {
                "structural_tag": json.dumps(
                    {"type": "structural_tag", "format": {"type": "token", "token": 99_999}},
                )
            }
        }
    ),
)
"""Requests with a grammar that vLLM 0.32 accepts and cannot compile: a token outside of the vocabulary."""
TOO_LONG = Clients(3, (9000, 9000), (8, 8), 0.12)
"""Requests with a prompt above the context: HTTP 400."""
CONTENTION = (Clients(8, (16, 48), (150, 250)), Clients(2, (7000, 7500), (2, 4), pause=8.0, start=5.0))


@contextmanager
def alone() -> Iterator[None]:
    """While no other process is in such a block: of two servers under load, each would be measured with the other's."""
    with Path(__file__).open(encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def running(port: int, *clients: Clients, gateway: int = UNLIMITED) -> Iterator[Load]:
    """Drive the server until the block ends; requests in flight are given up then.

    No more requests than `gateway` are let through to the server at a time; the others wait in front of it.
    """
    load = Load(Gateway(gateway))
    for group in clients:
        for number in range(group.count):
            threading.Thread(target=_client, args=(port, group, load, number), daemon=True).start()
    try:
        yield load
    finally:
        load.stop.set()


def _client(port: int, group: Clients, load: Load, number: int) -> None:
    chance = random.Random(number)
    load.stop.wait(group.start + number * 0.05)
    while not load.stop.is_set():
        begun = time.monotonic()
        try:
            with load.gateway:
                _request(port, group, load, chance, begun)
            load.latencies.append(time.monotonic() - begun)
            load.answered[group] += 1
        except (OSError, http.client.HTTPException) as error:
            load.errors.append(repr(error))
            load.stop.wait(1)
        load.stop.wait(group.pause * chance.uniform(0.5, 1.5))


def _request(port: int, group: Clients, load: Load, chance: random.Random, begun: float) -> None:
    prompt, answer = chance.randint(*group.prompt), chance.randint(*group.answer)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    text = "".join(chance.choice(LETTERS) for _ in range(prompt))
    body = {"model": "tiny", "prompt": text, "max_tokens": answer, "ignore_eos": True, "stream": group.stream}
    body |= json.loads(group.parameters)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {group.key}"} if group.key else {})}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    reply = connection.getresponse()
    if group.stream:
        _timed(reply, begun, load, load.first.setdefault(group, []))
    reply.read()
    connection.close()


def _timed(reply: http.client.HTTPResponse, begun: float, load: Load, first: list[float]) -> None:
    """Note when each token of a stream came."""
    before = 0.0
    for line in reply:
        if line.startswith(b"data: {"):
            now = time.monotonic()
            (load.gaps if before else first).append(now - (before or begun))
            before = now
