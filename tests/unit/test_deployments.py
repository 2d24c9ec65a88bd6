"""One page has one number for one thing, for launches at random; and what was reported of pages that had two."""

import json
import random
import re
import shlex
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from support.paths import MODELS, ROOT
from support.sampling import some

from diag.commands import budget
from diag.commands.budget import estimate, run, size_up
from diag.commands.lint import judge
from diag.commands.options import BudgetOptions, PreflightOptions
from diag.commands.preflight import _with_ledger as with_ledger
from diag.core.contract import Contract
from diag.core.errors import BadUsage
from diag.core.formatting import gibibytes
from diag.knowledge.catalog import load
from diag.lint.host import memory_ledger
from diag.lint.rule import HostGpu, HostGpus, LintTarget
from diag.preflight.capacity import memory_estimate
from diag.preflight.check import PreflightFacts
from diag.report.gpu_sizing import render_budget
from diag.vllm.command.parse import parse
from diag.vllm.deployments import NOW
from diag.vllm.gpus import memory
from diag.vllm.memory.ledger import WEIGHTS
from diag.vllm.work import _command_samples

NAMES = (
    "llama-3.1-8b",
    "llama-3-70b",
    "qwen2.5-7b",
    "qwen3-30b-a3b",
    "qwen3.5-27b",
    "gpt-oss-120b",
    "gemma-3-27b",
    "deepseek-v3",
    "bge-m3",
    "granite-4-hybrid",
    "ibm-granite/granite-4.0-h-tiny",
)
FLAGS = ("", "-tp 2", "-tp 4", "--kv-cache-dtype fp8", "--max-num-seqs 64", "--enforce-eager", "-dp 2", "-pp 2")


def launch(seed: int) -> tuple[str, str, str, int]:
    """Return a command, a GPU, a context and a concurrency at random."""
    chance = random.Random(seed)
    name = chance.choice(NAMES)
    command = f"vllm serve {name if '/' in name else MODELS / name} {chance.choice(FLAGS)}"
    gpu = chance.choice(("t4", "l4", "l40s", "a100-80", "h100", "h200", "b200", "mi300x", "gb10"))
    return command, gpu, chance.choice(("2k", "4k", "8k")), chance.choice((1, 8, 32, 200, 1000))


def sized(command: str, gpu: str, context: str, concurrency: int) -> tuple[str, dict[str, object]]:
    """Return a page, and what it says as JSON; both of one sizing."""
    options = BudgetOptions(command, gpu, version="0.32.0", context=context, concurrency=concurrency)
    with patch.object(budget, "size_up", cache(size_up)):
        return run(options)[0], json.loads(run(options, as_json=True)[0])


@pytest.mark.parametrize("seed", some(range(500), 10))
def test_a_page_has_one_number_for_one_thing(seed: int) -> None:
    try:
        page, said = sized(*launch(seed))
    except BadUsage:
        return
    rows = said["configurations"]
    assert isinstance(rows, list)
    for change in {one["change"] for one in rows}:
        alike = sorted((one["gpus"], one["requests"]) for one in rows if one["change"] == change)
        assert [held for _, held in alike] == sorted(held for _, held in alike), "more GPUs never hold less"
    able = [one for one in rows if one["requests"]]
    concurrency = said["concurrency"]
    if concurrency is None:  # nothing of a request is kept
        assert "nothing of a request is kept" in " ".join(page.split()) and len({one["verdict"] for one in able}) <= 1
        return
    assert all(one["requests"] >= concurrency for one in able)
    assert len({one["batch"] for one in able if one["batch"] == concurrency} | {concurrency}) == 1
    first = " ".join(page.splitlines()[0].split())
    if found := re.match(r"(\d+) x (\S+) ", first):
        total = re.search(r"room for ([\d,]+)", " ".join(page.split()))
        assert total and (int(found[1]), found[2], int(total[1].replace(",", "").rstrip("."))) in {
            (one["gpus"], one["gpu"], one["requests"]) for one in rows
        }


