"""What a line of vLLM's log may tell, and at which level: the shape of the table in patterns.py."""

from dataclasses import dataclass
from typing import Literal

from diag.core.log_events import CUDA_GRAPH_CAPTURE, LOG_EVENTS, STARTUP_PHASES

Kind = Literal["banner", "hint", "stage", "progress", "setting", "event", "serves", "ends", "fatal"]
"""What a line tells. A banner begins a new start; a hint does so only where no start is under way; a stage is what a
start has reached; progress is that it moves inside a stage; `fatal` is all that is left of a command that cannot start.
"""
PHASES = tuple(phase.name for phase in STARTUP_PHASES)
KERNEL_WARM_UP = "kernel_warm_up"
_BEFORE_CAPTURE = PHASES.index(CUDA_GRAPH_CAPTURE)
STAGES = (*PHASES[:_BEFORE_CAPTURE], KERNEL_WARM_UP, *PHASES[_BEFORE_CAPTURE:])
"""Kernels are warmed up before the graphs are captured: the phase warm_up has two parts."""
EVENTS = tuple(event.name for event in LOG_EVENTS)

RAW = ""
"""The level of a line without a head: a traceback, a progress bar, what a library prints."""
SAID = frozenset({"INFO", "DEBUG"})
WARNED = frozenset({"INFO", "DEBUG", "WARNING"})
FAILED = frozenset({RAW, "ERROR", "CRITICAL"})
BAR = frozenset({RAW})
UVICORN = frozenset({RAW, "INFO"})


@dataclass(frozen=True)
class Pattern:
    """A text that vLLM wrote in the releases from `first` to `last`.

    `begins` is a regular expression without groups. `numbers` is searched in the whole text; its groups are fields of
    the event, or flags of the configuration. `logger` names the files, one space between them, that have logged it in
    any release, as they stand in a line's head: once clients are served, the line counts from them only. "" is for what
    has no head of vLLM's: the text of an exception, a bar, uvicorn's lines, what a library or a shell prints. An
    exception counts in a record that says that an engine or a worker ends, or in one that shows the event `of`.
    """

    kind: Kind
    name: str
    begins: str
    levels: frozenset[str]
    first: str = "0.6.0"
    last: str = "0.33.0"
    numbers: str = ""
    logger: str = ""
    of: str = ""
