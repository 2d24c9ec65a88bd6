"""The help of the commands: its layout, and the notes below the options: exit statuses, environment, examples."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

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
        formatter.write(self.epilog or "")


class AppHelp(TyperGroup):
    """Plain help: the commands by purpose, each with its whole first sentence; then diag's own options; examples."""

    format_epilog = CommandHelp.format_epilog

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


CREDENTIALS = {
    "DIAG_BEARER_TOKEN[_FILE]": "bearer token, or file with the token",
    "DIAG_BASIC_AUTH[_FILE]": "user:password, or file with user:password",
    "DIAG_HEADERS_FILE": "file with HTTP headers, one 'Name: value' per line",
    "DIAG_CA_FILE": "CA certificates to trust instead of the system's",
    "DIAG_CLIENT_CERT": "client certificate for mutual TLS",
    "DIAG_CLIENT_KEY": "private key of DIAG_CLIENT_CERT, if in another file",
}


def notes(*examples: str, exits: Mapping[int, str], environment: Mapping[str, str] | None = None) -> str:
    """Format the sections below the options of a command's help."""
    statuses = {**exits, 64: "invalid usage or configuration", 70: "internal error: a defect of diag"}
    sections = {
        "Exit status": _table({f"{status}": meaning for status, meaning in sorted(statuses.items())}),
        "Environment": _table(environment or {}),
        "Examples": [*examples],
    }
    return "".join(
        f"\n{title}:\n" + "".join(f"  {line}\n" for line in lines) for title, lines in sections.items() if lines
    )


def _table(rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [f"{name:<{width}}  {meaning}" for name, meaning in rows.items()]


FIRST_STEPS = """
Examples:
  diag doctor http://127.0.0.1:8000        what is wrong, and what to change
  diag doctor server.log                   if a log is all that is left
  diag top --prometheus http://prom:9090   all servers, worst first
  diag preflight 'vllm serve MODEL'        before a launch: go, or no go and why
"""
UNREACHABLE = {69: "unreachable: no metrics page, no log, no process"}
NOTES = {
    "doctor": notes(
        "diag doctor http://127.0.0.1:8000 --log /var/log/vllm.log",
        "diag doctor --prometheus http://prom:9090 --at 2026-11-20T03:30 --window 2h",
        exits={
            0: "healthy, or no incident found",
            1: "warning",
            2: "critical",
            3: "cannot tell: telemetry is missing",
            **UNREACHABLE,
        },
        environment={
            **CREDENTIALS,
            "DIAG_ALERTMANAGER_...": "credentials for --alertmanager; it gets no others",
        },
    ),
    "top": notes(
        "diag top http://127.0.0.1:8000 http://127.0.0.1:8001",
        "diag top --prometheus http://prom:9090 --model 'qwen.*'",
        exits={0: "quit", **UNREACHABLE},
        environment=CREDENTIALS,
    ),
    "verify": notes(
        "diag verify recordings/before http://127.0.0.1:8000",
        "diag verify recordings/before recordings/after --markdown",
        exits={0: "fixed", 1: "better, or no effect", 2: "worse", 3: "not comparable", **UNREACHABLE},
        environment=CREDENTIALS,
    ),
    "bundle": notes(
        "diag bundle http://127.0.0.1:8000 --log /var/log/vllm.log -o sick.tar.zst",
        "diag bundle --k8s inference/app=vllm -o sick.tar.zst --issue",
        exits={0: "written", **UNREACHABLE},
        environment=CREDENTIALS,
    ),
    "baseline": notes(
        "diag baseline save http://127.0.0.1:8000 --file normal.json",
        "diag baseline compare january.json november.json",
        exits={0: "saved, or no speed got worse", 1: "compare: a speed got worse", **UNREACHABLE},
        environment=CREDENTIALS,
    ),
    "ramp": notes(
        "diag ramp http://127.0.0.1:8000 --vllm-python ~/vllm/bin/python",
        "diag ramp november.json --against august.json",
        exits={
            0: "a ceiling was found, or printed",
            1: "worse than the result of --against",
            2: "even the first step misses the SLO",
            3: "cannot tell: not enough data",
            **UNREACHABLE,
        },
        environment=CREDENTIALS,
    ),
    "config": notes(
        "diag config http://127.0.0.1:8000",
        "diag config recordings/monday --json",
        exits={0: "printed", **UNREACHABLE},
        environment=CREDENTIALS,
    ),
    "export": notes(
        "diag export recordings/monday --csv monday.csv",
        "diag export --prometheus http://prom:9090 --from -2d --to -1d --csv day.csv",
        exits={0: "written", **UNREACHABLE},
        environment=CREDENTIALS,
    ),
    "record": notes(
        "diag record http://127.0.0.1:8000 recordings/before",
        "diag record http://127.0.0.1:8000 monday --for 600 --log vllm.log",
        exits={0: "recorded", **UNREACHABLE},
        environment=CREDENTIALS,
    ),
    "replay": notes(
        "diag replay tests/recordings/kv_cascade",
        "diag replay monday --listen 0.0.0.0:8000 --log vllm.log --at-end hold",
        exits={0: "end of the recording"},
    ),
    "exporter": notes(
        "diag exporter --vllm http://127.0.0.1:8000 --log /var/log/vllm.log",
        "diag exporter --listen 0.0.0.0:9400 --gpus 0,1 --probe 60",
        exits={0: "stopped by SIGTERM"},
        environment=CREDENTIALS,
    ),
    "explain": notes("diag explain kv_eviction_cascade", "diag explain removed_flag", exits={0: "printed"}),
    "generate": notes(
        "diag generate ./monitoring --contract diag.toml",
        "diag generate --check",
        exits={0: "written; with --check: up to date", 1: "with --check: a file differs"},
    ),
    "budget": notes(
        "diag budget 'vllm serve Qwen/Qwen3-8B --max-model-len 32768' --gpu l40s",
        "diag budget Qwen/Qwen3-8B --all-gpus --context 32k --concurrency 50",
        exits={
            0: "the model fits; with several GPUs: on at least one",
            2: "the model does not fit",
            3: "cannot tell: the model or the GPU is unknown",
        },
    ),
    "lint": notes(
        "diag lint 'vllm serve Qwen/Qwen3-8B --num-gpu-blocks-override 128'",
        "diag lint deploy/vllm.yaml --vllm-version 0.32.0 --ignore eager",
        exits={0: "no warning or error", 1: "warnings", 2: "errors"},
    ),
    "preflight": notes(
        "diag preflight 'vllm serve Qwen/Qwen3-8B' --prometheus http://prom:9090",
        "diag preflight deploy/vllm.yaml --ramp ramp.json --markdown",
        exits={
            0: "go",
            1: "go, with warnings",
            2: "no go",
            3: "cannot tell: nothing decisive could be checked",
            **UNREACHABLE,
        },
        environment={**CREDENTIALS, "DIAG_ALERTMANAGER_...": "credentials for --alertmanager; it gets no others"},
    ),
    "mcp": notes(
        "diag mcp http://127.0.0.1:8000 --log /var/log/vllm.log",
        "diag mcp --recordings ./recordings --prometheus http://prom:9090",
        exits={0: "end of standard input"},
        environment=CREDENTIALS,
    ),
    "incidents": notes("diag incidents", "diag incidents --incidents ./incidents", exits={0: "printed"}),
}