@pytest.mark.parametrize("seed", some(range(500), 10))
def test_offers_repeat_the_ledger_of_their_page(seed: int) -> None:
    command, gpu, context, _ = launch(seed)
    try:
        budget = estimate(BudgetOptions(f"{command} --max-model-len {context}", gpu, version=("", "0.32.0")[seed % 2]))
    except BadUsage:
        return
    now = [one for one in budget.offers if one.change == NOW]
    assert [one.requests for one in now] == [budget.sequences for one in now]
    assert [one.ledger.tokens for one in now] == [budget.ledger.tokens for one in now]
    last = budget.offers[-1] if budget.offers else None
    if last and now and last.change == "more GPUs":
        assert last.requests >= 2 * now[0].requests * last.gpus // (2 * now[0].gpus)
    assert render_budget(budget)


@pytest.mark.parametrize("seed", some(range(60), 4))
def test_a_launch_has_the_same_numbers_on_budget_lint_preflight_and_doctor(seed: int) -> None:
    command, gpu, context, _ = launch(seed)
    command = f"{command} --max-model-len {context}"
    try:
        page = estimate(BudgetOptions(command, gpu, version="0.32.0")).ledger
    except BadUsage:
        return
    of_host = HostGpus(tuple(HostGpu(str(at), gpu, memory(gpu), memory(gpu)) for at in range(8)), {})
    linted = memory_ledger(LintTarget(parse(command, "0.32.0"), "0.32.0", page.model, of_host))
    assert linted and (linted.blocks, linted.kv_cache, linted.verdict) == (page.blocks, page.kv_cache, page.verdict)
    known = PreflightFacts(Contract(), load(None), "0.32.0", command=parse(command))
    before = with_ledger(known, PreflightOptions(command, gpu=gpu), command).ledger
    assert before and (before.rows, before.blocks, before.reasons) == (page.rows, page.blocks, page.reasons)
    runs = (("dtype", "float32"),) if page.setup.float32 else ()  # the server tells it
    live = {(name, *labels): value for name, labels, value in _command_samples(command, "0.32.0", runs)}
    kept = live.get(("diag_vllm_kv_cache_bytes_per_token",))
    if kept and page.layout and not page.layout.number("window", "chunk", "state") and page.setup.pipeline == 1:
        assert kept == pytest.approx(page.token_bytes, rel=0.01)
    total = next(row.computed for row in page.rows if row.name == WEIGHTS)
    read = sum(value for (name, *_), value in live.items() if name == "diag_vllm_weight_bytes")
    assert total and read <= 1.02 * total.high and (not read or read > 0.7 * total.low)  # all but the embedding


def test_the_answer_is_line_1_with_the_least_gpus_that_hold_the_load() -> None:
    """Was: 8 x H100 as the least in the third bullet, while TP 4 with an FP8 KV cache holds 215."""
    page, said = sized(f"vllm serve {MODELS / 'llama-3-70b'}", "h100", "4k", 200)
    assert " ".join(page.splitlines()[:2]).startswith(
        "4 x h100 (TP 4, --kv-cache-dtype fp8) holds 200 requests of 4,000 tokens, with room for 212; without"
        "   --kv-cache-dtype fp8: 8 x h100."
    )
    assert str(said["launch"]).endswith("--tensor-parallel-size 4 --max-model-len 4000 --kv-cache-dtype fp8")


def test_a_launch_holds_no_more_requests_than_its_states() -> None:
    """Was: 4 x H100 with --max-num-seqs 2 "holds 8 requests, with room for 35"."""
    options = BudgetOptions("nvidia/Qwen3.5-397B-A17B-NVFP4-V2", "h100", context="8k", concurrency=8)  # of any release
    said = json.loads(run(options, as_json=True)[0])
    for one in said["configurations"]:
        least = re.search(r"--max-num-seqs (\d+)", one["flags"])
        assert least is None or one["requests"] <= int(least[1]) * one["replicas"]


def test_rows_of_awq_on_t4_are_for_one_load() -> None:
    """Was: 1,621 tokens/s in the table and 3,119 for the same launch among the offers."""
    page, _ = sized("vllm serve Qwen/Qwen2.5-7B-Instruct-AWQ", "t4", "4k", 32)
    assert page.count("2 x t4") == 2 and "as it is" not in page


def test_wide_expert_parallelism_is_sized() -> None:
    """Was: --data-parallel-size with --concurrency refused."""
    page, said = sized("vllm serve deepseek-ai/DeepSeek-V3 -dp 16 --enable-expert-parallel", "h200", "8k", 256)
    assert page.startswith("16 x h200 (TP 1 DP 16 EP) holds 256 requests of 8,000 tokens, with room")
    assert [one["decode"] for one in said["configurations"]][:1] == [None]  # type: ignore[attr-defined]


