"""The tools of `diag mcp`: JSON schemas of their arguments and answers, and the calls behind them.

An answer may have more than its schema names.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diag.commands import budget, doctor, explain, lint, observe, sizing, verify
from diag.commands.mcp import answers
from diag.commands.mcp.targets import AllowedTargets, NotAllowed
from diag.core.errors import BadUsage
from diag.core.files import exists
from diag.sources.prometheus.scope import Scope, TimeSpan
from diag.vllm.command.parse import parse
from diag.vllm.memory.model import is_folder

Schema = dict[str, Any]


def text(says: str, longest: int = 200) -> Schema:
    """Return the schema of an argument that is a text."""
    return {"type": "string", "description": says, "minLength": 1, "maxLength": longest}


def _list(of: Schema | None = None) -> Schema:
    return {"type": "array", "items": {"type": "string"} if of is None else of}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties}


def _answer(*required: str, **properties: Schema) -> Schema:
    cut = {"left_out": {**_list(), "description": "what was cut: ask with detail, or for less"}}
    return {"type": "object", "required": list(required), "properties": {**properties, **cut}}


_STRING: Schema = {"type": "string"}
_MAYBE: Schema = {"type": ["string", "null"]}
_NUMBER: Schema = {"type": ["number", "null"]}
_YES: Schema = {"type": "boolean"}
_SEVERITY: Schema = {"enum": ["info", "warning", "critical"]}

DETAIL: Schema = {"type": "boolean", "description": "all that is known, in up to ten times as many tokens"}
TARGET = text("URL, name of a recording, or prometheus: one of the targets that the server's instructions list")
COMMAND = text(
    "the launch command itself (vllm serve MODEL --flag value), a script or a manifest; no file name", 65_536
)
VERSION = text("vLLM release: 0.32.0")
SCOPE = {
    "at": text("with the target prometheus: end of the time window, 2026-11-20T03:12Z or -2h; default now"),
    "window": text("with the target prometheus: length of the window, 15m or 24h"),
    "instance": text("with the target prometheus: regular expression of the servers' instance label"),
    "model": text("with the target prometheus: regular expression of the model's name"),
}
SIZES = {
    "gpu": text("h100, a100-80, l40s ...; default: this host's"),
    "gpu_memory": text("memory of one GPU: 79.1GiB"),
    "all_gpus": {"type": "boolean", "description": "compare all GPUs that diag knows"},
    "context": text("tokens of each request: 32k"),
    "concurrency": {"type": "integer", "minimum": 1, "maximum": 2**20, "description": "requests at a time"},
}

_DIAGNOSIS = _object(
    incident=_STRING,
    state={"enum": ["present"]},
    severity=_SEVERITY,
    subject={"type": "object", "additionalProperties": _STRING},
    primary=_YES,
    explained_by=_MAYBE,
    since={**_NUMBER, "description": "unix seconds; null: before the first scrape"},
    until=_NUMBER,
    ongoing=_YES,
    title=_STRING,
    impact=_STRING,
    symptoms=_list({"type": "object"}),
    ruled_out=_list({}),
    not_ruled_out=_list({}),
    quotes=_list({}),
    fixes=_list({"type": "object"}),
    relaunch=_MAYBE,
)
REPORT = _answer(
    *("verdict", "headlines", "diagnoses", "observed"),
    verdict={"enum": ["healthy", "warning", "critical", "unknown"]},
    headlines={**_list(), "description": "the verdict in a line for each primary incident"},
    shared={**_list(), "description": "the label that the ill servers of a fleet have and its healthy ones lack"},
    observed={"type": "object"},
    diagnoses={**_list(_DIAGNOSIS), "description": "the incidents that are present, primary ones first"},
    unknown={**_list(), "description": "why finding nothing does not mean health"},
    not_collected={**_list(), "description": "telemetry that is missing, and how to get it"},
    notes=_list(),
    normal=_list(),
)
PAGE = _answer(
    title=_STRING,
    sections=_list(_object(title=_STRING, text=_STRING)),
    other_sections=_list(),
    incidents=_list(),
)
FINDINGS = _answer(
    *("vllm_version", "findings", "corrected_command"),
    vllm_version=_STRING,
    findings=_list(
        _object(rule=_STRING, severity={"enum": ["error", "warning", "info"]}, message=_STRING, fix=_STRING)
    ),
    corrected_command=_MAYBE,
    errors_left={"type": "integer"},
    not_checked=_list(),
)
MEMORY = _answer(
    "model",
    model=_STRING,
    verdict={"enum": ["fits", "does not fit", "cannot tell"]},
    reasons=_list(),
    notes=_list(),
    rows=_list({"type": "object"}),
    suggestions=_list(_object(flag=_STRING, value=_STRING)),
    choices=_list(),
    configurations=_list({"type": "object"}),
)
CONFIGURATION = _answer(
    "servers",
    servers=_list(_object(instance=_STRING, version=_MAYBE, model=_MAYBE, settings=_list({"type": "object"}))),
    notes=_list(),
)
COMPARISON = _answer(
    *("verdict", "headlines", "servers"),
    verdict={"enum": ["fixed", "better", "no effect", "worse", "not comparable"]},
    headlines=_list(),
    servers=_list({"type": "object"}),
    unmatched=_list(),
)


Arguments = Mapping[str, Any]
Document = dict[str, Any]


class AgentTool(NamedTuple):
    """One tool: `takes` are the properties of its arguments, `needs` the required ones, `gives` its output schema.

    `declared` is True if its answer holds only declarations of diag and the site, so that nothing is quoted.
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
        """The schema of its arguments; it refuses unknown arguments, such as a token."""
        takes = {**self.takes, "detail": DETAIL}
        return {"type": "object", "properties": takes, "required": list(self.needs), "additionalProperties": False}


