"""Models by name: what is found, what is said of an unknown name, and that each row is a whole shape with a source."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
from support.live import server
from support.models import changed
from support.paths import MODELS, ROOT
from support.sampling import some

from diag.commands.budget import estimate, run
from diag.commands.options import BudgetOptions
from diag.core.errors import BadUsage
from diag.vllm.command.command import Command
from diag.vllm.memory import weights
from diag.vllm.memory.architectures import removed
from diag.vllm.memory.ledger import WEIGHTS
from diag.vllm.memory.model import load
from diag.vllm.memory.shapes import closest, find_shape, repositories, served_name

SERVED = """
Qwen/Qwen3-8B 8.19
qwen3-32b 32.76
Qwen/Qwen3-30B-A3B-Instruct-2507-FP8 30.53
Qwen/Qwen2.5-72B-Instruct-AWQ 72.71
Qwen/Qwen2.5-VL-72B-Instruct 73.41
Qwen/Qwen3.5-397B-A17B 396.8
Qwen/Qwen3.6-27B-FP8 27.36
Qwen/Qwen3-Coder-480B-A35B-Instruct 480.15
Qwen/Qwen3-Next-80B-A3B-Thinking 79.67
Qwen/Qwen3-Embedding-8B 7.57
meta-llama/Llama-3.1-8B-Instruct 8.03
RedHatAI/Llama-3.3-70B-Instruct-quantized.w4a16 70.55
llama3.2:3b 3.21
meta-llama/Llama-4-Scout-17B-16E-Instruct 107.77
deepseek-ai/DeepSeek-R1-0528 671.03
deepseek-ai/DeepSeek-V3.2-Exp 671.88
deepseek-ai/DeepSeek-V4-Flash 284.33
zai-org/GLM-4.5-Air-FP8 106.85
zai-org/GLM-4.6 352.8
zai-org/GLM-5.1-FP8 743.91
moonshotai/Kimi-K2.5 1026.88
MiniMaxAI/MiniMax-M2.5 228.69
mistralai/Mistral-Small-3.2-24B-Instruct-2506 24.01
mistralai/Ministral-3-8B-Instruct-2512 8.92
mistralai/Mixtral-8x22B-Instruct-v0.1 140.62
google/gemma-3-12b-it 12.19
google/gemma-4-31B-it 31.25
microsoft/phi-4 14.66
microsoft/Phi-4-mini-instruct 3.84
openai/gpt-oss-120b 116.83
nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4 120.67
nvidia/DeepSeek-V3.1-NVFP4 671.03
ibm-granite/granite-3.3-2b-instruct 2.53
BAAI/bge-m3 0.57
BAAI/bge-reranker-v2-m3 0.57
LGAI-EXAONE/EXAONE-4.0-32B 32.0
HuggingFaceTB/SmolLM3-3B 3.08
allenai/OLMo-2-0325-32B-Instruct 32.23
nvidia/NVIDIA-Nemotron-Nano-9B-v2-FP8 8.89
google/gemma-4-E2B-it-qat-w4a16-ct 5.1
XiaomiMiMo/MiMo-V2.5-Pro 1023.2
poolside/Laguna-M.1-FP8 225.8
meta-llama/Llama-Guard-4-12B 12.0
LiquidAI/LFM2.5-230M 0.23
hfl/chinese-alpaca-2-7b 6.93
OPEA/SmolVLM-Instruct-int4-sym-inc 2.246
allenai/Molmo-72B-0924 73.3
zai-org/GLM-GA 10.29
cl-nagoya/ruri-v3-310m 0.3146
cl-nagoya/ruri-base-v2 0.1112
lightonai/mDenseOn 0.3069
sdadas/mmlw-roberta-large 0.435
sbintuitions/sarashina-embedding-v2-1b 1.224
sentence-transformers/LaBSE 0.4709
cross-encoder/ettin-reranker-1b-v1 1.028
ibm-granite/granite-embedding-107m-multilingual 0.107
codefuse-ai/F2LLM-v2-8B 7.568
baai/Infinity-Instruct-3M-0613-Llama3-70B 70.55
deepseek-v3.1:671b 671.03
zai-org/GLM-4.5V-FP8 107.71
LiquidAI/LFM2-8B-A1B 8.34
arcee-ai/Trinity-Mini 26.12
ByteDance-Seed/Seed-OSS-36B-Instruct 36.15
Qwen/Qwen1.5-14B-Chat 14.17
Qwen/Qwen2-VL-2B-Instruct-GPTQ-Int8 2.21
deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B 1.78
01-ai/Yi-1.5-6B-Chat 6.06
TheBloke/deepseek-coder-33B-instruct-AWQ 33.34
mistralai/Devstral-Small-2505 23.57
CohereForAI/c4ai-command-r-08-2024 32.3
LiquidAI/LFM2-24B-A2B 23.84
BAAI/bge-reranker-base 0.278
BAAI/bge-small-en-v1.5 0.0334
shibing624/text2vec-base-chinese 0.102
deepseek-ai/DeepSeek-Prover-V2-671B 671.03
lmsys/vicuna-13b-v1.5 13.016
mistralai/Ministral-8B-Instruct-2410 8.02
OpenGVLab/InternVL3-78B 78.4
intfloat/multilingual-e5-large-instruct 0.5599
deepseek-ai/DeepSeek-V2.5 235.74
Qwen/Qwen2-57B-A14B-Instruct 57.41
google/gemma-3-270m-it 0.268
HuggingFaceTB/SmolVLM-Instruct 2.246
accounts/fireworks/models/llama-v3p1-70b-instruct 70.55
us.meta.llama3-3-70b-instruct-v1:0 70.55
meta.llama4-scout-17b-instruct-v1:0 107.77
deepseek.r1-v1:0 671.03
@cf/qwen/qwq-32b 32.76
nvidia/nemotron-3-content-safety 4.3
mistralai/Voxtral-Mini-4B-Realtime-2602 4.43
"""
"""Names that people serve, and parameters in billions as published with the weights."""


COUNTED = json.loads((MODELS.parent / "parameters.json").read_text(encoding="utf-8"))
"""Parameters by repository as published with the weights."""


def cached(home: str) -> Command:
    return Command((), 0, {"HF_HOME": home}, "", ())


@pytest.mark.parametrize("line", SERVED.split("\n")[1:-1])
def test_a_served_model_is_known_by_its_name(line: str) -> None:
    name, billions = line.split()
    model = load(name, cached("/nowhere"), version="0.32.0")
    counted = (weights.parameters(model) + weights.encoders(model).elements) / 1e9
    assert counted == pytest.approx(float(billions), rel=0.01)
    assert "no config.json is here: the shape is that of" in model.facts and "source: " in model.facts


@pytest.mark.slow
def test_the_matrices_of_a_row_are_as_many_as_published() -> None:
    wrong = {}
    for name, published in COUNTED.items():
        model = load(name, cached("/nowhere"), version="0.32.0")
        counted = weights.parameters(model) + weights.encoders(model).elements
        if counted != pytest.approx(published, rel=0.01):
            wrong[name] = counted / published
    assert len(COUNTED) > 400 and not wrong


@pytest.mark.parametrize(
    ("name", "layers"),
    [("inclusionAI/Ling-2.6-flash", 4), ("inclusionAI/Ling-3.0-tiny", 6), ("inclusionAI/Ling-3.0-flash", 7)],
)
def test_layers_of_ling_attend_once_a_group(name: str, layers: int) -> None:
    """Was: every layer kept a state alone, 0 bytes a token; vllm/model_executor/models/bailing_moe_v3.py:135."""
    found = estimate(BudgetOptions(f"vllm serve {name} -tp 8", "h200", version="0.33.0"))
    assert found.ledger.token_bytes == layers * (512 + 64) * 2


@pytest.mark.parametrize("repository", some(repositories(), 12))
def test_a_row_is_a_whole_shape_with_a_source(repository: str) -> None:
    found = find_shape(repository)
    assert found and len(found.source) > 10
    model = load(repository, cached("/nowhere"), version="0.32.0")
    assert model.stack and model.family and not model.unknown and not model.doubt


@pytest.mark.parametrize(
    ("name", "repository", "quantized"),
    [
        ("Qwen3-8B-AWQ", "Qwen/Qwen3-8B", "AWQ, 4 bits in groups of 128"),
        ("someone/Qwen2.5-7B-Instruct-GPTQ-Int8", "Qwen/Qwen2.5-7B-Instruct", "GPTQ, 8 bits"),
        ("unsloth/gemma-3-27b-it-bnb-4bit", "google/gemma-3-27b-it", "bitsandbytes, 4 bits"),
        ("unsloth/Qwen3-8B-Base-unsloth-bnb-4bit", "Qwen/Qwen3-8B-Base", "bitsandbytes, 4 bits"),
        ("01-ai/Yi-34B-Chat-4bits", "01-ai/Yi-34B", "4-bit integers in groups of 128"),
        ("QuantTrio/Qwen3-235B-A22B-GPTQ-Int4-Int8Mix", "Qwen/Qwen3-235B-A22B", "GPTQ, 4 bits in groups of 128"),
        ("moonshotai/kimi-k2-thinking-original:free", "moonshotai/Kimi-K2-Thinking", ""),
        ("openai-whisper-v3-turbo", "openai/whisper-large-v3-turbo", ""),
        ("nvidia/Qwen3.6-27B-NVFP4", "nvidia/Qwen3.6-27B-NVFP4", ""),
        ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1", ""),
    ],
)
def test_a_name_may_add_its_quantization(name: str, repository: str, quantized: str) -> None:
    found = find_shape(name)
    assert found and (found.repository, found.format) == (repository, quantized)


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("TheBloke/Llama-2-7B-Chat-uncensored", "meta-llama/Llama-2-7b-chat-hf"),
        ("mlabonne/Qwen3-8B-abliterated", "Qwen/Qwen3-8B"),
        ("Sao10K/L3-8B-Stheno-v3.2", "meta-llama/Meta-Llama-3-8B"),
        ("NousResearch/Hermes-4-70B-FP8", "meta-llama/Meta-Llama-3.1-70B"),
        ("Tongyi-Zhiwen/QwenLong-L1-32B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"),
        ("XGenerationLab/XiYanSQL-QwenCoder-7B-2502", "Qwen/Qwen2.5-Coder-7B-Instruct"),
        ("someone/Llama-Legal-3.1-8B-v2", "meta-llama/Llama-3.1-8B-Instruct"),
        ("qwen3-next:80b", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
        ("kimi-k2:1t", "moonshotai/Kimi-K2-Instruct"),
        ("nex-agi/DeepSeek-V3.1-Nex-N1", "deepseek-ai/DeepSeek-V3.1"),
        ("tngtech/deepseek-r1t2-chimera:free", "deepseek-ai/DeepSeek-R1"),
        ("openchat/openchat-3.6-8b-20240522", "meta-llama/Meta-Llama-3-8B"),
        ("command-r-plus-04-2024", "CohereLabs/c4ai-command-r-plus"),
        ("deepseek-r1:14b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B"),
        ("granite3.1-moe:3b", "ibm-granite/granite-3.0-3b-a800m-instruct"),  # moe is in the row's own words
        ("MadeAgents/Hammer2.1-7b", "Qwen/Qwen2.5-Coder-7B-Instruct"),
        ("watt-ai/watt-tool-8B", "meta-llama/Llama-3.1-8B-Instruct"),
        ("m-a-p/OpenCodeInterpreter-DS-33B", "deepseek-ai/deepseek-coder-33b-instruct"),
        ("wyt2000/InverseCoder-CL-7B", "codellama/CodeLlama-7b-Instruct-hf"),
        ("mixtral", "mistralai/Mixtral-8x7B-Instruct-v0.1"),  # Ollama's size of "latest"
        ("open-mixtral-8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        ("dolphin3:latest", "meta-llama/Llama-3.1-8B-Instruct"),
        ("zeroentropy/zerank-2", "Qwen/Qwen3-4B"),  # MTEB's list names its base
        ("Octen/Octen-Embedding-8B-INT8", "Qwen/Qwen3-Embedding-8B"),
        ("zerank-2", ""),
        ("someone/wizard-math-moe-7b", ""),
        ("someone/watt-tool-9b", ""),
        ("someone/GLM-4.6+", "zai-org/GLM-4.6"),  # raised IndexError
        ("someone/GLM-4.6-Flash", ""),
        ("someone/GLM-4.6-8B-distill", ""),
        ("vllm-ascend/DeepSeek-V3-Pruning", ""),
        ("Skywork/Skywork-Reward-V9-Llama-3.1-8B", ""),
        ("someone/Qwen3-8B-EAGLE3", ""),
        ("someone/Mistral-2x7B", ""),
        ("someone/Qwen2.5-7B-to-3B", ""),
        ("someone/Qwen9-8B", ""),
    ],
)
def test_a_fine_tune_is_taken_for_the_shape_in_its_name_and_says_so(name: str, repository: str) -> None:
    """Was: unknown, with a shape of another family as the closest."""
    found = find_shape(name)
    assert (found.repository if found else "") == repository
    assert not found or "; the name is taken for it (" in found.note


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("mistralai/Ministral-3-3B-Instruct-2512", 4.67),
        ("mistralai/Ministral-3-8B-Instruct-2512", 10.42),
        ("mistralai/Ministral-3-14B-Instruct-2512", 15.73),
        ("mistralai/Ministral-3-14B-Reasoning-2512", 27.9),
        ("mistralai/Mistral-Large-3-675B-Instruct-2512", 682),
        ("mistralai/Mistral-Small-4-119B-2603", 121),
        ("mistralai/Mistral-Medium-3.5-128B", 134),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", 41.6),
    ],
)
def test_a_checkpoint_has_the_size_of_its_files(name: str, gigabytes: float) -> None:
    """Was: FP8 checkpoints of Mistral in 16 bits."""
    found = estimate(BudgetOptions(f"vllm serve {name}", "b300", version="0.32.0"))
    size = next(row.computed for row in found.ledger.rows if row.name == WEIGHTS)
    assert size and size.central / 1e9 == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.parametrize("name", ["no/such-model", "bge-reranker-xyzzy-9b", "gpt-oss-3b"])
def test_a_hint_is_near_in_family_and_size_or_absent(name: str) -> None:
    assert closest(name) == ""


@pytest.mark.parametrize(
    "name", ["bartowski/Qwen3-8B-GGUF", "/models/Qwen3-8B", "s3://bucket/Qwen3-8B", "a/b/c", "x", "", "my-model-v2"]
)
def test_other_files_and_places_are_not_taken_for_a_shape(name: str) -> None:
    assert find_shape(name) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unsloth/gemma-4-31B-it-GGUF", "GGUF"),
        ("mlx-community/Qwen3-4B-4bit", "another engine"),
        ("gpt-4o", "its vendor alone"),
        ("us.anthropic.claude-sonnet-4-6", "its vendor alone"),
        ("databricks-gemini-3-pro", "its vendor alone"),
        ("openai.gpt-5.5", "its vendor alone"),
        ("llama3.1:8b-instruct-q4_K_M", "GGUF"),
        ("google/gemini-2.5-flash", "its vendor alone"),
        ("stabilityai/stable-diffusion-3.5-large", "makes pictures"),
        ("Qwen/Qwen-Image-Edit-2511", "makes pictures"),
        ("Qwen/Qwen3-TTS-12Hz-1.7B-Base", "makes speech"),
        ("google/flan-t5-xl", "an encoder and a decoder"),
        ("facebook/wav2vec2-base", "does not serve"),
        ("~anthropic/claude-opus-latest", "its vendor alone"),
        ("sonar-reasoning-pro", "its vendor alone"),
        ("vllm-ascend/Qwen3-32B-W8A8", "for Ascend NPUs"),
        ("QuantTrio/DeepSeek-R1-0528-GPTQ-Int4-Int8Mix-Compact", "a quantization that diag does not size"),
        (
            "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
            "drafts for, by its name meta-llama/Llama-3.1-8B-Instruct:",
        ),
        ("lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B", "drafts for, by its name meta-llama/Llama-3.1-8B-Instruct:"),
        ("z-lab/Qwen3-8B-DFlash-b16", "drafts for, by its name Qwen/Qwen3-8B: both are sized together"),
        ("someone/my-eagle3", "drafts for$"),
        ("minishlab/potion-retrieval-32M", "no model that vLLM serves"),
        ("KaLM-Embedding/KaLM-Reranker-V1-Small", "an encoder and a decoder"),
        ("nvidia/Cosmos3-Nano", "makes pictures"),
        ("cohere/embed-english-v3.0", "its vendor alone"),
        ("meta-llama/Llama-3.1", "names no size: diag knows meta-llama/Llama-3.1-8B-Instruct, .*70B"),
    ],
)
def test_what_vllm_does_not_serve_is_told_so_in_one_sentence(name: str, reason: str) -> None:
    with pytest.raises(BadUsage, match=f"^'{name}' .*{reason}") as refused:
        load(name, cached("/nowhere"))
    assert "hf download" not in str(refused.value)


def test_an_unknown_name_gets_the_closest_shape_and_the_way_to_the_file() -> None:
    with pytest.raises(BadUsage) as refused:
        load("openai/gpt-oss-121b", cached("/nowhere"))
    assert "hf download openai/gpt-oss-121b config.json" in str(refused.value)
    assert str(refused.value).endswith("the closest shape that diag knows is openai/gpt-oss-120b")
    assert closest("no/such-model") == ""


def test_a_config_json_in_the_cache_wins(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-8B" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    changed(snapshot, num_hidden_layers=2)
    model = load("Qwen/Qwen3-8B", cached(str(tmp_path)))
    assert (model.layers, model.facts) == (2, "")


def test_the_weights_of_a_shape_by_name_are_not_those_of_a_config_json() -> None:
    found = estimate(BudgetOptions("vllm serve Qwen/Qwen3-8B", "h100", version="0.32.0"))
    assert [row.source for row in found.ledger.rows if row.name == WEIGHTS] == ["the shape of that name"]


def test_formats_with_other_modules_in_16_bits_are_a_doubt() -> None:
    """No false precision: NVFP4 checkpoints of one model differ; what fits with most of them in 16 bits fits."""
    found = estimate(BudgetOptions("vllm serve someone/Qwen3-32B-NVFP4", "h100", version="0.32.0"))
    weights = next(row.size for row in found.ledger.rows if row.name == WEIGHTS)
    assert weights and weights.high > 1.2 * weights.central
    assert found.ledger.verdict == "fits"
    assert any("attention and shared experts may be in 16 bits" in note for note in found.notes)
    assert any("vLLM widens the weights" in note for note in found.notes)
    tight = estimate(
        BudgetOptions("vllm serve someone/Qwen3-32B-NVFP4 --max-model-len 1024", "rtx-4090", version="0.32.0")
    )
    assert tight.ledger.verdict == "cannot tell"


@pytest.mark.parametrize(("gpu", "is_told"), [("a100-80", True), ("l40s", False), ("mi300x", False)])
def test_weights_that_a_gpu_only_converts_are_told(gpu: str, is_told: bool) -> None:
    """Ampere has no FP8, its kernels are W8A16: vllm/model_executor/layers/quantization/utils/marlin_utils_fp8.py."""
    found = estimate(BudgetOptions("vllm serve RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", gpu, version="0.32.0"))
    assert any("vLLM widens the weights" in note for note in found.notes) == is_told


def test_the_page_states_the_number_of_shapes() -> None:
    for page in ("docs/sizing.md", "CHANGELOG.md"):
        assert f"the shapes of {len(repositories())} repositories" in (ROOT / page).read_text(encoding="utf-8")


@cache
def architectures() -> dict[str, str]:
    """Return the architecture of each repository's shape."""
    return {name: load(name, cached("/nowhere")).architecture for name in repositories()}


