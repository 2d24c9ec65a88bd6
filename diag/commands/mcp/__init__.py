"""`diag mcp`: the tools of diag for agents, over the Model Context Protocol."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diag.core.errors import BadUsage

if TYPE_CHECKING:
    from diag.commands.observe import ObserveOptions


def run(
    servers: Sequence[str], recordings: Path | None, prometheus: str, deadline: float, base: "ObserveOptions"
) -> None:
    """Serve until standard input ends; BadUsage if the allow-list is invalid or the SDK is not installed.

    A call is given up after `deadline` seconds; `base` has the options of every observation.
    """
    from diag.commands.mcp.targets import allow

    if base.log == "-":
        raise BadUsage("--log - reads standard input, which carries the protocol: name a file")
    targets = allow(servers, recordings, prometheus, base)
    try:
        from diag.commands.mcp.server import serve
    except ImportError as error:
        raise BadUsage("diag mcp needs the Model Context Protocol SDK: pip install 'diag[mcp]'") from error
    serve(targets, deadline)
