"""`diag record`: live servers into a folder that anybody can judge later."""

from pathlib import Path

from diag.commands.observe import ObserveOptions, plan, shown


def run(settings: ObserveOptions, folder: Path) -> str:
    """Record live servers into a folder; returns the sentence that says what is in it."""
    from diag.report.terminal import bar
    from diag.sources.recording.writer import record

    with bar(f"recording {shown(settings.targets)}") as tick:
        seen = record(settings.targets, folder, plan(settings, tick))
    return (
        f"{folder}: {seen.scrapes} scrapes, {seen.failed_scrapes} of them failed; judge it with: diag doctor {folder}"
    )
