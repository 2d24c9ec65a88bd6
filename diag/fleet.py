"""Servers as a Prometheus knows them, judged like those that are looked at directly: one or thousands, now or then."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from diag import telemetry
from diag.asking import Asked, Window
from diag.contract import Contract
from diag.fixes import Running
from diag.incident import Incident
from diag.judgement import Judgement, Observed, conclude, not_measured, server
from diag.sources.remote import Remote

AT_ONCE = 4
"""Queries at a time; a Prometheus allows itself twenty."""
VERSIONS = "count by (instance, version) (last_over_time(diag_vllm_info[$window]))"


def judge(remote: Remote, incidents: Sequence[Incident], contract: Contract, launch: str = "") -> Judgement:
    """Judge all of the remote's servers; `launch` is the command of the one, where there is one."""
    asked = Asked(remote, contract)
    with _no_collection(), ThreadPoolExecutor(AT_ONCE) as pool:
        beside = pool.submit(_beside, remote, incidents, asked)
        for _ in pool.map(lambda each: asked.ask(*each), _questions(incidents, asked)):
            pass
        observed, versions, asked.gone = beside.result()
        alone = launch if len(remote.members) == 1 else ""
        running = {name: Running(versions.get(name, ""), alone) for name in remote.members}
        judgement = conclude(observed, incidents, asked, running)
    notes = (*judgement.observed.notes, *remote.notes)
    return _told_as_of_then(remote, replace(judgement, observed=replace(judgement.observed, notes=notes)))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Of a thousand servers there are so many objects that to look for garbage takes half as long as to judge them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _questions(incidents: Sequence[Incident], asked: Asked) -> dict[tuple[str, tuple[str, ...], Window], None]:
    """What the incidents are made of; asked a few at a time, for the server works while answers are read."""
    return dict.fromkeys(
        (each.signal.promql, incident.per, asked.window(incident))
        for incident in incidents
        for each in incident.every_condition
    )


def _told_as_of_then(remote: Remote, judgement: Judgement) -> Judgement:
    """The judgement, which says nothing good of now where the last scrape was long ago."""
    late = telemetry.late(remote)
    if not late:
        return judgement
    why = f"{remote.shown}: nothing was scraped in the last {late:.0f} s of what was asked for"
    verdict = "unknown" if judgement.verdict == "healthy" else judgement.verdict
    return replace(judgement, blind=(why, *judgement.blind), verdict=verdict)


def _beside(
    remote: Remote, incidents: Sequence[Incident], asked: Asked
) -> tuple[Observed, dict[str, str], frozenset[str]]:
    """What is known of the servers and of how they were scraped, vLLM's versions, and who is gone."""
    scraped = telemetry.scrapes(asked)
    gone = frozenset(name for name, each in scraped.items() if each.last is not None)
    versions = _versions(asked)
    observed = _observed(remote, scraped, versions, asked)
    notes = telemetry.remarks(remote, scraped, incidents, asked)
    # where all are gone, that is what has to be said
    return replace(observed, notes=notes), versions, gone if gone < scraped.keys() else frozenset()


def _versions(asked: Asked) -> dict[str, str]:
    found = (dict(subject) for subject in asked.ask(VERSIONS, ("instance",), asked.whole))
    return {each["instance"]: each.get("version", "") for each in found}


def _observed(
    remote: Remote, scraped: Mapping[str, telemetry.Scrapes], versions: Mapping[str, str], asked: Asked
) -> Observed:
    models = {name: ", ".join(sorted(member.models)) for name, member in remote.members.items()}
    return Observed(
        source="prometheus",
        target=remote.shown,
        start=float(remote.instants[0]) / 1000,
        end=float(remote.instants[-1]) / 1000,
        scrapes=sum(each.count for each in scraped.values()),
        failed_scrapes=sum(each.failed for each in scraped.values()),
        servers=tuple(server(name, versions.get(name), models[name]) for name in remote.members),
        not_measured=not_measured(asked),
    )