def test_a_load_is_held_by_requests_that_decode() -> None:
    """Was: 168 x H200, each of 500 requests with two steps of tokens in its windows."""
    page, said = sized("vllm serve deepseek-ai/DeepSeek-V4-Flash", "h200", "16k", 500)
    first = rows_of(said)[0]
    assert first["gpus"] == 4 and f" holds 500 requests of 16,000 tokens, with room for {first['requests']:,}." in page
    text = render_budget(estimate(BudgetOptions(str(said["launch"]), "h200", version="0.32.0")))
    assert f"--max-num-seqs {int(str(first['requests'])) // int(str(first['replicas']))} without" in text
    assert "while its prompt is read, 93 while it decodes" in " ".join(text.split())
    text = render_budget(estimate(BudgetOptions("Qwen/Qwen3-8B", "h200", version="0.32.0")))
    assert "while it decodes" not in text


def rows_of(said: dict[str, object]) -> list[dict[str, object]]:
    rows = said["configurations"]
    assert isinstance(rows, list)
    return rows


def everywhere(model: str, **more: object) -> tuple[str, dict[str, object]]:
    options = BudgetOptions(model, version="0.33.0", all_gpus=True, **more)  # type: ignore[arg-type]
    with patch.object(budget, "size_up", cache(size_up)):
        return run(options)[0], json.loads(run(options, as_json=True)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "refusing"),
    [("gpt-oss-120b", {"v100-16", "v100-32", "t4"}), ("Qwen/Qwen2.5-7B-Instruct-AWQ", {"v100-16", "v100-32"})],
)
def test_a_quantization_that_a_gpu_lacks_fits_none_of_them(model: str, refusing: set[str]) -> None:
    """Was: FITS on V100 and T4, while lint called the same launch an error."""
    page, said = everywhere(model, context="4k")
    assert {one["gpu"] for one in rows_of(said) if not one["requests"]} == refusing
    assert "vLLM refuses to start" in page
    for gpu in (*refusing, "a100-80"):
        launch = f"vllm serve {model} -tp 4"
        reasons = " ".join(estimate(BudgetOptions(launch, gpu, version="0.33.0")).ledger.reasons)
        found = judge(launch, "0.33.0", gpu=gpu).findings
        assert ("refuses to start" in reasons) is (gpu in refusing)
        assert ("option_of_another_gpu" in {one.rule for one in found}) is (gpu in refusing)


@pytest.mark.parametrize("flags", ["--quantization experts_int8", "--attention-backend FLASHINFER", ""])
def test_what_rocm_lacks_is_refused_by_budget_and_lint(flags: str) -> None:
    """Was: FITS by memory alone for a GPU without a compute capability."""
    launch = f"vllm serve Qwen/Qwen2.5-7B-Instruct {flags}"
    ledger = estimate(BudgetOptions(launch, "mi300x", version="0.33.0")).ledger
    assert [why.startswith("vLLM refuses to start: -") for why in ledger.reasons] == [True] * bool(flags)
    rules = {one.rule for one in judge(launch, "0.33.0", gpu="mi300x").findings}
    assert ("option_of_another_gpu" in rules) is bool(flags)


def test_a_model_above_one_host_is_divided_among_hosts() -> None:
    """Was: none holds one request, and no word of two hosts."""
    page, said = sized("vllm serve deepseek-ai/DeepSeek-V3", "h100", "8k", 64)
    assert page.startswith("16 x h100 (TP 1 DP 16 EP) holds 64 requests of 8,000 tokens")
    assert "--data-parallel-size 16 --enable-expert-parallel --max-model-len 8000" in str(said["launch"])
    page, _ = sized("vllm serve deepseek-ai/DeepSeek-V3 -tp 8", "h100", "8k", 64)
    assert page.startswith("None holds one request")


