"""The commands: each reads its options, makes one call and prints. Only this module catches errors."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from copy import copy
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from typer.exceptions import TyperException

from diag import __version__
from diag.cli.options import (
    HERE,
    LEARNING,
    RECORDING,
    AppHelp,
    CommandHelp,
    ConfigurationOptions,
    DeclaredCommand,
    EvidenceOptions,
    FormatOptions,
    PrometheusOptions,
    ScrapeOptions,
    examples,
    missing_argument,
    observe_options,
)
from diag.commands.options import BudgetOptions, PreflightOptions, RampOptions
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


def command(panel: str, name: str = "", takes_flags: bool = False) -> Callable[[Callable[..., None]], object]:
    """Register a command under this heading of `diag --help`; if it `takes_flags`, one of vLLM may be its argument."""

    def register(function: Callable[..., None]) -> object:
        shown_name = name or function.__name__
        settings = {"ignore_unknown_options": takes_flags}
        decorate = app.command(shown_name, cls=CommandHelp, rich_help_panel=panel, context_settings=settings)
        return decorate(DeclaredCommand(function, shown_name))

    return register


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


class ReportOptions(NamedTuple):
    """The report of `diag doctor`: what is printed and written, once or as incidents begin and end."""

    html: Path | None = None
    keep_watching: bool = False
    until_what: Literal["resolved"] | None = None
    alertmanager: str = ""
    fail_on: Literal["warning", "critical", "never"] = "warning"
    verbose: bool = False
    quiet: bool = False
    why: str = ""
    log_level: Literal["debug", "warning"] = "warning"

    def check(self, form: str, *, baseline: bool, stacks: bool) -> None:
        """Raise BadUsage for options that exclude or need each other."""
        watching, other_form = self.keep_watching, form != "terminal"
        refusals = (
            (
                self.quiet and (self.verbose or watching or other_form),
                "--quiet prints line 1 only: leave out --verbose, --watch, --json and --markdown",
            ),
            (
                self.why and (self.verbose or self.quiet or watching or other_form),
                "--why prints one incident's conditions: leave out --verbose, --quiet, --watch and other formats",
            ),
            (baseline and watching, "--watch prints incidents as they begin and end: leave out --baseline"),
            (self.until_what and not watching, "--until needs --watch: it sets the end of the watch"),
            (
                self.alertmanager and not watching,
                "--alertmanager needs --watch: it receives alerts as they fire and resolve",
            ),
            (
                stacks and (watching or self.why or self.quiet),
                "--stacks adds to a report: leave out --watch, --why and --quiet",
            ),
            (
                watching and other_form,
                "--watch prints lines as incidents begin and end: leave out --json and --markdown",
            ),
        )
        for is_refused, sentence in refusals:
            if is_refused:
                raise BadUsage(sentence)


@command("Diagnose")
def doctor(
    targets: list[str] | None = None,
    *,
    prometheus: PrometheusOptions,
    k8s: str = "",
    scrape: ScrapeOptions,
    probe: bool = False,
    evidence: EvidenceOptions,
    stacks: bool = False,
    vllm_version: str = "",
    baseline: Path | None = None,
    output: FormatOptions,
    report: ReportOptions,
    configuration: ConfigurationOptions,
) -> None:
    """Diagnose a live vLLM server, a recording, or a fleet through Prometheus.

    Print at most 20 lines: verdict, evidence, mitigation, the flag to change, ruled-out causes.
    On the server's own host, also read its GPUs and processes.
    """
    from diag.commands import doctor as work

    if report.log_level == "debug":
        from diag.core.debug_log import print_log

        print_log()
    form, why = output.form, report.why
    more = {"probe": probe, "k8s": k8s, "version": vllm_version}
    options = observe_options(targets, prometheus, scrape, evidence, configuration, **more)
    report.check(form, baseline=baseline is not None, stacks=stacks)
    if report.keep_watching:
        from diag.commands import watch

        judged, status = watch.watch(options, report.until_what == "resolved", report.alertmanager), 0
    else:
        judged = work.run(
            options,
            baseline,
            only_suspects=form != "json" and not why,
            with_vitals=form != "terminal" or report.verbose or report.html is not None,
            with_stacks=stacks,
            why=why,
        )
        if why:
            work.print_why(judged, why)
        else:
            work.print_report(judged, form, verbose=report.verbose, quiet=report.quiet)
        status = work.exit_code(judged, report.fail_on)
    if report.html:
        work.write_html(judged, report.html, configuration.contract)
    raise typer.Exit(status)


@command("Diagnose")
def gpus(
    *,
    gpus: str = "",
    every: float = 1.0,
    duration: float = 30.0,
    as_json: bool = False,
    configuration: ConfigurationOptions,
) -> None:
    """Judge the GPUs of this host, also without a server: throttling, faults, lanes of PCIe, and who holds memory."""
    from diag.commands.gpus import run
    from diag.report.gpus import DOCUMENT, STATUS, render

    judged = run([name.strip() for name in gpus.split(",") if name.strip()], duration, every, *configuration)
    typer.echo((DOCUMENT.text if as_json else render)(judged), nl=False)
    raise typer.Exit(STATUS[judged.verdict])


@command("Diagnose")
def top(
    targets: list[str] | None = None,
    *,
    prometheus: PrometheusOptions,
    every: float = 5.0,
    timeout: float | None = None,
    evidence: EvidenceOptions,
    configuration: ConfigurationOptions,
) -> None:
    """Show live servers in a terminal, worst first: verdict, load, latency, GPUs; Enter opens a server.

    Keys: s sorts, / filters, g shows GPUs, p pauses, r records the last minutes, o opens the runbook, q quits. Needs
    pip install 'diag[top]'.
    """
    from diag.commands import top as work

    options = observe_options(targets, prometheus, evidence, configuration, every=every, timeout=timeout)
    work.run(options, here=not targets and not options.prometheus)


@command("Diagnose")
def verify(
    before: str,
    after: str = "",
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
    targets: list[str] | None = None,
    *,
    load: RampOptions,
    every: float = 1.0,
    duration: float = 300.0,
    timeout: float | None = None,
    evidence: EvidenceOptions,
    contract: Path | None = None,
    against: Path | None = None,
    output: FormatOptions,
    html: Path | None = None,
) -> None:
    """Increase the load on a server step by step to find its ceiling, the binding resource and the flag to change.

    Except for --probe, this is the only load that diag generates. It asks first, and changes no setting. Given finished
    results, it generates none: --against compares one with an earlier one, and several make a table by time.
    """
    from diag.commands import ramp as work

    sources = [load.attach, bool(load.results), bool(load.python)]
    if sum(sources) > 1:
        raise BadUsage("--vllm-python, --attach and --results exclude each other: choose one source of load")
    names, earlier = targets or ([] if load.results else [HERE]), work.read_earlier(against)
    if not any(sources) and work.are_kept(names):
        raise typer.Exit(work.print_kept(names, earlier, output.form))
    observed = observe_options(names, evidence, every=every, duration=duration, timeout=timeout, contract=contract)
    judged = work.run(load, observed)
    if html:
        work.write_html(judged, html, earlier)
    raise typer.Exit(work.print_report(judged, output.form, earlier))


@command("Collect")
def config(
    targets: list[str] | None = None, *, timeout: float | None = None, evidence: EvidenceOptions, as_json: bool = False
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
    targets: list[str] | None = None,
    *,
    prometheus: PrometheusOptions,
    scrape: ScrapeOptions,
    csv: Path | None = None,
    configuration: ConfigurationOptions,
) -> None:
    """Write the signals of a time range as CSV: time, instance, engine, gpu, signal, unit, window, value."""
    from diag.commands.observe import export_signals

    summary = export_signals(observe_options(targets, prometheus, scrape, configuration), csv)
    if csv:
        typer.echo(summary)


@command("Collect")
def record(target: list[str], folder: Path, *, scrape: ScrapeOptions = RECORDING, evidence: EvidenceOptions) -> None:
    """Record live servers, without secrets, into a folder that diag can diagnose anywhere at any time."""
    from diag.commands.observe import record_servers

    typer.echo(record_servers(observe_options(target, scrape, evidence), folder))


@command("Collect")
def bundle(
    targets: list[str] | None = None,
    *,
    k8s: str = "",
    scrape: ScrapeOptions = RECORDING,
    evidence: EvidenceOptions,
    file: Path | None = None,
    as_issue: bool = False,
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
    action: Literal["save", "compare"],
    targets: list[str] | None = None,
    *,
    prometheus: PrometheusOptions,
    scrape: ScrapeOptions = LEARNING,
    evidence: EvidenceOptions,
    file: Path | None = None,
    include_unhealthy: bool = False,
    even_ill: bool = False,  # the old name of the option
    configuration: ConfigurationOptions,
) -> None:
    """Save the speed of healthy servers at each load for diag doctor --baseline, or compare two such files.

    The file keeps ITL, TTFT, output tokens/s, energy per token, prefix cache hit rate and start-up phases for each
    model, vLLM release, GPU and set of flags.
    """
    from diag.commands.verify import compare_baselines, save_baseline

    if action == "compare":
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
    vllm: str = HERE,
    gpus: str = "",
    evidence: EvidenceOptions,
    timeout: float = 8.0,
    probe: float = 0.0,
    listen: str = "127.0.0.1:9400",
    tls_cert: str = "",
    tls_key: str = "",
    tls_client_ca: str = "",
    web_config: str = "",
) -> None:
    """Serve vLLM's metrics with GPU, log and process metrics added, for Prometheus to scrape instead of vLLM."""
    from diag.commands.exporter import ExporterOptions, run

    tls, more = (tls_cert, tls_key, tls_client_ca), evidence._asdict()
    run(ExporterOptions(vllm, listen, gpus=gpus, timeout=timeout, probe=probe, tls=tls, web_config=web_config, **more))


