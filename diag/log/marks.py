"""Words by which the lines around a failure are told (marks.toml)."""

import re
from typing import NamedTuple

from diag.core.declarations import PACKAGE, document, typed


class Functions(NamedTuple):
    """Names of functions in the frames of a traceback."""

    step: tuple[str, ...]
    start: tuple[str, ...]
    request: tuple[str, ...]


class Marks(NamedTuple):
    """Regular expressions; the file describes each."""

    ends_process: re.Pattern[str]
    logs_ends: re.Pattern[str]
    headline: re.Pattern[str]
    ends_child: re.Pattern[str]
    chains: re.Pattern[str]
    entry: re.Pattern[str]
    frame: re.Pattern[str]
    of_request: re.Pattern[str]
    logs_request: re.Pattern[str]
    uncaught: re.Pattern[str]
    names_request: re.Pattern[str]
    says_of_request: re.Pattern[str]
    module: re.Pattern[str]
    feature: re.Pattern[str]
    of_vllm: re.Pattern[str]
    cut_short: re.Pattern[str]
    exception: re.Pattern[str]
    lone: re.Pattern[str]
    call_failed: re.Pattern[str]
    of_plugin: re.Pattern[str]
    of_platform: re.Pattern[str]
    bare_name: re.Pattern[str]
    stopped: re.Pattern[str]
    says_end: re.Pattern[str]
    heading: re.Pattern[str]
    unfinished: re.Pattern[str]
    wrapped: re.Pattern[str]
    goes_on: re.Pattern[str]
    wrapper: re.Pattern[str]
    detail: re.Pattern[str]
    validation: re.Pattern[str]
    field: re.Pattern[str]
    before: re.Pattern[str]
    names_process: re.Pattern[str]
    no_reason: re.Pattern[str]
    of_nccl: re.Pattern[str]
    foreign: re.Pattern[str]
    ended_from_outside: re.Pattern[str]
    waits_for_gpus: re.Pattern[str]
    waits_for_lock: re.Pattern[str]
    compiles: re.Pattern[str]
    of_script: re.Pattern[str]
    of_others: re.Pattern[str]
    of_choices: re.Pattern[str]
    inside: re.Pattern[str]
    colour: re.Pattern[str]
    torn: re.Pattern[str]
    begins: re.Pattern[str]
    source: re.Pattern[str]
    own_line: re.Pattern[str]
    bare_colour: re.Pattern[str]
    returns: re.Pattern[str]
    whole: re.Pattern[str]
    numbered: re.Pattern[str]
    glued: re.Pattern[str]
    behind_uvicorn: re.Pattern[str]
    dated: re.Pattern[str]
    yearless: re.Pattern[str]


_, _FILE = document(PACKAGE / "log" / "marks.toml")
_WORDS = {name: text if isinstance(text, str) else "|".join(text) for name, text in _FILE["words"].items()}
MARKS: Marks = typed(_WORDS, Marks)
FUNCTIONS: Functions = typed(_FILE["functions"], Functions)