@pytest.mark.parametrize("name", ["moonshotai/Kimi-K2.5", "inclusionAI/Ling-2.5-1T"])
def test_a_model_of_a_trillion_parameters_is_offered_several_hosts(name: str) -> None:
    """Was: no change makes it fit; or tensor parallelism over 32 GPUs of four hosts."""
    budget = estimate(BudgetOptions(f"vllm serve {name} -tp 8", "h100", version="0.32.0"))
    (flag, value), *_ = budget.suggestions
    assert flag == "--tensor-parallel-size" and re.fullmatch(r"8 --pipeline-parallel-size [248]", value)
    may = "may make" if "Kimi" in name else "makes"  # the activations of its encoder are not counted
    assert f"This {may} it fit:\n    {flag} {value}" in render_budget(budget)


@pytest.mark.parametrize(("length", "states"), [("16k", ["pass"]), ("32k", ["warn"])])
def test_a_second_request_beside_small_windows_does_not_wait(length: str, states: list[str]) -> None:
    """Was: a warning of preflight, for 1.4 requests with two steps in the windows of each; with 16k two fit."""
    launch = f"vllm serve {MODELS / 'gemma-3-27b'} --max-model-len {length}"
    facts = PreflightFacts(Contract(), load(None), "0.32.0", command=parse(launch))
    facts = with_ledger(facts, PreflightOptions(launch, gpu="h100"), launch)
    assert [one.state for one in memory_estimate(facts)] == states


def test_rates_that_are_not_modelled_say_so() -> None:
    """Was: blanks without a word."""
    page, _ = sized("vllm serve deepseek-ai/DeepSeek-V3", "h100", "8k", 64)
    assert re.search(r"DP 16 EP +yes +\d+ +unknown +unknown", page) and "unknown: the traffic of PP" in page
    page, _ = sized("vllm serve Qwen/Qwen3-8B", "h100", "8k", 4)
    assert "unknown" not in page


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("meta-llama/llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("Qwen/Qwen3_8b", "Qwen/Qwen3-8B"),
        ("mlabonne/Qwen3-8B-abliterated", "mlabonne/Qwen3-8B-abliterated"),
        ("Qwen/Qwen3-8B-GPTQ-Int8", "Qwen/Qwen3-8B-GPTQ-Int8"),
    ],
)
def test_the_launch_names_the_repository(name: str, served: str) -> None:
    """Was: the command to copy kept the typing error."""
    _, said = sized(name, "h100", "8k", 4)
    assert str(said["launch"]).startswith(f"vllm serve {served} ")


def test_a_quantized_checkpoint_is_not_quantized_again() -> None:
    """Was: --quantization fp8, which vLLM refuses for a checkpoint in FP8."""
    page, _ = sized("vllm serve mistralai/Ministral-3-8B-Instruct-2512", "h100", "8k", 200)
    assert "--quantization" not in page


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    some(["Qwen2.5-72B-Instruct-AWQ", "Qwen2-VL-72B-Instruct-GPTQ-Int4", "Qwen2.5-VL-72B-Instruct-AWQ"], 1, "padded"),
)
def test_padded_checkpoints_divide_among_gpus(name: str) -> None:
    """Was: 29,568 columns, which are no whole groups of 128 for two GPUs."""
    _, said = everywhere(f"Qwen/{name}", context="8k")
    assert {one["tensor_parallel_size"] for one in rows_of(said) if one["requests"]} >= {1, 2, 4}


def test_impossible_sizes_are_left_out_with_the_reason() -> None:
    page, said = sized("vllm serve Qwen/Qwen2.5-7B-Instruct", "h100", "8k", 2000)
    assert "left out: vLLM refuses --tensor-parallel-size 8" in page
    assert 8 not in {one["tensor_parallel_size"] for one in rows_of(said)}


@pytest.mark.parametrize(
    "name", ["BAAI/bge-m3", "BAAI/bge-reranker-base", "Qwen/Qwen3-Embedding-8B", "Qwen/Qwen3-Reranker-8B"]
)
def test_pooling_models_have_an_answer(name: str) -> None:
    """Was: exit 64, no ceilings of decoding."""
    page, said = sized(f"vllm serve {name}", "l4", "512", 8)
    assert page.startswith("1 x l4 (TP 1)") and "--kv-cache-dtype" not in page
    assert all(one["decode"] is None for one in rows_of(said))
    assert ("Qwen3ForSequenceClassification" in str(said["launch"])) is ("Reranker" in name)
    again = estimate(BudgetOptions(str(said["launch"]), "l4", version="0.32.0"))
    assert again.ledger.verdict == "fits"


