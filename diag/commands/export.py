"""`diag export`: the signals of a span as CSV."""

import sys
from contextlib import nullcontext
from pathlib import Path

from diag.commands.observe import ObserveOptions, declared, observe, prometheus_source
from diag.core.errors import BadUsage
from diag.diagnosis.query_cache import QueryCache, TelemetrySource
from diag.sources.samples import SampleSource


def run(settings: ObserveOptions, file: Path | None) -> str:
    """Write the signals of a span as CSV, to standard output without a file; the sentence that says what is in it."""
    from diag.report import dataframe as frame

    contract, incidents = declared(settings)
    answers: TelemetrySource
    if settings.prometheus:
        answers = prometheus_source(settings, contract)
    else:
        seen = observe(settings, contract)
        answers = SampleSource(seen.samples, seen.instants, seen.interval)
    try:
        with file.open("w", encoding="utf-8", newline="") if file else nullcontext(sys.stdout) as out:
            values = frame.write(incidents, QueryCache(answers, contract), out)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BadUsage(f"{file or 'standard output'} cannot be written: {error.strerror}") from error
    return f"{file}: {values:,} values at {len(answers.instants):,} instants"
