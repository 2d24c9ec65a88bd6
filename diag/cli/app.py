"""The commands: each reads its options, makes one call and prints. Errors are caught here, and nowhere else."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from copy import copy
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from diag import __version__
from diag.cli.help import NOTES, HelpOfAll, HelpOfCommand
from diag.cli.options import (
    HERE,
    LONGEST_PAUSE,
    LONGEST_WAIT,
    LONGEST_WATCH,
    BaselineScrapeOptions,
    ConfigurationOptions,
    ContractFile,
    EvidenceOptions,
    FormatOptions,
    Grouped,
    Json,
    PrometheusOptions,
    RecordOptions,
    ScrapeOptions,
    Targets,
    Timeout,
    TopScrapeOptions,
    UserIncidents,
    allow_option,
    config_option,
    evidence_option,
    kubernetes_option,
    load_option,
    observe_options,
    output_option,
    scrape_option,
    seconds_option,
    serve_option,
    sizing_option,
    vllm_option,
)
from diag.core.errors import BadUsage, DiagError, internal_error

USAGE = 64
INTERNAL = 70
INTERRUPTED = 130
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

app = typer.Typer(
    cls=HelpOfAll,
    invoke_without_command=True,
    rich_markup_mode=None,  # plain help: half the time and memory, and room for whole sentences
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 100},
    help="Diagnose vLLM servers: what is wrong and why, what was ruled out, and which flag to change to which value."
    " diag only reads; it never changes a server.",
)


class FailOn(StrEnum):
    """The mildest verdict that makes the exit status other than 0."""

    warning = "warning"
    critical = "critical"
    never = "never"


class LogLevel(StrEnum):
    """The mildest messages that are printed on standard error."""

    debug = "debug"
    warning = "warning"


class BaselineAction(StrEnum):
    """What is done with a baseline; `diag doctor --baseline` reads it."""

    save = "save"


class AtEnd(StrEnum):
    """What `diag replay` does after the last scrape."""

    again = "again"
    hold = "hold"
    exit = "exit"


class Until(StrEnum):
    """When a watch ends by itself."""

    resolved = "resolved"


def command(panel: str, name: str = "") -> Callable[[Callable[..., None]], object]:
    """Register a command, which `diag --help` lists under this heading."""

    def register(function: Callable[..., None]) -> object:
        known_as = name or function.__name__
        decorate = app.command(known_as, cls=HelpOfCommand, rich_help_panel=panel, epilog=NOTES[known_as])
        return decorate(Grouped(function))

    return register


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"diag {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print diag's version and exit.")
    ] = False,
) -> None:
    """Options of diag itself; without a command, what there is."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@command("Diagnose")
