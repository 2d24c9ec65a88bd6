"""Recognise programs that are not vLLM, by the first page or log: diag judges vLLM alone, and says so at once."""

import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from diag.core.declarations import PACKAGE, read

OF_VLLM = re.compile(
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./-]{1,120}\.py:\d+\]?"
    r"|\((?:EngineCore|APIServer|VllmWorker|Worker\w*|Api[Ss]erver)\w* pid=\d+\)"
    r"|\bvllm (?:serve|: error)|/vllm/|\bvllm\.(?:v1|engine|entry)"
)
"""A line that vLLM wrote, or one that names its code."""
BEGINNING = 2**20
"""Bytes of a page in which the metrics of other programs are looked for."""
ONLY_JUDGES = "diag judges vLLM alone"


class Program(NamedTuple):
    """A program, and the patterns of its page and its log; a sentence about its page ends in the `hint`."""

    name: str
    metrics: re.Pattern[str]
    log: re.Pattern[str]
    hint: str = ""


@cache
def programs() -> tuple[Program, ...]:
    return read(PACKAGE / "knowledge" / "other_engines.toml", tuple[Program, ...], "program")


def program_of_page(page: bytes) -> str:
    """Return the name of the program whose metrics page this is; "" for vLLM's, diag's and any unknown one."""
    if re.search(rb"vllm[:_]\w*num_requests|^(?:# TYPE )?(?:diag_|vllm:)", page, re.MULTILINE):
        return ""
    text = page[:BEGINNING].decode(errors="replace")
    for each in programs():
        if re.search(rf"^(?:# (?:TYPE|HELP) )?(?:{each.metrics.pattern})", text, re.MULTILINE):
            return f"{each.name}{each.hint}"
    return ""


def program_of_log(lines: Iterable[str]) -> str:
    """Return the name of the program that wrote a log, "" if vLLM wrote a line of it or nothing is recognised."""
    found = ""
    for line in lines:
        if OF_VLLM.search(line):
            return ""
        found = found or next((each.name for each in programs() if each.log.search(line)), "")
    return found