def test_an_engine_on_several_hosts_names_what_each_runs() -> None:
    page, said = sized("vllm serve deepseek-ai/DeepSeek-V3.1 -dp 32 -ep", "h100", "8k", 1000)
    assert "--data-parallel-size-local 8 --data-parallel-address" in str(said["launch"])
    assert "on 4 hosts" in page and "--headless --data-parallel-start-rank 8" in " ".join(page.split())
    page, _ = sized("vllm serve meta-llama/Llama-3.3-70B-Instruct -tp 2", "gb10", "8k", 4)
    assert "--nnodes 2" in page and "on 2 hosts" in page


def test_the_link_of_amd_is_not_nvlink() -> None:
    page, _ = sized("vllm serve Qwen/Qwen2.5-14B-Instruct", "mi300x", "8k", 300)
    assert "over Infinity Fabric" in page and "NVLink" not in page


def test_without_bfloat16_gemma_3_is_float32() -> None:
    """Was: sized in 16 bits, in which vLLM refuses it on a T4."""
    t4, l4 = (estimate(BudgetOptions("vllm serve google/gemma-3-4b-it", gpu, version="0.32.0")) for gpu in ("t4", "l4"))
    assert t4.ledger.token_bytes == 2 * (l4.ledger.token_bytes or 0)
    sizes = [next(row.computed for row in one.ledger.rows if row.name == WEIGHTS) for one in (t4, l4)]
    assert sizes[0] and sizes[1] and sizes[0].central > 1.8 * sizes[1].central
    assert any("float32" in note for note in t4.notes) and not any("float32" in note for note in l4.notes)


@pytest.mark.parametrize(("gpu", "most"), [("gb10", 2), ("thor", 1), ("h100", 8)])
def test_tensor_parallelism_joins_the_gpus_of_one_host(gpu: str, most: int) -> None:
    """Was: eight GB10 with TP 8, which are eight hosts."""
    options = BudgetOptions("meta-llama/Llama-3.3-70B-Instruct", gpu, version="0.32.0", context="32k", concurrency=300)
    found = size_up(options, None)
    assert max(one.setup.tensor for one in found.rows) == most


@pytest.mark.slow
def test_a_launch_for_no_load_runs_what_it_is_said_to_hold() -> None:
    """Was: more requests than --max-num-seqs' default in line 1, and no flag in the launch."""
    found = size_up(BudgetOptions("Qwen/Qwen3-0.6B", version="0.32.0", context="128", all_gpus=True), None)
    assert found.best and found.best.requests > 256
    assert found.launch.endswith(f"--max-num-seqs {found.best.setup.sequences}")
    assert 0.9 * found.best.requests < found.best.batch <= found.best.requests


def test_a_default_max_num_seqs_that_vllm_refuses_is_in_the_launch() -> None:
    page, said = sized("vllm serve Qwen/Qwen3.5-27B", "h100", "4k", 20)
    assert "--max-num-seqs" in str(said["launch"]) and page.startswith("1 x h100")


@pytest.mark.parametrize(
    ("model", "gpu", "seen"),
    [
        ("openai/gpt-oss-120b", "h100", "--max-model-len 6656"),
        ("Qwen/Qwen2.5-7B-Instruct", "t4", ""),
    ],
)
def test_what_makes_it_fit_fits_when_it_is_tried(model: str, gpu: str, seen: str) -> None:
    """Was: computed for another release than the verdict."""
    offered = [" ".join(each) for each in estimate(BudgetOptions(model, gpu)).suggestions]
    assert offered and seen not in offered
    for flags in offered:
        assert estimate(BudgetOptions(f"vllm serve {model} {flags}", gpu)).ledger.verdict == "fits"


@pytest.mark.parametrize(("model", "gpu"), [("Qwen/Qwen3-32B", "a10"), ("Qwen/Qwen3-14B", "t4")])
def test_what_is_too_little_has_one_number(model: str, gpu: str) -> None:
    """Was: at least 41.22 GiB in the reason, 40.78 in the table, which is over all releases."""
    found = estimate(BudgetOptions(model, gpu)).ledger
    assert found.kv_cache and found.kv_cache.high < 0
    assert found.reasons[0].endswith(f"at least {gibibytes(-found.kv_cache.high)} too little")


