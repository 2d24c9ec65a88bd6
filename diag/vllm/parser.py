"""Asks the real parser of an installed vLLM. Run by the interpreter that has it, as a script without anything of ours.

    python -I parser.py describe       -> {"version": ..., "flags": {flag: {"takes", "no", "short"}}}
    [[word, ...], ...] | ... check     -> ["" or why this command is refused, ...]

It imports torch (about 9 s and 600 MB), and starts no engine. The only file that speaks vllm.
"""

import contextlib
import importlib
import io
import json
import sys
from argparse import ArgumentParser
from typing import Any

MODULES = tuple(f"vllm.entrypoints.{name}.cli_args" for name in ("common", "launchers", "openai"))
"""Where `make_arg_parser` is: from 0.33 on, 0.29 - 0.32, before."""
PARSERS = ("vllm.utils.argparse_utils", "vllm.utils")
TAKES = {None: "one", "?": "optional", "+": "many", "*": "many", 0: "none"}


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
    """Every flag with how many words it takes, whether it has a --no- form, and its short names."""
    flags: dict[str, Any] = {}
    for action in parser()._actions:
        names = [
            each for each in action.option_strings if each.startswith("--") and not each.startswith(("--no-", "--help"))
        ]
        short = [each for each in action.option_strings if not each.startswith("--")]
        negated = any(each.startswith("--no-") for each in action.option_strings)
        for name in names:
            flags[name] = {"takes": TAKES[action.nargs], "no": negated, "short": short}
    return {"version": _of("vllm", "__version__"), "flags": flags}


def refusal(words: list[str], vllm: ArgumentParser) -> str:
    """Why the parser refuses these words, in its own; "" where it does not."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            vllm.parse_args(words)
    except SystemExit as error:
        return said.getvalue().strip().rpartition("error: ")[2] if error.code else ""
    except Exception as error:  # noqa: BLE001 - a type function of vLLM's may raise anything
        return str(error) or type(error).__name__
    return ""


if __name__ == "__main__":
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # vLLM greets on it
        if sys.argv[1] == "describe":
            answer: Any = describe()
        else:
            vllm = parser()
            answer = [refusal(words, vllm) for words in json.load(sys.stdin)]
    json.dump(answer, out)
