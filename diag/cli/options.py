"""The options that commands share, each declared once, in the group that `--help` shows it in.

Options that belong together are one record: a command takes it as one parameter, and `Grouped` shows typer each
option of it. The names of the fields are those of `ObserveOptions`, so that a command hands on a group as it is.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from diag.core.errors import BadUsage

if TYPE_CHECKING:
    from diag.commands.observe import ObserveOptions
    from diag.sources.prometheus.scope import Scope

HERE = "http://127.0.0.1:8000"
WINDOW = "15m"
LONGEST_WAIT, LONGEST_PAUSE, LONGEST_WATCH = 3600.0, 86_400.0, 7 * 86_400.0
"""Seconds at most: for a response, between two scrapes, and for all of them."""

vllm_option = partial(typer.Option, rich_help_panel="vLLM and GPU")
allow_option = partial(typer.Option, rich_help_panel="What may be asked")
scrape_option = partial(typer.Option, rich_help_panel="Scraping")
prometheus_option = partial(typer.Option, rich_help_panel="Prometheus (instead of scraping)")
kubernetes_option = partial(typer.Option, rich_help_panel="Kubernetes")
evidence_option = partial(typer.Option, rich_help_panel="Evidence")
serve_option = partial(typer.Option, rich_help_panel="Serving")
sizing_option = partial(typer.Option, rich_help_panel="Comparing GPUs")
load_option = partial(typer.Option, rich_help_panel="Load")
output_option = partial(typer.Option, rich_help_panel="Output")
config_option = partial(typer.Option, rich_help_panel="Configuration")


def _a_number(value: float | None) -> float | None:
    """What a range lets through: nan is neither below nor above anything."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number of seconds")
    return value


seconds_option = partial(scrape_option, metavar="SECONDS", callback=_a_number)

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TARGET...",
        help="URLs of vLLM servers or of diag exporters, or one recording (a folder made by diag record)."
        f"  [default: {HERE}]",
        show_default=False,
    ),
]
Timeout = Annotated[
    float | None,
    seconds_option(
        "--timeout",
        min=0.1,
        max=LONGEST_WAIT,
        help="Time until a scrape (default: 5) or a Prometheus query (default: 30) fails.",
        show_default=False,
    ),
]
Every = Annotated[float, seconds_option("--every", min=0.1, max=LONGEST_PAUSE, help="Time between two scrapes.")]
Json = Annotated[bool, output_option("--json", help="Print JSON (its schema: diag/report/diag.COMMAND.schema.json).")]


class ScrapeOptions(NamedTuple):
    """How live servers are scraped."""

    every: Every = 2.0
    duration: Annotated[
        float,
        seconds_option(
            "--for", min=0.0, max=LONGEST_WATCH, help="How long to scrape; extended while a server looks stuck."
        ),
    ] = 30.0
    timeout: Timeout = None


class RecordOptions(NamedTuple):
    """How live servers are recorded: for twice as long."""

    every: Every = 2.0
    duration: Annotated[float, seconds_option("--for", min=0.0, max=LONGEST_WATCH, help="How long to record.")] = 60.0
    timeout: Timeout = None


class BaselineScrapeOptions(NamedTuple):
    """How live servers are observed to learn what is normal: long enough for several loads."""

    every: Every = 2.0
    duration: Annotated[float, seconds_option("--for", min=0.0, max=LONGEST_WATCH, help="How long to observe.")] = 300.0
    timeout: Timeout = None


class TopScrapeOptions(NamedTuple):
    """How live servers are scraped for as long as somebody looks."""

    every: Annotated[float, seconds_option("--every", min=0.5, max=60.0, help="Time between two scrapes.")] = 5.0
    timeout: Timeout = None