def doctor(
    targets: Targets = None,
    *,
    prometheus: PrometheusOptions,
    k8s: Annotated[
        str,
        kubernetes_option(
            "--k8s",
            metavar="[CONTEXT/]NAMESPACE[/SELECTOR]",
            help="Find vLLM's pods, as in prod-eu/inference/app=vllm, and read their pages, logs and status through the"
            " API server.",
        ),
    ] = "",
    scrape: ScrapeOptions,
    probe: Annotated[
        bool, scrape_option("--probe", help="Also send one request for one token: a load that diag causes only then.")
    ] = False,
    evidence: EvidenceOptions,
    baseline: Annotated[
        Path | None,
        evidence_option(
            "--baseline",
            metavar="FILE",
            help="What is normal here, by diag baseline save.  [default: [baseline] file of diag.toml]",
            show_default=False,
        ),
    ] = None,
    output: FormatOptions,
    html: Annotated[
        Path | None,
        output_option("--html", metavar="FILE", help="Also write an HTML report with plots, for a post-mortem."),
    ] = None,
    keep_watching: Annotated[
        bool, output_option("--watch", help="Keep diagnosing; print each incident when it begins and when it ends.")
    ] = False,
    until_what: Annotated[
        Until | None, output_option("--until", metavar="resolved", help="With --watch: exit once no incident is left.")
    ] = None,
    alertmanager: Annotated[
        str,
        output_option(
            "--alertmanager", metavar="URL", help="With --watch: also post what begins and ends as alerts to this one."
        ),
    ] = "",
    fail_on: Annotated[
        FailOn,
        output_option("--fail-on", metavar="VERDICT", help="Exit with 0 below this: warning, critical or never."),
    ] = FailOn.warning,
    verbose: Annotated[
        bool,
        output_option(
            "--verbose", "-v", help="Print all evidence, alternatives, thresholds and every incident's state."
        ),
    ] = False,
    quiet: Annotated[
        bool, output_option("--quiet", "-q", help="Print line 1 only: severity, incident, where, since when.")
    ] = False,
    why: Annotated[
        str,
        output_option(
            "--why",
            metavar="INCIDENT",
            help="Print why this incident is present, absent or unknown: each condition with its value and threshold.",
        ),
    ] = "",
    log_level: Annotated[
        LogLevel,
        output_option("--log-level", metavar="LEVEL", help="debug prints what each source, collector and query took."),
    ] = LogLevel.warning,
    configuration: ConfigurationOptions,
) -> None:
    """Diagnose a live vLLM server, a recording, or a fleet through Prometheus.

    Prints at most 20 lines: the verdict, the evidence for it, what to do now, the flag to change, what was ruled out.
    On the server's own host its GPUs and processes are read too.
    """
    from diag.commands import doctor as work
    from diag.core.debug_log import print_log

    print_log(log_level.value)
    form = output.form
    options = observe_options(targets, prometheus, scrape, evidence, configuration, probe=probe, k8s=k8s)
    if k8s and (targets or prometheus.prometheus or evidence.log):
        raise BadUsage("--k8s finds servers and their logs itself: leave out URLs, --prometheus and --log")
    if quiet and (verbose or keep_watching or form != "terminal"):
        raise BadUsage("--quiet prints line 1 only: leave out --verbose, --watch, --json and --markdown")
    if why and (verbose or quiet or keep_watching or form != "terminal"):
        raise BadUsage(
            "--why prints one incident's conditions: leave out --verbose, --quiet, --watch and other formats"
        )
    if baseline and keep_watching:
        raise BadUsage("--watch prints incidents as they begin and end: leave out --baseline")
    if until_what and not keep_watching:
        raise BadUsage("--until needs --watch: it says when the watch ends")
    if alertmanager and not keep_watching:
        raise BadUsage("--alertmanager needs --watch: it is told what begins and what ends")
    if keep_watching and form != "terminal":
        raise BadUsage("--watch prints lines as incidents begin and end: leave out --json and --markdown")
    if keep_watching:
        from diag.commands import watch

        report, status = watch.watch(options, until_what is Until.resolved, alertmanager), 0
    else:
        report = work.run(options, baseline, only_suspects=form != "json" and not why, why=why)
        if why:
            work.print_why(report, why)
        else:
            work.print_report(report, form, verbose=verbose, quiet=quiet)
        status = work.exit_code(report, fail_on.value)
    if html:
        work.write_html(report, html)
    raise typer.Exit(status)


@command("Diagnose")
def top(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL...",
            help="URLs of vLLM servers or of diag exporters.  [default: the servers that run on this host]",
            show_default=False,
        ),
    ] = None,
    *,
    prometheus: PrometheusOptions,
    scrape: TopScrapeOptions,
    evidence: EvidenceOptions,
    configuration: ConfigurationOptions,
) -> None:
    """Show live servers, worst first, in a terminal: verdict, load, latency, GPUs; Enter opens one.

    Keys: s sorts, / filters, g shows GPUs, p pauses, r records the last minutes, o opens the runbook, q quits. Needs
    pip install 'diag[top]'.
    """
    from diag.commands import top as work

    options = observe_options(targets, prometheus, scrape, evidence, configuration)
    work.run(options, here=not targets and not options.prometheus)


@command("Diagnose")
def verify(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="A recording made before the change.")],
    after: Annotated[
        str,
        typer.Argument(
            metavar="AFTER",
            help="A recording or the URL of the server after the change.  [default: BEFORE's servers, as they are now]",
            show_default=False,
        ),
    ] = "",
    *,
    scrape: ScrapeOptions,
    evidence: EvidenceOptions,
    output: FormatOptions,
    configuration: ConfigurationOptions,
) -> None:
    """Check whether a change fixed an incident, at the same load, and what it cost.

    --log and --launch are those of the server after the change.
    """
    from diag.commands import verify as work

    form = output.form
    options = observe_options([after] if after else [], scrape, evidence, configuration)
    raise typer.Exit(work.print_report(work.verify(before, options), form))