@pytest.mark.slow
def test_an_architecture_that_vllm_removed_is_judged_by_the_release() -> None:
    """Was: FITS, for every release."""
    falls_back = {kind for kind, last in removed().items() if last.endswith("+")}
    assert len(removed()) == 56 and len(falls_back) == 15
    gone = {name: kind for name, kind in architectures().items() if kind in removed()}
    assert len(gone) > 60
    never = {name: kind for name, kind in gone.items() if "never" in removed()[kind]}
    assert len(never) == 4
    for name, kind in never.items():
        page = estimate(BudgetOptions(name, "h200")).ledger
        assert page.verdict != "fits" and f"has no {kind}: no release is known" in page.reasons[0]
    for name in gone.keys() - never.keys():
        kind = gone[name]
        last = removed()[kind].rstrip("+")
        after = f"0.{int(last.split('.')[1]) + 1}.0"
        page = estimate(BudgetOptions(name, "h200", version=after)).ledger
        said = f"vLLM {after} has no {kind}: {last} is the last release"
        assert page.verdict != "fits"
        assert page.reasons[0].startswith(said)  # was: behind what is too little, if Transformers has the model
        assert not any(
            "has no" in reason for reason in estimate(BudgetOptions(name, "h200", version=last)).ledger.reasons
        )
    assert estimate(BudgetOptions("mosaicml/mpt-7b", "h200", version="0.28.0")).ledger.verdict == "fits"
    text, status = run(BudgetOptions("mosaicml/mpt-7b", "h200", concurrency=2, context="1k"))
    assert status == 2 and "0.28.0 is the last release that serves the model" in " ".join(text.split())


