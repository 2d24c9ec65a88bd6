"""Servers as a Prometheus knows them, judged like those that are looked at directly: one or thousands, now or then."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from diag import telemetry
from diag.asking import Asked
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
    scraped = telemetry.scrapes(asked)
    gone = frozenset(name for name, each in scraped.items() if each.last is not None)
    asked.gone = gone if gone < scraped.keys() else frozenset()  # where all are gone, that is what has to be said
    versions = _versions(asked)
    _ask_ahead(incidents, asked)
    alone = launch if len(remote.members) == 1 else ""
    running = {name: Running(versions.get(name, ""), alone) for name in remote.members}
    judgement = conclude(_observed(remote, scraped, versions, asked), incidents, asked, running)
    notes = (*telemetry.remarks(remote, scraped, incidents, asked), *remote.notes)
    return replace(judgement, observed=replace(judgement.observed, notes=notes))


def _ask_ahead(incidents: Sequence[Incident], asked: Asked) -> None:
    """Ask what the incidents are made of, a few questions at a time: the server works while answers are read."""
    questions = dict.fromkeys(
        (each.signal.promql, incident.per, asked.window(incident))
        for incident in incidents
        for each in incident.every_condition
    )
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(lambda each: asked.ask(*each), questions):
            pass


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
