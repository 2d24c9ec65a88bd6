"""`diag export`: the signals of a time range as CSV."""

import sys
from contextlib import nullcontext
from pathlib import Path

from diag.commands.observe import ObserveOptions, observe, prometheus_source
from diag.commands.site import site
from diag.core.contract import Contract
from diag.core.files import refused_in_words, written_whole
from diag.diagnosis.query_cache import QueryCache, TelemetrySource
from diag.sources.observation import SampleSource


def run(options: ObserveOptions, file: Path | None) -> str:
    """Write the signals to a file, or to standard output; returns the sentence that says what was written."""
    from diag.report import dataframe

    contract, incidents = site(options.incidents, options.contract)
    source = _source(options, contract)
    with (
        refused_in_words(file or Path("standard output")),
        written_whole(file, newline="") if file else nullcontext(sys.stdout) as out,
    ):
        values = dataframe.write(incidents, QueryCache(source, contract), out)
    return f"{file}: {values:,} values at {len(source.instants):,} instants"


def _source(options: ObserveOptions, contract: Contract) -> TelemetrySource:
    if options.prometheus:
        return prometheus_source(options, contract)
    observation = observe(options, contract)
    return SampleSource(observation.samples, observation.instants, observation.interval)