@command("Diagnose")
def ramp(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="URL of a vLLM server; with --attach or --results also a recording."),
    ] = "",
    *,
    vllm_python: Annotated[
        str,
        vllm_option(
            "--vllm-python", metavar="FILE", help="Python that has vLLM: its `vllm bench serve` makes the load."
        ),
    ] = "",
    tokenizer: Annotated[
        str,
        vllm_option("--tokenizer", metavar="NAME", help="Folder or name of the tokenizer.  [default: the server's]"),
    ] = "",
    model: Annotated[
        str, vllm_option("--model", metavar="NAME", help="Served model name.  [default: the first one served]")
    ] = "",
    attach: Annotated[
        bool, load_option("--attach", help="Make no load: watch while somebody else does; Ctrl-C ends it.")
    ] = False,
    results: Annotated[
        list[Path] | None,
        load_option(
            "--results", metavar="FILE", help="Result of guidellm, AIPerf or vllm bench serve instead. Repeatable."
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        load_option(
            "--prompt-tokens", metavar="N", min=1, max=2**22, help="Of each request.  [default: the server's own mean]"
        ),
    ] = None,
    output_tokens: Annotated[
        int | None,
        load_option(
            "--output-tokens", metavar="N", min=1, max=2**20, help="Of each answer.  [default: the server's own mean]"
        ),
    ] = None,
    step_seconds: Annotated[
        float,
        load_option("--step-seconds", metavar="SECONDS", min=5, max=3600, help="How long each load is held."),
    ] = 30.0,
    first: Annotated[
        int, load_option("--from", metavar="N", min=1, max=2**16, help="Requests at a time in the first step.")
    ] = 1,
    most: Annotated[
        int, load_option("--most", metavar="N", min=1, max=2**16, help="Requests at a time in the last step at most.")
    ] = 1024,
    rates: Annotated[
        int, load_option("--rates", metavar="N", min=0, max=20, help="Open-loop steps around the ceiling (Poisson).")
    ] = 2,
    yes: Annotated[bool, load_option("--yes", help="Start without a question.")] = False,
    every: Annotated[float, seconds_option("--every", min=0.1, max=60, help="Time between two scrapes.")] = 1.0,
    duration: Annotated[
        float, seconds_option("--for", min=1, max=LONGEST_WATCH, help="With --attach: how long to watch.")
    ] = 300.0,
    timeout: Timeout = None,
    evidence: EvidenceOptions,
    contract: ContractFile = None,
    as_json: Json = False,
    html: Annotated[
        Path | None, output_option("--html", metavar="FILE", help="Also write an HTML page with the curves.")
    ] = None,
) -> None:
    """Put more and more load on a server: its ceiling, what binds there, and the flag that moves it.

    Besides --probe this is the only load diag ever makes: it asks first, and changes nothing.
    """
    from diag.commands import ramp as work

    if sum((attach, bool(results), bool(vllm_python))) > 1:
        raise BadUsage("--vllm-python, --attach and --results exclude each other: choose who makes the load")
    targets = [target] if target or results else [HERE]
    observed = observe_options(
        [name for name in targets if name], evidence, every=every, duration=duration, timeout=timeout, contract=contract
    )
    lengths = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    found = work.run(
        work.RampOptions(
            observed,
            vllm_python,
            attach,
            results or (),
            model,
            tokenizer,
            **lengths,
            step_seconds=step_seconds,
            first=first,
            most=most,
            rates=rates,
            yes=yes,
        )
    )
    work.print_report(found, "json" if as_json else "terminal")
    if html:
        work.write_html(found, html)
    raise typer.Exit(work.exit_code(found))


@command("Collect")
def config(
    targets: Targets = None, *, timeout: Timeout = None, evidence: EvidenceOptions, as_json: Json = False
) -> None:
    """Show the configuration that servers run with, and where each value was read.

    Sources, most trusted first: /server_info (needs VLLM_SERVER_DEV_MODE=1), the process on this host, the log, the
    metrics page (cache_config_info), /v1/models, --launch, the defaults of the vLLM release. A value that vLLM decides
    itself is taken from the metrics page or the log before any command line.
    """
    from diag.commands.observe import show_configuration

    typer.echo(show_configuration(observe_options(targets, evidence, timeout=timeout), as_json), nl=False)


