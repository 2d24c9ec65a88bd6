"""`diag preflight`: gather the facts of a launch or of a server that runs, and run every check."""

import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from diag import promql
from diag.commands import budget
from diag.commands.lint import gpu_samples, ignored_rules, judge, judge_all
from diag.commands.observe import ObserveOptions, site
from diag.commands.options import BudgetOptions, PreflightOptions
from diag.core.errors import BadContract, BadUsage, Unreachable
from diag.core.files import exists, expanded, is_folder
from diag.core.formatting import plural
from diag.core.metric_families import families
from diag.http.address import from_environment, is_here, parse
from diag.http.prometheus_api import Alertmanager, PrometheusApi, Refused
from diag.lint.judge import ASSUMED, UNSTATED
from diag.lint.rule import is_open
from diag.lint.rules import RULES
from diag.preflight import machine
from diag.preflight.check import Ask, PreflightFacts
from diag.preflight.checks import CHECKS, STATUS, Preflight, preflight
from diag.preflight.machine import Machine, Wheel
from diag.report import preflight as text
from diag.sources import kept_ramp, source
from diag.sources.source import Scraping
from diag.vllm.command import redaction
from diag.vllm.command.free_text import hidden
from diag.vllm.command.parse import parse as parse_launch
from diag.vllm.command.parse import read
from diag.vllm.flags.installed_parser import interpreter
from diag.vllm.flags.registry import versions
from diag.vllm.memory import model
from diag.vllm.memory.usage import indexed

_SECONDS = 2.0
"""Time limit of one answer of a Prometheus or an Alertmanager: the whole preflight takes a few seconds."""
_PROGRAM = re.compile(r"vllm|python[\d.]*")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")


def run(options: PreflightOptions, contract_file: Path | None = None) -> Preflight:
    """Return the results; BadUsage for a target that is no launch, Unreachable for a server that does not answer."""
    contract, incidents = site(None, contract_file)
    for name in contract.preflight.ignore:
        if name not in CHECKS and name not in RULES:
            problem = f"[preflight.ignore] no check is called '{name}' (docs/preflight.md lists them)"
            raise BadContract(f"{contract.origin}: {problem}")
    file, url = options.ramp or contract.preflight.ramp, options.alertmanager
    facts = PreflightFacts(
        contract=contract,
        incidents=incidents,
        version=options.vllm_version or versions()[-1],
        prometheus=_prometheus(options.prometheus) if options.prometheus else None,
        alertmanager=partial(Alertmanager(url, os.environ).get, seconds=_SECONDS) if url else None,
        ramp=kept_ramp.read(Path(file)) if file else None,
        bench=options.bench,
    )
    is_url = options.target.startswith(("http://", "https://"))
    facts = _of_server(facts, options) if is_url else _of_launch(facts, options)
    named = redaction.name(facts.command.model) if facts.command else ""
    return preflight(facts, named or (parse(options.target).shown if is_url else "the launch"))


def print_report(results: Preflight, form: Literal["terminal", "json", "markdown"], verbose: bool) -> int:
    """Print the results; return the exit status."""
    if form == "json":
        sys.stdout.write(text.DOCUMENT.text(results))
    else:
        is_markdown = form == "markdown"
        sys.stdout.write(text.render_markdown(results) if is_markdown else text.render(results, verbose=verbose))
    return STATUS[results.answer]


# -- a launch ----------------------------------------------------------------------------------------------------------


def _of_launch(facts: PreflightFacts, options: PreflightOptions) -> PreflightFacts:
    launch = options.target
    command = read(launch)
    python = options.vllm_python or interpreter()
    beside = python
    if not beside:  # the Python that the command starts, or the one beside its `vllm`
        programs = (word for word in command.words[: command.arguments] if _PROGRAM.fullmatch(Path(word).name))
        beside = shutil.which(expanded(next(programs, ""))) or ""
        if Path(beside).name == "vllm":
            place = Path(beside).with_name("python")
            beside = str(place) if place.exists() else ""
    wheel = machine.wheel(beside) if beside and not command.elsewhere else Wheel()
    wanted = options.vllm_version or ("" if command.image else wheel.vllm)
    share = facts.contract.preflight.gpu_memory_share
    ignored = ignored_rules((), facts.contract)
    lint, *others = judge_all(launch, wanted, ignored=ignored, gpu=options.gpu, tenant_share=share, ask=False)
    if others:  # they start beside it
        findings = [
            replace(finding, message=f"{report.place or f'line {report.line}'}: {finding.message}")
            for report in others
            for finding in report.findings
            if finding.severity != "info"
        ]
        note = f"the memory and the host of {plural(len(others), 'more server')}: give them one by one"
        lint = replace(lint, findings=(*lint.findings, *findings), not_checked=(note, *lint.not_checked))
    command = read(launch, version=lint.version)
    gpus: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
    samples, no_gpus = gpu_samples(command)
    for family, labels, value in samples:
        gpus[family].append((dict(zip(families()[family].labels, labels, strict=True)), value))
    facts = replace(
        facts,
        version=lint.version,
        command=command,
        lint=lint,
        machine=None if command.elsewhere else Machine(),
        elsewhere=f"the launch starts {command.elsewhere}",
        gpus=gpus,
        no_gpus=no_gpus,
        wheel=wheel,
        python=python,
    )
    return _with_weights(_with_ledger(facts, options, launch))


