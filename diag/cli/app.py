"""The commands: each reads its options, makes one call and prints. Only this module catches errors."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from copy import copy
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.exceptions import TyperException

from diag import __version__
from diag.cli.help import AppHelp, CommandHelp, examples, missing_argument
from diag.cli.options import (
    HERE,
    LONGEST_PAUSE,
    LONGEST_WAIT,
    BaselineScrapeOptions,
    ConfigurationOptions,
    ContractFile,
    EvidenceOptions,
    FormatOptions,
    GpuName,
    Grouped,
    Json,
    KubernetesPlace,
    LaunchRelease,
    PrometheusOptions,
    RecordOptions,
    ScrapeOptions,
    Targets,
    Timeout,
    TopScrapeOptions,
    UserIncidents,
    allow_option,
    config_option,
    duration_option,
    evidence_option,
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
from diag.core.files import discard_output
from diag.core.formatting import addresses_without_secrets

USAGE = 64
INTERNAL = 70
INTERRUPTED = 130
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

app = typer.Typer(
    cls=AppHelp,
    invoke_without_command=True,
    rich_markup_mode=None,  # plain help: half the time and memory, and room for whole sentences
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 100},
    help="Diagnose vLLM servers: incident, cause, ruled-out causes, and the flag to change with its new value."
    " diag only reads; it never changes a server.",
)


class FailOn(StrEnum):
    """The mildest verdict with an exit status other than 0."""

    warning = "warning"
    critical = "critical"
    never = "never"


class LogLevel(StrEnum):
    """The mildest messages that are printed on standard error."""

    debug = "debug"
    warning = "warning"


class BaselineAction(StrEnum):
    """Action on a baseline; `diag doctor --baseline` reads the file."""

    save = "save"
    compare = "compare"


class AtEnd(StrEnum):
    """Action of `diag replay` after the last scrape."""

    again = "again"
    hold = "hold"
    exit = "exit"


class Until(StrEnum):
    """Condition that ends a watch."""

    resolved = "resolved"


def command(panel: str, name: str = "", takes_flags: bool = False) -> Callable[[Callable[..., None]], object]:
    """Register a command under this heading of `diag --help`; if it `takes_flags`, one of vLLM may be its argument."""

    def register(function: Callable[..., None]) -> object:
        shown_name = name or function.__name__
        settings = {"ignore_unknown_options": takes_flags}
        decorate = app.command(shown_name, cls=CommandHelp, rich_help_panel=panel, context_settings=settings)
        return decorate(Grouped(function))

    return register


def _complete_id(start: str) -> list[str]:
    """Return the ids of incidents, lint rules and checks that begin with this text, for the completion of a shell."""
    from diag.knowledge.catalog import load
    from diag.lint.rules import RULES
    from diag.preflight.checks import CHECKS

    names = (*(incident.id for incident in load(None)), *RULES, *CHECKS)
    return [name for name in names if name.startswith(start)]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"diag {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print diag's version and exit.")
    ] = False,
) -> None:
    """Handle diag's own options; without a command, print the help."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@command("Diagnose")