def test_blocks_of_states_have_one_range() -> None:
    """Was: 280 to 427 in the reason, 199 to 427 in the table, and 280 certain in lint."""
    found = estimate(BudgetOptions("Qwen/Qwen3.5-27B", "h100")).ledger
    assert found.blocks and found.reasons[0].endswith(
        f"has {found.blocks.low} to {found.blocks.high}; --max-num-seqs {found.blocks.low} certainly has enough"
    )
    tried = estimate(BudgetOptions(f"vllm serve Qwen/Qwen3.5-27B --max-num-seqs {found.blocks.low}", "h100")).ledger
    assert not any("refuses" in reason for reason in tried.reasons)


@pytest.mark.parametrize(
    ("model", "gpu", "context", "concurrency", "says"),
    [
        ("llama-3.1-8b", "h100", "32k", 9_000_000, r"^No configuration holds 9,000,000 requests of 32,000 tokens: the"),
        ("llama-3.1-8b", "l40s", "1k", 2000, r"--max-num-seqs 2000$"),
        ("llama-3.1-8b", "h100", "256", 3000, r"--max-num-seqs 3000$"),
        ("llama-3.1-8b", "h100", "4k", 20, r"--max-model-len 4000$"),
        ("llama-3.1-8b", "h100", "1", 3, r"holds 3 requests of 1 token, with room for [\d,]+\."),
    ],
)
def test_first_line_and_launch_are_true(model: str, gpu: str, context: str, concurrency: int, says: str) -> None:
    page, said = sized(f"vllm serve {MODELS / model}", gpu, context, concurrency)
    assert re.search(says, f"{' '.join(page.split())[:200]}\n{said['launch']}", re.M)


def test_the_chosen_row_is_marked_and_the_parameters_are_counted() -> None:
    for context, concurrency in (("8k", 4), ("8k", 200)):
        page, said = sized("Qwen/Qwen3-8B", "l4", context, concurrency)
        (marked,) = re.findall(r"^  > (\d+ x \S+) ", page, re.M)
        assert page.startswith(f"{marked} (") and "chosen (>): what holds it on the least GPU memory" in page
        assert marked in {f"{one['gpus']} x {one['gpu']}" for one in rows_of(said)}
        assert "8.19 billion parameters;" in page
    unchosen, _ = sized(f"vllm serve {MODELS / 'llama-3.1-8b'}", "h100", "32k", 9_000_000)
    assert "  > " not in unchosen and "billion parameters" not in unchosen


def test_a_part_of_a_gpu_holds_a_load_but_is_joined_with_no_other() -> None:
    """Was: exit 64 for the load, and tensor parallelism over parts of a GPU as what makes it fit."""
    page, said = sized("Qwen/Qwen3-8B", "h100-mig-3g.40gb", "8k", 10)
    assert page.startswith("1 x h100-3g.40gb (TP 1) holds 10 requests") and "only the memory is known" in page
    assert {one["tensor_parallel_size"] for one in rows_of(said)} == {1}
    small = estimate(BudgetOptions("meta-llama/Llama-3.1-8B-Instruct", "h100-mig-1g.10gb", version="0.32.0"))
    assert small.ledger.verdict == "does not fit" and not small.suggestions
    assert {one.setup.tensor for one in small.offers} <= {1}
    whole = estimate(BudgetOptions("meta-llama/Llama-3.1-70B-Instruct", "h100", version="0.32.0"))
    assert "--tensor-parallel-size" in {flag for flag, _ in whole.suggestions}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Mixtral MoE 8x7B (FP8)", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        ("Mixtral MoE 8x22B FP8", "mistralai/Mixtral-8x22B-Instruct"),
        ("StarCoderBase 15.5B", "bigcode/starcoder"),
        ("DBRX Instruct FP8", "databricks/dbrx-instruct"),
    ],
)
def test_a_displayed_name_may_have_spaces_and_brackets(name: str, shape: str) -> None:
    """Was: exit 65, no command that starts a vLLM server."""
    assert any(f"the shape is that of {shape} " in note for note in estimate(BudgetOptions(name, "h200")).notes)


def test_a_launch_has_each_flag_once() -> None:
    _, said = sized(f"vllm serve {MODELS / 'llama-3.1-8b'} --max-num-seqs 8 --max-model-len 4k", "h100", "1k", 50)
    flags = str(said["launch"]).split()[3:]
    assert flags == ["--max-model-len", "1000", "--max-num-seqs", "50"]


