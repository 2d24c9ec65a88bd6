"""The commands: they read options, call one function and print. No logic here; errors are caught here only."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import TyperException

from diag import __version__
from diag.core.errors import BadUsage, DiagError

if TYPE_CHECKING:
    from diag.sources.prometheus.scope import Scope

USAGE = 64
INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="What is wrong with a vLLM server, why, what it is not, and which flag to change to which value. Read-only.",
)


class FailOn(StrEnum):
    """From which verdict on the exit status is not 0."""

    warning = "warning"
    critical = "critical"
    never = "never"


class Until(StrEnum):
    """When a watch ends by itself."""

    resolved = "resolved"


HERE = "http://127.0.0.1:8000"
WINDOW = "15m"
Targets = Annotated[
    list[str] | None,
    typer.Argument(
        help="URLs of servers (their /metrics is found) or one recording: a folder that `diag record` made."
        f" Without any: {HERE}.",
        show_default=False,
    ),
]
Log = Annotated[str, typer.Option("--log", help="The server's log: a file, or - for standard input.")]
LogTimezone = Annotated[
    str,
    typer.Option("--log-timezone", help="The time zone of the log's lines, UTC for one; otherwise this host's own."),
]
Every = Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two scrapes.")]
For = Annotated[
    float, typer.Option("--for", min=0.0, help="Seconds to watch a live server; longer when it seems stuck.")
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0.1,
        help="Seconds until a scrape (5) or a query of a Prometheus (30) counts as failed.",
        show_default=False,
    ),
]
Prometheus = Annotated[
    str, typer.Option("--prometheus", help="Ask this Prometheus (Thanos, Mimir, VictoriaMetrics) instead of servers.")
]
At = Annotated[str, typer.Option("--at", help="With --prometheus: the time to judge, 2026-11-20T03:12Z, -2h; now.")]
Window = Annotated[str, typer.Option("--window", help="With --prometheus: how far to look back, 15m, 24h.")]
From = Annotated[str, typer.Option("--from", help="With --prometheus: the beginning of a span to look for incidents.")]
To = Annotated[str, typer.Option("--to", help="With --prometheus: its end; now.")]
Instance = Annotated[
    list[str] | None, typer.Option("--instance", help="With --prometheus: only these, a regular expression.")
]
Model = Annotated[
    list[str] | None, typer.Option("--model", help="With --prometheus: only servers of these models, likewise.")
]
Job = Annotated[
    list[str] | None, typer.Option("--job", help="With --prometheus: only targets of these jobs, likewise.")
]
Match = Annotated[
    list[str] | None, typer.Option("--match", help='With --prometheus: only series with this, cluster="eu".')
]
Launch = Annotated[str, typer.Option("--launch", help="The command that started the server, where nothing else tells.")]
Incidents = Annotated[
    Path | None,
    typer.Option("--incidents", help="A folder of incident files of your own. They are Python and run as you."),
]
ContractFile = Annotated[
    Path | None, typer.Option("--contract", help="The measurement contract; ./diag.toml where there is one.")
]


def _scope(
    prometheus: str,
    targets: list[str] | None,
    at: str,
    window: str,
    since: str,
    until: str,
    instance: list[str] | None,
    model: list[str] | None,
    job: list[str] | None,
    match: list[str] | None,
) -> "Scope":
    """Which servers and which time a Prometheus is asked about; none of it makes sense without one."""
    from diag.sources.prometheus.scope import Scope, TimeSpan

    if prometheus and targets:
        raise BadUsage("with --prometheus, servers are named by --instance, --model or --job")
    named = {"--at": at, "--window": window != WINDOW, "--from": since, "--to": until}
    given = {**named, "--instance": instance, "--model": model, "--job": job, "--match": match}
    lost = [option for option, value in given.items() if value]
    if lost and not prometheus:
        raise BadUsage(f"{', '.join(lost)}: only a Prometheus can be asked that; name it with --prometheus")
    return Scope(TimeSpan(at, window, since, until), instance or (), model or (), job or (), match or ())


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"diag {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Options of every command."""


