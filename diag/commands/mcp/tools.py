"""The tools: what each takes, what it answers with, and the command of diag whose work it is.

Each is the command's own JSON with what is most needed of it, so that an agent reads what `diag COMMAND --json` prints.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diag.commands import budget, config, doctor, explain, incidents, lint, sizing, verify
from diag.commands.mcp import pages, schemas
from diag.commands.mcp.targets import AllowedTargets, NotAllowed
from diag.core.errors import BadUsage
from diag.core.files import exists
from diag.sources.prometheus.scope import Scope, TimeSpan
from diag.vllm.command.parse import parse
from diag.vllm.memory.model import is_folder

Arguments = Mapping[str, Any]
Document = dict[str, Any]


class AgentTool(NamedTuple):
    """One tool: `takes` are the properties of its arguments, `needs` the required ones, `gives` its output schema.

    `declared` is whether its answer has nothing in it but what diag and the site declare, so that nothing is quoted.
    """

    name: str
    title: str
    says: str
    takes: Mapping[str, Any]
    needs: tuple[str, ...]
    gives: Mapping[str, Any]
    work: Callable[[AllowedTargets, Arguments], Document]
    declared: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """The schema of its arguments; an argument that is not in it is refused, a token above all."""
        takes = {**self.takes, "detail": schemas.DETAIL}
        return {"type": "object", "properties": takes, "required": list(self.needs), "additionalProperties": False}


def _doctor(targets: AllowedTargets, given: Arguments) -> Document:
    span = TimeSpan(given.get("at", ""), given.get("window", TimeSpan().window))
    these = {field: [given[name]] for name, field in (("instance", "instances"), ("model", "models")) if name in given}
    report = doctor.run(targets.options(given.get("target", ""), Scope(span, **these)))
    return pages.report(report, given.get("detail", False))


def _config(targets: AllowedTargets, given: Arguments) -> Document:
    options = targets.options(given.get("target", ""))
    if options.prometheus:
        raise NotAllowed("config reads a server or a recording: a Prometheus does not know flags (doctor does ask it)")
    return pages.configuration(json.loads(config.run(options, as_json=True)), given.get("detail", False))


def _verify(targets: AllowedTargets, given: Arguments) -> Document:
    before = targets.recording(given["before"])
    if not before:
        raise NotAllowed(f"before must be a recording made before the change; the targets are: {targets.named()}")
    options = targets.options(given["after"])
    if options.prometheus:
        raise NotAllowed("after must be a server or a recording: verify does not ask a Prometheus")
    return pages.comparison(verify.verify(before, options), given.get("detail", False))


def _explain(targets: AllowedTargets, given: Arguments) -> Document:
    folder = targets.base.incidents
    if "id" not in given:
        return {"incidents": incidents.run(folder).splitlines()}
    return pages.runbook(explain.run(given["id"], folder), given.get("section", ""), given.get("detail", False))


def _lint(targets: AllowedTargets, given: Arguments) -> Document:
    command = _text(given["command"])
    options = lint.LintOptions(given.get("vllm_version", ""), contract=targets.base.contract, foreign=True)
    return pages.findings(json.loads(lint.run(command, options, as_json=True)[0]), given.get("detail", False))


def _budget(targets: AllowedTargets, given: Arguments) -> Document:
    if ("command" in given) == ("target" in given):
        raise NotAllowed("give either command (a launch command or a model) or target (a server, to compare GPUs)")
    what = _without_files(given["command"]) if "command" in given else _server(targets, given["target"])
    version = given.get("vllm_version", "")
    several = sizing.SizingOptions(
        given.get("all_gpus", False),
        given.get("gpu", ""),
        given.get("context", ""),
        given.get("concurrency"),
        version=version,
    )
    options = budget.BudgetOptions(what, given.get("gpu", ""), given.get("gpu_memory", ""), "", version, several)
    return pages.memory(json.loads(budget.run(options, as_json=True)[0]), given.get("detail", False))


def _server(targets: AllowedTargets, name: str) -> str:
    options = targets.options(name)
    if options.prometheus:
        raise NotAllowed("budget needs a server or a recording: a Prometheus does not know how servers were started")
    return options.targets[0]


def _text(command: str) -> str:
    """A command as an agent may give it: not the name of a file."""
    if exists(command.strip()):
        raise NotAllowed("give the command itself: no file of this host is opened for an agent")
    return command


def _without_files(command: str) -> str:
    """The same for what would open the files that a command names: a --config file, a model's folder."""
    command = _text(command)
    try:
        found = parse(command)
    except BadUsage:  # what is wrong with it is said by the command itself; it may be the id of a model alone
        model, config_file = command.strip(), ""
    else:
        model, config_file = found.model, found.config
    if config_file:
        raise NotAllowed("write the flags of its --config file into the command: that file is not opened for an agent")
    if is_folder(model) or Path(model).is_absolute() or model.startswith(("~", ".")):
        raise NotAllowed("name the model by its Hugging Face id: no folder of this host is opened for an agent")
    return command


TOOLS = (
    AgentTool(
        "doctor",
        "Diagnose a vLLM server",
        "Diagnose a live vLLM server (it is watched for half a minute, up to two while it looks stuck), a recording, or"
        " a fleet through Prometheus: incidents with evidence, what was ruled out, and the flag to change.",
        {"target": schemas.TARGET, **schemas.SCOPE},
        (),
        schemas.REPORT,
        _doctor,
    ),
    AgentTool(
        "explain",
        "Explain an incident or a lint rule",
        "The runbook of an incident or the page of a lint rule; without an id, the list of incidents.",
        {"id": schemas.text("the id of an incident or of a lint rule"), "section": schemas.text("one section, whole")},
        (),
        schemas.PAGE,
        _explain,
        declared=True,
    ),
    AgentTool(
        "lint",
        "Check a launch command",
        "Check a vLLM launch command for removed, ineffective, conflicting or harmful flags. Nothing is started.",
        {"command": schemas.COMMAND, "vllm_version": schemas.VERSION},
        ("command",),
        schemas.FINDINGS,
        _lint,
    ),
    AgentTool(
        "budget",
        "Estimate GPU memory",
        "Estimate the GPU memory of a launch command or a model, or compare GPUs (all_gpus, or gpu with concurrency):"
        " what fits, how many requests, how fast at most. Nothing is started or downloaded.",
        {"command": schemas.COMMAND, "target": schemas.TARGET, "vllm_version": schemas.VERSION, **schemas.SIZES},
        (),
        schemas.MEMORY,
        _budget,
    ),
    AgentTool(
        "config",
        "Show a server's configuration",
        "The flags that a server runs with, each with where it was read; by default those that are not the default.",
        {"target": schemas.TARGET},
        (),
        schemas.CONFIGURATION,
        _config,
    ),
    AgentTool(
        "verify",
        "Check whether a change fixed an incident",
        "Compare a recording made before a change with the server, or a recording, after it: fixed or not, at the same"
        " load, and at what cost for users.",
        {"before": schemas.text("name of a recording"), "after": schemas.TARGET},
        ("before", "after"),
        schemas.COMPARISON,
        _verify,
    ),
)
"""All of them only read. Recording and ramping are not among them: they write files, and put load on servers."""
