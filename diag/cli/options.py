"""Options that commands share, each declared once, in its group of `--help`.

Related options form one record: a command takes the record as one parameter, and `Grouped` shows typer each
of its options. Fields have the names of `ObserveOptions`, so that a command passes a group on unchanged.
"""

import inspect
import math
from collections.abc import Callable, Sequence
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
LONGEST_WAIT, LONGEST_PAUSE, LONGEST_DURATION = 3600.0, 86_400.0, 7 * 86_400.0
"""Upper limits in seconds: for a response, between two scrapes, and for a whole watch."""

vllm_option = partial(typer.Option, rich_help_panel="vLLM and GPU")
allow_option = partial(typer.Option, rich_help_panel="Allowed targets")
scrape_option = partial(typer.Option, rich_help_panel="Scraping")
prometheus_option = partial(typer.Option, rich_help_panel="Prometheus (instead of scraping)")
kubernetes_option = partial(typer.Option, rich_help_panel="Kubernetes")
evidence_option = partial(typer.Option, rich_help_panel="Evidence")
serve_option = partial(typer.Option, rich_help_panel="Serving")
sizing_option = partial(typer.Option, rich_help_panel="Comparing GPUs")
load_option = partial(typer.Option, rich_help_panel="Load")
output_option = partial(typer.Option, rich_help_panel="Output")
config_option = partial(typer.Option, rich_help_panel="Configuration")