def _doctor(targets: AllowedTargets, given: Arguments) -> Document:
    span = TimeSpan(given.get("at", ""), given.get("window", TimeSpan().window))
    these = {field: [given[name]] for name, field in (("instance", "instances"), ("model", "models")) if name in given}
    report = doctor.run(targets.options(given.get("target", ""), Scope(span, **these)))
    return answers.report(report, given.get("detail", False))


def _config(targets: AllowedTargets, given: Arguments) -> Document:
    options = targets.options(given.get("target", ""))
    return answers.configuration(
        json.loads(observe.show_configuration(options, as_json=True)), given.get("detail", False)
    )


def _verify(targets: AllowedTargets, given: Arguments) -> Document:
    before = targets.recording(given["before"])
    if not before:
        raise NotAllowed(f"before must be a recording made before the change; the targets are: {targets.named()}")
    return answers.comparison(verify.verify(before, targets.options(given["after"])), given.get("detail", False))


def _explain(targets: AllowedTargets, given: Arguments) -> Document:
    folder = targets.base.incidents
    if "id" not in given:
        return {"incidents": explain.list_incidents(folder).splitlines()}
    return answers.runbook(explain.run(given["id"], folder), given.get("section", ""), given.get("detail", False))


def _lint(targets: AllowedTargets, given: Arguments) -> Document:
    command = _not_a_file(given["command"])
    options = lint.LintOptions(given.get("vllm_version", ""), contract=targets.base.contract, foreign=True)
    return answers.findings(json.loads(lint.run(command, options, as_json=True)[0]), given.get("detail", False))


def _budget(targets: AllowedTargets, given: Arguments) -> Document:
    if ("command" in given) == ("target" in given):
        raise NotAllowed("give either command (a launch command or a model) or target (a server, to compare GPUs)")
    if "command" in given:
        what = _without_files(given["command"])
    else:
        server = targets.options(given["target"])
        if server.prometheus:
            raise NotAllowed(
                "budget needs a server or a recording: a Prometheus does not know how servers were started"
            )
        what = server.targets[0]
    version = given.get("vllm_version", "")
    several = sizing.SizingOptions(
        given.get("all_gpus", False),
        given.get("gpu", ""),
        given.get("context", ""),
        given.get("concurrency"),
        version=version,
    )
    options = budget.BudgetOptions(what, given.get("gpu", ""), given.get("gpu_memory", ""), "", version, several)
    return answers.memory(json.loads(budget.run(options, as_json=True)[0]), given.get("detail", False))


def _not_a_file(command: str) -> str:
    """Return the command; NotAllowed for the name of a file."""
    if exists(command.strip()):
        raise NotAllowed("give the command itself: no file of this host is opened for an agent")
    return command


def _without_files(command: str) -> str:
    """Return the command; NotAllowed for a file, and for a command that names a --config file or a model's folder."""
    command = _not_a_file(command)
    try:
        found = parse(command)
    except BadUsage:  # it may be a model's id; else `diag budget` reports the error
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
        {"target": TARGET, **SCOPE},
        (),
        REPORT,
        _doctor,
    ),
    AgentTool(
        "explain",
        "Explain an incident or a lint rule",
        "The runbook of an incident or the page of a lint rule; without an id, the list of incidents.",
        {"id": text("the id of an incident or of a lint rule"), "section": text("one section, whole")},
        (),
        PAGE,
        _explain,
        declared=True,
    ),
    AgentTool(
        "lint",
        "Check a launch command",
        "Check a vLLM launch command for removed, ineffective, conflicting or harmful flags. Nothing is started.",
        {"command": COMMAND, "vllm_version": VERSION},
        ("command",),
        FINDINGS,
        _lint,
    ),
    AgentTool(
        "budget",
        "Estimate GPU memory",
        "Estimate the GPU memory of a launch command or a model, or compare GPUs (all_gpus, or gpu with concurrency):"
        " what fits, how many requests, how fast at most. Nothing is started or downloaded.",
        {"command": COMMAND, "target": TARGET, "vllm_version": VERSION, **SIZES},
        (),
        MEMORY,
        _budget,
    ),
    AgentTool(
        "config",
        "Show a server's configuration",
        "The flags that a server runs with, each with where it was read; by default those that are not the default.",
        {"target": TARGET},
        (),
        CONFIGURATION,
        _config,
    ),
    AgentTool(
        "verify",
        "Check whether a change fixed an incident",
        "Compare a recording made before a change with the server, or a recording, after it: fixed or not, at the same"
        " load, and at what cost for users.",
        {"before": text("name of a recording"), "after": TARGET},
        ("before", "after"),
        COMPARISON,
        _verify,
    ),
)
"""All tools only read. Recording and ramping are left out: they write files, and put load on servers."""
