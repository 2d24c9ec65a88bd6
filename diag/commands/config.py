"""`diag config`: what each server runs with, and where each value is known from."""

from diag.commands.observe import ObserveOptions, observe_once
from diag.diagnosis import configuration
from diag.report import config as report


def run(settings: ObserveOptions, as_json: bool) -> str:
    """What each server runs with and where that is known from, after one look."""
    seen = observe_once(settings)
    servers, notes = configuration.of(seen), configuration.notes(seen)
    return (report.render_json if as_json else report.render)(servers, notes)