@command("Collect")
def export(
    targets: Targets = None,
    *,
    prometheus: PrometheusOptions,
    scrape: ScrapeOptions,
    csv: Annotated[
        Path | None,
        output_option("--csv", metavar="FILE", help="File to write.  [default: standard output]", show_default=False),
    ] = None,
    configuration: ConfigurationOptions,
) -> None:
    """Write the signals of a time range as CSV: time, instance, engine, gpu, signal, unit, window, value."""
    from diag.commands.observe import export_signals

    summary = export_signals(observe_options(targets, prometheus, scrape, configuration), csv)
    if csv:
        typer.echo(summary)


@command("Collect")
def record(
    target: Annotated[list[str], typer.Argument(metavar="URL...", help="URLs of vLLM servers or of diag exporters.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create; it must be new or empty.")],
    *,
    scrape: RecordOptions,
    evidence: EvidenceOptions,
) -> None:
    """Record live servers into a folder that can be diagnosed anywhere, any time; secrets are left out."""
    from diag.commands.observe import record_servers

    typer.echo(record_servers(observe_options(target, scrape, evidence), folder))


@command("Collect")
def baseline(
    action: Annotated[BaselineAction, typer.Argument(metavar="save", help="Save what is observed.")],
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET...",
            help=f"URLs of vLLM servers or of diag exporters, or recordings, several of them too.  [default: {HERE}]",
            show_default=False,
        ),
    ] = None,
    *,
    prometheus: PrometheusOptions,
    scrape: BaselineScrapeOptions,
    evidence: EvidenceOptions,
    file: Annotated[
        Path | None,
        output_option(
            "--file",
            metavar="FILE",
            help="File to add to.  [default: [baseline] file of diag.toml, else baseline.json]",
            show_default=False,
        ),
    ] = None,
    even_ill: Annotated[
        bool, output_option("--even-ill", help="Learn from servers with an incident too: by default they are left out.")
    ] = False,
    configuration: ConfigurationOptions,
) -> None:
    """Save how fast healthy servers are at each load, for diag doctor --baseline to compare with.

    ITL, TTFT, output tokens/s, energy per token, prefix cache hit rate and start-up phases are kept for each model,
    vLLM release, GPU and set of flags.
    """
    from diag.commands.verify import save_baseline

    options = observe_options(targets, prometheus, scrape, evidence, configuration)
    typer.echo(save_baseline(options, file, even_ill))


@command("Collect")
def exporter(
    *,
    vllm: Annotated[str, vllm_option("--vllm", metavar="URL", help="The vLLM server of this host.")] = HERE,
    gpus: Annotated[
        str,
        vllm_option("--gpus", metavar="LIST", help="GPU indices or UUIDs: 0,1.  [default: those the server runs on]"),
    ] = "",
    evidence: EvidenceOptions,
    timeout: Annotated[
        float,
        seconds_option("--timeout", min=0.1, max=LONGEST_WAIT, help="Leave out a part of the page that takes longer."),
    ] = 8.0,
    probe: Annotated[
        float,
        seconds_option(
            "--probe", min=0.0, max=LONGEST_PAUSE, help="Send a request for one token this often; 0 sends none."
        ),
    ] = 0.0,
    listen: Annotated[
        str,
        serve_option(
            "--listen",
            metavar="HOST:PORT",
            help="Address to serve /metrics on; 0.0.0.0:9400 for a Prometheus on another host.",
        ),
    ] = "127.0.0.1:9400",
    tls_cert: Annotated[
        str, serve_option("--tls-cert", metavar="FILE", help="Serve HTTPS with this certificate (PEM).")
    ] = "",
    tls_key: Annotated[
        str, serve_option("--tls-key", metavar="FILE", help="Its private key, if it is in a file of its own.")
    ] = "",
    tls_client_ca: Annotated[
        str,
        serve_option("--tls-client-ca", metavar="FILE", help="Accept only clients with a certificate of this CA."),
    ] = "",
    web_config: Annotated[
        str,
        serve_option(
            "--web.config.file", metavar="FILE", help="TLS and users, in the format of Prometheus' own exporters."
        ),
    ] = "",
) -> None:
    """Serve vLLM's metrics with GPU, log and process metrics added, for Prometheus to scrape instead of vLLM."""
    from diag.commands.exporter import ExporterOptions, run

    tls = (tls_cert, tls_key, tls_client_ca)
    run(
        ExporterOptions(
            vllm, listen, gpus=gpus, timeout=timeout, probe=probe, tls=tls, web_config=web_config, **evidence._asdict()
        )
    )


