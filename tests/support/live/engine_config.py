"""Run by vLLM's own Python: `engine_config.py parser.py < [[word, ...], ...]` says why each command is refused.

By the parser, by the checks of `vllm serve`, or by the configuration of an engine that is made and not started; "" for
a command that is not refused.
"""

import contextlib
import importlib.util
import json
import sys
from types import ModuleType

with contextlib.redirect_stdout(sys.stderr):  # vLLM greets on it
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args


def main() -> None:
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        parser = load(sys.argv[1])
        vllm = parser.parser()
        answers = [parser.refusal(words, vllm) or engine(words, vllm) for words in json.load(sys.stdin)]
    json.dump(answers, out)


def load(file: str) -> ModuleType:
    """Load a module of diag from its file, because diag is not installed beside vLLM."""
    spec = importlib.util.spec_from_file_location("parser_of_diag", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engine(words: list[str], vllm) -> str:
    args = vllm.parse_args(words)
    args.model = args.model_tag or args.model
    try:
        validate_parsed_serve_args(args)
        AsyncEngineArgs.from_cli_args(args).create_engine_config(headless=args.headless)
    except Exception as error:  # noqa: BLE001 - a refusal may be of any kind
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
