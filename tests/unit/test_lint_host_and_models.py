"""Rules of `diag lint` that read models, adapters and GPUs: what they find, and where they find nothing."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.live import model, server
from support.paths import MODELS, TESTS

from diag.commands.lint import judge
from diag.core.errors import BadUsage
from diag.lint.rule import LintFinding, LintTarget
from diag.lint.rules import lint
from diag.lint.weights import adapter_rank
from diag.vllm.command.parse import read
from diag.vllm.flags import installed_parser
from diag.vllm.flags.registry import described

LLAMA = str(MODELS / "llama-3.1-8b")
LARGE = str(MODELS / "llama-3-70b")


def findings(text: str, gpu: str = "", version: str = "0.32.0") -> dict[str, LintFinding]:
    return {finding.rule: finding for finding in judge(text, version, gpu=gpu).findings}


# -- memory and parallelism


@pytest.mark.parametrize(
    ("words", "gpu", "expected"),
    [
        ("--gpu-memory-utilization 0.5", "h100", True),
        ("--gpu-memory-utilization 0.72", "h100", True),
        ("--gpu-memory-utilization 0.75", "h100", False),
        ("--gpu-memory-utilization 0.5", "", False),
        ("--gpu-memory-utilization $SHARE", "h100", False),
        ("--gpu-memory-utilization 0.5 --kv-cache-memory-bytes 8G", "h100", False),
        ("", "h100", False),
    ],
)
def test_unused_gpu_memory_is_reported_only_if_it_is_known(words: str, gpu: str, expected: bool) -> None:
    assert ("gpu_memory_given_away" in findings(f"vllm serve {LLAMA} {words}", gpu)) is expected


def test_unused_memory_is_in_tokens_where_the_model_is_known_and_else_in_bytes() -> None:
    known, unknown = (
        findings(f"vllm serve {name} --gpu-memory-utilization 0.5", "h100")["gpu_memory_given_away"].message
        for name in (LLAMA, "some/model")
    )
    assert known == "--gpu-memory-utilization 0.5 leaves 33.2 GiB of each GPU unused, 272,155 tokens of KV cache"
    assert unknown == "--gpu-memory-utilization 0.5 leaves 33.2 GiB of each GPU unused"


@pytest.mark.parametrize(
    ("words", "gpu", "expected"),
    [
        (f"{LLAMA} -tp 2", "h100", True),
        (f"{LLAMA} -tp 2", "", False),
        (f"{LLAMA} -tp 2", "a10", False),  # its weights leave too little of 22 GiB
        (f"{LARGE} -tp 4", "h100", False),
        (f"{LLAMA} -tp 2 -pp 2", "h100", False),
        (f"{LLAMA} -tp 2 --max-model-len $LENGTH", "h100", False),
    ],
)
def test_tensor_parallelism_is_questioned_only_for_a_model_that_fits_one_gpu(
    words: str, gpu: str, expected: bool
) -> None:
    found = findings(f"vllm serve {words}", gpu)
    assert ("tensor_parallel_of_a_small_model" in found) is expected
    if expected:
        assert "all-reduces take at least" in found["tensor_parallel_of_a_small_model"].why


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-tp 16 --nnodes 2", True),
        ("-tp 8 -dp 2 --nnodes 2", False),
        ("-tp 16 -dp 2 --nnodes 4", True),
        ("-tp 16 --nnodes $NODES", False),
        ("-tp 16 -dp $RANKS --nnodes 2", False),
    ],
)
def test_tensor_parallelism_across_nodes_needs_every_size(words: str, expected: bool) -> None:
    assert ("tensor_parallel_across_nodes" in findings(f"vllm serve m {words}")) is expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--enable-expert-parallel", True),
        ("--enable-expert-parallel -tp 1", True),
        ("--enable-expert-parallel -tp $TP", False),
        ("--enable-expert-parallel $ARGS", False),
        ("--enable-expert-parallel -dp 2", False),
    ],
)
def test_expert_parallelism_of_one_rank_needs_every_size(words: str, expected: bool) -> None:
    assert ("expert_parallel_of_one_rank" in findings(f"vllm serve m {words}")) is expected


CONNECTOR = "--kv-transfer-config"
OFFLOADING = (
    '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",'
    ' "kv_connector_extra_config": {"cpu_bytes_to_use": %d}}'
)
SEVERAL = '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [%s]}}'
PER_RANK = (
    '{"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": {"cpu_bytes_to_use_per_rank": %d}}'
)


@pytest.mark.parametrize(
    ("words", "version", "memory", "expected"),
    [
        ("--cpu-offload-gb 10 -tp 4", "0.32.0", 32, True),
        ("--cpu-offload-gb 10 -tp 4", "0.32.0", 64, False),
        ("--cpu-offload-gb 10 -tp 4", "0.32.0", 0, False),
        ("--kv-offloading-size 40 -tp 4", "0.32.0", 32, True),
        ("--kv-offloading-size 20 -tp 4", "0.32.0", 32, False),  # of all ranks together
        ("--kv-offloading-size 40 --kv-offloading-backend lmcache", "0.32.0", 32, False),
        (f"{CONNECTOR} '{OFFLOADING % 40e9}' -tp 4", "0.32.0", 32, True),
        (f"{CONNECTOR} '{OFFLOADING % 20e9}' -tp 4", "0.32.0", 32, False),  # of all ranks together
        (f"{CONNECTOR} '{OFFLOADING % 20e9}' -tp 4 -dp 2", "0.32.0", 32, True),
        (f"{CONNECTOR} '{SEVERAL % OFFLOADING % 40e9}'", "0.32.0", 32, True),
        (f"{CONNECTOR} '{PER_RANK % 10e9}' -tp 4", "0.32.0", 32, True),
        (f"{CONNECTOR} '{PER_RANK % 10e9}'", "0.32.0", 32, False),
        (f"{CONNECTOR} '{OFFLOADING % 40e9}' --kv-offloading-size 20", "0.32.0", 32, False),
        (f"{CONNECTOR} '{OFFLOADING.replace('Offloading', 'LMCache') % 40e9}'", "0.32.0", 32, False),
        ("--swap-space 16 -tp 4", "0.7.3", 32, True),
        ("--swap-space 16 -tp 4", "0.10.0", 32, False),
    ],
)
def test_offloading_is_compared_with_the_memory_of_this_host(
    words: str, version: str, memory: int, expected: bool
) -> None:
    target = LintTarget(read(f"vllm serve m {words}", version=version), version, host_memory=memory * 2**30)
    assert ("offloading_above_the_host" in {finding.rule for finding in lint(target)}) is expected


def test_an_unknown_gpu_is_refused_in_one_sentence() -> None:
    with pytest.raises(BadUsage, match=r"\Aunknown GPU 'h1000' [^\n]*\Z"):
        judge("vllm serve m", gpu="h1000")


@pytest.mark.parametrize(
    ("words", "gpu", "version", "severity"),
    [
        ("--kv-cache-dtype fp8", "a100-80", "0.32.0", "info"),
        ("--kv-cache-dtype fp8", "a100-80", "0.10.0", ""),
        ("--kv-cache-dtype fp8", "l40s", "0.32.0", ""),
        ("--kv-cache-dtype fp8", "h100", "0.32.0", ""),
        ("--kv-cache-dtype fp8", "t4", "0.32.0", "error"),
        ("--kv-cache-dtype fp8", "t4", "0.23.0", ""),
        ("--kv-cache-dtype fp8 --attention-backend TRITON_ATTN", "a100-80", "0.32.0", "error"),
        ("--kv-cache-dtype fp8 --attention-backend FLASH_ATTN", "a100-80", "0.32.0", ""),
        ("--kv-cache-dtype bfloat16", "a100-80", "0.32.0", ""),
        ("--kv-cache-dtype fp8", "", "0.32.0", ""),
    ],
)
def test_fp8_cache_depends_on_the_gpu(words: str, gpu: str, version: str, severity: str) -> None:
    found = findings(f"vllm serve m {words}", gpu, version).get("fp8_cache_is_converted")
    assert (found.severity if found else "") == severity


@pytest.mark.parametrize(
    ("gpu", "version", "found"), [("b200", "0.28.0", 0), ("b200", "0.27.1", 1), ("h100", "0.32.0", 1)]
)
def test_graphs_of_datacentre_blackwell_are_larger(gpu: str, version: str, found: int) -> None:
    assert len({"sequences_above_graphs"} & findings("vllm serve m --max-num-seqs 1024", gpu, version).keys()) == found


# -- adapters and the container


@pytest.mark.parametrize(
    ("settings", "words", "expected"),
    [
        ({"r": 64}, "", True),
        ({"r": 16}, "", False),
        ({"r": 8, "rank_pattern": {"q_proj": 64}}, "", True),
        ({"r": 64}, "--max-lora-rank 64", False),
        ({"r": 64}, "--max-lora-rank $RANK", False),
        ({"r": "64"}, "", False),
        ([], "", False),
    ],
)
def test_adapter_rank_is_read_from_its_folder(settings: object, words: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    for module in (f"a={tmp_path}", json.dumps({"name": "a", "path": str(tmp_path)})):
        found = findings(f"vllm serve m --enable-lora {words} --lora-modules '{module}'")
        assert ("adapter_rank_above_the_maximum" in found) is expected


def test_rank_of_an_unreadable_adapter_is_unknown() -> None:
    assert adapter_rank({"r": True}) == adapter_rank(None) == 0


def test_adapters_without_lora_are_corrected() -> None:
    assert judge("vllm serve m --lora-modules a=/a", "0.32.0").corrected == (
        "vllm serve m --enable-lora --lora-modules a=/a"
    )
    assert "adapters_without_lora" not in findings("vllm serve m --lora-modules a=/a $MORE")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "", True),
        ("-v /cache:/root/.cache", "", False),
        ("--volume=/cache:/root/.cache/vllm:ro", "", False),
        ("--mount type=bind,source=/c,target=/root/.cache", "", False),
        ("-v /hub:/root/.cache/huggingface", "", True),
        ("-v /root/.cache", "", True),
        ("-e VLLM_CACHE_ROOT=/cache -v /c:/cache", "", False),
        ("-v $CACHE:/data", "", True),
        ("-v $VOLUME", "", False),
        ("--rm $MORE", "", False),
        ("--volumes-from other", "", False),
        ("--user 1000", "", False),
        ("", "--enforce-eager", False),
    ],
)
def test_compile_cache_is_lost_without_a_volume(before: str, after: str, expected: bool) -> None:
    text = f"docker run --gpus all {before} vllm/vllm-openai:v0.32.0 m {after}"
    assert ("compile_cache_is_lost" in findings(text)) is expected
    assert "compile_cache_is_lost" not in findings(f"vllm serve m {after}")


def test_home_of_an_unknown_image_is_not_guessed() -> None:
    assert "compile_cache_is_lost" not in findings("docker run -v /c:/home/app/.cache registry/app vllm serve m")


# -- the checkpoint's quantization and the draft model, beside a real vLLM

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}
OTHER_CHECKPOINT, NOT_QUANTIZED = "quantization_of_another_checkpoint", "checkpoint_not_quantized"
CHECKPOINTS: tuple[tuple[Mapping[str, object] | None, str, str], ...] = (
    (None, "--quantization awq", NOT_QUANTIZED),
    (None, "--quantization gptq", NOT_QUANTIZED),
    (None, "--quantization compressed-tensors", NOT_QUANTIZED),
    (None, "--quantization fp8", ""),
    (None, "--quantization fp8_per_tensor", ""),
    (None, "--quantization bitsandbytes", "quantization_removed"),
    (AWQ, "", ""),
    (AWQ, "--quantization awq", ""),
    (AWQ, "--quantization awq --dtype bfloat16", ""),
    (AWQ, "--quantization fp8", OTHER_CHECKPOINT),
    (AWQ, "--quantization fp8_per_tensor", OTHER_CHECKPOINT),
    (AWQ, "--quantization gptq_marlin", OTHER_CHECKPOINT),
    (GPTQ, "--quantization gptq_marlin", ""),
    (GPTQ, "--quantization awq", OTHER_CHECKPOINT),
    (FP8, "--quantization fp8", ""),
    (FP8, "--quantization gptq", OTHER_CHECKPOINT),
    (COMPRESSED, "--quantization fp8", OTHER_CHECKPOINT),
    (COMPRESSED, "--quantization bitsandbytes", OTHER_CHECKPOINT),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "", "quantization_removed"),
    (None, "SPECULATION DRAFT", ""),
    (None, "SPECULATION OTHER", "draft_of_another_vocabulary"),
    (None, "SPECULATION OTHER HETEROGENEOUS", ""),
)


def checkpoint(folder: Path, at: int) -> tuple[str, str]:
    """Write the models of a case; return the model's folder and the words."""
    quantization, words, _ = CHECKPOINTS[at]
    paths = {name: folder / f"{at}-{name}" for name in ("model", "draft", "other")}
    for name, path in paths.items():
        model.write(path, "tiny")
        config = json.loads((path / "config.json").read_text())
        config |= {"vocab_size": 2 * config["vocab_size"]} if name == "other" else {}
        config |= {"quantization_config": quantization} if quantization else {}
        (path / "config.json").write_text(json.dumps(config))
    if words.startswith("SPECULATION"):
        drafting = {"model": str(paths["other" if "OTHER" in words else "draft"]), "num_speculative_tokens": 2}
        drafting |= {"method": "draft_model"}
        drafting |= {"use_heterogeneous_vocab": True} if "HETEROGENEOUS" in words else {}
        words = f"--speculative-config '{json.dumps(drafting)}'"
    return str(paths["model"]), words