def doctor(
    targets: Targets = None,
    *,
    prometheus: PrometheusOptions,
    k8s: KubernetesPlace = "",
    scrape: ScrapeOptions,
    probe: Annotated[
        bool, scrape_option("--probe", help="Also send one request for one token; without --probe, diag adds no load.")
    ] = False,
    evidence: EvidenceOptions,
    stacks: Annotated[
        bool,
        evidence_option(
            "--stacks",
            help="Also read where each process of a server on this host stands, without stopping it. Needs pip install"
            " 'diag[stacks]'.",
        ),
    ] = False,
    vllm_version: Annotated[
        str,
        evidence_option("--vllm-version", metavar="RELEASE", help="The release of vLLM, if a log does not print it."),
    ] = "",
    baseline: Annotated[
        Path | None,
        evidence_option(
            "--baseline",
            metavar="FILE",
            help="Baseline file of diag baseline save.  [default: [baseline] file of diag.toml]",
            show_default=False,
        ),
    ] = None,
    output: FormatOptions,
    html: Annotated[
        Path | None,
        output_option("--html", metavar="FILE", help="Also write an HTML report with plots, for a post-mortem."),
    ] = None,
    keep_watching: Annotated[
        bool, output_option("--watch", help="Keep diagnosing; print each incident as it begins and ends.")
    ] = False,
    until_what: Annotated[
        Until | None, output_option("--until", metavar="resolved", help="With --watch: exit when no incident is left.")
    ] = None,
    alertmanager: Annotated[
        str,
        output_option(
            "--alertmanager", metavar="URL", help="With --watch: also post incidents as alerts to this Alertmanager."
        ),
    ] = "",
    fail_on: Annotated[
        FailOn,
        output_option(
            "--fail-on", metavar="VERDICT", help="Exit with 0 below this verdict: warning, critical or never."
        ),
    ] = FailOn.warning,
    verbose: Annotated[
        bool,
        output_option(
            "--verbose", "-v", help="Print all evidence, alternatives, thresholds and every incident's state."
        ),
    ] = False,
    quiet: Annotated[
        bool, output_option("--quiet", "-q", help="Print line 1 only: severity, incident, subject, start time.")
    ] = False,
    why: Annotated[
        str,
        output_option(
            "--why",
            metavar="INCIDENT",
            autocompletion=_complete_id,
            help="Print why this incident is present, absent or unknown: each condition with its value and threshold.",
        ),
    ] = "",
    log_level: Annotated[
        LogLevel,
        output_option(
            "--log-level",
            metavar="LEVEL",
            help="debug: print the duration of each source, collector, request and query on standard error.",
        ),
    ] = LogLevel.warning,
    configuration: ConfigurationOptions,
) -> None:
    """Diagnose a live vLLM server, a recording, or a fleet through Prometheus.

    Print at most 20 lines: verdict, evidence, mitigation, the flag to change, ruled-out causes.
    On the server's own host, also read its GPUs and processes.
    """
    from diag.commands import doctor as work

    if log_level is LogLevel.debug:
        from diag.core.debug_log import print_log

        print_log()
    form = output.form
    more = {"probe": probe, "k8s": k8s, "version": vllm_version}
    options = observe_options(targets, prometheus, scrape, evidence, configuration, **more)
    if quiet and (verbose or keep_watching or form != "terminal"):
        raise BadUsage("--quiet prints line 1 only: leave out --verbose, --watch, --json and --markdown")
    if why and (verbose or quiet or keep_watching or form != "terminal"):
        raise BadUsage(
            "--why prints one incident's conditions: leave out --verbose, --quiet, --watch and other formats"
        )
    if baseline and keep_watching:
        raise BadUsage("--watch prints incidents as they begin and end: leave out --baseline")
    if until_what and not keep_watching:
        raise BadUsage("--until needs --watch: it sets the end of the watch")
    if alertmanager and not keep_watching:
        raise BadUsage("--alertmanager needs --watch: it receives alerts as they fire and resolve")
    if stacks and (keep_watching or why or quiet):
        raise BadUsage("--stacks adds to a report: leave out --watch, --why and --quiet")
    if keep_watching and form != "terminal":
        raise BadUsage("--watch prints lines as incidents begin and end: leave out --json and --markdown")
    if keep_watching:
        from diag.commands import watch

        report, status = watch.watch(options, until_what is Until.resolved, alertmanager), 0
    else:
        is_short = form == "terminal" and not verbose and html is None
        only_suspects = form != "json" and not why
        report = work.run(
            options,
            baseline,
            only_suspects=only_suspects,
            with_vitals=not is_short,
            with_stacks=stacks,
            why=why,
        )
        if why:
            work.print_why(report, why)
        else:
            work.print_report(report, form, verbose=verbose, quiet=quiet)
        status = work.exit_code(report, fail_on.value)
    if html:
        work.write_html(report, html, configuration.contract)
    raise typer.Exit(status)


