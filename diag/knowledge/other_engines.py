"""Recognise programs that are not vLLM, by the first page or log: diag judges vLLM alone, and says so at once."""

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from diag.core.declarations import PACKAGE, read

OF_VLLM = re.compile(
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./-]{1,120}\.py:\d+\]?"
    r"|\((?:EngineCore|APIServer|VllmWorker|Worker\w*|Api[Ss]erver)\w* pid=\d+\)|\bvllm(?: serve)?: error: "
)
"""A line that vLLM itself wrote."""
NAMES_VLLM = re.compile(r"/vllm/|\bvllm\.(?:v1|engine|entry)|\bvllm serve\b")
"""A line that names vLLM's code, as tracebacks of programs that use it do too."""
BEGINNING = 2**20
"""Bytes of a page in which the metrics of other programs are looked for."""
ONLY_JUDGES = "diag judges vLLM alone"


class Program(NamedTuple):
    """A program, the patterns of its page and its log, and the owner that its /v1/models names.

    A sentence about its page ends in the `hint`.
    """

    name: str
    metrics: re.Pattern[str]
    log: re.Pattern[str]
    hint: str = ""
    owner: str = ""


@cache
def programs() -> tuple[Program, ...]:
    return read(PACKAGE / "knowledge" / "other_engines.toml", tuple[Program, ...], "program")


def program_of_page(page: bytes) -> str:
    """Return the name of the program whose metrics page this is; "" for vLLM's, diag's and any unknown one."""
    if re.search(rb"vllm[:_]\w*num_requests|^(?:# TYPE )?(?:diag_|vllm:)", page, re.MULTILINE):
        return ""
    text = page[:BEGINNING].decode(errors="replace")
    for program in programs():
        if re.search(rf"^(?:# (?:TYPE|HELP) )?(?:{program.metrics.pattern})", text, re.MULTILINE):
            return f"{program.name}{program.hint}"
    return ""


def program_of_models(body: bytes) -> str:
    """Return the name of the program that a page /v1/models shows as the owner of its models, "" for vLLM or none."""
    named = re.search(rb'"owned_by": ?"([\w.-]{1,60})"', body)
    owner = named[1].decode() if named else ""
    return next((program.name for program in programs() if program.owner and program.owner == owner), "")


def program_of_log(lines: Iterable[str]) -> str:
    """Return the name of the program that wrote a log, "" if vLLM wrote a line of it or nothing is recognised.

    Without a line that vLLM wrote, the program counts whose lines outnumber those that name vLLM's code.
    """
    lines_of: Counter[str] = Counter()
    for line in lines:
        if OF_VLLM.search(line):
            return ""
        name = next((program.name for program in programs() if program.log.search(line)), "")
        lines_of[name or "vLLM"] += bool(name or NAMES_VLLM.search(line))
    (name, _), *_ = lines_of.most_common(1) or [("vLLM", 0)]
    return "" if name == "vLLM" else name