@command("Collect")
def replay(
    recording: Path,
    *,
    listen: str = "127.0.0.1:8000",
    speed: float = 1.0,
    log: Path | None = None,
    at_end: Literal["again", "hold", "exit"] = "again",
) -> None:
    """Serve a recording as a live vLLM server, to try dashboards, alerts and the doctor without a GPU."""
    from diag.commands.exporter import replay as work

    work(recording, listen, speed, log, at_end)


@command("Diagnose", takes_flags=True)
def explain(name: str = "", *, as_markdown: bool = False, incidents: Path | None = None) -> None:
    """Show an incident's runbook (meaning, symptoms, look-alikes, mitigation, fix) or a lint rule's page.

    Popular advice that is wrong is answered by its name: gpu_cache_usage_perc, nccl, --swap-space.

    On a terminal, format the page and show it through $PAGER (default: less; cat for none); NO_COLOR is respected.
    """
    from diag.commands.explain import show

    show(name, incidents, as_markdown)


@command("Check before a rollout", takes_flags=True)
def budget(command: list[str], *, options: BudgetOptions, as_json: bool = False) -> None:
    """Estimate GPU memory, before or after launch, or compare GPUs: fit, ceilings, cost.

    Nothing is started or downloaded.
    """
    from diag.commands.budget import launch, run

    text, status = run(options._replace(target=launch(command)), as_json)
    typer.echo(text, nl=False)
    raise typer.Exit(status)