@pytest.mark.parametrize(
    ("launch", "method", "last", "after"),
    [
        ("unsloth/granite-4.0-1b-bnb-4bit", "bitsandbytes", "0.27.1", "0.28.0"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "bitsandbytes", "0.27.1", "0.28.0"),
        ("Qwen/Qwen3-8B --quantization bitsandbytes", "bitsandbytes", "0.27.1", "0.28.0"),
        ("Qwen/Qwen3-8B --quantization gguf", "gguf", "0.23.0", "0.24.0"),
    ],
)
def test_a_method_that_vllm_removed_is_judged_by_the_release(launch: str, method: str, last: str, after: str) -> None:
    then, now = (estimate(BudgetOptions(f"vllm serve {launch}", "h100", version=one)).ledger for one in (last, after))
    assert not any("has no" in reason for reason in then.reasons)
    assert now.verdict == "does not fit"
    assert now.reasons[0] == f"vLLM {after} has no {method}: {last} is the last release that serves the model"


@pytest.mark.parametrize(("name", "weights"), [("openai/gpt-oss-20b-BF16", 41.8e9), ("openai/gpt-oss-20b", 13.8e9)])
def test_a_copy_in_16_bits_of_a_model_that_is_published_quantized_has_their_size(name: str, weights: float) -> None:
    """Was: 14.4 GB, which FITS one L4."""
    rows = {row.name: row.size for row in estimate(BudgetOptions(name, "h200", version="0.33.0")).ledger.rows}
    assert (size := rows[WEIGHTS]) and size.central == pytest.approx(weights, rel=0.06)