@command("Diagnose")
def top(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL...",
            help="URLs of vLLM servers or of diag exporters.  [default: the servers on this host]",
            show_default=False,
        ),
    ] = None,
    *,
    prometheus: PrometheusOptions,
    scrape: TopScrapeOptions,
    evidence: EvidenceOptions,
    configuration: ConfigurationOptions,
) -> None:
    """Show live servers in a terminal, worst first: verdict, load, latency, GPUs; Enter opens a server.

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
            help="A recording or the URL of the server after the change.  [default: the servers of BEFORE, now]",
            show_default=False,
        ),
    ] = "",
    *,
    scrape: ScrapeOptions,
    evidence: EvidenceOptions,
    output: FormatOptions,
    configuration: ConfigurationOptions,
) -> None:
    """Check whether a change fixed an incident, at the same load, and its cost.

    --log and --launch describe the server after the change.
    """
    from diag.commands import verify as work

    form = output.form
    options = observe_options([after] if after else [], scrape, evidence, configuration)
    raise typer.Exit(work.print_report(work.verify(before, options), form))


@command("Diagnose")
def ramp(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET...",
            help="URL of a vLLM server; with --attach or --results, also a recording; or results of diag ramp --json.",
            show_default=False,
        ),
    ] = None,
    *,
    vllm_python: Annotated[
        str,
        vllm_option(
            "--vllm-python",
            metavar="FILE",
            help="Python with vLLM installed; its `vllm bench serve` generates the load.",
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
        bool, load_option("--attach", help="Generate no load; observe existing traffic. Ctrl-C ends the ramp.")
    ] = False,
    results: Annotated[
        list[Path] | None,
        load_option(
            "--results", metavar="FILE", help="Use a result of guidellm, AIPerf or vllm bench serve. Repeatable."
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        load_option(
            "--prompt-tokens", metavar="N", min=1, max=2**22, help="Tokens per prompt.  [default: the server's mean]"
        ),
    ] = None,
    output_tokens: Annotated[
        int | None,
        load_option(
            "--output-tokens", metavar="N", min=1, max=2**20, help="Tokens per answer.  [default: the server's mean]"
        ),
    ] = None,
    step_seconds: Annotated[
        float,
        load_option("--step-seconds", metavar="SECONDS", min=5, max=3600, help="Duration of each step."),
    ] = 30.0,
    first: Annotated[
        int, load_option("--from", metavar="N", min=1, max=2**16, help="Concurrency of the first step.")
    ] = 1,
    most: Annotated[int, load_option("--most", metavar="N", min=1, max=2**16, help="Highest concurrency.")] = 1024,
    rates: Annotated[
        int,
        load_option(
            "--rates", metavar="N", min=0, max=20, help="Number of open-loop steps (Poisson) around the ceiling."
        ),
    ] = 2,
    yes: Annotated[bool, load_option("--yes", help="Start without confirmation.")] = False,
    every: Annotated[float, seconds_option("--every", min=0.1, max=60, help="Time between two scrapes.")] = 1.0,
    duration: Annotated[float, duration_option(min=1, help="With --attach: duration of the observation.")] = 300.0,
    timeout: Timeout = None,
    evidence: EvidenceOptions,
    contract: ContractFile = None,
    against: Annotated[
        Path | None,
        output_option("--against", metavar="FILE", help="Compare with an earlier result of diag ramp --json."),
    ] = None,
    output: FormatOptions,
    html: Annotated[
        Path | None, output_option("--html", metavar="FILE", help="Also write an HTML page with the curves.")
    ] = None,
) -> None:
    """Increase the load on a server step by step to find its ceiling, the binding resource and the flag to change.

    Except for --probe, this is the only load that diag generates. It asks first, and changes no setting. Given finished
    results, it generates none: --against compares one with an earlier one, and several make a table by time.
    """
    from diag.commands import ramp as work

    if sum((attach, bool(results), bool(vllm_python))) > 1:
        raise BadUsage("--vllm-python, --attach and --results exclude each other: choose one source of load")
    given, earlier = targets or ([] if results else [HERE]), work.read_earlier(against)
    if not (attach or results or vllm_python) and work.are_kept(given):
        raise typer.Exit(work.print_kept(given, earlier, output.form))
    observed = observe_options(given, evidence, every=every, duration=duration, timeout=timeout, contract=contract)
    found = work.run(
        work.RampOptions(
            observed,
            vllm_python,
            attach,
            results or (),
            model,
            tokenizer,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            step_seconds=step_seconds,
            first=first,
            most=most,
            rates=rates,
            yes=yes,
        )
    )
    if html:
        work.write_html(found, html, earlier)
    raise typer.Exit(work.print_report(found, output.form, earlier))


@command("Collect")
def config(
    targets: Targets = None, *, timeout: Timeout = None, evidence: EvidenceOptions, as_json: Json = False
) -> None:
    """Show the configuration that servers run with, and the source of each value.

    Sources, most trusted first: /server_info (needs VLLM_SERVER_DEV_MODE=1), the process on this host, the log, the
    metrics page (cache_config_info), /v1/models, --launch, the defaults of the vLLM release. For values that vLLM
    computes itself, the metrics page and the log come before any command line.
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
    """Record live servers, without secrets, into a folder that diag can diagnose anywhere at any time."""
    from diag.commands.observe import record_servers

    typer.echo(record_servers(observe_options(target, scrape, evidence), folder))