@command("Check before a rollout")
def lint(
    command: list[str],
    *,
    vllm_version: str = "",
    python: str = "",
    ignore: list[str] | None = None,
    gpu: str = "",
    here: bool = False,
    only: str = "",
    every: bool = False,
    form: Literal["text", "json", "sarif", "github", "junit", "markdown"] = "text",
    contract: Path | None = None,
    as_json: bool = False,
) -> None:
    """Check launch commands, files or folders for removed, ineffective, conflicting or harmful flags.

    Every server of a file is judged. Nothing is started. Exit status: 0 no warning, 1 warnings or a file of several
    that could not be read, 2 errors, 65 no launch of vLLM found, 66 no such file.
    """
    from diag.commands.lint import LintOptions, run

    options = LintOptions(
        vllm_version, python, ignore or (), contract, gpu=gpu, here=here, every=every, only=only, form=form
    )
    text, status = run(command, options, as_json)
    typer.echo(text, nl=False)
    raise typer.Exit(status)


@command("Check before a rollout")
def preflight(
    *, options: PreflightOptions, output: FormatOptions, verbose: bool = False, contract: Path | None = None
) -> None:
    """Decide if a launch may go ahead: command, GPU memory, host, network, telemetry and measured capacity.

    Nothing is started, written or downloaded. Without --bench it takes less than 5 s.
    """
    from diag.commands import preflight as work

    form = output.form
    raise typer.Exit(work.print_report(work.run(options, contract), form, verbose))


@command("Diagnose", "incidents")
def list_incidents(incidents: Path | None = None) -> None:
    """List the incidents that diag looks for."""
    from diag.commands.explain import list_incidents as work

    typer.echo(work(incidents), nl=False)


@command("Diagnose")
def mcp(
    servers: list[str] | None = None,
    *,
    recordings: Path | None = None,
    prometheus: str = "",
    scrape: ScrapeOptions,
    deadline: float = 180.0,
    evidence: EvidenceOptions,
    configuration: ConfigurationOptions,
) -> None:
    """Serve doctor, explain, lint, budget, config and verify as read-only tools for agents (MCP over stdio).

    An agent can query only the servers, recordings and the Prometheus on this command line.
    """
    from diag.commands.mcp import run

    run(servers or (), recordings, prometheus, deadline, observe_options([], scrape, evidence, configuration))


@command("Set up Prometheus and Grafana")
def generate(
    folder: Path = Path(),
    *,
    check: bool = False,
    only: list[str] | None = None,
    dashboards: Literal["default", "incidents"] = "default",
    settings: list[str] | None = None,
    configuration: ConfigurationOptions,
) -> None:
    """Write Prometheus alerts, Grafana dashboards and runbooks, with your SLOs and thresholds."""
    from diag.commands.explain import generate as work

    per_incident = dashboards == "incidents"
    text, status = work(folder, check, *configuration, only or (), per_incident, settings or ())
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
        named = copy(app)  # with the named command alone, if it exists: building the options of all takes 10 ms
        named.registered_commands = [one for one in app.registered_commands if [one.name] == sys.argv[1:2]]
        status = (named if named.registered_commands else app)(prog_name="diag", standalone_mode=False)
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
