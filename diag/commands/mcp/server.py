"""The tools of `diag mcp`, and their MCP server over standard input and output: the only file that imports the SDK.

A tool is one typed function, from which the SDK derives the schemas of arguments and answers. An answer may have more
than its type names.
"""

import asyncio
import json
import re
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Literal, NamedTuple, Required, cast

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import CallToolResult, InputRequiredResult, TextContent, ToolAnnotations
from pydantic import Field, TypeAdapter, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

from diag import __version__
from diag.commands import budget, doctor, explain, lint, observe, verify
from diag.commands.mcp import answers
from diag.commands.mcp.answers import COMPACT, DETAILED, quote, quote_foreign, quote_name, shorten, to_json, without
from diag.commands.mcp.targets import AllowedTargets, NotAllowed, instructions, own_texts
from diag.commands.options import BudgetOptions
from diag.core.errors import BadUsage, DiagError, internal_error
from diag.http.client import run_in_thread
from diag.sources.prometheus.scope import Scope, TimeSpan
from diag.vllm.command.parse import parse
from diag.vllm.memory.model import CACHE_VARIABLES

MOST_AT_ONCE = 4
"""Calls that run at the same time; further ones are queued."""
PROGRESS_SECONDS = 5.0
"""Seconds between two progress notices of a call, for clients that give up after a minute without one."""
LONGEST_MESSAGE = 200


# -- arguments: an optional text is "" if it is not given -------------------------------------------------------------


def text(description: str, longest: int = 200, shortest: int = 0) -> Any:
    """Return the bounds and the description of an argument that is a text."""
    return Field(description=description, min_length=shortest or None, max_length=longest)


_A_TARGET = "URL, name of a recording, or prometheus: one of the targets that the server's instructions list"
_A_COMMAND = "the launch command itself (vllm serve MODEL --flag value), a script or a manifest; no file name"
_OF_PROMETHEUS = "with the target prometheus: "

Detail = Annotated[bool, Field(description="all that is known, in up to ten times as many tokens")]
Target = Annotated[str, text(_A_TARGET)]
Version = Annotated[str, text("vLLM release: 0.32.0")]


# -- answers ----------------------------------------------------------------------------------------------------------


class AgentAnswer(TypedDict, total=False):
    """An answer."""

    left_out: Annotated[list[str], Field(description="what was cut: ask with detail, or for less")]


class PresentIncident(TypedDict, total=False):
    """An incident that is present."""

    incident: str
    state: Literal["present"]
    severity: Literal["info", "warning", "critical"]
    subject: dict[str, str]
    primary: bool
    explained_by: str | None
    since: Annotated[float | None, Field(description="unix seconds; null: before the first scrape")]
    until: float | None
    ongoing: bool
    title: str
    impact: str
    symptoms: list[dict[str, Any]]
    ruled_out: list[Any]
    not_ruled_out: list[Any]
    quotes: list[Any]
    fixes: list[dict[str, Any]]
    relaunch: str | None


class DoctorAnswer(AgentAnswer, total=False):
    """A diagnosis."""

    verdict: Required[Literal["healthy", "no_incident", "warning", "critical", "unknown"]]
    headlines: Required[Annotated[list[str], Field(description="the verdict in a line for each primary incident")]]
    answers: Annotated[
        list[dict[str, Any]],
        Field(description="what to do: for each primary incident where, since when, do_now, fix, do_not"),
    ]
    shared: Annotated[
        list[str], Field(description="the label that the ill servers of a fleet have and its healthy ones lack")
    ]
    observed: Required[dict[str, Any]]
    diagnoses: Required[
        Annotated[list[PresentIncident], Field(description="the incidents that are present, primary ones first")]
    ]
    unknown: Annotated[list[str], Field(description="why finding nothing does not mean health")]
    not_shown: Annotated[list[str], Field(description="what health needs and was not seen")]
    not_collected: Annotated[list[str], Field(description="telemetry that is missing, and how to get it")]
    notes: list[str]
    normal: list[str]


class ExplainAnswer(AgentAnswer, total=False):
    """A page, or the list of incidents."""

    title: str
    sections: list[dict[str, str]]
    other_sections: list[str]
    incidents: list[str]


