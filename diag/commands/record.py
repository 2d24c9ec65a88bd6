"""`diag record`: live servers into a folder that can be diagnosed later."""

from pathlib import Path

from diag.commands.observe import ObserveOptions, scrape_plan, without_credentials
from diag.core.formatting import plural


def run(options: ObserveOptions, folder: Path) -> str:
    """Record live servers into a folder; returns the sentence that says what is in it."""
    from diag.report.terminal import bar
    from diag.sources.recording.writer import record

    with bar(f"recording {without_credentials(options.targets)}") as tick:
        recorded = record(options.targets, folder, scrape_plan(options, tick))
    silent = f", {recorded.silent_scrapes} without vLLM's metrics" if recorded.silent_scrapes else ""
    return (
        f"{folder}: {plural(recorded.scrapes, 'scrape')}, {recorded.failed_scrapes} failed{silent};"
        f" diagnose it with: diag doctor {folder}"
    )
