"""Closed-loop clients: each sends a request, waits for the whole answer, and sends the next."""

import http.client
import json
import random
import string
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LETTERS = string.ascii_lowercase + " "


@dataclass(frozen=True)
class Clients:
    """So many clients; prompt and answer lengths in tokens, drawn evenly; a pause in seconds between two requests."""

    count: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    pause: float = 0.0
    start: float = 0.0


@dataclass
class Load:
    """What the clients have met so far; `latencies` are seconds of whole requests."""

    stop: threading.Event = field(default_factory=threading.Event)
    latencies: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


HEALTHY = (Clients(6, (30, 300), (20, 80), pause=0.3),)
STEADY = (Clients(6, (30, 300), (200, 400)),)
"""Always some in flight: a server that is stopped between two requests shows an idle page, and nobody could tell."""
CASCADE = (Clients(20, (16, 64), (200, 600)), Clients(8, (600, 1000), (200, 400)))
CONTENTION = (Clients(8, (16, 48), (150, 250)), Clients(2, (7000, 7500), (2, 4), pause=8.0, start=5.0))


@contextmanager
def running(port: int, *clients: Clients) -> Iterator[Load]:
    """Drive the server until the block ends; requests in flight are given up then."""
    load = Load()
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
            _request(port, chance.randint(*group.prompt), chance.randint(*group.answer), chance)
            load.latencies.append(time.monotonic() - begun)
        except (OSError, http.client.HTTPException) as error:
            load.errors.append(repr(error))
            load.stop.wait(1)
        load.stop.wait(group.pause * chance.uniform(0.5, 1.5))


def _request(port: int, prompt: int, answer: int, chance: random.Random) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    text = "".join(chance.choice(LETTERS) for _ in range(prompt))
    body = {"model": "tiny", "prompt": text, "max_tokens": answer, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    connection.getresponse().read()
    connection.close()