@command("Collect")
def bundle(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET...",
            help=f"URLs of vLLM servers or of diag exporters, or one recording.  [default: {HERE}]",
            show_default=False,
        ),
    ] = None,
    *,
    k8s: KubernetesPlace = "",
    scrape: RecordOptions,
    evidence: EvidenceOptions,
    file: Annotated[
        Path | None,
        output_option("--output", "-o", metavar="FILE", help="The archive to write, such as sick.tar.zst."),
    ] = None,
    as_issue: Annotated[
        bool, output_option("--issue", help="Print an issue in the form that vLLM's template for bugs asks for.")
    ] = False,
    configuration: ConfigurationOptions,
) -> None:
    """Put what the next person needs of a sick server into one file, without secrets; nothing is uploaded.

    It holds the recording, the ends of the log, the stacks, facts about the host or the pods, and the report; diag
    doctor FILE judges it anywhere.
    """
    from diag.commands import bundle as work

    if not (file or as_issue):
        raise BadUsage("name the file with -o FILE, or print an issue with --issue")
    options = observe_options(targets, scrape, evidence, configuration, k8s=k8s)
    typer.echo(work.run(options, file, as_issue=as_issue))


@command("Collect")
def baseline(
    action: Annotated[
        BaselineAction,
        typer.Argument(metavar="save|compare", help="Save the observation, or compare two baseline files."),
    ],
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET...",
            help=f"URLs of vLLM servers or of diag exporters, or one or more recordings.  [default: {HERE}] To"
            " compare: the earlier file and the later one.",
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
            help="File to extend.  [default: [baseline] file of diag.toml, else baseline.json]",
            show_default=False,
        ),
    ] = None,
    include_unhealthy: Annotated[
        bool,
        output_option("--include-unhealthy", help="Include servers with an incident; by default they are left out."),
    ] = False,
    even_ill: Annotated[bool, output_option("--even-ill", hidden=True)] = False,  # the old name of the option
    configuration: ConfigurationOptions,
) -> None:
    """Save the speed of healthy servers at each load for diag doctor --baseline, or compare two such files.

    The file keeps ITL, TTFT, output tokens/s, energy per token, prefix cache hit rate and start-up phases for each
    model, vLLM release, GPU and set of flags.
    """
    from diag.commands.verify import compare_baselines, save_baseline

    if action == BaselineAction.compare:
        if len(targets or ()) != 2:
            raise BadUsage("diag baseline compare takes two baseline files: the earlier one and the later one")
        printed, status = compare_baselines(*map(Path, targets or ()))
        typer.echo(printed)
        raise typer.Exit(status)
    options = observe_options(targets, prometheus, scrape, evidence, configuration)
    typer.echo(save_baseline(options, file, include_unhealthy or even_ill))