class CommandFinding(TypedDict, total=False):
    """A finding about a command."""

    rule: str
    severity: Literal["error", "warning", "info"]
    message: str
    fix: str


class LintedServer(TypedDict, total=False):
    """The findings about one server."""

    name: str | None
    line: int | None
    vllm_version: Required[str]
    findings: Required[list[CommandFinding]]
    corrected_command: Required[str | None]
    errors_left: int
    not_checked: list[str]


class LintAnswer(AgentAnswer, total=False):
    """The findings about each server that a text starts."""

    launches: Required[list[LintedServer]]


class BudgetAnswer(AgentAnswer, total=False):
    """An estimate of GPU memory, or a comparison of GPUs."""

    model: Required[str]
    verdict: Literal["fits", "does not fit", "cannot tell"]
    reasons: list[str]
    notes: list[str]
    rows: list[dict[str, Any]]
    suggestions: list[dict[str, str]]
    choices: list[str]
    configurations: list[dict[str, Any]]


class ServerSettings(TypedDict, total=False):
    """The configuration of a server."""

    instance: str
    version: str | None
    model: str | None
    settings: list[dict[str, Any]]


class ConfigAnswer(AgentAnswer, total=False):
    """The configuration of each server."""

    servers: Required[list[ServerSettings]]
    notes: list[str]


class VerifyAnswer(AgentAnswer, total=False):
    """A comparison of two observations."""

    verdict: Required[Literal["fixed", "better", "no effect", "worse", "not comparable"]]
    headlines: Required[list[str]]
    servers: Required[list[dict[str, Any]]]
    unmatched: list[str]


# -- the tools --------------------------------------------------------------------------------------------------------

TITLES = {
    "doctor": "Diagnose a vLLM server",
    "explain": "Explain an incident or a lint rule",
    "lint": "Check a launch command",
    "budget": "Estimate GPU memory",
    "config": "Show a server's configuration",
    "verify": "Check whether a change fixed an incident",
}
"""All tools only read. Recording and ramping are left out: they write files, and put load on servers."""
DECLARED = ("explain",)
"""Tools whose answers hold only declarations of diag and the site, so that nothing is quoted."""


