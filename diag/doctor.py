"""The commands' work: from targets to a judgement, and from a judgement to text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from diag.asking import Asked
from diag.catalog import load
from diag.contract import Contract, find
from diag.errors import BadUsage
from diag.fixes import Running
from diag.incident import Incident
from diag.judgement import Judgement, Observed, conclude, not_measured
from diag.progress import judge, owed_and_still
from diag.sources.answers import SampleAnswers

if TYPE_CHECKING:
    from diag.sources import Observation

PATIENCE = 120.0
"""Seconds to watch on for while work is owed and nothing moves: one huge prefill may take that long."""


@dataclass(frozen=True)
class Settings:
    """What the command line said; times in seconds."""

    targets: Sequence[str]
    every: float = 2.0
    watch: float = 30.0
    timeout: float = 5.0
    launch: str = ""
    incidents: Path | None = None
    contract: Path | None = None
    probe: bool = False