@pytest.mark.parametrize("name", ["lmms-lab/llava-onevision-qwen2-72b-ov-sft", "lmms-lab/llava-onevision-qwen2-7b-ov"])
def test_llavas_own_form_is_refused_and_that_of_transformers_is_sized(name: str) -> None:
    """Was: FITS, as its text model."""
    with pytest.raises(BadUsage, match="for which no release of vLLM has a class"):
        estimate(BudgetOptions(name, "h100"))
    assert find_shape("llava-hf/llava-onevision-qwen2-7b-ov-hf") is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "served", "shape"),
    [
        ("Command R+", "Command-R+", "CohereLabs/c4ai-command-r-plus"),  # was: the one of 35B
        ("C4AI Command R+ 08-2024", "CohereForAI/c4ai-command-r-plus-08-2024", "c4ai-command-r-plus-08-2024"),
        ("command-r", "command-r", "CohereForAI/c4ai-command-r-v01"),
        ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B-Instruct", "Llama-3.1-70B"),  # was: the base
        ("google/gemma-2b-it", "google/gemma-2b-it", "google/gemma-2b"),
        ("CodeLlama-34b-hf", "CodeLlama-34b-hf", "codellama/CodeLlama-34b-Instruct-hf"),
        ("Llama 2 7B", "Llama-2-7B", "meta-llama/Llama-2-7b"),
        ("gemma-3-27b-instruct", "google/gemma-3-27b-it", "google/gemma-3-27b-it"),
        ("qwen3-8b", "Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("qwen3-8b-base", "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B-Base"),
        ("HuggingFaceTB/SmolLM3-3B", "HuggingFaceTB/SmolLM3-3B", "HuggingFaceTB/SmolLM3-3B"),  # was: hidden
        ("@cf/google/gemma-4-26b-a4b-it", "google/gemma-4-26B-A4B-it", "google/gemma-4-26B-A4B-it"),
        ("FuseO1-DeepSeekR1-QwQ-32B-Preview", "FuseO1-DeepSeekR1-QwQ-32B-Preview", "Qwen/QwQ-32B"),
        ("Mistral 7B", "Mistral-7B", "mistralai/Mistral-7B-v0.3"),  # was: v0.1
        ("Mistral 7B v0.1", "mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.1"),
        ("some-tune-of-mistral-7b", "some-tune-of-mistral-7b", "mistralai/Mistral-7B-v0.1"),
    ],
)
def test_the_launch_names_the_model_that_was_asked_for(name: str, served: str, shape: str) -> None:
    text = run(BudgetOptions(name, "h200", concurrency=2, context="1k"))[0]
    assert f"vllm serve {served} " in text.replace("\n", " ") and shape in " ".join(text.split())


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("ibm-granite/granite-3b-code-instruct-128k", 128_000),  # was: 2,048
        ("ibm-granite/granite-8b-code-instruct-128k", 128_000),
        ("ibm-granite/granite-3b-code-instruct-2k", 2048),
        ("HuggingFaceTB/SmolLM3-3B", 65_536),
        ("tiiuae/falcon-40b-instruct", 2048),
        ("CohereLabs/c4ai-command-r-v01", 131_072),  # by model_max_length, not max_position_embeddings
        ("CohereForAI/aya-23-35B", 8192),
    ],
)
def test_the_longest_context_is_that_of_the_checkpoint(name: str, longest: int) -> None:
    assert load(name, cached("/nowhere"), version="0.33.0").longest == longest