class AgentTools(NamedTuple):
    """The tools for the targets of an allow-list; a docstring is the tool's description for agents."""

    targets: AllowedTargets

    def doctor(
        self,
        target: Target = "",
        at: Annotated[str, text(_OF_PROMETHEUS + "end of the time window, 2026-11-20T03:12Z or -2h; default now")] = "",
        window: Annotated[str, text(_OF_PROMETHEUS + "length of the window, 15m or 24h")] = "",
        instance: Annotated[str, text(_OF_PROMETHEUS + "regular expression of the servers' instance label")] = "",
        model: Annotated[str, text(_OF_PROMETHEUS + "regular expression of the model's name")] = "",
        detail: Detail = False,
    ) -> DoctorAnswer:
        """Diagnose a live vLLM server (it is watched for half a minute, up to two while it looks stuck), a recording,
        or a fleet through Prometheus: incidents with evidence, what was ruled out, and the flag to change.
        """
        span = TimeSpan(at, window or TimeSpan().window)
        scope = Scope(span, instances=[instance] if instance else (), models=[model] if model else ())
        return cast(
            DoctorAnswer, answers.report(doctor.run(self.targets.options(target, scope), with_vitals=False), detail)
        )

    def explain(
        self,
        id: Annotated[str, text("the id of an incident or of a lint rule")] = "",
        section: Annotated[str, text("one section, whole")] = "",
        detail: Detail = False,
    ) -> ExplainAnswer:
        """The runbook of an incident or the page of a lint rule; without an id, the list of incidents."""
        folder = self.targets.base.incidents
        if not id:
            return {"incidents": explain.list_incidents(folder).splitlines()}
        return cast(ExplainAnswer, answers.runbook(explain.run(id, folder), section, detail))

    def lint(
        self,
        command: Annotated[str, text(_A_COMMAND, answers.LONGEST_COMMAND, shortest=1)],
        vllm_version: Version = "",
        detail: Detail = False,
    ) -> LintAnswer:
        """Check a vLLM launch command for removed, ineffective, conflicting or harmful flags. Nothing is started."""
        options = lint.LintOptions(vllm_version, contract=self.targets.base.contract, foreign=True)
        findings, _ = lint.run(_not_a_file(command), options, as_json=True)
        return cast(LintAnswer, answers.findings(json.loads(findings), detail))

    def budget(
        self,
        command: Annotated[str, text(_A_COMMAND, answers.LONGEST_COMMAND)] = "",
        target: Target = "",
        vllm_version: Version = "",
        gpu: Annotated[str, text("h100, a100-80, l40s ...; default: this host's")] = "",
        gpu_memory: Annotated[str, text("memory of one GPU: 79.1GiB")] = "",
        all_gpus: Annotated[bool, Field(description="compare all known GPUs")] = False,
        context: Annotated[str, text("tokens of each request: 32k")] = "",
        concurrency: Annotated[int | None, Field(description="requests at a time", ge=1, le=2**20)] = None,
        detail: Detail = False,
    ) -> BudgetAnswer:
        """Estimate the GPU memory of a launch command or a model, or compare GPUs (all_gpus, or gpu with concurrency):
        what fits, how many requests, how fast at most. Nothing is started or downloaded.
        """
        if bool(command) == bool(target):
            raise NotAllowed("give either command (a launch command or a model) or target (a server, to compare GPUs)")
        what = _without_files(command) if command else self.targets.pages(target).targets[0]
        options = BudgetOptions(
            what,
            gpu,
            gpu_memory,
            version=vllm_version,
            foreign=True,
            all_gpus=all_gpus,
            context=context,
            concurrency=concurrency,
        )
        return cast(BudgetAnswer, answers.memory(json.loads(budget.run(options, as_json=True)[0]), detail))

    def config(self, target: Target = "", detail: Detail = False) -> ConfigAnswer:
        """The flags that a server runs with, each with where it was read; by default those that are not the default."""
        settings = observe.show_configuration(self.targets.pages(target), as_json=True)
        return cast(ConfigAnswer, answers.configuration(json.loads(settings), detail))

    def verify(
        self,
        before: Annotated[str, text("name of a recording", shortest=1)],
        after: Annotated[str, text(_A_TARGET, shortest=1)],
        detail: Detail = False,
    ) -> VerifyAnswer:
        """Compare a recording made before a change with the server, or a recording, after it: fixed or not, at the same
        load, and at what cost for users.
        """
        recorded = self.targets.recording(before)
        if not recorded:
            raise NotAllowed(
                f"before must be a recording made before the change; the targets are: {self.targets.describe()}"
            )
        return cast(VerifyAnswer, answers.comparison(verify.verify(recorded, self.targets.pages(after)), detail))


_A_FILE = re.compile(r"[/~.]|\S+\.(?:ipynb|json|log|md|py|sh|tf|toml|txt|ya?ml)\Z")


def _not_a_file(command: str) -> str:
    """Return the command; NotAllowed for what may name a file, whether or not there is one: that is not told."""
    command = command.strip()
    if _A_FILE.match(command) and not re.search(r"\s-|\n|\bserve\b", command):
        raise NotAllowed("give the command itself: no file of this host is opened for an agent")
    return command


def _without_files(command: str) -> str:
    """Return the command; NotAllowed for a file, and for a command that names a --config file or a model's folder."""
    command = _not_a_file(command)
    try:
        parsed = parse(command)
    except BadUsage:  # it may be a model's id; else `diag budget` reports the error
        model, config_file, cache = command.strip(), "", False
    else:
        model, config_file = parsed.model, parsed.config
        cache = any(name in parsed.environment for name in CACHE_VARIABLES) or "/" in (parsed.get("--revision") or "")
    if config_file:
        raise NotAllowed("write the flags of its --config file into the command: that file is not opened for an agent")
    if cache or re.match(r"[/~.]", model) or model.count("/") > 1:
        raise NotAllowed("name the model by its Hugging Face id: no folder of this host is opened for an agent")
    return command


# -- the server --------------------------------------------------------------------------------------------------------


