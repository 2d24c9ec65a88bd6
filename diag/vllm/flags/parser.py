"""Run the parser of an installed vLLM: a script for its interpreter, which may lack diag and its dependencies.

It answers each line of its input by a line of its output, as JSON:

    null               -> {"version": ..., "environment": [name, ...], "flags": {flag: {"takes", "no", ...}}}
    [[word, ...], ...] -> {"version": ..., "refusals": [the error for this command or "", ...]}

It imports torch (about 9 s and 600 MB), and starts no engine. No other file imports vllm.
"""

import contextlib
import importlib
import io
import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

MODULES = tuple(f"vllm.entrypoints.{name}.cli_args" for name in ("common", "launchers", "openai"))
"""Modules with `make_arg_parser`: from 0.33 on, 0.29 - 0.32, before."""
PARSERS = ("vllm.utils.argparse_utils", "vllm.utils")
TAKES = {None: "one", "?": "optional", "+": "many", "*": "many", 0: "none"}
VALUES = {
    "int": "integer",
    "float": "number",
    "human_readable_int": "size",
    "human_readable_int_or_auto": "size",
    "loads": "json",
    "parse_dataclass": "object",
}
"""The kind of a value by the name of the function that reads it; other functions read text."""


def parser() -> ArgumentParser:
    """Return the parser of `vllm serve`."""
    flexible = next(filter(None, (_attribute(name, "FlexibleArgumentParser") for name in PARSERS)))
    make = next(filter(None, (_attribute(name, "make_arg_parser") for name in MODULES)))
    made: ArgumentParser = make(flexible(prog="vllm serve"))
    return made


def _attribute(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return None


def describe() -> dict[str, Any]:
    """Return every flag with the number and kind of its words, its --no- form, and its other names."""
    flags: dict[str, Any] = {}
    for action in parser()._actions:
        names = [
            name for name in action.option_strings if name.startswith("--") and not name.startswith(("--no-", "--help"))
        ]
        short = [name for name in action.option_strings if not name.startswith("--")]
        negated = any(name.startswith("--no-") for name in action.option_strings)
        value: dict[str, Any] = {}
        if action.nargs != 0:
            functions = list(_function_names(action.type))
            # a function of vLLM's own may spell the choices otherwise
            choices = [] if "<lambda>" in functions else [str(one) for one in action.choices or () if one is not None]
            kind = VALUES.get(functions[-1], "text")
            value = {"value": kind, "null": "_optional_type" in functions, "choices": choices}
        for at, name in enumerate(names):
            alias = {"alias": names[0]} if at else {}
            flags[name] = {"takes": TAKES[action.nargs], "no": negated, "short": short, **value, **alias}
    return {
        "version": version(),
        "environment": sorted(_attribute("vllm.envs", "environment_variables")),
        "flags": flags,
    }


def version() -> str:
    """Return the release without its build, 0.32.0 for 0.32.0+cpu."""
    return str(_attribute("vllm", "__version__")).partition("+")[0]


def _function_names(read: Any) -> Iterator[str]:
    """Yield the name of the function that reads a value, and of the function that it wraps for an optional value."""
    name = getattr(read, "__qualname__", "")
    yield name.rpartition(".")[2]
    if name.startswith(("optional_type.", "parse_type.")):
        yield from _function_names(read.__closure__[0].cell_contents)


def refusal(words: list[str], vllm: ArgumentParser) -> str:
    """Return the error of the parser for these words; "" if it accepts them."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            vllm.parse_args(words)
    except SystemExit as error:
        return output.getvalue().strip().rpartition("error: ")[2] if error.code else ""
    except Exception as error:  # noqa: BLE001 - a type function of vLLM's may raise anything
        return str(error) or type(error).__name__
    return ""


def answer(commands: list[list[str]] | None) -> dict[str, Any]:
    if commands is None:
        return describe()
    vllm = parser()
    return {"version": version(), "refusals": [refusal(words, vllm) for words in commands]}


if __name__ == "__main__":
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # vLLM prints its banner there
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=out, flush=True)
