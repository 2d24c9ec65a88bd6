"""Asks an installed vLLM's own parser, in a process of its own: to load it takes ten seconds and 600 MB, once."""

import atexit
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
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
    description: dict[str, Any] = _ask(python, None)
    return description


def check(python: str, commands: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
    """The release, and why each command's words (after `vllm serve`) are refused; "" where they are not."""
    answer = _ask(python, [list(words) for words in commands])
    return answer["version"], answer["refusals"]


class _Process:
    """The process that has loaded the parser; it ends with this one."""

    def __init__(self, python: str) -> None:
        self._late = False
        self._errors = TemporaryFile()  # noqa: SIM115 - it is read when the process has ended
        pipe, environment = subprocess.PIPE, {**os.environ, **_QUIET}
        command = [python, "-I", str(SCRIPT)]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, env=environment)
        atexit.register(self.end)

    def ask(self, request: Any) -> Any:
        """Its answer; TimeoutError, or ValueError with what it says instead."""
        timer = Timer(SECONDS, self._give_up)
        timer.start()
        try:
            return json.loads(self._answer(json.dumps(request).encode()) or self._last_words())
        finally:
            timer.cancel()

    def _answer(self, request: bytes) -> bytes:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        with suppress(BrokenPipeError):  # then its last words say why
            stdin.write(request + b"\n")
            stdin.flush()
        return stdout.readline()

    def _last_words(self) -> bytes:
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", "replace")
        raise TimeoutError if self._late else ValueError(said)

    def _give_up(self) -> None:
        self._late = True
        self.end()

    def end(self) -> None:
        """Stop it."""
        self._process.kill()
        self._process.wait()


_process = cache(_Process)


def _ask(python: str, request: Any) -> Any:
    try:
        return _process(python).ask(request)
    except TimeoutError as error:
        _process.cache_clear()
        raise BadUsage(f"the parser of the vLLM in {python} did not answer within {SECONDS} s") from error
    except (OSError, ValueError) as error:
        _process.cache_clear()
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise BadUsage(f"{python}: vLLM's parser cannot be run with it: {last}") from error
