"""`diag doctor`: diagnose a recording, live servers or a Prometheus; print the report and choose the exit status."""

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from diag.commands.observe import ObserveOptions, look, site
from diag.core.errors import BadUsage
from diag.core.files import refused_in_words, written_whole
from diag.core.formatting import printable
from diag.core.subjects import instance_name
from diag.diagnosis.report import Report
from diag.diagnosis.vitals import vitals
from diag.report.sentences import is_fleet

if TYPE_CHECKING:
    from diag.diagnosis.roll_call import RollCall

EXIT = {"healthy": 0, "no_incident": 0, "warning": 1, "critical": 2, "unknown": 3}
MOST_COMPARED = 20
"""Unhealthy servers of a fleet, at most, that are compared with their peers."""
Format = Literal["terminal", "json", "markdown"]
_IMAGE = "python:3.12-slim"
IN_A_POD = (
    'pip install -q py-spy && grep -lzxE "[V]LLM::.*|.*/[v]llm|[v]llm[.]entrypoints.*" /proc/[0-9]*/cmdline'
    " | cut -d/ -f3 | xargs -rn1 py-spy dump --nonblocking --pid"
)
"""Prints the stacks of vLLM's processes, by their titles or the command of the API server, in a pod's namespace of
processes; the brackets keep grep from finding itself."""


def run(
    options: ObserveOptions,
    baseline: Path | None = None,
    *,
    only_suspects: bool = False,
    with_vitals: bool = True,
    with_stacks: bool = False,
    why: str = "",
) -> Report:
    """Diagnose one recording, live servers, or the servers in a Prometheus, and compare them with their normal speed.

    `only_suspects` is for fleets (`diag.diagnosis.fleet.judge`). Without `with_vitals`, the vital signs of the
    servers are not measured, which the short report does not print; `with_stacks` also reads the stacks of their
    processes. BadUsage if there is no incident `why`, and for stacks of anything but servers of this host.
    """
    if with_stacks and options.kind not in ("servers", "pods"):
        raise BadUsage("--stacks reads the processes of a server on this host")
    contract, incidents = site(options.incidents, options.contract)
    if why and why not in {incident.id for incident in incidents}:
        raise BadUsage(f"there is no incident '{printable(why, 40)}': diag incidents lists them")
    file = baseline or (Path(contract.baseline) if contract.baseline else None)
    if file:
        from diag.normal.baseline import read
        from diag.normal.comparison import by_baseline

        normal = read(file)  # an error in it is reported before servers are scraped
    report, queries, running = look(options, contract, incidents, only_suspects=only_suspects)
    if with_vitals and not report.observed.endings and not is_fleet(report):
        report = report._replace(vitals=vitals(queries, running))
    if file:
        report = report._replace(normality=by_baseline(queries, normal, str(file)))
    else:
        diagnoses = (finding.diagnosis for finding in report.present if finding.diagnosis.severity != "info")
        unhealthy = list(dict.fromkeys(instance_name(diagnosis.subject) for diagnosis in diagnoses))
        if unhealthy and not report.observed.endings and len(report.observed.servers) > 1:
            from diag.normal.comparison import by_peers

            report = report._replace(normality=by_peers(queries, unhealthy[:MOST_COMPARED]))
    if with_stacks:
        calls = stacks_in_pods(report) if options.k8s else roll_calls(report, options.targets)
        report = report._replace(roll_calls=tuple(calls))
    return report


def roll_calls(report: Report, targets: Sequence[str]) -> Iterator["RollCall"]:
    """Yield where the processes of each server stand, by two dumps; a server that moves tokens has no suspect."""
    from diag.diagnosis.roll_call import APART, RollCall, roll_call
    from diag.exporter.process import stacks
    from diag.exporter.process.collector import ProcessCollector
    from diag.http.address import is_here, parse

    for address in map(parse, targets):
        if not is_here(address):
            where = f"Its processes are on another host: run diag doctor --stacks there, on {address.host}."
            yield RollCall(address.instance, conclusion=where)
            continue
        processes = ProcessCollector(address.port)
        problem = processes.collect().problem
        owners = processes.owners()
        dumps = [stacks.take(owners)]
        if any(stack.frames for stack in dumps[0]):
            time.sleep(APART)
            dumps.append(stacks.take(owners))
        states = {progress.state for progress in report.progress if instance_name(progress.subject) == address.instance}
        call = roll_call(address.instance, dumps, works=states == {"busy"})
        yield call._replace(conclusion=f"{problem[0].upper()}{problem[1:]}.") if problem else call


def stacks_in_pods(report: Report) -> Iterator["RollCall"]:
    """Yield the command that reads the stacks in each pod: it adds a container to the pod, so a person runs it."""
    from diag.diagnosis.roll_call import RollCall

    containers = dict(report.observed.containers)
    for server in report.observed.servers:
        if server.name not in containers:
            yield RollCall(server.name, conclusion="Its container does not run: it has no stacks.")
            continue
        context, namespace, pod, container = containers[server.name]
        place = [*(["--context", context] if context else []), "-n", namespace]
        debug = ["debug", "-it", pod, f"--target={container}", "--profile=general", f"--image={_IMAGE}"]
        command = shlex.join(["kubectl", *place, *debug, "--", "sh", "-c", IN_A_POD])
        why = "Its processes are in a pod. This command adds a container to the pod, which reads their stacks:"
        yield RollCall(server.name, conclusion=why, command=command)


def print_report(report: Report, form: Format, *, verbose: bool = False, quiet: bool = False) -> None:
    """Print a report on standard output; JSON has every incident anyway."""
    if form == "terminal":
        from diag.report import terminal

        return terminal.write(report, verbose=verbose, quiet=quiet)
    if form == "json":
        from diag.report import json

        text = json.render(report)
    else:
        from diag.report import markdown

        text = markdown.render(report, verbose)
    sys.stdout.write(text)


def print_why(report: Report, incident: str) -> None:
    """Print every condition of an incident on each subject."""
    from diag.report.plain_text import render_why

    sys.stdout.write(render_why(report, incident))


def write_html(report: Report, file: Path, contract: Path | None = None) -> None:
    """Write the page, with links to the site's runbooks if diag.toml has their address."""
    from diag.core.contract import find
    from diag.report import html

    runbooks = find(contract).site.runbook_base_url

    with refused_in_words(file), written_whole(file) as out:
        out.write(html.render(report, runbooks))


def exit_code(report: Report, fail_on: str) -> int:
    """Return 0 healthy, 1 warning, 2 critical, 3 cannot tell; 0 below the verdict `fail_on`."""
    code = EXIT[report.verdict]
    least = {"warning": 1, "critical": 2, "never": max(EXIT.values()) + 1}[fail_on]
    return code if code >= least else 0