@command("Collect")
def exporter(
    *,
    vllm: Annotated[str, vllm_option("--vllm", metavar="URL", help="The vLLM server of this host.")] = HERE,
    gpus: Annotated[
        str,
        vllm_option("--gpus", metavar="LIST", help="GPU indices or UUIDs: 0,1.  [default: the server's GPUs]"),
    ] = "",
    evidence: EvidenceOptions,
    timeout: Annotated[
        float,
        seconds_option("--timeout", min=0.1, max=LONGEST_WAIT, help="Time limit for each part of the page."),
    ] = 8.0,
    probe: Annotated[
        float,
        seconds_option(
            "--probe", min=0.0, max=LONGEST_PAUSE, help="Interval of probe requests for one token; 0 sends none."
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
        str, serve_option("--tls-key", metavar="FILE", help="Private key of --tls-cert, if in a separate file.")
    ] = "",
    tls_client_ca: Annotated[
        str,
        serve_option("--tls-client-ca", metavar="FILE", help="Accept only clients with a certificate of this CA."),
    ] = "",
    web_config: Annotated[
        str,
        serve_option(
            "--web.config.file",
            metavar="FILE",
            help="File with TLS and users, in the format of Prometheus' own exporters.",
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
        float, serve_option("--speed", min=0.01, max=100.0, help="Speed relative to the recording.")
    ] = 1.0,
    log: Annotated[
        Path | None,
        serve_option("--log", metavar="FILE", help="Write the recorded log to this file at the same speed."),
    ] = None,
    at_end: Annotated[
        AtEnd,
        serve_option("--at-end", metavar="WHAT", help="again: start again; hold: keep the last page; exit: stop."),
    ] = AtEnd.again,
) -> None:
    """Serve a recording as a live vLLM server, to try dashboards, alerts and the doctor without a GPU."""
    from diag.commands.exporter import ReplayOptions
    from diag.commands.exporter import replay as work

    work(ReplayOptions(recording, listen, speed, log, at_end.value))


@command("Diagnose", takes_flags=True)
def explain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="Id of an incident, a signal or a lint rule; a flag, a metric, an alert, or a pasted line of a log.",
            autocompletion=_complete_id,
        ),
    ] = "",
    as_markdown: Annotated[
        bool, output_option("--markdown", help="Print Markdown on a terminal too, as in a pipe.")
    ] = False,
    incidents: UserIncidents = None,
) -> None:
    """Show an incident's runbook (meaning, symptoms, look-alikes, mitigation, fix) or a lint rule's page.

    Popular advice that is wrong is answered by its name: gpu_cache_usage_perc, nccl, --swap-space.

    On a terminal, format the page and show it through $PAGER (default: less; cat for none); NO_COLOR is respected.
    """
    from diag.commands.explain import show

    show(name, incidents, as_markdown)


@command("Check before a rollout")
def budget(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A launch command, 'vllm serve MODEL --flag value', or a model; to compare GPUs, also the URL or the"
            " recording of a server, for its traffic.",
        ),
    ],
    gpu: GpuName = "",
    gpu_memory: Annotated[
        str, vllm_option("--gpu-memory", metavar="SIZE", help="Memory of one GPU as CUDA reports it: 79.1GiB.")
    ] = "",
    vllm_version: Annotated[
        str, vllm_option("--vllm-version", metavar="VERSION", help="vLLM release: 0.32.0.  [default: the log's]")
    ] = "",
    log: Annotated[
        str, evidence_option("--log", metavar="FILE", help="Log of a start of this server, to use its measured sizes.")
    ] = "",
    config: Annotated[
        str,
        vllm_option("--config", metavar="FILE", help="The model's config.json.  [default: this host's, or its name's]"),
    ] = "",
    all_gpus: Annotated[
        bool, sizing_option("--all-gpus", help="Compare all supported GPUs, with 1, 2, 4 and 8 of each.")
    ] = False,
    context: Annotated[str, sizing_option("--context", metavar="TOKENS", help="Tokens per request: 32k.")] = "",
    concurrency: Annotated[
        int | None,
        sizing_option("--concurrency", metavar="N", min=1, max=2**20, help="Concurrency.  [default: as many as fit]"),
    ] = None,
    price: Annotated[
        list[str] | None,
        sizing_option("--price", metavar="GPU=DOLLARS", help="Cost per GPU hour: h100=2.5. Repeatable."),
    ] = None,
    utilisation: Annotated[
        str,
        sizing_option("--utilisation", metavar="SHARE", help="Also show the cost at this share of the ceiling: 40%."),
    ] = "",
    as_json: Json = False,
) -> None:
    """Estimate GPU memory, before or after launch, or compare GPUs: fit, ceilings, cost.

    Nothing is started or downloaded.
    """
    from diag.commands.budget import BudgetOptions, run
    from diag.commands.sizing import SizingOptions

    sizing = SizingOptions(all_gpus, gpu, context, concurrency, price or (), utilisation, vllm_version)
    text, status = run(BudgetOptions(target, gpu, gpu_memory, log, vllm_version, sizing, config), as_json)
    typer.echo(text, nl=False)
    raise typer.Exit(status)


