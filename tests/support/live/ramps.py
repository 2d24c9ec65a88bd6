"""Servers that are bound in known ways, the load that shows it, and what `diag ramp` says of them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.live import server

SLOW = Path(__file__).parent / "slow_python.py"
PLENTY = ("--max-model-len", "1024", "--block-size", "32", "--no-enable-prefix-caching")
"""The tokenizer has one token for a byte, so random prompts often begin alike."""


@dataclass(frozen=True)
class Case:
    """A server, the tokens of prompt and answer, and what binds it; `share` is that of the time a client may run."""

    name: str
    binds: str
    size: str
    flags: tuple[str, ...]
    tokens: tuple[int, int]
    share: float = 1.0


KV_CACHE = Case(
    *("KV cache of 64 blocks", "kv_cache", "tiny"),
    flags=(*PLENTY, "--num-gpu-blocks-override", "64", "--max-num-seqs", "64"),
    tokens=(128, 128),
)
SEQUENCES = Case("4 sequences", "sequence_cap", "tiny", (*PLENTY, "--max-num-seqs", "4"), (64, 64))
EIGHT = Case("8 sequences", "sequence_cap", "tiny", (*PLENTY, "--max-num-seqs", "8"), (64, 64))
BUDGET = Case(
    *("16 tokens in a step", "token_budget", "tiny"),
    flags=(*PLENTY, "--max-num-seqs", "16", "--max-num-batched-tokens", "16"),
    tokens=(512, 16),
)
COMPUTE = Case("CPU", "compute", "small", (*PLENTY, "--max-num-seqs", "64"), (512, 32))
CLIENT = Case("slow client", "client", "tiny", (*PLENTY, "--max-num-seqs", "64"), (64, 16), share=0.1)
CASES = (KV_CACHE, SEQUENCES, BUDGET, COMPUTE, CLIENT)


def ramp(url: str, tokens: tuple[int, int], *options: str, share: float = 1.0) -> dict[str, Any]:
    """Return the output of `diag ramp --json`."""
    python = server.PYTHON if share == 1 else str(SLOW)
    lengths = ("--prompt-tokens", str(tokens[0]), "--output-tokens", str(tokens[1]))
    command = ["ramp", url, "--vllm-python", python, "--yes", "--json", *lengths, *options]
    slow = {"SLOW_PYTHON": server.PYTHON, "SLOW_SHARE": f"{share}"}
    done = subprocess.run(
        [sys.executable, "-c", "from diag.cli.app import main; main()", *command],
        stdout=subprocess.PIPE,
        check=False,
        env={**os.environ, **server.ENVIRONMENT, **slow},
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def names_a_crowded_host(found: dict[str, Any]) -> bool:
    """Return True if a ramp ended because other programs took its CPU: then it says so and names nothing that binds."""
    crowded = [step for step in found["steps"] if "crowded" in step["unusable"]]
    if crowded:
        assert crowded == found["steps"][-1:], found
        assert (found["stopped"], found["binds"]) == (crowded[0]["unusable"], None), found
    return bool(crowded)


def applied(flags: Sequence[str], change: dict[str, Any]) -> tuple[str, ...]:
    """The flags with a proposed change."""
    name, after = change["flag"], change["after"]
    at = flags.index(name) if name in flags else len(flags)
    rest = (*flags[:at], *flags[at + 2 :])
    return rest if after is None else (*rest, name, f"{after:.0f}" if isinstance(after, float) else str(after))
