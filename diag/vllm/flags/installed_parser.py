"""Asks an installed vLLM's own parser, in a process of its own: it needs ten seconds and 600 MB."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diag.core.errors import BadUsage

SCRIPT = Path(__file__).parent / "parser.py"
SECONDS = 180
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def interpreter() -> str:
    """This Python where vLLM is installed beside diag (the extra `vllm`); "" where it is not."""
    return sys.executable if importlib.util.find_spec("vllm") else ""


def describe(python: str) -> dict[str, Any]:
    """The release and its flags, as `parser.describe` says; BadUsage where the interpreter has no vLLM that can."""
    description: dict[str, Any] = _run(python, "describe", "")
    return description


def check(python: str, commands: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
    """The release, and why each command's words (after `vllm serve`) are refused; "" where they are not."""
    answer = _run(python, "check", json.dumps([list(words) for words in commands]))
    return answer["version"], answer["refusals"]


def _run(python: str, what: str, text: str) -> Any:
    command = [python, "-I", str(SCRIPT), what]
    environment = {**os.environ, **_QUIET}
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=SECONDS, check=True, env=environment
        )
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise BadUsage(f"the parser of the vLLM in {python} did not answer within {SECONDS} s") from error
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise BadUsage(f"{python}: vLLM's parser cannot be run with it: {_last_line(error)}") from error


def _last_line(error: Exception) -> str:
    output = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return (output.strip().splitlines() or [type(error).__name__])[-1]