def _with_ledger(facts: PreflightFacts, options: PreflightOptions, launch: str) -> PreflightFacts:
    try:
        gpu = options.gpu or ("cpu" if facts.on_cpu else "")
        is_assumed = facts.lint is not None and facts.lint.version_source in (ASSUMED, UNSTATED)
        estimate = budget.estimate(BudgetOptions(launch, gpu=gpu, version="" if is_assumed else facts.version))
    except (BadUsage, OSError) as error:
        return replace(facts, no_ledger=hidden(str(error)))
    fitting = tuple(f"{flag} {value}" for flag, value in estimate.suggestions)
    return replace(facts, ledger=estimate.ledger, fitting=fitting)


def _with_weights(facts: PreflightFacts) -> PreflightFacts:
    """Find the files of the weights; a model that will be downloaded has none yet."""
    command = facts.command
    if command is None or command.elsewhere or not command.model or is_open(command.model):
        return facts
    is_path = command.model.startswith(("/", "~", ".")) or is_folder(command.model)
    if is_path and not exists(expanded(command.model)):
        return replace(facts, no_folder=redaction.name(command.model))
    if command.get("--load-format") == "dummy":  # vLLM invents the weights
        return facts
    try:
        folder = model.find(command.model, command, command.get("--revision") or "")
        named = indexed(folder)
    except (BadUsage, OSError, ValueError):
        return facts
    there = tuple(str(file) for pattern in _WEIGHTS for file in sorted(folder.glob(pattern)) if file.exists())
    missing = tuple(sorted(name for name in named if not (folder / name).exists()))
    downloads = not is_path and command.environment.get("HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE")) != "1"
    if downloads and (missing or not there):
        return facts
    return replace(facts, weight_files=there, missing_files=missing if there or named else ("every weight file",))


# -- a server that runs ------------------------------------------------------------------------------------------------


def _of_server(facts: PreflightFacts, options: PreflightOptions) -> PreflightFacts:
    observed = source.observe(ObserveOptions([options.target], duration=0.0, launch=options.launch), Scraping())
    name = observed.instances[0]
    launch, address = options.launch or observed.launch.get(name, ""), parse(options.target)
    gpus: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in families():
        if not family.startswith("diag_gpu_") or family not in observed.samples.names:
            continue
        vector = promql.evaluate(family, observed.samples, observed.instants[-1:])
        rows = zip(vector.labels, vector.values, vector.present, strict=True)
        gpus[family] = [(dict(labels), float(row[0])) for labels, row, there in rows if there[0]]
    facts = replace(
        facts,
        version=options.vllm_version or observed.versions.get(name, "").partition("+")[0] or facts.version,
        machine=Machine() if is_here(address) else None,
        elsewhere="the server runs on another host: run diag preflight there",
        gpus=gpus,
        no_gpus="the page has no GPU metrics: give the URL of diag exporter on that host",
        running=True,
        instance=address.instance,
    )
    if not launch:
        return facts
    ignored, foreign = ignored_rules((), facts.contract), facts.machine is None
    lint = judge(launch, facts.version, ignored=ignored, foreign=foreign, ask=False)
    # no file of this host is opened for the command of another one
    command = parse_launch(launch, lint.version) if foreign else read(launch, version=lint.version)
    return replace(facts, command=command, lint=lint)


# -- Prometheus and Alertmanager ---------------------------------------------------------------------------------------


def _prometheus(url: str) -> Ask:
    address = parse(url)
    if address.query:
        raise BadUsage(f"{address.shown} has a query: leave out the question mark and what follows of a Prometheus URL")
    api = PrometheusApi(address.shown, address, from_environment(os.environ), _SECONDS)
    base = address.path.rstrip("/").removesuffix("/api/v1")

    silent: list[Unreachable] = []

    def ask(path: str) -> Any:
        if silent:  # one that does not answer is not waited for again
            raise silent[0]
        place, _, form = path.partition("?")
        try:
            return api.query("GET", f"{base}{place}", form).get("data")
        except Refused as error:
            raise Unreachable(f"{address.shown}: {error}") from error
        except Unreachable as error:
            silent.append(error)
            raise

    return ask