@pytest.mark.parametrize("at", range(len(CHECKPOINTS)))
def test_checkpoint_and_draft_model_are_judged(at: int, tmp_path: Path) -> None:
    folder, words = checkpoint(tmp_path, at)
    found = {rule for rule, finding in findings(f"vllm serve {folder} {words}").items() if finding.severity == "error"}
    assert (CHECKPOINTS[at][2] in found) if CHECKPOINTS[at][2] else not found


@pytest.mark.nightly
@pytest.mark.live
@server.needed
def test_a_real_vllm_refuses_what_lint_refuses_of_a_checkpoint(tmp_path: Path) -> None:
    cases = [checkpoint(tmp_path, at) for at in range(len(CHECKPOINTS))]
    asked = [[*read(f"vllm serve {folder} {words}", version=described()).words[2:]] for folder, words in cases]
    command = [server.PYTHON, "-I", str(TESTS / "support" / "live" / "engine_config.py"), str(installed_parser.SCRIPT)]
    environment = {**os.environ, **server.ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True, env=environment)
    refused = [bool(answer) for answer in json.loads(done.stdout)]
    assert refused == [bool(rule) for _, _, rule in CHECKPOINTS], json.loads(done.stdout)


def test_a_checkpoint_with_an_unnamed_method_is_not_compared(tmp_path: Path) -> None:
    model.write(tmp_path / "m", "tiny")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"] = {"quant_algo": "FP8"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert not {OTHER_CHECKPOINT, NOT_QUANTIZED} & findings(f"vllm serve {tmp_path / 'm'} --quantization awq").keys()


