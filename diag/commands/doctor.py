"""`diag doctor`: the report of a recording, of live servers or of a Prometheus, its text and its exit status."""

import sys
from pathlib import Path
from typing import Literal

from diag.commands.observe import ObserveOptions, prometheus_source, take_snapshot
from diag.commands.site import site
from diag.core.errors import BadUsage
from diag.core.writing import written_whole
from diag.diagnosis.report import Report

EXIT = {"healthy": 0, "warning": 1, "critical": 2, "unknown": 3}
Format = Literal["terminal", "json", "markdown"]


def run(options: ObserveOptions) -> Report:
    """Diagnose one recording, live servers, or the servers in a Prometheus."""
    if options.prometheus:
        from diag.diagnosis import fleet

        contract, incidents = site(options.incidents, options.contract)
        return fleet.judge(prometheus_source(options, contract), incidents, contract, options.launch)
    return take_snapshot(options).report


def print_report(report: Report, form: Format, *, verbose: bool = False, quiet: bool = False) -> None:
    """Print a report on standard output; JSON has every incident anyway."""
    if form == "terminal":
        from diag.report import terminal

        return terminal.write(report, verbose=verbose, quiet=quiet)
    from diag.report import json, markdown

    sys.stdout.write(json.render(report) if form == "json" else markdown.render(report, verbose))


def write_html(report: Report, file: Path) -> None:
    """Write the report as one HTML page."""
    from diag.report import html

    try:
        with written_whole(file) as out:
            out.write(html.render(report))
    except OSError as error:
        raise BadUsage(f"{file} cannot be written: {error.strerror}") from error


def exit_code(report: Report, fail_on: str) -> int:
    """0 healthy, 1 warning, 2 critical, 3 cannot tell; 0 below the verdict `fail_on`."""
    code = EXIT[report.verdict]
    least = {"warning": 1, "critical": 2, "never": max(EXIT.values()) + 1}[fail_on]
    return code if code >= least else 0