@command("Check before a rollout")
def lint(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...",
            help="A launch command, 'vllm serve MODEL --flag value'; or files, folders and patterns: scripts, --config,"
            " Dockerfiles, manifests, Compose, Helm values, Python.",
        ),
    ],
    vllm_version: LaunchRelease = "",
    python: Annotated[
        str,
        vllm_option("--vllm-python", metavar="FILE", help="Also check with the vLLM that this Python has installed."),
    ] = "",
    ignore: Annotated[
        list[str] | None,
        config_option(
            "--ignore", metavar="RULE", help="Drop the findings of this rule. Repeatable; in diag.toml: [lint] ignore."
        ),
    ] = None,
    gpu: Annotated[
        str,
        vllm_option("--gpu", metavar="NAME", help="GPUs of the server: h100, a100-80 ...  [default: this host's GPUs]"),
    ] = "",
    here: Annotated[
        bool, vllm_option("--here", help="Judge a file for this host: its GPUs, memory and installed vLLM.")
    ] = False,
    only: Annotated[
        str, output_option("--only", metavar="NAME", help="Judge one service, container or function of the files.")
    ] = "",
    every: Annotated[bool, output_option("--all", help="Show infos about files, too.")] = False,
    contract: ContractFile = None,
    as_json: Json = False,
) -> None:
    """Check launch commands, files or folders for removed, ineffective, conflicting or harmful flags.

    Every server of a file is judged. Nothing is started. Exit status: 0 no warning, 1 warnings or a file of several
    that could not be read, 2 errors, 65 no launch of vLLM found, 66 no such file.
    """
    from diag.commands.lint import LintOptions, run

    options = LintOptions(vllm_version, python, ignore or (), contract, gpu=gpu, here=here, every=every, only=only)
    text, status = run(command, options, as_json)
    typer.echo(text, nl=False)
    raise typer.Exit(status)


@command("Check before a rollout")
def preflight(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="A launch as diag lint takes it, or the URL of a server that runs."),
    ],
    *,
    vllm_version: LaunchRelease = "",
    python: Annotated[
        str,
        vllm_option("--vllm-python", metavar="FILE", help="Python that has vLLM.  [default: beside the launch's vllm]"),
    ] = "",
    gpu: GpuName = "",
    launch: Annotated[
        str, evidence_option("--launch", metavar="COMMAND", help="The launch command of the server at the URL.")
    ] = "",
    prometheus: Annotated[
        str, evidence_option("--prometheus", metavar="URL", help="Prometheus that is to scrape the server.")
    ] = "",
    alertmanager: Annotated[
        str, evidence_option("--alertmanager", metavar="URL", help="Alertmanager that sends the pages.")
    ] = "",
    ramp: Annotated[
        str,
        evidence_option(
            "--ramp", metavar="FILE", help="Result of diag ramp --json.  [default: [preflight] ramp of diag.toml]"
        ),
    ] = "",
    bench: Annotated[
        bool, load_option("--bench", help="Measure the all-reduce between the ranks on this host: it makes load.")
    ] = False,
    output: FormatOptions,
    verbose: Annotated[bool, output_option("--verbose", "-v", help="Print every result with its reason.")] = False,
    contract: ContractFile = None,
) -> None:
    """Decide if a launch may go ahead: command, GPU memory, host, network, telemetry and measured capacity.

    Nothing is started, written or downloaded. Without --bench it takes less than 5 s.
    """
    from diag.commands import preflight as work

    form = output.form
    options = work.PreflightOptions(
        target,
        vllm_version,
        python,
        launch=launch,
        gpu=gpu,
        prometheus=prometheus,
        alertmanager=alertmanager,
        ramp=ramp,
        bench=bench,
        contract=contract,
    )
    raise typer.Exit(work.print_report(work.run(options), form, verbose))


@command("Diagnose", "incidents")
def list_incidents(incidents: UserIncidents = None) -> None:
    """List the incidents that diag looks for."""
    from diag.commands.explain import list_incidents as work

    typer.echo(work(incidents), nl=False)


@command("Diagnose")
def mcp(
    servers: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL...", help="Servers that agents may query; none by default.", show_default=False),
    ] = None,
    *,
    recordings: Annotated[
        Path | None,
        allow_option("--recordings", metavar="DIR", help="Folder with recordings and logs that agents may query."),
    ] = None,
    prometheus: Annotated[
        str, allow_option("--prometheus", metavar="URL", help="Prometheus that agents may query, with all its servers.")
    ] = "",
    scrape: ScrapeOptions,
    deadline: Annotated[
        float, seconds_option("--deadline", min=1, max=LONGEST_WAIT, help="Time limit for an answer.")
    ] = 180.0,
    evidence: EvidenceOptions,
    configuration: ConfigurationOptions,
) -> None:
    """Serve doctor, explain, lint, budget, config and verify as read-only tools for agents (MCP over stdio).

    An agent can query only the servers, recordings and the Prometheus on this command line.
    """
    from diag.commands.mcp.targets import McpOptions, run

    base = observe_options([], scrape, evidence, configuration)
    run(McpOptions(tuple(servers or ()), recordings, prometheus, deadline, base))


