"""`diag config`: the configuration of each server, and the source of each value."""

from diag.commands.observe import ObserveOptions, observe_once
from diag.diagnosis import configuration
from diag.report.settings import render_config, render_config_json


def run(options: ObserveOptions, as_json: bool) -> str:
    """The configuration of each server, after one scrape."""
    observation = observe_once(options)
    servers, notes = configuration.configurations(observation), configuration.notes(observation)
    return (render_config_json if as_json else render_config)(servers, notes)
