"""The commands' work: from targets to a judgement, and from a judgement to text and an exit status."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from diag.asking import Answers, Asked
from diag.catalog import load
from diag.contract import Contract
from diag.contract_file import find
from diag.errors import BadUsage
from diag.fixes import Running
from diag.incident import Incident
from diag.judgement import Judgement, Observed, conclude, not_measured, server
from diag.limits import limited
from diag.progress import judge, owed_and_still
from diag.sources.answers import SampleAnswers
from diag.sources.observation import Observation
from diag.sources.scope import Scope
from diag.verify.side import Side

if TYPE_CHECKING:
    from diag.report.terminal import Tick
    from diag.sources.local import Local
    from diag.sources.remote import Remote
    from diag.sources.scrape import Plan
    from diag.sources.server import Server

PATIENCE = 125.0
"""Seconds to watch for at most while work is owed and nothing moves: one huge prefill may take two minutes."""
PROBE_SECONDS = 30.0
"""What a request of one token may take."""
SCRAPE_SECONDS, ANSWER_SECONDS = 5.0, 30.0
"""What a page, and a Prometheus' answer to one query, may take unless the command line says otherwise."""
EXIT = {"healthy": 0, "warning": 1, "critical": 2, "unknown": 3}
Format = Literal["terminal", "json", "markdown"]


@dataclass(frozen=True)
class Settings:
    """What the command line said; times in seconds, 0 for what suits the source.

    `prometheus` is the URL of a Prometheus to ask about the servers in `scope` instead of asking `targets`.
    """

    targets: Sequence[str]
    every: float = 2.0
    watch: float = 30.0
    timeout: float = 0.0
    launch: str = ""
    incidents: Path | None = None
    contract: Path | None = None
    probe: bool = False
    log: str = ""
    log_timezone: str = ""
    prometheus: str = ""
    scope: Scope = field(default_factory=Scope)


def run(settings: Settings) -> Judgement:
    """Judge what the settings name: one recording, live servers, or those that a Prometheus knows."""
    if settings.prometheus:
        from diag import fleet

        contract, incidents = _declared(settings)
        return fleet.judge(remote(settings, contract), incidents, contract, settings.launch)
    return look(settings).judgement


def look(settings: Settings) -> Side:
    """Judge one recording or live servers, and keep what they can still be asked."""
    contract, incidents = _declared(settings)
    seen = _observe(settings, contract)
    asked = Asked(SampleAnswers(seen.samples, seen.instants, seen.interval), contract)
    running = {name: _running(seen, name) for name in seen.instances}
    return Side(conclude(_observed(seen, asked), incidents, asked, running), asked, running)


def _running(seen: Observation, name: str) -> Running:
    whole = name in seen.settled and not seen.settled[name].unread
    return Running(seen.versions.get(name, ""), seen.launch.get(name, ""), whole)


def _declared(settings: Settings) -> tuple[Contract, tuple[Incident, ...]]:
    """The site's contract, and the incidents under its limits."""
    contract = find(settings.contract)
    return contract, limited(load(settings.incidents), contract)


def keep(judgement: Judgement, file: Path) -> None:
    """Write the judgement as an HTML page."""
    from diag.report import html

    try:
        file.write_text(html.render(judgement), encoding="utf-8")
    except OSError as error:
        raise BadUsage(f"{file} cannot be written: {error.strerror}") from error


def export(settings: Settings, file: Path | None) -> str:
    """Write the signals of a span as CSV, to standard output without a file; the sentence that says what is in it."""
    from diag.report import frame

    contract, incidents = _declared(settings)
    answers: Answers
    if settings.prometheus:
        answers = remote(settings, contract)
    else:
        seen = _observe(settings, contract)
        answers = SampleAnswers(seen.samples, seen.instants, seen.interval)
    try:
        with file.open("w", encoding="utf-8", newline="") if file else nullcontext(sys.stdout) as out:
            values = frame.write(incidents, Asked(answers, contract), out)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BadUsage(f"{file or 'standard output'} cannot be written: {error.strerror}") from error
    return f"{file}: {values:,} values at {len(answers.instants):,} instants"


def remote(settings: Settings, contract: Contract) -> "Remote":
    """The servers in scope as a Prometheus knows them."""
    from diag.sources.access import from_environment
    from diag.sources.address import parse
    from diag.sources.prometheus import Prometheus
    from diag.sources.remote import Remote

    seconds = settings.timeout or ANSWER_SECONDS
    address = parse(settings.prometheus)
    if address.query:
        raise BadUsage(f"{address.shown}?...: a Prometheus is asked by its address alone, without a question mark")
    prometheus = Prometheus(address, from_environment(os.environ), seconds)
    return Remote(prometheus, settings.scope, contract.site.labels)


def _observe(settings: Settings, contract: Contract) -> Observation:
    paths = [Path(each) for each in settings.targets if Path(each).exists()]
    if not paths:
        return _watch(settings, contract)
    if len(settings.targets) > 1:
        raise BadUsage("a recording is judged alone: name one recording, or URLs only")
    from diag.sources.recording import read

    return read(paths[0], launch=settings.launch)


