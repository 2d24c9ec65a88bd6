"""The memory ledger against vLLM's own KV cache planner and transformers' models; no server is started."""

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live import model, server
from support.paths import MODELS, TESTS

from diag.log.memory_sizes import read_memory_log
from diag.vllm.command.parse import parse
from diag.vllm.memory import kv_layout, weights
from diag.vllm.memory.ledger import ledger, state_blocks_needed
from diag.vllm.memory.model import Model, read
from diag.vllm.memory.parts import Mixer
from diag.vllm.memory.setup import GpuSpec, Setup
from diag.vllm.memory.setup import setup as planned_setup
from diag.vllm.memory.usage import ByteRange

pytestmark = [pytest.mark.live, server.needed]
LIVE = TESTS / "support" / "live"


def asked(script: str, cases: object) -> list[object]:
    """Return the output of a script of tests/live, run by vLLM's own Python."""
    told = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [server.PYTHON, str(LIVE / script)]
    ended = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, env=told, check=True)
    found: list[object] = json.loads(ended.stdout.splitlines()[-1])
    return found


def case(chance: random.Random, name: str) -> tuple[dict[str, object], kv_layout.CacheLayout]:
    """A question for vLLM's planner, and our own answer."""
    shape = read(MODELS / name)
    kinds = {mixer.kind for layer in shape.stack for mixer in layer.mixers}
    setup = Setup(
        version="0.32.0",
        total=None,
        length=chance.randint(1, shape.longest),
        tensor=chance.choice((1, 2, 4, 8)),
        block=chance.choice((16, 32, 64, 128)),
        batched_tokens=chance.choice((512, 2048, 8192)),
        sequences=chance.choice((16, 256, 1024)),
        kv_dtype=chance.choice(("auto", "fp8")),
        hybrid=chance.random() < 0.7 or not kinds.isdisjoint(("state", "cross", "compressed")),
        hybrid_chunks=True,
        prefix_caching=chance.random() < 0.7,
    )
    kept = kv_layout.cache_layout(shape, setup)
    question = {
        "caches": [cache for layer in shape.stack for mixer in layer.mixers for cache in caches(shape, setup, mixer)],
        "length": setup.length,
        "in_flight": setup.in_flight,
        "memory": chance.randint(2**34, 2**37),
        "hybrid": setup.hybrid,
        "mode": "align" if setup.prefix_caching else "none",
        "max_num_seqs": setup.sequences,
        "least": state_blocks_needed(shape, setup),
    }
    return question, kept


def caches(shape: Model, setup: Setup, mixer: Mixer) -> Iterator[dict[str, object]]:
    """The caches of a layer as vLLM's classes describe them."""
    if not mixer.cached:
        return
    if mixer.kind == "compressed":
        yield {"kind": mixer.kind, "ratio": mixer.ratio, "size": mixer.head_dim, "index": mixer.index} | {
            "window": mixer.window
        }
        return
    block, padded = kv_layout.block_tokens(shape, setup)
    cache: dict[str, object] = {"kind": mixer.kind, "block": block, "window": mixer.window, "packed": 0}
    if mixer.kind == "state":
        size = kv_layout.state_bytes(shape, mixer, setup)
        mode = "align" if setup.prefix_caching else "none"
        yield cache | {"bytes": size, "padded": padded, "mode": mode, "checkpoints": int(bool(mixer.checkpoint))}
        return
    number = 2 if setup.kv_dtype == "auto" else 1
    heads = max(1, mixer.kv_heads // setup.tensor)
    cache |= {"bytes": number, "size": mixer.head_dim, "value": mixer.value_dim, "heads": heads}
    if mixer.kind == "latent" and shape.config.has("index_topk") and number == 1:
        cache["packed"] = 656
    yield cache
    if mixer.index:
        yield cache | {"kind": "index", "bytes": 1, "size": mixer.index, "packed": 0}


def test_kv_cache_plan_equals_vllms() -> None:
    """Every model twice, with contexts, memories and settings at random."""
    chance = random.Random(1)
    names = sorted(each.name for each in MODELS.iterdir() if read(each).keeps_tokens) * 2
    pairs = [case(chance, name) for name in names]
    answers = asked("kv_cache.py", [each for each, _ in pairs])
    for name, (question, kept), planned in zip(names, pairs, answers, strict=True):
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
            "refused": blocks < int(str(question["least"])),
        }, name


def test_a_shape_has_as_many_parameters_as_transformers_makes() -> None:
    folders = sorted(MODELS.iterdir())
    made = asked("parameters.py", [json.loads((each / "config.json").read_text()) for each in folders])
    for folder, counts in zip(folders, made, strict=True):
        shape = read(folder)
        language, encoders = counts  # type: ignore[misc]
        assert weights.parameters(shape) == pytest.approx(language, rel=0.001), folder.name
        if encoders and shape.encoders:
            assert weights.encoders(shape).elements == pytest.approx(encoders, rel=0.005), folder.name


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] if name == "large" else []) for name in sorted(model.SHAPES)],
)
def test_a_server_logs_the_kv_cache_that_is_computed(tmp_path: Path, name: str) -> None:
    """The sizes of a real server's own log: latent attention and gated delta net, both with experts, and Mamba 2."""
    flags = ["--max-model-len", "4096", "--max-num-batched-tokens", "512", "--mamba-ssm-cache-dtype", "float32"]
    if name == "latent" and "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        flags += ["--block-size", "128"]  # what vLLM's backend for this CPU takes by default
    with server.starting(tmp_path, name, flags) as vllm:
        end = time.monotonic() + server.READY_SECONDS
        logged = read_memory_log(str(vllm.log))
        while "concurrency" not in logged.numbers and vllm.process.poll() is None and time.monotonic() < end:
            time.sleep(0.5)
            logged = read_memory_log(str(vllm.log))
    command = parse(f"VLLM_CPU_KVCACHE_SPACE=1 vllm serve {tmp_path / name} {' '.join(flags)}", "0.32.0")
    shape = read(tmp_path / name, name, "0.32.0")
    found = ledger(shape, planned_setup(command, shape, GpuSpec(name="cpu"), "0.32.0"))
    assert found.tokens == ByteRange.of(int(logged.numbers["tokens"]))
    assert found.concurrency is not None
    assert f"{found.concurrency[0]:.2f}" == f"{logged.numbers['concurrency']:.2f}"  # as vLLM writes it