@command("Collect")
def replay(
    recording: Annotated[Path, typer.Argument(metavar="RECORDING", help="The folder of a recording.")],
    *,
    listen: Annotated[
        str,
        serve_option(
            "--listen",
            metavar="HOST:PORT",
            help="Address to serve /metrics on; each further server of the recording gets the next port.",
        ),
    ] = "127.0.0.1:8000",
    speed: Annotated[
        float, serve_option("--speed", min=0.01, max=100.0, help="How many times as fast as it was recorded.")
    ] = 1.0,
    log: Annotated[
        Path | None, serve_option("--log", metavar="FILE", help="Write the recorded log to this file as time passes.")
    ] = None,
    at_end: Annotated[
        AtEnd,
        serve_option("--at-end", metavar="WHAT", help="again: begin again; hold: keep the last page; exit: stop."),
    ] = AtEnd.again,
) -> None:
    """Serve a recording as a live vLLM server, to see dashboards, alerts and the doctor at work without a GPU."""
    from diag.commands.exporter import ReplayOptions
    from diag.commands.exporter import replay as work

    work(ReplayOptions(recording, listen, speed, log, at_end.value))


@command("Diagnose")
def explain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="The id of an incident (see diag incidents), of a signal or of a diag lint rule."
        ),
    ],
    as_markdown: Annotated[
        bool, output_option("--markdown", help="Print Markdown on a terminal too, as anywhere else.")
    ] = False,
    incidents: UserIncidents = None,
) -> None:
    """Show an incident's runbook (meaning, symptoms, look-alikes, mitigation, fix) or a lint rule's page.

    On a terminal the page is laid out and shown through $PAGER (default: less; cat for none); NO_COLOR is respected.
    """
    from diag.commands.explain import show

    show(name, incidents, as_markdown)