@app.command()
def doctor(
    targets: Targets = None,
    every: Every = 2.0,
    watch: For = 30.0,
    timeout: Timeout = None,
    prometheus: Prometheus = "",
    at: At = "",
    window: Window = WINDOW,
    since: From = "",
    until: To = "",
    instance: Instance = None,
    model: Model = None,
    job: Job = None,
    match: Match = None,
    log: Log = "",
    log_timezone: LogTimezone = "",
    launch: Launch = "",
    incidents: Incidents = None,
    contract: ContractFile = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Send one request of one token too: the only load diag ever makes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print schema diag.doctor/1.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown for a ticket.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page with plots of the evidence too, for a post-mortem.")
    ] = None,
    keep_watching: Annotated[
        bool, typer.Option("--watch", help="Look again and again; print what begins and what ends.")
    ] = False,
    until_what: Annotated[
        Until | None, typer.Option("--until", help="With --watch: end once nothing is wrong any more.")
    ] = None,
    fail_on: Annotated[
        FailOn, typer.Option("--fail-on", help="From which verdict on to exit above 0.")
    ] = FailOn.warning,
) -> None:
    """Judge live servers, those that a Prometheus knows, or a recording: what is wrong, why, and what to change.

    On a server's own host its GPUs and processes are looked at too.

    Exit status: 0 healthy, 1 warning, 2 critical, 3 cannot tell, 64 usage, 69 unreachable.
    Credentials come from the environment only: DIAG_BEARER_TOKEN[_FILE], DIAG_BASIC_AUTH[_FILE], DIAG_HEADERS_FILE,
    DIAG_CA_FILE, DIAG_CLIENT_CERT, DIAG_CLIENT_KEY.
    """
    from diag.commands import doctor as work
    from diag.commands.observe import ObserveOptions

    if as_json and as_markdown:
        raise BadUsage("--json and --markdown are two formats: choose one")
    if keep_watching and (as_json or as_markdown):
        raise BadUsage("--watch prints lines as things change: it has neither --json nor --markdown")
    if keep_watching and (at or until):
        raise BadUsage("--watch looks at what goes on now: it has neither --at nor --to")
    if until_what and not keep_watching:
        raise BadUsage("--until says when a --watch ends: give both")
    scope = _scope(prometheus, targets, at, window, since, until, instance, model, job, match)
    settings = ObserveOptions(
        targets or [HERE],
        every,
        watch,
        timeout or 0,
        launch,
        incidents,
        contract,
        probe,
        log,
        log_timezone,
        prometheus,
        scope,
    )
    if keep_watching:  # which ends by itself only where nothing is wrong any more
        from diag.commands import watch as watching

        report, status = watching.watch(settings, until_what is Until.resolved), 0
    else:
        report = work.run(settings)
        work.print_report(report, "json" if as_json else "markdown" if as_markdown else "terminal")
        status = work.exit_code(report, fail_on.value)
    if html:
        work.write_html(report, html)
    raise typer.Exit(status)


@app.command()
def verify(
    before: Annotated[str, typer.Argument(help="What was before the change: a recording, or the URL of a server.")],
    after: Annotated[
        str,
        typer.Argument(
            help="What is after it: a recording, or the URL of a server; the servers of BEFORE as they are now.",
            show_default=False,
        ),
    ] = "",
    every: Every = 2.0,
    watch: For = 30.0,
    timeout: Timeout = None,
    log: Log = "",
    log_timezone: LogTimezone = "",
    launch: Launch = "",
    incidents: Incidents = None,
    contract: ContractFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print schema diag.verify/1.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown for a ticket.")] = False,
) -> None:
    """Say whether a change cured an incident: what was changed, what became of it, and what it costs users.

    --log and --launch are about the server after the change.

    Exit status: 0 cured, 1 better or no effect, 2 worse, 3 not comparable, 64 usage, 69 unreachable.
    """
    from diag.commands import verify as verifying
    from diag.commands.observe import ObserveOptions

    if as_json and as_markdown:
        raise BadUsage("--json and --markdown are two formats: choose one")
    settings = ObserveOptions(
        [after] if after else [],
        every,
        watch,
        timeout or 0,
        launch,
        incidents,
        contract,
        log=log,
        log_timezone=log_timezone,
    )
    found = verifying.verify(before, settings)
    raise typer.Exit(verifying.tell(found, "json" if as_json else "markdown" if as_markdown else "terminal"))


