"""Recognise programs that are not vLLM, by the first page or log: diag judges vLLM alone, and says so at once."""

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import NamedTuple

OF_VLLM = re.compile(
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./-]{1,120}\.py:\d+\]?"
    r"|\((?:EngineCore|APIServer|VllmWorker|Worker\w*|Api[Ss]erver)\w* pid=\d+\)"
    r"|\bvllm (?:serve|: error)|/vllm/|\bvllm\.(?:v1|engine|entry)"
)
"""A line that vLLM wrote, or one that names its code."""
ONLY_JUDGES = "diag judges vLLM alone"


class Program(NamedTuple):
    """A program: how a sentence names its log and its page, and the patterns of both."""

    of_log: str
    of_page: str
    metrics: re.Pattern[bytes]
    log: re.Pattern[str]


@cache
def programs() -> tuple[Program, ...]:
    text = (files("diag.knowledge") / "other_engines.toml").read_text(encoding="utf-8")
    return tuple(
        Program(
            each["is"],
            each["page"],
            re.compile(rf"^(?:# (?:TYPE|HELP) )?(?:{each['metrics']})".encode(), re.MULTILINE),
            re.compile(each["log"]),
        )
        for each in tomllib.loads(text)["program"]
    )


def program_of_page(page: bytes) -> str:
    """Return the name of the program whose metrics page this is; "" for vLLM's, diag's and any unknown one."""
    if re.search(rb"vllm[:_]\w*num_requests|^(?:# TYPE )?(?:diag_|vllm:)", page, re.MULTILINE):
        return ""
    return next((program.of_page for program in programs() if program.metrics.search(page)), "")


def program_of_log(lines: Iterable[str]) -> str:
    """Return the words for a log of another program, "" if vLLM wrote a line of it or nothing is recognised."""
    found = ""
    for line in lines:
        if OF_VLLM.search(line):
            return ""
        found = found or next((program.of_log for program in programs() if program.log.search(line)), "")
    return found
