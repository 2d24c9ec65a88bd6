"""Plays the module of `vllm bench serve`: PLAYED_BENCH says how it fails, and from which step on ("crash 2").

The real one is run by tests/live; here is what it cannot be made to do.
"""

import argparse
import json
import os
import time
from pathlib import Path

STEP = Path(os.environ.get("PLAYED_BENCH_STEPS", os.devnull))


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the options that diag passes, each with a value."""
    for name in ("backend", "base-url", "model", "tokenizer", "dataset-name", "percentile-metrics"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("metric-percentiles", "result-dir", "result-filename"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("random-input-len", "random-output-len", "random-prefix-len", "num-prompts", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--random-range-ratio", type=float, required=True)
    parser.add_argument("--max-concurrency", type=int)
    parser.add_argument("--request-rate", type=float)
    parser.add_argument("--save-result", action="store_true")
    parser.add_argument("--disable-tqdm", action="store_true")


def main(args: argparse.Namespace) -> None:
    """Write a result after a moment, or fail."""
    with STEP.open("a") as steps:
        steps.write(".")
    how, _, first = os.environ.get("PLAYED_BENCH", "").partition(" ")
    failing = STEP.stat().st_size >= int(first or 1)
    if how == "crash" and failing:
        raise OSError("Can't load tokenizer for 'tiny'")
    time.sleep(600 if how == "hang" and failing else 1.5)
    result = {"duration": 1.5, "completed": args.num_prompts, "failed": 0, "total_input_tokens": 640}
    result |= {"request_throughput": args.num_prompts / 1.5, "output_throughput": 400.0}
    (Path(args.result_dir) / args.result_filename).write_text(json.dumps(result))