@app.command()
def config(
    targets: Targets = None,
    log: Log = "",
    log_timezone: LogTimezone = "",
    launch: Launch = "",
    timeout: Timeout = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print schema diag.config/1.")] = False,
) -> None:
    """Show what servers run with, and where each value is known from; what nobody set has its release's default.

    In this order of trust: /server_info (VLLM_SERVER_DEV_MODE=1), the process on this host, the log, the page
    (cache_config_info), /v1/models, --launch, the release's defaults. What vLLM settles itself, whatever it was asked
    for, is taken from the page and the log before any command.

    Exit status: 0 shown, 64 usage, 69 unreachable.
    """
    from diag.commands.config import run
    from diag.commands.observe import ObserveOptions

    settings = ObserveOptions(
        targets or [HERE], timeout=timeout or 0, launch=launch, log=log, log_timezone=log_timezone
    )
    typer.echo(run(settings, as_json), nl=False)


@app.command()
def export(
    targets: Targets = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="The file to write; standard output without.", show_default=False)
    ] = None,
    prometheus: Prometheus = "",
    at: At = "",
    window: Window = WINDOW,
    since: From = "",
    until: To = "",
    instance: Instance = None,
    model: Model = None,
    job: Job = None,
    match: Match = None,
    every: Every = 2.0,
    watch: For = 30.0,
    timeout: Timeout = None,
    incidents: Incidents = None,
    contract: ContractFile = None,
) -> None:
    """Write the signals of a span as CSV: time, instance, engine, gpu, signal, unit, window, value."""
    from diag.commands.export import run
    from diag.commands.observe import ObserveOptions

    scope = _scope(prometheus, targets, at, window, since, until, instance, model, job, match)
    settings = ObserveOptions(
        targets or [HERE], every, watch, timeout or 0, "", incidents, contract, prometheus=prometheus, scope=scope
    )
    told = run(settings, csv)
    if csv:
        typer.echo(told)


@app.command()
def record(
    target: Annotated[list[str], typer.Argument(help="URLs of servers.")],
    folder: Annotated[Path, typer.Argument(help="The folder to make; it must not hold anything yet.")],
    every: Every = 2.0,
    watch: For = 60.0,
    timeout: Timeout = None,
    log: Log = "",
    log_timezone: LogTimezone = "",
    launch: Launch = "",
) -> None:
    """Record live servers into a folder that anybody can judge later; secrets are left out."""
    from diag.commands.observe import ObserveOptions
    from diag.commands.record import run

    settings = ObserveOptions(target, every, watch, timeout or 0, launch, log=log, log_timezone=log_timezone)
    typer.echo(run(settings, folder))


@app.command()
def exporter(
    vllm: Annotated[str, typer.Option("--vllm", help="The server on this host.")] = HERE,
    log: Log = "",
    log_timezone: LogTimezone = "",
    listen: Annotated[str, typer.Option("--listen", help="Where to serve the page.")] = "127.0.0.1:9400",
    gpus: Annotated[
        str, typer.Option("--gpus", help="Indices or UUIDs, 0,1 for one; those that the server runs on.")
    ] = "",
    probe: Annotated[
        float, typer.Option("--probe", min=0.0, help="Send a request of one token every so many seconds; 0: never.")
    ] = 0.0,
    launch: Launch = "",
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that a part of a page may take.")] = 8.0,
    tls_cert: Annotated[str, typer.Option("--tls-cert", help="Serve HTTPS with this certificate (PEM).")] = "",
    tls_key: Annotated[str, typer.Option("--tls-key", help="Its key, where it is a file of its own.")] = "",
    tls_client_ca: Annotated[
        str, typer.Option("--tls-client-ca", help="Only answer clients with a certificate of this authority.")
    ] = "",
) -> None:
    """Serve vLLM's page with its GPUs, log and processes on it: for Prometheus to scrape instead of vLLM."""
    from diag.commands.exporter import ExporterOptions, run

    run(
        ExporterOptions(
            vllm, listen, log, log_timezone, gpus, launch, timeout, probe, (tls_cert, tls_key, tls_client_ca)
        )
    )


