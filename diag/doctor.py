"""The commands' work: from targets to a judgement, and from a judgement to text and an exit status."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from diag.asking import Asked
from diag.catalog import load
from diag.contract import Contract, find
from diag.errors import BadUsage
from diag.fixes import Running
from diag.judgement import Judgement, Observed, conclude, not_measured
from diag.progress import judge, owed_and_still
from diag.report import explain as pages
from diag.sources import Observation
from diag.sources.answers import SampleAnswers

PATIENCE = 120.0
"""Seconds to watch on for while work is owed and nothing moves: one huge prefill may take that long."""
EXIT = {"healthy": 0, "warning": 1, "critical": 2, "unknown": 3}
Format = Literal["terminal", "json", "markdown"]


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


def run(settings: Settings) -> Judgement:
    """Judge what the settings name: one recording, or live servers."""
    incidents, contract = load(settings.incidents), find(settings.contract)
    seen = _observe(settings, contract)
    asked = Asked(SampleAnswers(seen.samples, seen.instants, seen.interval), contract)
    running = {name: Running(seen.versions.get(name, ""), seen.launch.get(name, "")) for name in seen.instances}
    return conclude(_observed(seen, asked), incidents, asked, running)


def _observe(settings: Settings, contract: Contract) -> Observation:
    paths = [Path(each) for each in settings.targets if Path(each).exists()]
    if not paths:
        return _watch(settings, contract)
    if len(settings.targets) > 1:
        raise BadUsage("a recording is judged alone: name one recording, or URLs only")
    from diag.sources.recording import read

    return read(paths[0], launch=settings.launch)


def _watch(settings: Settings, contract: Contract) -> Observation: ...


def _observed(seen: Observation, asked: Asked) -> Observed:
    return Observed(
        source=seen.source,
        target=seen.target,
        start=float(seen.instants[0]) / 1000,
        end=float(seen.instants[-1]) / 1000,
        scrapes=seen.scrapes,
        failed_scrapes=seen.failed_scrapes,
        servers=tuple(_server(seen, name) for name in seen.instances),
        notes=seen.notes,
        not_measured=not_measured(asked),
    )


def _server(seen: Observation, name: str) -> str:
    version, model = seen.versions.get(name, "version not known"), seen.models.get(name, "model not known")
    return f"{name}: vLLM {version}, {model}"


def show(judgement: Judgement, form: Format) -> None:
    """Print a judgement on standard output."""
    if form == "terminal":
        from diag.report import terminal

        return terminal.write(judgement)
    from diag.report import json, markdown

    sys.stdout.write((json if form == "json" else markdown).render(judgement))


def exit_code(judgement: Judgement, fail_on: str) -> int:
    """0 healthy, 1 warning, 2 critical, 3 cannot tell; 0 below what `fail_on` asks for."""
    code = EXIT[judgement.verdict]
    least = {"warning": 1, "critical": 2, "never": max(EXIT.values()) + 1}[fail_on]
    return code if code >= least else 0


def explain(name: str, folder: Path | None) -> str:
    """The page of one incident."""
    known = {each.id: each for each in load(folder)}
    if name not in known:
        raise BadUsage(f"no incident is called '{name}'; there are {', '.join(known)}")
    return pages.explain(known[name], find(None))


def catalogue(folder: Path | None) -> str:
    """The list of incidents."""
    return pages.catalogue(load(folder))