class _NoTitles(GenerateJsonSchema):
    """Schemas without a title for each field, which repeats its name and costs an agent tokens."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


class DiagServer(MCPServer[Any]):
    """The tools of diag for the targets of an allow-list; a call is given up after `deadline` seconds."""

    def __init__(self, targets: AllowedTargets, own: frozenset[str], instructions: str, deadline: float) -> None:
        self._own, self._hidden = own, targets.folders
        self._deadline, self._turns = deadline, asyncio.Semaphore(MOST_AT_ONCE)
        tools = AgentTools(targets)
        super().__init__(
            "diag",
            title="diag: what is wrong with a vLLM server",
            version=__version__,
            instructions=instructions,
            tools=[self._tool(getattr(tools, name), title) for name, title in TITLES.items()],
            log_level="WARNING",
            subscriptions=False,
        )

    def _tool(self, work: Callable[..., Any], title: str) -> Tool:
        """Return the SDK's tool of a function, which runs in a thread that may outlive the call."""

        @wraps(work)
        async def call(detail: bool, **arguments: Any) -> CallToolResult:
            await self._turns.acquire()
            loop = asyncio.get_running_loop()
            running = run_in_thread(lambda: work(detail=detail, **arguments))

            def release(_: object) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(self._turns.release)

            running.add_done_callback(release)
            answer = await asyncio.wrap_future(running)
            quoted = answer if work.__name__ in DECLARED else quote_foreign(answer, self._own, self._hidden)
            document = shorten(quoted, DETAILED if detail else COMPACT)
            content = TextContent(type="text", text=to_json(document))
            return CallToolResult(content=[content], structured_content=document)

        reads = ToolAnnotations(read_only_hint=True, destructive_hint=False, open_world_hint=False)
        description = " ".join((work.__doc__ or "").split())
        tool = Tool.from_function(call, title=title, description=description, annotations=reads)

        derived = tool.fn_metadata
        strict = {"extra": "forbid", "strict": True}  # the SDK's own model drops unknown arguments and converts texts
        derived.arg_model = create_model(work.__name__, __base__=derived.arg_model, __cls_kwargs__=strict)
        tool.parameters = derived.arg_model.model_json_schema(schema_generator=_NoTitles)
        derived.output_schema = TypeAdapter(derived.output_model).json_schema(schema_generator=_NoTitles)
        return tool

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Return the answer of a tool, or one sentence about why there is none."""
        call = asyncio.ensure_future(super().call_tool(name, arguments, context))
        seconds = 0.0
        try:
            async with asyncio.timeout(self._deadline):
                while not (await asyncio.wait([call], timeout=PROGRESS_SECONDS))[0]:
                    seconds += PROGRESS_SECONDS
                    if context:
                        await context.report_progress(seconds, self._deadline)
            return call.result()
        except TimeoutError:
            sentence = f"{name} did not end within {self._deadline:g} s, and was given up"
        except Exception as error:  # noqa: BLE001  a defect must not end the server, nor show values
            cause = error.__cause__
            if isinstance(cause, NotAllowed):
                sentence = str(cause)
            elif isinstance(cause, DiagError):  # the message may quote a server
                sentence = quote(without(str(cause), self._hidden))
            elif isinstance(error, UnexpectedToolError) or not isinstance(error, ToolError):
                defect = cause if isinstance(cause, Exception) and not isinstance(cause, ValidationError) else error
                print(f"diag: {internal_error(defect)}", file=sys.stderr)
                sentence = f"{name} failed by a defect of diag; the standard error of diag mcp says where"
            elif isinstance(cause, ValidationError):
                first = cause.errors(include_url=False, include_input=False)[0]
                place = ".".join(map(str, first["loc"]))  # of an argument that there is not, the name is the agent's
                place = quote_name(place[:40]) if first["type"] == "extra_forbidden" else place
                sentence = f"{name}: {place}: {first['msg'][:LONGEST_MESSAGE]}"
            else:
                sentence = f"there is no tool {quote_name(name)}: the tools are {', '.join(TITLES)}"
        finally:
            call.cancel()
        return CallToolResult(content=[TextContent(type="text", text=sentence)], is_error=True)


def serve(targets: AllowedTargets, deadline: float) -> None:
    """Serve until standard input ends; standard output carries nothing but the protocol."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Python would wait for the thread that reads standard input
    DiagServer(targets, own_texts(targets.base), instructions(targets), deadline).run()