@app.command()
def explain(
    incident: Annotated[str, typer.Argument(help="The id of an incident, as `diag incidents` lists it.")],
    incidents: Incidents = None,
) -> None:
    """Explain one incident: its cause, what it is recognised by and why, what looks like it, what cures it."""
    from diag.commands.explain import run

    typer.echo(run(incident, incidents), nl=False)


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="Where alerts/, dashboards/ and runbooks/ are.")] = Path(),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 where a file differs from the declarations.")
    ] = False,
    incidents: Incidents = None,
    contract: ContractFile = None,
) -> None:
    """Write Prometheus alerts, Grafana dashboards and runbooks from the incidents and diag.toml."""
    from diag.commands.generate import run

    text, status = run(folder, check, incidents, contract)
    typer.echo(text)
    raise typer.Exit(status)


@app.command()
def budget(
    target: Annotated[str, typer.Argument(help="The command, 'vllm serve MODEL --flag value'; or a model's folder.")],
    gpu: Annotated[str, typer.Option("--gpu", help="h100, a100-80, l40s ...; cpu; otherwise this host's own.")] = "",
    gpu_memory: Annotated[str, typer.Option("--gpu-memory", help="Of one GPU as CUDA counts it, 79.1GiB.")] = "",
    log: Log = "",
    version: Annotated[str, typer.Option("--version", help="The release, 0.32.0; otherwise the log's.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print schema diag.budget/1.")] = False,
) -> None:
    """Reckon a server's GPU memory, also before there is one: weights, KV cache, the context that is safe.

    Nothing is started or downloaded. Exit status: 0 it fits, 2 it does not, 3 cannot tell, 64 usage.
    """
    from diag.commands.budget import BudgetOptions, run

    text, status = run(BudgetOptions(target, gpu, gpu_memory, log, version), as_json)
    typer.echo(text, nl=False)
    raise typer.Exit(status)


@app.command()
def lint(
    command: Annotated[
        str,
        typer.Argument(
            help="The command, 'vllm serve MODEL --flag value'; or a file with it: a script, a --config, a manifest."
        ),
    ],
    vllm_version: Annotated[
        str,
        typer.Option(
            "--vllm-version", help="The vLLM release, such as 0.32.0; default: the image's, the installed, the newest."
        ),
    ] = "",
    python: Annotated[
        str, typer.Option("--vllm-python", help="The Python of another environment: its vLLM's parser is asked too.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print schema diag.lint/1.")] = False,
) -> None:
    """Check a launch command before it is rolled out: flags that are gone, do nothing, contradict or hurt.

    Nothing is started. Exit status: 0 nothing above info, 1 warnings, 2 errors, 64 usage.
    """
    from diag.commands.lint import run

    text, status = run(command, vllm_version, python, as_json)
    typer.echo(text, nl=False)
    raise typer.Exit(status)


@app.command("incidents")
def list_incidents(incidents: Incidents = None) -> None:
    """List the incidents that are looked for."""
    from diag.commands.incidents import run

    typer.echo(run(incidents), nl=False)


def main() -> None:
    """Run a command; every error becomes one sentence and its exit status."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy starts a thread for each core; nothing here multiplies
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
    except TyperException as error:
        typer.echo(f"diag: {error.format_message()} (see diag --help)", err=True)
        status = USAGE
    except DiagError as error:
        typer.echo(f"diag: {error}", err=True)
        status = error.exit_code
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