def _reject_nan(value: float | None) -> float | None:
    """Raise BadParameter for nan, which passes typer's range check."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number of seconds")
    return value


seconds_option = partial(scrape_option, metavar="SECONDS", callback=_reject_nan)
duration_option = partial(seconds_option, "--for", max=LONGEST_DURATION)

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TARGET...",
        help="URLs of vLLM servers or of diag exporters, one recording (a folder made by diag record), or logs: files,"
        " a folder of them, or - for standard input."
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
        help="Time limit for a scrape (default: 5) or a Prometheus query (default: 30).",
        show_default=False,
    ),
]
GpuName = Annotated[
    str, vllm_option("--gpu", metavar="NAME", help="h100, a100-80, l40s ... or cpu.  [default: this host's GPUs]")
]
LaunchRelease = Annotated[
    str,
    vllm_option(
        "--vllm-version",
        metavar="VERSION",
        help="vLLM release: 0.32.0.  [default: the image's, else the installed, else the newest release]",
    ),
]
Every = Annotated[float, seconds_option("--every", min=0.1, max=LONGEST_PAUSE, help="Time between two scrapes.")]
Json = Annotated[bool, output_option("--json", help="Print JSON (its schema: diag/report/diag.COMMAND.schema.json).")]


KubernetesPlace = Annotated[
    str,
    kubernetes_option(
        "--k8s",
        metavar="[CONTEXT/]NAMESPACE[/SELECTOR]",
        help="Find vLLM's pods (example: prod-eu/inference/app=vllm) and read their pages, logs and status through the"
        " API server.",
    ),
]


class ScrapeOptions(NamedTuple):
    """Scraping of live servers."""

    every: Every = 2.0
    duration: Annotated[
        float, duration_option(min=0.0, help="Duration of scraping; extended while a server looks stuck.")
    ] = 30.0
    timeout: Timeout = None


class RecordOptions(NamedTuple):
    """Recording of live servers, by default twice as long as a diagnosis."""

    every: Every = 2.0
    duration: Annotated[float, duration_option(min=0.0, help="Duration of the recording.")] = 60.0
    timeout: Timeout = None


class BaselineScrapeOptions(NamedTuple):
    """Observation of live servers for a baseline, by default long enough for several loads."""

    every: Every = 2.0
    duration: Annotated[float, duration_option(min=0.0, help="Duration of the observation.")] = 300.0
    timeout: Timeout = None


class TopScrapeOptions(NamedTuple):
    """Scraping of live servers until the live view is closed."""

    every: Annotated[float, seconds_option("--every", min=0.5, max=60.0, help="Time between two scrapes.")] = 5.0
    timeout: Timeout = None


class PrometheusOptions(NamedTuple):
    """A Prometheus, a selection of its servers, and a time range."""

    prometheus: Annotated[
        str,
        prometheus_option(
            "--prometheus",
            metavar="URL",
            help="Query this Prometheus, Thanos, Mimir or VictoriaMetrics; do not contact servers.",
        ),
    ] = ""
    at: Annotated[
        str,
        prometheus_option(
            "--at",
            metavar="TIME",
            help="End of the window: 12:00, yesterday 18:00, 2026-11-20T03:12Z, -2h.  [default: now]",
        ),
    ] = ""
    window: Annotated[
        str, prometheus_option("--window", metavar="DURATION", help="Length of the window: 15m, 24h.")
    ] = WINDOW
    since: Annotated[
        str, prometheus_option("--from", metavar="TIME", help="Start of a time range, instead of --at and --window.")
    ] = ""
    until: Annotated[
        str, prometheus_option("--to", metavar="TIME", help="End of the time range of --from.  [default: now]")
    ] = ""
    instance: Annotated[
        list[str] | None,
        prometheus_option("--instance", metavar="REGEX", help="Select servers by their instance label; repeatable."),
    ] = None
    model: Annotated[
        list[str] | None,
        prometheus_option("--model", metavar="REGEX", help="Select servers by their model name; repeatable."),
    ] = None
    job: Annotated[
        list[str] | None,
        prometheus_option("--job", metavar="REGEX", help="Select servers by their scrape job; repeatable."),
    ] = None
    match: Annotated[
        list[str] | None,
        prometheus_option("--match", metavar="MATCHER", help='Select series by a label: cluster="eu"; repeatable.'),
    ] = None

    def scope(self, targets: Sequence[str] | None) -> "Scope":
        """Return the selected servers and time range; raise BadUsage for options that need a Prometheus without one."""
        from diag.sources.prometheus.scope import Scope, TimeSpan

        if self.prometheus and targets:
            raise BadUsage("with --prometheus, select servers by --instance, --model, --job or --match, not by URL")
        times = {"--at": self.at, "--window": self.window != WINDOW, "--from": self.since, "--to": self.until}
        servers = {"--instance": self.instance, "--model": self.model, "--job": self.job, "--match": self.match}
        unused = [option for option, given in {**times, **servers}.items() if given]
        if unused and not self.prometheus:
            raise BadUsage(f"{', '.join(unused)} needs --prometheus URL: only a Prometheus has other times and servers")
        span = TimeSpan(self.at, self.window, self.since, self.until)
        return Scope(span, self.instance or (), self.model or (), self.job or (), self.match or ())


class EvidenceOptions(NamedTuple):
    """Evidence about a server besides its metrics."""

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
            "--launch", metavar="COMMAND", help="The server's launch command, if diag cannot read it from the server."
        ),
    ] = ""
    nccl_ras: Annotated[
        str,
        evidence_option(
            "--nccl-ras",
            metavar="HOST:PORT",
            help="Ask NCCL's RAS service which rank is missing: localhost:28028 unless NCCL_RAS_ADDR is set.",
        ),
    ] = ""


UserIncidents = Annotated[
    Path | None,
    config_option(
        "--incidents",
        metavar="DIR",
        help="Folder with your own incident files: Python code that runs with your rights.",
    ),
]
ContractFile = Annotated[
    Path | None,
    config_option(
        "--contract",
        metavar="FILE",
        help="File with your SLOs, thresholds and labels.  [default: ./diag.toml, if it exists]",
        show_default=False,
    ),
]


class ConfigurationOptions(NamedTuple):
    """Settings of a site: its own incidents, SLOs and thresholds."""

    incidents: UserIncidents = None
    contract: ContractFile = None


class FormatOptions(NamedTuple):
    """Output format of a report."""

    as_json: Json = False
    as_markdown: Annotated[bool, output_option("--markdown", help="Print Markdown, for a ticket.")] = False

    @property
    def form(self) -> Literal["terminal", "json", "markdown"]:
        if self.as_json and self.as_markdown:
            raise BadUsage("--json and --markdown exclude each other: choose one")
        return "json" if self.as_json else "markdown" if self.as_markdown else "terminal"


def observe_options(targets: Sequence[str] | None, *groups: Any, **more: Any) -> "ObserveOptions":
    """Combine targets (None: the server on this host) and option groups into `ObserveOptions`."""
    from diag.commands.observe import ObserveOptions

    given: dict[str, Any] = {}
    for group in groups:
        if isinstance(group, PrometheusOptions):
            given |= {"prometheus": group.prometheus, "scope": group.scope(targets)}
        else:
            given |= group._asdict()
    if more.get("k8s") and (targets or given.get("prometheus") or given.get("log")):
        raise BadUsage("--k8s finds servers and their logs itself: leave out URLs, --prometheus and --log")
    return ObserveOptions([HERE] if targets is None else targets, **given, **more)


class Grouped:
    """A command for typer: each option of a group becomes a separate parameter.

    Only the command that runs is inspected: inspecting all commands takes some milliseconds of each start.
    """

    def __init__(self, command: Callable[..., None]) -> None:
        self._command = command
        self.__name__, self.__doc__ = command.__name__, command.__doc__

    def __call__(self, **given: Any) -> None:
        """Collect the options of each group and run the command."""
        for parameter in inspect.signature(self._command).parameters.values():
            if _is_group(parameter):
                group = parameter.annotation
                given[parameter.name] = group(**{option: given.pop(option) for option in group._fields})
        self._command(**given)

    @property
    def __signature__(self) -> inspect.Signature:
        options: list[inspect.Parameter] = []
        for parameter in inspect.signature(self._command).parameters.values():
            group = inspect.signature(parameter.annotation).parameters.values() if _is_group(parameter) else [parameter]
            options += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in group]
        return inspect.Signature(options)

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]  # of the object, not of its class
        return {option.name: option.annotation for option in self.__signature__.parameters.values()}


def _is_group(parameter: inspect.Parameter) -> bool:
    return hasattr(parameter.annotation, "_fields")
