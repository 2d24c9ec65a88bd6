"""A simulated vLLM under a load like that of `vllm bench serve`: one request alone, then all at once, then a tail."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from support import rewriting
from support.simulated_vllm import Engine, Limits, Request, page

from diag.sources.observation import Observation
from diag.sources.recording.reader import read

BEGUN = 1_795_000_000.0
LOADS = 2.0
"""Seconds for which the generator loads its tokenizer."""
TICK = 0.02
Change = Callable[[str, float], str]


def offered(
    folder: Path,
    limits: Limits,
    concurrency: int,
    answers: Sequence[int],
    *,
    prompt: int = 128,
    every: float = 1.0,
    change: Change = lambda text, _: text,
) -> Observation:
    """Return the scrapes of a step: a closed loop of requests with so many tokens of answer, the first one alone.

    `change` alters a page, by the seconds since the generator was started.
    """
    engine = Engine(limits, BEGUN)
    for _ in range(3):  # the warm-up
        engine.send(Request(engine.now, prompt, 16))
        engine.run(engine.now + 5)
    started, count = engine.now, 0

    def scraped() -> Iterator[rewriting.Scrape]:
        nonlocal count
        left = list(answers)
        alone = True
        while left or in_flight(engine) or count < 3:
            if engine.now >= started + LOADS:
                alone = alone and (len(left) == len(answers) or in_flight(engine) > 0)
                while left and in_flight(engine) < (1 if alone else concurrency):
                    engine.send(Request(engine.now, prompt, left.pop(0)))
            engine.run(engine.now + TICK)
            if engine.now - started >= every * count:
                count += 1
                yield engine.now, "sim", change(page([engine]), engine.now - started)

    rewriting.write(folder, scraped())
    (folder / "recording.toml").write_text(
        f'vllm = "0.32.0"\nlaunch = "vllm serve sim --max-num-seqs {limits.max_num_seqs}"\n'
        f"scrape_interval_seconds = {every}\n"
    )
    return read(folder)


def in_flight(engine: Engine) -> int:
    """Requests that have been sent and are not answered yet."""
    return len(engine.waiting) + len(engine.running) + len(engine.coming)
