"""The help of the commands: its layout, and the notes below the options: exit statuses, environment, examples."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from typer.core import TyperCommand, TyperGroup


class CommandHelp(TyperCommand):
    """Plain help, which needs no rich: options in their named groups, and the notes below them line by line."""

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
