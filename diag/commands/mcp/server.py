"""The MCP server over standard input and output: the only file that imports the official SDK."""

import asyncio
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from jsonschema import Draft202012Validator
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

from diag import __version__
from diag.commands.mcp.answers import COMPACT, DETAILED, fitted, marked, quoted, written
from diag.commands.mcp.targets import AllowedTargets, NotAllowed
from diag.commands.mcp.tools import TOOLS, AgentTool
from diag.core.errors import DiagError, internal_error
from diag.core.formatting import printable
from diag.http.deadline import run_in_thread

MOST_AT_ONCE = 4
"""Calls that run at the same time; further ones are queued."""
PROGRESS_SECONDS = 5.0
"""Seconds between two progress notices of a call, for clients that give up after a minute without one."""
LONGEST_MESSAGE = 200
Context = ServerRequestContext[Any]


class DiagServer:
    """The tools of diag for the targets of an allow-list; a call is given up after `deadline` seconds."""

    def __init__(self, targets: AllowedTargets, own: frozenset[str], deadline: float) -> None:
        self._targets, self._own, self._deadline = targets, own, deadline
        self._tools = {tool.name: tool for tool in TOOLS}
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)

    async def list_tools(self, context: Context, params: PaginatedRequestParams | None) -> ListToolsResult:
        """Return all tools; each only reads."""
        reads = ToolAnnotations(read_only_hint=True, destructive_hint=False, open_world_hint=False)
        return ListToolsResult(
            tools=[
                Tool(
                    name=tool.name,
                    title=tool.title,
                    description=tool.says,
                    input_schema=tool.arguments,
                    output_schema=dict(tool.gives),
                    annotations=reads,
                )
                for tool in TOOLS
            ]
        )

    async def call(self, context: Context, params: CallToolRequestParams) -> CallToolResult:
        """Return the answer of a tool, or one sentence about why there is none."""
        arguments = params.arguments or {}
        try:
            tool = self._checked(params.name, arguments)
            document = await asyncio.wait_for(self._answer(tool, arguments, context), self._deadline)
        except NotAllowed as error:
            sentence = str(error)
        except DiagError as error:  # the message may quote a server
            sentence = quoted(str(error))
        except TimeoutError:
            sentence = f"{params.name} did not end within {self._deadline:g} s, and was given up"
        except Exception as error:  # noqa: BLE001  a defect must not end the server, nor show values
            print(f"diag: {internal_error(error)}", file=sys.stderr)
            sentence = f"{params.name} failed by a defect of diag; the standard error of diag mcp says where"
        else:
            content = [TextContent(type="text", text=written(document))]
            return CallToolResult(content=[*content], structured_content=document)
        return CallToolResult(content=[TextContent(type="text", text=sentence)], is_error=True)

    def _checked(self, name: str, arguments: Mapping[str, Any]) -> AgentTool:
        """Return the tool of a name; NotAllowed if there is none or the arguments do not fit its schema."""
        tool = self._tools.get(name)
        if tool is None:
            raise NotAllowed(f"there is no tool {printable(name, 40)}: the tools are {', '.join(self._tools)}")
        for error in Draft202012Validator(tool.arguments).iter_errors(arguments):
            place = ".".join(map(str, error.path)) or "arguments"
            says = error.message if len(error.message) <= LONGEST_MESSAGE else f"does not fit its {error.validator}"
            raise NotAllowed(f"{name}: {place}: {printable(says, LONGEST_MESSAGE)}")
        return tool

    async def _answer(self, tool: AgentTool, arguments: Mapping[str, Any], context: Context) -> dict[str, Any]:
        """Run a tool in a thread, which may outlive the call, and return the marked and shortened answer."""
        await self._turns.acquire()
        loop = asyncio.get_running_loop()
        work = run_in_thread(lambda: tool.work(self._targets, arguments))

        def release(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._turns.release)

        work.add_done_callback(release)
        found = await self._watched(work, context)
        shown = found if tool.declared else marked(found, self._own)
        return fitted(shown, DETAILED if arguments.get("detail") else COMPACT)

    async def _watched(self, work: Future[dict[str, Any]], context: Context) -> dict[str, Any]:
        """Return the result; until then, send progress notices."""
        waiting, seconds = asyncio.wrap_future(work), 0.0
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # the call may have been given up
        while not (await asyncio.wait([waiting], timeout=PROGRESS_SECONDS))[0]:
            seconds += PROGRESS_SECONDS
            await context.session.report_progress(seconds, self._deadline)
        return waiting.result()


def serve(targets: AllowedTargets, own: frozenset[str], instructions: str, deadline: float) -> None:
    """Serve until standard input ends; standard output carries nothing but the protocol."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Python would wait for the thread that reads standard input

    async def run() -> None:
        diag = DiagServer(targets, own, deadline)
        server = Server(
            "diag",
            version=__version__,
            title="diag: what is wrong with a vLLM server",
            instructions=instructions,
            on_list_tools=diag.list_tools,
            on_call_tool=diag.call,
        )
        async with stdio_server() as (reads, writes):
            await server.run(reads, writes, server.create_initialization_options())

    asyncio.run(run())
