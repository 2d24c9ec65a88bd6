"""Observations of one recording, of live servers, or of the servers in a Prometheus, for the commands that judge them;
and the commands that only keep or print what was observed: `diag record`, `diag export` and `diag config`.
"""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from diag.core.contract import Contract, apply_overrides, find, renamed_thresholds, with_settings
from diag.core.formatting import plural
from diag.core.incident import Incident
from diag.core.metric_prefix import OWN
from diag.core.subjects import instance_name
from diag.diagnosis.build_report import build_report, merge_log_reports
from diag.diagnosis.progress import judge, owed_and_still
from diag.diagnosis.proposals import Running
from diag.diagnosis.query_cache import FEWEST_INTERVALS, QueryCache
from diag.diagnosis.report import Observed, ObservedServer, Snapshot
from diag.diagnosis.telemetry_checks import departures, not_measured, scrapes, vanished
from diag.knowledge.catalog import load
from diag.sources import source
from diag.sources.observation import Observation
from diag.sources.source import Scraping, SourceOptions, Tick, open_source, read_logs, scrape_plan, shown_targets

if TYPE_CHECKING:
    from diag.sources.kubernetes.servers import ServersOfNamespace

DECISIVE = frozenset({"engine_dead", "startup_failed", "engine_orphaned", "gpu_out_of_memory"})
"""Incidents of which more scrapes of a server that refuses them show nothing new."""
ORPHANS = "max by (instance) (diag_vllm_process_orphaned) == 1"
LEFT = 60.0
"""Seconds without a scrape, longer than one may take, after which a server has left an observation of several."""
LEFT_BEHIND = f"""
$running_last + $waiting_last + $does_not_answer and on (instance) count_over_time(up[$window]) > {FEWEST_INTERVALS}"""
"""0 at the last scrape of a server that was stopped in order: drained, and answering to the end; none after a few."""
LONGEST_SCRAPING = 125.0
"""Seconds to scrape for at most while requests are in flight and nothing moves: a huge prefill may take two minutes."""


@dataclass(frozen=True)
class ObserveOptions(SourceOptions):
    """The choice of a source, the user's own incidents, and the path of diag.toml if it is not the default."""

    incidents: Path | None = None
    contract: Path | None = None


def site(
    incident_folder: Path | None, contract_file: Path | None, settings: Sequence[str] = ()
) -> tuple[Contract, tuple[Incident, ...]]:
    """Return the contract, and diag's incidents and the site's own with the site's thresholds."""
    contract, incidents = with_settings(find(contract_file), settings), load(incident_folder)
    for sentence in renamed_thresholds(incidents, contract):
        print(f"diag: {sentence}", file=sys.stderr)  # the report itself goes to standard output
    return contract, apply_overrides(incidents, contract)


def scraping(contract: Contract, incidents: Sequence[Incident] = ()) -> Scraping:
    """Return how live servers are scraped: with a progress bar, and for longer while one looks stuck.

    With `incidents`, servers that are not well are watched until /health, their log or their processes show an outage.
    """

    def bar(description: str) -> AbstractContextManager[Tick]:
        from diag.report import terminal

        return terminal.bar(description)

    def may_be_stuck(observation: Observation) -> bool:
        cache = QueryCache(observation, contract)
        return cache.span < LONGEST_SCRAPING and owed_and_still(judge(cache)[0])

    def is_dead(observation: Observation) -> bool:
        """Return True if an incident explains what is wrong with the servers; an orphan is one at its third scrape."""
        if not incidents:
            return False
        report, queries, _ = judge_observation(observation, contract, incidents)
        found = {each.diagnosis.incident.id for each in report.present if each.diagnosis.ongoing}
        orphans = queries.ask(ORPHANS, ("instance",), queries.whole, queries.source.instants[-1:])
        return bool(found & DECISIVE) and ("engine_orphaned" in found or not orphans)

    return Scraping(bar, may_be_stuck, is_dead)


def observe(options: ObserveOptions, contract: Contract) -> Observation:
    """Read the samples of one recording, or scrape live servers; BadUsage for a Prometheus."""
    return source.observe(options, scraping(contract))


def look(
    options: ObserveOptions, contract: Contract, incidents: Sequence[Incident], *, only_suspects: bool = False
) -> Snapshot:
    """Diagnose the servers of any source; `only_suspects` is for fleets (`diag.diagnosis.fleet.judge`)."""
    if options.kind == "log":
        snapshots = [judge_observation(observation, contract, incidents) for observation in read_logs(options)]
        return snapshots[0]._replace(report=merge_log_reports([snapshot.report for snapshot in snapshots]))
    opened = open_source(options, scraping(contract, incidents), contract, incidents)
    if isinstance(opened, Observation):
        return judge_observation(opened, contract, incidents)
    from diag.diagnosis import fleet

    queries = QueryCache(opened, contract)
    report = fleet.judge(opened, incidents, queries, options.launch, only_suspects=only_suspects)
    return Snapshot(report, queries, {})