class PrometheusOptions(NamedTuple):
    """Which Prometheus is queried, about which servers, and for which time."""

    prometheus: Annotated[
        str,
        prometheus_option(
            "--prometheus",
            metavar="URL",
            help="Query this Prometheus, Thanos, Mimir or VictoriaMetrics; no server is contacted.",
        ),
    ] = ""
    at: Annotated[
        str,
        prometheus_option(
            "--at", metavar="TIME", help="Diagnose the window that ends here: 2026-11-20T03:12Z or -2h.  [default: now]"
        ),
    ] = ""
    window: Annotated[
        str, prometheus_option("--window", metavar="DURATION", help="How far to look back: 15m, 24h.")
    ] = WINDOW
    since: Annotated[
        str, prometheus_option("--from", metavar="TIME", help="Start of a time range, instead of --at and --window.")
    ] = ""
    until: Annotated[str, prometheus_option("--to", metavar="TIME", help="End of that time range.  [default: now]")] = (
        ""
    )
    instance: Annotated[
        list[str] | None,
        prometheus_option("--instance", metavar="REGEX", help="Only servers whose instance label matches; repeatable."),
    ] = None
    model: Annotated[
        list[str] | None,
        prometheus_option("--model", metavar="REGEX", help="Only servers of a model whose name matches; repeatable."),
    ] = None
    job: Annotated[
        list[str] | None,
        prometheus_option("--job", metavar="REGEX", help="Only scrape jobs whose name matches; repeatable."),
    ] = None
    match: Annotated[
        list[str] | None,
        prometheus_option("--match", metavar="MATCHER", help='Only series with this label: cluster="eu"; repeatable.'),
    ] = None

    def scope(self, targets: Sequence[str] | None) -> "Scope":
        """Which servers and which time is meant; BadUsage where no Prometheus is there to be asked."""
        from diag.sources.prometheus.scope import Scope, TimeSpan

        if self.prometheus and targets:
            raise BadUsage("with --prometheus, select servers by --instance, --model, --job or --match, not by URL")
        unused = [option for option, given in self._given().items() if given]
        if unused and not self.prometheus:
            raise BadUsage(
                f"{', '.join(unused)} needs --prometheus URL: only a Prometheus knows other times and servers"
            )
        span = TimeSpan(self.at, self.window, self.since, self.until)
        return Scope(span, self.instance or (), self.model or (), self.job or (), self.match or ())

    def _given(self) -> Mapping[str, object]:
        times = {"--at": self.at, "--window": self.window != WINDOW, "--from": self.since, "--to": self.until}
        servers = {"--instance": self.instance, "--model": self.model, "--job": self.job, "--match": self.match}
        return {**times, **servers}


class EvidenceOptions(NamedTuple):
    """What is known of a server beside its metrics."""

    log: Annotated[
        str, evidence_option("--log", metavar="FILE", help="The server's log file; - reads standard input.")
    ] = ""
    log_timezone: Annotated[
        str,
        evidence_option(
            "--log-timezone", metavar="ZONE", help="Time zone of the log: UTC, Europe/Berlin.  [default: this host's]"
        ),
    ] = ""
    launch: Annotated[
        str,
        evidence_option(
            "--launch", metavar="COMMAND", help="The server's launch command, where it cannot be read from the server."
        ),
    ] = ""


UserIncidents = Annotated[
    Path | None,
    config_option(
        "--incidents", metavar="DIR", help="Folder of your own incident files: Python code that runs with your rights."
    ),
]
ContractFile = Annotated[
    Path | None,
    config_option(
        "--contract",
        metavar="FILE",
        help="Your SLOs, thresholds and labels.  [default: ./diag.toml, if there is one]",
        show_default=False,
    ),
]


class ConfigurationOptions(NamedTuple):
    """What a site sets: incidents of its own, SLOs and thresholds."""

    incidents: UserIncidents = None
    contract: ContractFile = None


class FormatOptions(NamedTuple):
    """In which format a report is printed."""

    as_json: Json = False
    as_markdown: Annotated[bool, output_option("--markdown", help="Print Markdown, for a ticket.")] = False

    @property
    def form(self) -> Literal["terminal", "json", "markdown"]:
        """The format that was asked for."""
        if self.as_json and self.as_markdown:
            raise BadUsage("--json and --markdown exclude each other: choose one")
        return "json" if self.as_json else "markdown" if self.as_markdown else "terminal"


def observe_options(targets: Sequence[str] | None, *groups: Any, **more: Any) -> "ObserveOptions":
    """What a command looks at: its targets (None: the server on this host), and every option of these groups."""
    from diag.commands.observe import ObserveOptions

    given: dict[str, Any] = {}
    for group in groups:
        if isinstance(group, PrometheusOptions):
            given |= {"prometheus": group.prometheus, "scope": group.scope(targets)}
        else:
            given |= group._asdict()
    return ObserveOptions([HERE] if targets is None else targets, **given, **more)


class Grouped:
    """A command as typer has to see it: each option of a group is a parameter of its own.

    Only the command that is run is looked at: to look at all of them takes some milliseconds of each start.
    """

    def __init__(self, command: Callable[..., None]) -> None:
        self._command = command
        self.__name__, self.__doc__ = command.__name__, command.__doc__

    def __call__(self, **given: Any) -> None:
        """Run the command with its groups put together again."""
        for parameter in inspect.signature(self._command).parameters.values():
            if _is_group(parameter):
                group = parameter.annotation
                given[parameter.name] = group(**{option: given.pop(option) for option in group._fields})
        self._command(**given)

    @property
    def __signature__(self) -> inspect.Signature:
        """What inspect.signature looks at first."""
        parameters = inspect.signature(self._command).parameters.values()
        return inspect.Signature([option for parameter in parameters for option in _options(parameter)])

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]  # those of an object, not of its class
        return {option.name: option.annotation for option in self.__signature__.parameters.values()}


def _options(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """The parameter itself, or one for each option of its group."""
    group = inspect.signature(parameter.annotation).parameters.values() if _is_group(parameter) else [parameter]
    return [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in group]


def _is_group(parameter: inspect.Parameter) -> bool:
    return hasattr(parameter.annotation, "_fields")