def test_the_first_line_is_the_least_that_holds_the_load_over_flags_kinds_and_experts() -> None:
    kimi = BudgetOptions("moonshotai/Kimi-K2-Instruct", "h200", concurrency=64, context="32k")
    text, _ = run(kimi)
    assert text.startswith("16 x h200 (TP 1 DP 16 EP) holds 64 requests")  # was: 32 x h200, TP 8 PP 4
    assert "--data-parallel-size 16 --enable-expert-parallel" in text
    assert run(kimi._replace(gpu="b200"))[0].startswith("16 x b200 (TP 1 DP 16 EP)")  # was: 24, with an FP8 KV cache
    assert run(kimi._replace(gpu="h200,b200"))[0].startswith("16 x h200")
    qwen = BudgetOptions("Qwen/Qwen3-32B", "l40s,h100", concurrency=20, context="16k")
    assert run(qwen)[0].startswith("2 x l40s (TP 2, --quantization fp8 --kv-cache-dtype fp8)")  # was: 2 x h100
    assert run(qwen._replace(prices=("l40s=0.5", "h100=2.5")))[0].startswith("2 x l40s")
    small = BudgetOptions("deepseek-ai/DeepSeek-V2-Lite-Chat", "h100", concurrency=4, context="4k")
    assert run(small)[0].startswith("1 x h100 (TP 1)")