def take_snapshot(options: ObserveOptions) -> Snapshot:
    """Diagnose one recording or live servers; keep the samples, so that signals can be compared later."""
    contract, incidents = site(options.incidents, options.contract)
    return judge_observation(observe(options, contract), contract, incidents)


def judge_observation(observation: Observation, contract: Contract, incidents: Sequence[Incident]) -> Snapshot:
    """Diagnose an observation."""
    cache = QueryCache(observation, contract)
    scraped = scrapes(cache, LEFT) if len(observation.instances) > 1 else {}
    ends = cache.ask(LEFT_BEHIND, ("instance",), cache.whole, observation.instants[-1:])
    cache.gone = vanished(scraped) & {instance_name(subject) for subject, row in ends.items() if row[-1] == 0}
    if contract.site.prefix != OWN:  # a page does not show how Prometheus renames its metrics
        incidents = tuple(incident for incident in incidents if incident.id != "scrape_renames_metrics")
    running = {instance: running_of(observation, instance) for instance in observation.instances}
    versions, models = observation.versions, observation.models
    observed = Observed(
        source=observation.source,
        target=observation.target,
        start=float(observation.instants[0]) / 1000,
        end=float(observation.instants[-1]) / 1000,
        scrapes=observation.scrapes,
        failed_scrapes=observation.failed_scrapes,
        servers=tuple(
            ObservedServer(name, versions.get(name, ""), models.get(name, "")) for name in observation.instances
        ),
        notes=observation.notes,
        defects=tuple(departures(scraped)),
        not_measured=() if observation.endings else not_measured(cache),
        mixed=tuple(observation.mixed.items()),
        endings=tuple(observation.endings.items()),
        containers=tuple(observation.containers.items()),
    )
    return Snapshot(build_report(observed, incidents, cache, running), cache, running)


def running_of(observation: Observation, instance: str) -> Running:
    """Return version and launch command of a server, and whether they are all of its configuration."""
    config = observation.settled.get(instance)
    is_complete = config is not None and not config.incomplete
    version, launch = observation.versions.get(instance, ""), observation.launch.get(instance, "")
    exported, log = observation.exported_by.get(instance, ("", "")), observation.logs.get(instance)
    return Running(version, launch, is_complete, exported, log)


# -- commands that only keep or print what was observed ----------------------------------------------------------------


def record_servers(options: ObserveOptions, folder: Path, pods: "ServersOfNamespace | None" = None) -> str:
    """Record live servers, or those in `pods`, into a folder; return a sentence about what it holds."""
    from diag.report.terminal import bar
    from diag.sources.recording.writer import record

    with bar(f"recording {pods.shown if pods else shown_targets(options.targets)}") as tick:
        plan = scrape_plan(options, tick)
        recorded = record(pods.addresses, folder, pods.plan(plan)) if pods else record(options.targets, folder, plan)
    silent = f", {recorded.silent_scrapes} without vLLM's metrics" if recorded.silent_scrapes else ""
    return (
        f"{folder}: {plural(recorded.scrapes, 'scrape')}, {recorded.failed_scrapes} failed{silent};"
        f" diagnose it with: diag doctor {folder}"
    )


def export_signals(options: ObserveOptions, file: Path | None) -> str:
    """Write the signals of a time range as CSV, by default to standard output; return a sentence about the file."""
    from diag.core.files import refused_in_words, written_whole
    from diag.report import dataframe

    contract, incidents = site(options.incidents, options.contract)
    opened = open_source(options, scraping(contract), contract)
    with (
        refused_in_words(file or Path("standard output")),
        written_whole(file, newline="") if file else nullcontext(sys.stdout) as out,
    ):
        values = dataframe.write(incidents, QueryCache(opened, contract), out)
    return f"{file}: {values:,} values at {len(opened.instants):,} instants"


def show_configuration(options: ObserveOptions, as_json: bool) -> str:
    """Return the configuration of each server and the source of each value, after one scrape."""
    from diag.diagnosis import configuration
    from diag.report.settings import CONFIG, render_config

    observation = source.observe(replace(options, duration=0.0), Scraping())
    servers, notes = configuration.configurations(observation), configuration.notes(observation)
    return CONFIG.text((servers, notes)) if as_json else render_config(servers, notes)