@pytest.mark.parametrize(
    ("words", "version", "expected"),
    [
        ("--quantization awq --dtype bfloat16", "0.23.0", {"awq_with_bfloat16"}),
        ("--quantization awq --dtype float16", "0.23.0", set()),
        ("--quantization awq_marlin --dtype bfloat16", "0.23.0", set()),
        ("--quantization awq --dtype bfloat16", "0.24.0", set()),
        ("--quantization gguf", "0.23.0", set()),
        ("--quantization gguf", "0.24.0", {"quantization_removed"}),
        ("--quantization nvfp4", "0.32.0", {"quantization_removed"}),
        ("--quantization modelopt_fp4", "0.32.0", set()),
        ("--quantization $METHOD --dtype bfloat16", "0.23.0", set()),
    ],
)
def test_quantization_depends_on_the_release(words: str, version: str, expected: set[str]) -> None:
    found = findings(f"vllm serve m {words}", version=version)
    assert {rule for rule, finding in found.items() if finding.severity == "error"} == expected


def test_an_architecture_that_the_release_no_longer_has_is_an_error() -> None:
    launch = "vllm serve mosaicml/mpt-7b"
    match = findings(launch)["model_does_not_fit"]
    assert "0.28.0 is the last release that serves the model" in match.message and match.severity == "error"
    assert "model_does_not_fit" not in findings(launch, version="0.28.0")
    assert findings("vllm serve adept/persimmon-8b-chat")["model_does_not_fit"].severity == "warning"
