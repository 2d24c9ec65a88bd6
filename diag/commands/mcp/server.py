"""The MCP server over standard input and output: the only file that imports the official SDK."""

import asyncio
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import CallToolResult, InputRequiredResult, TextContent, ToolAnnotations
from pydantic import TypeAdapter, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from diag import __version__
from diag.commands.mcp.answers import COMPACT, DETAILED, quote, quote_foreign, quote_name, shorten, to_json, without
from diag.commands.mcp.targets import AllowedTargets, NotAllowed, instructions, own_texts
from diag.commands.mcp.tools import DECLARED, TITLES, AgentTools
from diag.core.errors import DiagError, internal_error
from diag.http.client import run_in_thread

MOST_AT_ONCE = 4
"""Calls that run at the same time; further ones are queued."""
PROGRESS_SECONDS = 5.0
"""Seconds between two progress notices of a call, for clients that give up after a minute without one."""
LONGEST_MESSAGE = 200


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
        async def call(detail: bool, **given: Any) -> CallToolResult:
            await self._turns.acquire()
            loop = asyncio.get_running_loop()
            running = run_in_thread(lambda: work(detail=detail, **given))

            def release(_: object) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(self._turns.release)

            running.add_done_callback(release)
            found = await asyncio.wrap_future(running)
            shown = found if work.__name__ in DECLARED else quote_foreign(found, self._own, self._hidden)
            document = shorten(shown, DETAILED if detail else COMPACT)
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
            sentence = self._refusal(name, error)
        finally:
            call.cancel()
        return CallToolResult(content=[TextContent(type="text", text=sentence)], is_error=True)

    def _refusal(self, name: str, error: Exception) -> str:
        """Return the sentence about a call that failed."""
        cause = error.__cause__
        if isinstance(cause, NotAllowed):
            return str(cause)
        if isinstance(cause, DiagError):  # the message may quote a server
            return quote(without(str(cause), self._hidden))
        if isinstance(error, UnexpectedToolError) or not isinstance(error, ToolError):
            defect = cause if isinstance(cause, Exception) and not isinstance(cause, ValidationError) else error
            print(f"diag: {internal_error(defect)}", file=sys.stderr)
            return f"{name} failed by a defect of diag; the standard error of diag mcp says where"
        if isinstance(cause, ValidationError):
            first = cause.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))  # of an argument that there is not, the name is the agent's
            place = quote_name(place[:40]) if first["type"] == "extra_forbidden" else place
            return f"{name}: {place}: {first['msg'][:LONGEST_MESSAGE]}"
        return f"there is no tool {quote_name(name)}: the tools are {', '.join(TITLES)}"


def serve(targets: AllowedTargets, deadline: float) -> None:
    """Serve until standard input ends; standard output carries nothing but the protocol."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Python would wait for the thread that reads standard input
    DiagServer(targets, own_texts(targets.base), instructions(targets), deadline).run()
