"""The memory ledger against vLLM's own KV cache planner and transformers' models; no server is started."""

import json
import os
import random
import subprocess

import pytest
from support.live import server
from support.paths import MODELS, TESTS

from diag.vllm.memory import usage, weights
from diag.vllm.memory.model import read
from diag.vllm.memory.setup import Setup

pytestmark = [pytest.mark.live, server.needed]
LIVE = TESTS / "support" / "live"


def asked(script: str, cases: object) -> list[object]:
    """Return the output of a script of tests/live, run by vLLM's own Python."""
    told = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [server.PYTHON, str(LIVE / script)]
    ended = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, env=told, check=True)
    found: list[object] = json.loads(ended.stdout.splitlines()[-1])
    return found


def case(chance: random.Random) -> tuple[dict[str, object], usage.CacheLayout]:
    """A question for vLLM's planner, and our own answer."""
    model = read(chance.choice(sorted(MODELS.iterdir())))
    setup = Setup(
        version="0.32.0",
        total=None,
        length=chance.randint(1, model.longest),
        tensor=chance.choice((1, 2, 4, 8)),
        block=chance.choice((16, 32, 64, 128)),
        batched_tokens=chance.choice((512, 2048, 8192)),
        kv_dtype=chance.choice(("auto", "fp8")),
        hybrid=chance.random() < 0.7,
    )
    question = {
        "layers": model.layers,
        "heads": max(1, model.kv_heads // setup.tensor),
        "size": model.head_dim,
        "latent": model.latent,
        "bytes": 2 if setup.kv_dtype == "auto" else 1,
        "windows": model.windows,
        "block": setup.block,
        "length": setup.length,
        "in_flight": setup.in_flight,
        "memory": chance.randint(2**30, 2**37),
        "hybrid": setup.hybrid,
    }
    return question, usage.cache_layout(model, setup)


def test_kv_cache_plan_equals_vllms() -> None:
    """Sixty models, contexts and memories at random."""
    chance = random.Random(1)
    pairs = [case(chance) for _ in range(60)]
    for (question, kept), planned in zip(pairs, asked("kv_cache.py", [each for each, _ in pairs]), strict=True):
        length, memory = int(str(question["length"])), int(str(question["memory"]))
        blocks = memory // kept.block_bytes()
        concurrency = blocks / kept.blocks(length)
        assert planned == {
            "needed": kept.blocks(length) * kept.block_bytes(),
            "block_bytes": kept.block_bytes(),
            "blocks": blocks,
            "tokens": int(concurrency * length),
            "concurrency": concurrency,
            "longest": kept.longest(blocks, length),
        }


def test_a_shape_has_as_many_parameters_as_transformers_makes() -> None:
    folders = sorted(MODELS.iterdir())
    made = asked("parameters.py", [json.loads((each / "config.json").read_text()) for each in folders])
    assert made == [weights.parameters(read(each)) for each in folders]
