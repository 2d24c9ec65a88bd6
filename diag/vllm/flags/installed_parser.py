"""Ask the parser of an installed vLLM, and update flags.json: `python -m diag.vllm.flags.installed_parser PYTHON`.

The parser runs in a process of its own: to load it takes ten seconds and 600 MB, once.
"""

import atexit
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from typing import Any

from diag.core.errors import BadUsage
from diag.vllm.flags.registry import FILE, release

SCRIPT = Path(__file__).parent / "parser.py"
SECONDS = 180
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
Known = dict[str, Any]


def interpreter() -> str:
    """Return this Python if vLLM is installed beside diag (the extra `vllm`), else ""."""
    return sys.executable if importlib.util.find_spec("vllm") else ""


def describe(python: str) -> Known:
    """Return the release and its flags, as `parser.describe` does; BadUsage if the interpreter has no usable vLLM."""
    description: Known = _ask(python, None)
    return description


def check(python: str, commands: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
    """Return the release, and for each command (its words after `vllm serve`) the error of the parser, or ""."""
    answer = _ask(python, [list(words) for words in commands])
    return answer["version"], answer["refusals"]


class _Process:
    """The process that has loaded the parser; it ends with this one."""

    def __init__(self, python: str) -> None:
        self._errors = TemporaryFile()  # noqa: SIM115 - it is read after the process has ended
        pipe, environment = subprocess.PIPE, {**os.environ, **_QUIET}
        command = [python, "-I", str(SCRIPT)]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, env=environment)
        atexit.register(self.end)

    def ask(self, request: Any) -> Any:
        """Return the answer; TimeoutError, or ValueError with the errors that the process wrote instead."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        deadline = time.monotonic() + SECONDS
        timer = Timer(SECONDS, self.end)
        timer.start()
        try:
            with suppress(BrokenPipeError):  # its errors are read below
                stdin.write(json.dumps(request).encode() + b"\n")
                stdin.flush()
            answer = stdout.readline()
            if not answer:
                self._process.wait()
                self._errors.seek(0)
                errors = self._errors.read().decode("utf-8", "replace")
                raise TimeoutError if time.monotonic() >= deadline else ValueError(errors)
            return json.loads(answer)
        finally:
            timer.cancel()

    def end(self) -> None:
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


def merged(known: Known, described: Known) -> Known:
    """Return the content of flags.json, updated by the parser of one release.

    A release newer than the newest known extends the ranges of the flags that it accepts; a flag that it no longer has
    keeps its last release. The number and kind of a flag's words and its other names are those of the newest release
    whose parser was read; `until` has older forms, each by the last release that is known to have it.
    """
    own, others = described["version"], known["versions"]
    is_new = release(own) not in map(release, others)  # 0.6.3.post1 and 0.6.3 are one release
    releases = sorted([*others, own] if is_new else others, key=release)
    version = next(known for known in releases if release(known) == release(own))
    parsers = sorted({*known["parsers"], version}, key=release)
    flags = {name: dict(flag) for name, flag in known["flags"].items()}
    for name, flag in described["flags"].items():
        old = flags.get(name) or {"versions": (version, version)}
        first, last = old["versions"]
        newest = {key: value for key, value in old.items() if key not in ("versions", "until")}
        older = sorted(old.get("until", {}).items(), key=lambda entry: release(entry[0]))
        forms = {
            at: next((form for end, form in older if release(at) <= release(end)), newest)
            for at in known["parsers"]
            if release(first) <= release(at) <= release(last)
        }
        forms[version] = {key: value for key, value in flag.items() if value and (key, value) != ("value", "text")}
        until, (latest, *before) = {}, sorted(forms, key=release, reverse=True)
        later = forms[latest]
        for at in before:
            if forms[at] != later:
                until[at] = later = forms[at]
        ranges = [min(first, version, key=release), max(last, version, key=release)]
        flags[name] = {"versions": ranges, **forms[latest], **({"until": until} if until else {})}
    return {
        "about": known["about"],
        "versions": releases,
        "parsers": parsers,
        "environment": sorted(described["environment"]) if version == parsers[-1] else known["environment"],
        "flags": dict(sorted(flags.items())),
    }


def written(content: Known) -> str:
    """Write flags.json, one flag a line."""
    flags = ",\n".join(f"  {json.dumps(name)}: {json.dumps(flag)}" for name, flag in content["flags"].items())
    head = "".join(f' "{name}": {json.dumps(content[name])},\n' for name in content if name != "flags")
    return f'{{\n{head} "flags": {{\n{flags}\n }}\n}}\n'


if __name__ == "__main__":
    before = json.loads(FILE.read_text(encoding="utf-8"))
    try:
        content = merged(before, describe(sys.argv[-1]))
    except BadUsage as error:
        sys.exit(str(error))
    FILE.write_text(written(content), encoding="utf-8")
