"""Options of the commands: their words and bounds in options.toml, and records of those that several commands share.

A command takes a record as one parameter, and `DeclaredCommand` shows typer each of its options. Fields have the names
of `ObserveOptions`, so that a command passes a record on unchanged.
"""

import inspect
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from diag.core.errors import BadUsage

if TYPE_CHECKING:
    from diag.commands.observe import ObserveOptions
    from diag.sources.prometheus.scope import Scope

HERE = "http://127.0.0.1:8000"
WINDOW = "15m"


@cache
def declared() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Return the options by command ("shared" for those of any), section of --help, and name of the parameter."""
    return tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))


class DeclaredCommand:
    """A command for typer: its parameters, and each option of a record of them, as options.toml declares them.

    Only the command that runs is inspected: inspecting all commands takes some milliseconds of each start.
    """

    def __init__(self, function: Callable[..., None], name: str) -> None:
        self._function = function
        self._name = name
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __call__(self, **values: Any) -> None:
        """Collect the options of each record and run the command."""
        for parameter in inspect.signature(self._function).parameters.values():
            if _is_record(parameter):
                record = parameter.annotation
                given = {name: values.pop(name) for name in record._fields if name in values}
                values[parameter.name] = record(**given)
        self._function(**values)

    @property
    def __signature__(self) -> inspect.Signature:
        rows = {
            name: (section, name, row)
            for part in ("shared", self._name)
            for section, options in declared().get(part, {}).items()
            for name, row in options.items()
        }
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(self._function).parameters.values():
            if not _is_record(parameter):
                parameters.append(parameter)
                continue
            defaults = {} if parameter.default is parameter.empty else parameter.default._asdict()
            for field in inspect.signature(parameter.annotation).parameters.values():
                if field.name in rows:
                    parameters.append(field.replace(default=defaults.get(field.name, field.default)))
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Signature(
            [
                parameter.replace(
                    kind=kind, annotation=Annotated[parameter.annotation, _for_typer(*rows[parameter.name])]
                )
                for parameter in parameters
            ]
        )

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]  # of the object, not of its class
        return {option.name: option.annotation for option in self.__signature__.parameters.values()}


def _is_record(parameter: inspect.Parameter) -> bool:
    return hasattr(parameter.annotation, "_fields")


def _for_typer(section: str, name: str, row: Mapping[str, Any]) -> Any:
    """Return an option, or an argument, as typer takes it."""
    settings = {key: value for key, value in row.items() if key not in ("flags", "completes")}
    if row.get("completes"):
        settings["autocompletion"] = _complete_id
    if section == "Arguments":
        return typer.Argument(**settings)
    if row.get("metavar") == "SECONDS":
        settings["callback"] = _reject_nan
    flags = row.get("flags", [f"--{name.replace('_', '-')}"])
    return typer.Option(*flags, rich_help_panel=section, **settings)


def _reject_nan(value: float | None) -> float | None:
    """Raise BadParameter for nan, which passes typer's range check."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number of seconds")
    return value


def _complete_id(start: str) -> list[str]:
    """Return the ids of incidents, lint rules and checks that begin with this text, for the completion of a shell."""
    from diag.knowledge.catalog import load
    from diag.lint.rules import RULES
    from diag.preflight.checks import CHECKS

    names = (*(incident.id for incident in load(None)), *RULES, *CHECKS)
    return [name for name in names if name.startswith(start)]


# -- records of options ------------------------------------------------------------------------------------------------


class ScrapeOptions(NamedTuple):
    """Scraping of live servers, in seconds."""

    every: float = 2.0
    duration: float = 30.0
    timeout: float | None = None


RECORDING = ScrapeOptions(duration=60.0)
"""Twice as long as a diagnosis."""
LEARNING = ScrapeOptions(duration=300.0)
"""Long enough for several loads."""


class PrometheusOptions(NamedTuple):
    """A Prometheus, a selection of its servers, and a time range."""

    prometheus: str = ""
    at: str = ""
    window: str = WINDOW
    since: str = ""
    until: str = ""
    instance: list[str] | None = None
    model: list[str] | None = None
    job: list[str] | None = None
    match: list[str] | None = None

    def scope(self, targets: Sequence[str] | None) -> "Scope":
        """Return the selected servers and time range; raise BadUsage for options that need a Prometheus without one."""
        from diag.sources.prometheus.scope import Scope, TimeSpan

        if self.prometheus and targets:
            raise BadUsage("with --prometheus, select servers by --instance, --model, --job or --match, not by URL")
        times = {"--at": self.at, "--window": self.window != WINDOW, "--from": self.since, "--to": self.until}
        servers = {"--instance": self.instance, "--model": self.model, "--job": self.job, "--match": self.match}
        unused = [option for option, value in {**times, **servers}.items() if value]
        if unused and not self.prometheus:
            raise BadUsage(f"{', '.join(unused)} needs --prometheus URL: only a Prometheus has other times and servers")
        span = TimeSpan(self.at, self.window, self.since, self.until)
        return Scope(span, self.instance or (), self.model or (), self.job or (), self.match or ())


class EvidenceOptions(NamedTuple):
    """Evidence about a server besides its metrics."""

    log: str = ""
    log_timezone: str = ""
    launch: str = ""
    nccl_ras: str = ""


class ConfigurationOptions(NamedTuple):
    """Settings of a site: its own incidents, SLOs and thresholds."""

    incidents: Path | None = None
    contract: Path | None = None


class FormatOptions(NamedTuple):
    """Output format of a report."""

    as_json: bool = False
    as_markdown: bool = False

    @property
    def form(self) -> Literal["terminal", "json", "markdown"]:
        if self.as_json and self.as_markdown:
            raise BadUsage("--json and --markdown exclude each other: choose one")
        return "json" if self.as_json else "markdown" if self.as_markdown else "terminal"


def observe_options(targets: Sequence[str] | None, *records: Any, **more: Any) -> "ObserveOptions":
    """Combine targets (None: the server on this host) and records of options into `ObserveOptions`."""
    from diag.commands.observe import ObserveOptions

    options: dict[str, Any] = {}
    for record in records:
        if isinstance(record, PrometheusOptions):
            options |= {"prometheus": record.prometheus, "scope": record.scope(targets)}
        else:
            options |= record._asdict()
    if more.get("k8s") and (targets or options.get("prometheus") or options.get("log")):
        raise BadUsage("--k8s finds servers and their logs itself: leave out URLs, --prometheus and --log")
    return ObserveOptions([HERE] if targets is None else targets, **options, **more)