@command("Set up Prometheus and Grafana")
def generate(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder for alerts/, dashboards/, runbooks/ and docs/.")
    ] = Path(),
    *,
    check: Annotated[
        bool, output_option("--check", help="Write nothing; fail if a file differs from the output.")
    ] = False,
    only: Annotated[
        list[str] | None,
        output_option("--only", metavar="ID", help="Write only the files of this incident. Repeatable."),
    ] = None,
    dashboards: Annotated[
        Literal["default", "incidents"],
        output_option("--dashboards", help="incidents: also write a dashboard for each incident."),
    ] = "default",
    settings: Annotated[
        list[str] | None,
        config_option(
            "--set",
            metavar="NAME=VALUE",
            help="A value as of the chart (docs/slo.md): grafanaUrl=URL, siteLabels=namespace,pod. Repeatable.",
        ),
    ] = None,
    configuration: ConfigurationOptions,
) -> None:
    """Write Prometheus alerts, Grafana dashboards and runbooks, with your SLOs and thresholds."""
    from diag.commands.explain import generate as work

    text, status = work(
        folder,
        check,
        configuration.incidents,
        configuration.contract,
        only or (),
        dashboards == "incidents",
        settings or (),
    )
    typer.echo(text)
    raise typer.Exit(status)


def main() -> None:
    """Run a command; turn every error into one sentence and its exit status."""
    # numpy starts a thread for each core, but diag multiplies no matrices
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if sys.stdout is None:  # closed, as by `>&-`: only the exit status has the verdict
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  until the end
    if isinstance(sys.stdout, TextIOWrapper):  # names of files need not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _load_command(sys.argv[1:2])(prog_name="diag", standalone_mode=False)
        sys.stdout.flush()
    except TyperException as error:
        context = getattr(error, "ctx", None)
        command_path = context.command_path if context else "diag"
        refusal = addresses_without_secrets(error.format_message().rstrip("."))  # it quotes the command line
        wanted = context and missing_argument(error, context)
        typer.echo(wanted or f"diag: {refusal} (see {command_path} --help)", err=True)
        status = USAGE
    except DiagError as error:
        typer.echo(f"diag: {error}{examples() if sys.argv[1:] == ['doctor'] else ''}", err=True)
        status = error.exit_code
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        discard_output()
        status = 0
    except MemoryError:
        typer.echo("diag: this input needs more memory than there is (docs/limits.md)", err=True)
        status = USAGE
    except Exception as error:  # noqa: BLE001  a defect: 1, as Python has it, would mean "warning"
        if isinstance(error, OSError) and error.errno in _WRITE_ERRORS:  # the disk behind standard output
            discard_output()
            typer.echo(f"diag: standard output cannot be written: {error.strerror}", err=True)
            status = USAGE
        else:
            mistake = _mistake(error)
            typer.echo(f"diag: {mistake or internal_error(error)}", err=True)
            status = USAGE if mistake else INTERNAL
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more Ctrl-C would only disturb Python's own end
    sys.exit(status)


def _mistake(error: Exception) -> str:
    """Return the sentence about the declaration that made a command fail, "" for a defect of the code."""
    from diag.core.declarations import PACKAGE, executed

    if sentence := executed(error, PACKAGE):
        return sentence
    try:
        from diag.commands.explain import check_declarations

        check_declarations()
    except DiagError as mistake:
        return str(mistake)
    except Exception as another:  # noqa: BLE001  the defect itself is reported
        return executed(another, PACKAGE)
    return ""


def _load_command(name: list[str]) -> typer.Typer:
    """Return the app with only the named command, if it exists: building the options of all takes 10 ms."""
    loaded = copy(app)
    loaded.registered_commands = [found for found in app.registered_commands if [found.name] == name]
    return loaded if loaded.registered_commands else app