def test_the_cache_of_a_window_is_in_bytes_within_it() -> None:
    page = run(BudgetOptions("mistralai/Mistral-7B-v0.1", "l4"))[0]
    assert "KV cache per token  131,072 bytes within the window" in page  # was: 0 bytes


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.33.0"])
def test_each_architecture_of_a_shape_has_a_class_or_says_that_it_has_none(version: str) -> None:
    """Was: MiniMaxM3ForCausalLM and eight others, which no release has."""
    package = server.sources().get(version)
    if package is None:
        pytest.skip(f"no sources of vLLM {version}")
    text = (package / "model_executor" / "models" / "registry.py").read_text(encoding="utf-8")
    classes = set(re.findall(r'^    "(\w+)": \(', text, re.M))
    assert len(classes) > 300
    converted = (
        "ForSequenceClassification",
        "ForTokenClassification",
        "Qwen3Model",
    )  # model_executor/models/adapters.py
    own = {"Mistral4ForCausalLM"}  # read in Mistral's own format
    for name, kind in architectures().items():
        assert kind in classes | removed().keys() | own or kind.endswith(converted), (name, kind)


@pytest.mark.parametrize(
    ("name", "base", "billions"),
    [
        ("BitAgent/BitAgent-Bounty-8B", "meta-llama/Llama-3.1-8B-Instruct", 8.03),
        ("TheDrummer/Behemoth-X-123B-v2.2", "mistralai/Mistral-Large-Instruct-2411", 122.61),
        ("rombodawg/Rombos-Coder-V2.5-Qwen-14b", "Qwen/Qwen2.5-Coder-14B-Instruct", 14.77),  # was: Qwen-14B
        ("anthracite-org/magnum-v4-22b", "mistralai/Mistral-Small-Instruct-2409", 22.25),
        ("thedrummer/skyfall-36b-v2", "TheDrummer/Skyfall-36B-v2", 36.9),
        ("allenai/Molmo-7B-O-0924", "allenai/Molmo-7B-O-0924", 7.67),
        ("thedrummer/anubis-pro-105b-v1", "TheDrummer/Anubis-Pro-105B-v1", 104.8),
    ],
)
def test_a_fine_tune_without_a_base_in_its_name_is_known_by_its_card(name: str, base: str, billions: float) -> None:
    shape, model = find_shape(name), load(name, cached("/nowhere"))
    assert shape and shape.repository == base
    counted = weights.parameters(model) + weights.encoders(model).elements
    assert counted / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", ["LiquidAI/LFM2-24B-A2B", "some/thing-8b", "some/moe-24b-a3b"])
def test_other_models_of_a_size_are_not_taken_for_the_dense_one(name: str) -> None:
    shape = find_shape(name)
    assert shape is None or "istral" not in shape.repository


def test_a_launch_names_the_repository_of_a_name_without_its_owner() -> None:
    """Meta's repositories begin with Meta-; an instruct model is not its base, whose shape it has."""
    assert served_name("llama-3-70b") == "meta-llama/Meta-Llama-3-70B"
    assert served_name("llama-3-8b-instruct") == "llama-3-8b-instruct"
