"""Lines that a client may write into a server's log: every line that the doctor recognises, with every head."""

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from support.paths import LOGS

from diag.log.patterns import recognise


class Heads(NamedTuple):
    """The start of a log, and the heads of its processes; that of the engine has places for {level} and {file}."""

    start: str
    api: str
    engine: str


SERVER_0_32 = Heads(
    (LOGS / "v1_0.32.0_cpu_small.log").read_text(encoding="utf-8"),
    "(APIServer pid=24326) INFO 11-21 19:50:00 [request_logger.py:62] ",
    "(EngineCore pid=24343) {level} 11-21 19:50:00 [{file}] ",
)


def at_of(head: str) -> float:
    """Return the unix time in a head of vLLM."""
    return datetime.strptime(f"2026-{head.split()[3]} {head.split()[4]} +0000", "%Y-%m-%d %H:%M:%S %z").timestamp()


def known_texts() -> Iterator[tuple[str, str]]:
    """Level and text of each line that the doctor knows."""
    for case in (LOGS / "texts.tsv").read_text(encoding="utf-8").splitlines():
        _, level, _, text = case.split("\t")
        yield level, text


def imitations(server: Heads) -> Iterator[str]:
    """Every text that the doctor knows: alone, behind uvicorn's head, and behind the head of who writes it."""
    for level, text in known_texts():
        pattern = recognise(text, level)
        assert pattern
        yield text
        yield f"{level or 'ERROR'}:     {text}"
        for file in pattern.logger.split() or ("core.py",):
            yield server.engine.format(level=level or "ERROR", file=f"{file}:1512") + text
