"""A simulated server that speculates: ten minutes of short requests, then ten minutes of long ones."""

import math
import random
from collections.abc import Iterator

from support.rewriting import Scrape
from support.simulated_vllm import Engine, Limits, Request, page

BEGUN = 1_795_000_000.0
HALF = 600
SHORT, LONG = 800, 24_000
"""Tokens of the prompts."""


def scrapes(
    every: float,
    draft_context: float = math.inf,
    prompts: tuple[int, int] = (SHORT, LONG),
    drafted: int = 4,
    accepted: float = 0.75,
) -> Iterator[Scrape]:
    """Scrape the server, which accepts no draft token while its requests hold more than `draft_context` on average."""
    draw = random.Random(3)
    engine = Engine(Limits(drafted=drafted, accepted=accepted, draft_context=draft_context), BEGUN)
    for begin, prompt, rate in ((0, prompts[0], 0.5), (HALF, prompts[1], 0.12)):
        at = BEGUN + begin
        while (at := at + draw.expovariate(rate)) < BEGUN + begin + HALF:
            engine.send(Request(at, round(draw.gauss(prompt, prompt / 10)), draw.randint(200, 600)))
    for scrape in range(int(2 * HALF / every)):
        engine.run(BEGUN + (scrape + 1) * every)
        yield engine.now, "vllm-0:8000", page([engine])