def _watch(settings: Settings, contract: Contract) -> Observation:
    """Scrape live servers; watch on while work is owed, nothing moves, and it may still be one huge prefill."""
    from diag.report.terminal import bar
    from diag.sources.scrape import watch

    def stuck(seen: Observation) -> bool:
        asked = Asked(SampleAnswers(seen.samples, seen.instants, seen.interval), contract)
        return asked.span < PATIENCE and owed_and_still(judge(asked)[0])

    with bar(f"watching {shown(settings.targets)}") as tick:
        return watch(settings.targets, _plan(settings, tick, stuck))


def _plan(settings: Settings, tick: "Tick", should_go_on: Callable[[Observation], bool] = lambda _: False) -> "Plan":
    from diag.sources.scrape import Plan

    return Plan(
        every=settings.every,
        duration=settings.watch,
        timeout=settings.timeout or SCRAPE_SECONDS,
        launch=settings.launch,
        probe=PROBE_SECONDS if settings.probe else None,
        beside=partial(_beside, settings),
        on_progress=lambda at: tick(at.seconds / max(at.of_seconds, at.seconds, settings.every)),
        should_go_on=should_go_on,
    )


def _beside(settings: Settings, server: "Server") -> "Local | None":
    """GPUs, processes and log of a server on this host, or of the one whose log was named."""
    from diag.sources.here import is_here
    from diag.sources.local import Local
    from diag.sources.zone import zone

    if not settings.log and not is_here(server.address):
        return None
    return Local(server, settings.log, zone(settings.log_timezone))


def shown(targets: Sequence[str]) -> str:
    """The targets as they may be printed: without credentials."""
    from diag.sources.address import parse

    return ", ".join(parse(each).shown for each in targets)


def config(settings: Settings, as_json: bool) -> str:
    """What each server runs with and where that is known from, after one look."""
    from diag import configuration
    from diag.report import config as report

    seen = _look_once(settings)
    servers, notes = configuration.of(seen), configuration.notes(seen)
    return (report.render_json if as_json else report.render)(servers, notes)


def _look_once(settings: Settings) -> Observation:
    """A recording as a whole, or live servers at one moment."""
    if any(Path(each).exists() for each in settings.targets):
        return _observe(settings, Contract())
    from diag.sources.scrape import watch

    return watch(settings.targets, _plan(replace(settings, watch=0.0), lambda share: None))


def record(settings: Settings, folder: Path) -> str:
    """Record live servers into a folder; returns the sentence that says what is in it."""
    from diag.report.terminal import bar
    from diag.sources.record import record as keep

    with bar(f"recording {shown(settings.targets)}") as tick:
        seen = keep(settings.targets, folder, _plan(settings, tick))
    return (
        f"{folder}: {seen.scrapes} scrapes, {seen.failed_scrapes} of them failed; judge it with: diag doctor {folder}"
    )


def _observed(seen: Observation, asked: Asked) -> Observed:
    return Observed(
        source=seen.source,
        target=seen.target,
        start=float(seen.instants[0]) / 1000,
        end=float(seen.instants[-1]) / 1000,
        scrapes=seen.scrapes,
        failed_scrapes=seen.failed_scrapes,
        servers=tuple(server(name, seen.versions.get(name), seen.models.get(name)) for name in seen.instances),
        notes=seen.notes,
        not_measured=not_measured(asked),
    )


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


def generate(root: Path, check: bool, folder: Path | None, contract: Path | None) -> tuple[str, int]:
    """Write alerts, dashboards and runbooks, or only compare them; what to print and the exit status."""
    from diag.artefacts.generate import differences, files, write

    settled = find(contract)
    texts = files(limited(load(folder), settled), settled)
    if not check:
        changed = write(root, texts)
        return "\n".join([*changed, f"{root}: {len(texts)} files, {len(changed)} of them changed"]), 0
    wrong = [f"{name}: {how}" for name, how in differences(root, texts)]
    if wrong:
        return "\n".join([*wrong, f"{root}: {len(wrong)} files disagree with the declarations: run diag generate"]), 1
    return f"{root}: all {len(texts)} files say what the declarations say", 0


def explain(name: str, folder: Path | None) -> str:
    """The runbook of one incident."""
    from diag.artefacts.runbooks import runbook

    contract = find(None)
    known = {each.id: each for each in limited(load(folder), contract)}
    if name not in known:
        raise BadUsage(f"no incident is called '{name}'; there are {', '.join(known)}")
    return runbook(known[name], tuple(known.values()), contract)


def catalogue(folder: Path | None) -> str:
    """One line per incident."""
    incidents = load(folder)
    width = max(len(each.id) for each in incidents)
    return "".join(f"{each.id:<{width}}  {each.severity:<8}  {each.title}\n" for each in incidents)