@command("Check before a rollout")
def budget(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A launch command, 'vllm serve MODEL --flag value', or a model; to compare GPUs also the URL or the"
            " recording of a server, for its traffic.",
        ),
    ],
    gpu: Annotated[
        str, vllm_option("--gpu", metavar="NAME", help="h100, a100-80, l40s ... or cpu.  [default: this host's GPUs]")
    ] = "",
    gpu_memory: Annotated[
        str, vllm_option("--gpu-memory", metavar="SIZE", help="Memory of one GPU as CUDA reports it: 79.1GiB.")
    ] = "",
    vllm_version: Annotated[
        str, vllm_option("--vllm-version", metavar="VERSION", help="vLLM release: 0.32.0.  [default: the log's]")
    ] = "",
    log: Annotated[
        str, evidence_option("--log", metavar="FILE", help="Log of a start of this server, for measured sizes.")
    ] = "",
    all_gpus: Annotated[
        bool, sizing_option("--all-gpus", help="Compare all GPUs that diag knows, with 1, 2, 4 and 8 of each.")
    ] = False,
    context: Annotated[str, sizing_option("--context", metavar="TOKENS", help="Tokens of each request: 32k.")] = "",
    concurrency: Annotated[
        int | None,
        sizing_option(
            "--concurrency", metavar="N", min=1, max=2**20, help="Requests at a time.  [default: what each holds]"
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        sizing_option("--price", metavar="GPU=DOLLARS", help="Of one GPU and hour: h100=2.5. Repeatable."),
    ] = None,
    utilisation: Annotated[
        str, sizing_option("--utilisation", metavar="SHARE", help="Of the ceiling, for the cost too: 40%.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Estimate GPU memory, before or after launch, or compare GPUs: what fits, how fast at most, at what cost.

    Nothing is started or downloaded.
    """
    from diag.commands.budget import BudgetOptions, run
    from diag.commands.sizing import SizingOptions

    sizing = SizingOptions(all_gpus, gpu, context, concurrency, price or (), utilisation, vllm_version)
    text, status = run(BudgetOptions(target, gpu, gpu_memory, log, vllm_version, sizing), as_json)
    typer.echo(text, nl=False)
    raise typer.Exit(status)


@command("Check before a rollout")
def lint(
    command: Annotated[
        str,
        typer.Argument(
            metavar="COMMAND",
            help="A launch command, 'vllm serve MODEL --flag value', or a file: a script, a --config, a manifest.",
        ),
    ],
    vllm_version: Annotated[
        str,
        vllm_option(
            "--vllm-version",
            metavar="VERSION",
            help="vLLM release: 0.32.0.  [default: the image's, else the installed one, else the newest]",
        ),
    ] = "",
    python: Annotated[
        str,
        vllm_option("--vllm-python", metavar="FILE", help="Also ask the vLLM that is installed for this Python."),
    ] = "",
    ignore: Annotated[
        list[str] | None,
        config_option(
            "--ignore", metavar="RULE", help="Drop the findings of this rule. Repeatable; in diag.toml: [lint] ignore."
        ),
    ] = None,
    contract: ContractFile = None,
    as_json: Json = False,
) -> None:
    """Check a launch command for removed, ineffective, conflicting or harmful flags.

    Nothing is started.
    """
    from diag.commands.lint import LintOptions, run

    text, status = run(command, LintOptions(vllm_version, python, ignore or (), contract), as_json)
    typer.echo(text, nl=False)
    raise typer.Exit(status)


@command("Diagnose", "incidents")
def list_incidents(incidents: UserIncidents = None) -> None:
    """List the incidents that diag looks for."""
    from diag.commands.explain import list_incidents as work

    typer.echo(work(incidents), nl=False)


@command("Diagnose")
def mcp(
    servers: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL...", help="Servers that may be asked about; none by default.", show_default=False),
    ] = None,
    *,
    recordings: Annotated[
        Path | None, allow_option("--recordings", metavar="DIR", help="Folder whose recordings may be asked about.")
    ] = None,
    prometheus: Annotated[
        str, allow_option("--prometheus", metavar="URL", help="Prometheus that may be asked, about all its servers.")
    ] = "",
    scrape: ScrapeOptions,
    deadline: Annotated[
        float, seconds_option("--deadline", min=1, max=LONGEST_WAIT, help="Time until an answer is given up.")
    ] = 180.0,
    evidence: EvidenceOptions,
    configuration: ConfigurationOptions,
) -> None:
    """Serve doctor, explain, lint, budget, config and verify as read-only tools for agents (MCP over stdio).

    An agent can ask about nothing but the servers, recordings and the Prometheus that are named here.
    """
    from diag.commands.mcp.command import McpOptions, run

    base = observe_options([], scrape, evidence, configuration)
    run(McpOptions(tuple(servers or ()), recordings, prometheus, deadline, base))


@command("Set up Prometheus and Grafana")
def generate(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder for alerts/, dashboards/, runbooks/ and docs/.")
    ] = Path(),
    *,
    check: Annotated[
        bool, output_option("--check", help="Write nothing; fail if a file is not what would be written.")
    ] = False,
    only: Annotated[
        list[str] | None,
        output_option("--only", metavar="ID", help="Write what this incident needs and no more (may be repeated)."),
    ] = None,
    configuration: ConfigurationOptions,
) -> None:
    """Write Prometheus alerts, Grafana dashboards and runbooks for every incident, with your SLOs and thresholds."""
    from diag.commands.explain import generate as work

    text, status = work(folder, check, configuration.incidents, configuration.contract, only or ())
    typer.echo(text)
    raise typer.Exit(status)


def main() -> None:
    """Run a command; every error becomes one sentence and its exit status."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy starts a thread for each core; nothing here multiplies
    if sys.stdout is None:  # closed, as by `>&-`: the exit status is the answer
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  until the end
    try:
        status = _with_what_is_named(sys.argv[1:2])(prog_name="diag", standalone_mode=False)
        sys.stdout.flush()
    except TyperException as error:
        context = getattr(error, "ctx", None)
        command_path = context.command_path if context else "diag"
        typer.echo(f"diag: {error.format_message().rstrip('.')} (see {command_path} --help)", err=True)
        status = USAGE
    except DiagError as error:
        typer.echo(f"diag: {error}", err=True)
        status = error.exit_code
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        _write_no_more()
        status = 0
    except Exception as error:  # noqa: BLE001  a defect: 1, as Python has it, would mean "warning"
        status = _failed(error)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more Ctrl-C would only disturb Python's own end
    sys.exit(status)


def _with_what_is_named(name: list[str]) -> typer.Typer:
    """The commands, or the one of this name alone: to build the options of all takes a hundredth of a second."""
    named = copy(app)
    named.registered_commands = [found for found in app.registered_commands if [found.name] == name]
    return named if named.registered_commands else app


def _failed(error: Exception) -> int:
    """Say what went wrong: the disk behind standard output is full, or diag has a defect."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        _write_no_more()
        typer.echo(f"diag: standard output cannot be written: {error.strerror}", err=True)
        return USAGE
    typer.echo(f"diag: {internal_error(error)}", err=True)
    return INTERNAL


def _write_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