def test_both_pages_hold_the_same_requests_if_no_release_is_named() -> None:
    """Was: a safe concurrency of 8 over all releases, and 9 held with the newest."""
    command = f"vllm serve {MODELS / 'llama-3.1-8b'} --max-model-len 32000 -tp 1"
    options = BudgetOptions(command, "l40s", context="32k", concurrency=2)
    said = json.loads(run(options, as_json=True)[0])
    assert said["configurations"][0]["requests"] == estimate(BudgetOptions(command, "l40s")).sequences


def test_config_takes_a_file_of_any_name(tmp_path: Path) -> None:
    (tmp_path / "my.json").write_bytes((MODELS / "llama-3.1-8b" / "config.json").read_bytes())
    for config in (tmp_path / "my.json", MODELS / "llama-3.1-8b", MODELS / "llama-3.1-8b" / "config.json"):
        assert estimate(BudgetOptions("some/model", "h100", config=str(config))).ledger.model.layers == 32


FENCE = re.compile(r"```console\n\$ diag budget (.*?)\n(.*?)```", re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("at", range(5))
def test_the_questions_of_the_page_have_these_answers(at: int) -> None:
    command, answer = FENCE.findall((ROOT / "docs" / "sizing.md").read_text(encoding="utf-8"))[at]
    target, *flags = shlex.split(command)
    given = dict(zip(flags[flags[0] == "--all-gpus" :: 2], flags[1 + (flags[0] == "--all-gpus") :: 2], strict=True))
    concurrency = int(given["--concurrency"]) if "--concurrency" in given else None
    options = BudgetOptions(
        target,
        given.get("--gpu", ""),
        version=given["--vllm-version"],
        all_gpus="--all-gpus" in flags,
        context=given.get("--context", ""),
        concurrency=concurrency,
    )
    page, _ = run(options)
    assert [part.strip("\n") in page for part in answer.split("...\n")] == [True] * (1 + answer.count("...\n"))


@pytest.mark.parametrize(
    ("command", "gpu", "memory", "first"),
    [
        ("vllm serve Qwen/Qwen2.5-32B-Instruct -tp 2", "rtx4090", "", "--quantization fp8"),
        ("vllm serve Qwen/Qwen2.5-14B-Instruct-AWQ --max-model-len 4096", "t4", "", "--enforce-eager"),
        ("vllm serve Qwen/Qwen3-4B", "", "7.6GiB", "--max-model-len"),
        ("vllm serve Qwen/Qwen3-8B", "l4", "", "--kv-cache-dtype fp8"),
    ],
)
def test_smaller_changes_are_offered_before_more_gpus(command: str, gpu: str, memory: str, first: str) -> None:
    """Was: 2 or 4 GPUs as the one offer, since the context was kept and only the half of it was tried."""
    found = estimate(BudgetOptions(command, gpu, gpu_memory=memory))
    assert found.ledger.verdict != "fits"
    assert found.offers[0].change != "more GPUs" and found.offers[-1].change == "more GPUs"
    assert any(first in one.flags for one in found.offers[:-1])
    for one in found.offers:
        if not one.checkpoint:
            again = estimate(BudgetOptions(f"{command} {one.flags}", gpu, gpu_memory=memory)).ledger
            assert again.verdict == "fits", one.flags


def test_a_model_of_a_trillion_is_offered_several_hosts() -> None:
    """Was: no offer beyond 8 GPUs."""
    found = estimate(BudgetOptions("moonshotai/Kimi-K2-Instruct", "h100"))
    assert found.offers[-1].flags == "-tp 8 -pp 3" and found.offers[-1].gpus == 24


@pytest.mark.parametrize("context", ["2k", "4k", "16k"])
def test_requests_of_a_hybrid_are_those_that_are_safe(context: str) -> None:
    """Was: 1,024 requests in the table beside a safe concurrency of 1,681."""
    command = f"vllm serve ibm-granite/granite-4.0-h-tiny -tp 4 --max-model-len {context}"
    found = estimate(BudgetOptions(command, "h100"))
    assert found.offers[0].change == NOW and found.offers[0].requests == found.sequences
    assert (found.sequences and found.sequences > 1024) or context == "16k"
