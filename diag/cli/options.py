"""Options of the commands and their help: words and bounds are in options.toml, the notes below them in help.toml.

Options that several commands share form a record. A command takes a record as one parameter, and `DeclaredCommand`
shows typer each of its options. Fields have the names of `ObserveOptions`, so that a command passes a record on
unchanged.
"""

import inspect
import math
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from diag.core.errors import BadUsage

if TYPE_CHECKING:
    from diag.commands.observe import ObserveOptions
    from diag.sources.prometheus.scope import Scope

HERE = "http://127.0.0.1:8000"
WINDOW = "15m"


@cache
def declared(command: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the options of a command ("shared": of any) by section of --help and name; no other table is parsed."""
    text = Path(__file__).with_name("options.toml").read_text(encoding="utf-8")
    tables = re.findall(rf"(?ms)^\[{command}\..*?(?=^\[|\Z)", text)
    content: Mapping[str, Mapping[str, Any]] = tomllib.loads("".join(tables)).get(command, {})
    return content


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
                options = {name: values.pop(name) for name in record._fields if name in values}
                joined = {name for _, name, row in self._rows().values() if row.get("joined")} & options.keys()
                options |= {name: ",".join(options[name] or ()) for name in joined}
                values[parameter.name] = record(**options)
        self._function(**values)

    def _rows(self) -> dict[str, tuple[str, str, Mapping[str, Any]]]:
        return {
            name: (section, name, row)
            for part in ("shared", self._name)
            for section, options in declared(part).items()
            for name, row in options.items()
        }

    @cached_property
    def __signature__(self) -> inspect.Signature:
        rows = self._rows()
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(self._function).parameters.values():
            if not _is_record(parameter):
                parameters.append(parameter)
                continue
            defaults = {} if parameter.default is parameter.empty else parameter.default._asdict()
            for field in inspect.signature(parameter.annotation).parameters.values():
                if field.name in rows:
                    parameters.append(field.replace(default=defaults.get(field.name, field.default)))
        options = []
        for parameter in parameters:
            section, name, row = rows[parameter.name]
            is_joined = bool(row.get("joined"))  # by commas: it may be given several times
            kind: Any = list[str] | None if is_joined else parameter.annotation
            default = None if is_joined else parameter.default
            settings = {key: value for key, value in row.items() if key not in ("flags", "completes", "joined")}
            if row.get("completes"):
                settings["autocompletion"] = _complete_id
            if section == "Arguments":
                option = typer.Argument(**settings)
            else:
                if row.get("metavar") == "SECONDS" or isinstance(row.get("min"), float):
                    settings["callback"] = _reject_nan
                flags = row.get("flags", [f"--{name.replace('_', '-')}"])
                option = typer.Option(*flags, rich_help_panel=section, **settings)
            annotation = Annotated[kind, option]
            options.append(parameter.replace(kind=parameter.KEYWORD_ONLY, default=default, annotation=annotation))
        return inspect.Signature(options)

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]  # of the object, not of its class
        return {option.name: option.annotation for option in self.__signature__.parameters.values()}


def _is_record(parameter: inspect.Parameter) -> bool:
    return hasattr(parameter.annotation, "_fields")


def _reject_nan(value: float | None) -> float | None:
    """Raise BadParameter for nan, which passes typer's range check."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number")
    return value


def _complete_id(start: str) -> list[str]:
    """Return the ids of incidents, lint rules and checks that begin with this text, for the completion of a shell."""
    from diag.knowledge.catalog import load
    from diag.lint.rules import RULES
    from diag.preflight.checks import CHECKS

    names = (*(incident.id for incident in load(None)), *RULES, *CHECKS)
    return [name for name in names if name.startswith(start)]


# -- help --------------------------------------------------------------------------------------------------------------


class CommandHelp(TyperCommand):
    """Plain help, which needs no rich: options in their named groups, and the notes below them line by line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an option with one value that is given twice: click takes the last one without a word."""
        given = Counter(self.make_parser(ctx).parse_args(list(args))[2])
        for option, times in given.items():
            has_value = option.param_type_name == "option" and not getattr(option, "is_flag", False)
            if times > 1 and has_value and not getattr(option, "multiple", False):
                raise BadUsage(f"{option.opts[0]} is given {times} times but takes one value")
        return list(super().parse_args(ctx, args))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Show a required argument without braces."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group, in the order of the command's parameters."""
        groups: dict[str, list[Any]] = defaultdict(list)
        for parameter in self.get_params(ctx):
            group = "Arguments" if parameter.param_type_name == "argument" else "Help"
            groups[getattr(parameter, "rich_help_panel", None) or group].append(parameter.get_help_record(ctx))
        _write(groups, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write exit statuses, environment and examples: lines that must not be filled."""
        formatter.write(notes()[str(self.name)].text())


def missing_argument(error: Exception, context: Any) -> str:
    """Return what a command that lacks an argument can take, with two examples; "" for any other refusal."""
    parameter: Any = getattr(error, "param", None)
    if not hasattr(error, "param_type") or getattr(parameter, "param_type_name", "") != "argument":
        return ""
    name, meaning = parameter.get_help_record(context)
    meaning = meaning.replace("  [required]", "")
    lines = [f"diag: Missing argument '{name}': {meaning}", *notes()[context.info_name].examples[:2]]
    return "\n  ".join(lines) + f"\n(see {context.command_path} --help)"


def examples() -> str:
    """Return what `diag doctor` can be given."""
    return FIRST_STEPS.partition("  diag top")[0].rstrip() + "\n(see diag doctor --help)"


class AppHelp(TyperGroup):
    """Plain help: the commands by purpose, each with its whole first sentence; then diag's own options; examples."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write examples: lines that must not be filled."""
        formatter.write(FIRST_STEPS)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group of commands, in the order of the commands."""
        groups: dict[str, list[Any]] = defaultdict(list)
        for name, command in self.commands.items():
            summary = (command.help or "").partition("\n\n")[0].replace("\n", " ")
            groups[getattr(command, "rich_help_panel", None) or "Commands"].append((name, summary))
        groups["Options"] = [parameter.get_help_record(ctx) for parameter in self.get_params(ctx)]
        _write(groups, formatter)


def _write(groups: Mapping[str, Iterable[Any]], formatter: Any) -> None:
    for title, records in groups.items():
        with formatter.section(title):
            formatter.write_dl([record for record in records if record])


UNREACHABLE = {"69": "unreachable: no metrics page, no log, no process"}
EVERY_COMMAND = {"64": "invalid usage or configuration", "70": "internal error: a defect of diag"}
CREDENTIALS = {
    "DIAG_BEARER_TOKEN[_FILE]": "bearer token, or file with the token",
    "DIAG_BASIC_AUTH[_FILE]": "user:password, or file with user:password",
    "DIAG_HEADERS_FILE": "file with HTTP headers, one 'Name: value' per line",
    "DIAG_CA_FILE": "CA certificates to trust instead of the system's",
    "DIAG_CLIENT_CERT": "client certificate for mutual TLS",
    "DIAG_CLIENT_KEY": "private key of DIAG_CLIENT_CERT, if in another file",
}


class Notes(NamedTuple):
    """The notes of a command: its exit statuses, the variables that it reads, and examples.

    With `unreachable` it also exits with the status of a target that cannot be reached, with `credentials` it reads the
    variables of `CREDENTIALS` too.
    """

    exits: Mapping[str, str]
    examples: tuple[str, ...]
    unreachable: bool = False
    credentials: bool = False
    environment: Mapping[str, str] = {}

    def text(self) -> str:
        statuses = {**self.exits, **(UNREACHABLE if self.unreachable else {}), **EVERY_COMMAND}
        sections = {
            "Exit status": _table(dict(sorted(statuses.items()))),
            "Environment": _table({**(CREDENTIALS if self.credentials else {}), **self.environment}),
            "Examples": self.examples,
        }
        return "".join(
            f"\n{title}:\n" + "".join(f"  {line}\n" for line in lines) for title, lines in sections.items() if lines
        )


def _table(rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [f"{name:<{width}}  {meaning}" for name, meaning in rows.items()]


@cache
def notes() -> Mapping[str, Notes]:
    """Return the notes by the names of the commands."""
    from diag.core.declarations import PACKAGE, read

    return read(PACKAGE / "cli" / "help.toml", dict[str, Notes])


FIRST_STEPS = """
Examples:
  diag doctor http://127.0.0.1:8000        what is wrong, and what to change
  diag doctor server.log                   if a log is all that is left
  diag top --prometheus http://prom:9090   all servers, worst first
  diag preflight 'vllm serve MODEL'        before a launch: go, or no go and why
"""


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
