"""Asks the real parser of an installed vLLM. Run by the interpreter that has it, as a script without anything of ours.

It answers each line of its input by one of its output, as JSON:

    null               -> {"version": ..., "environment": [name, ...], "flags": {flag: {"takes", "no", ...}}}
    [[word, ...], ...] -> {"version": ..., "refusals": ["" or why this command is refused, ...]}

It imports torch (about 9 s and 600 MB), and starts no engine. The only file that speaks vllm.
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
"""Where `make_arg_parser` is: from 0.33 on, 0.29 - 0.32, before."""
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
"""By the name of the function that reads a value; what is not here is text, or the function's own business."""


def parser() -> ArgumentParser:
    """The parser of `vllm serve`."""
    flexible = next(filter(None, (_of(name, "FlexibleArgumentParser") for name in PARSERS)))
    make = next(filter(None, (_of(name, "make_arg_parser") for name in MODULES)))
    made: ArgumentParser = make(flexible(prog="vllm serve"))
    return made


def _of(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return None


def describe() -> dict[str, Any]:
    """Every flag with how many words it takes and of what kind, its --no- form, and its other names."""
    flags: dict[str, Any] = {}
    for action in parser()._actions:
        names = [
            name for name in action.option_strings if name.startswith("--") and not name.startswith(("--no-", "--help"))
        ]
        short = [name for name in action.option_strings if not name.startswith("--")]
        negated = any(name.startswith("--no-") for name in action.option_strings)
        of_value = {} if action.nargs == 0 else _of_value(action)
        for at, name in enumerate(names):
            alias = {"alias": names[0]} if at else {}
            flags[name] = {"takes": TAKES[action.nargs], "no": negated, "short": short, **of_value, **alias}
    return {"version": version(), "environment": sorted(_of("vllm.envs", "environment_variables")), "flags": flags}


def version() -> str:
    """The release, without what it was built for."""
    return str(_of("vllm", "__version__")).partition("+")[0]


def _of_value(action: Any) -> dict[str, Any]:
    """The kind of a value, whether None is one, and the choices; a function of vLLM's own may spell these otherwise."""
    names = list(_names(action.type))
    choices = [] if "<lambda>" in names else [str(choice) for choice in action.choices or () if choice is not None]
    return {"value": VALUES.get(names[-1], "text"), "null": "_optional_type" in names, "choices": choices}


def _names(read: Any) -> Iterator[str]:
    """The function that reads a value, and the one that it calls: an optional value has one around it."""
    name = getattr(read, "__qualname__", "")
    yield name.rpartition(".")[2]
    if name.startswith(("optional_type.", "parse_type.")):
        yield from _names(read.__closure__[0].cell_contents)


def refusal(words: list[str], vllm: ArgumentParser) -> str:
    """Why the parser refuses these words, in its own; "" where it does not."""
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
    """Answer a request."""
    if commands is None:
        return describe()
    vllm = parser()
    return {"version": version(), "refusals": [refusal(words, vllm) for words in commands]}


if __name__ == "__main__":
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # vLLM greets on it
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=out, flush=True)
