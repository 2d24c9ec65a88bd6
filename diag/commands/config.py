"""`diag config`: the configuration of each server, and the source of each value."""

from diag.commands.observe import ObserveOptions, observe_once
from diag.diagnosis import configuration
from diag.report import config as report


def run(options: ObserveOptions, as_json: bool) -> str:
    """The configuration of each server, after one scrape."""
    seen = observe_once(options)
    servers, notes = configuration.configurations(seen), configuration.notes(seen)
    return (report.render_json if as_json else report.render)(servers, notes)
