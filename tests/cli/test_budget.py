"""The command `diag budget` as it is used: what it prints, and its exit status."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support import cli, scripted_nvml
from support.models import changed
from support.sampling import some
from support.schemas import validator

from diag import report
from diag.commands.budget import estimate, run
from diag.commands.options import BudgetOptions
from diag.core.errors import BadUsage
from diag.vllm import gpus

MODELS = Path("tests/data/models")
LOGS = Path("tests/data/logs")
SCHEMA = validator(Path(report.__file__).parent / "diag.budget.schema.json")

WITH_A_LOG = """\
FITS: llama-3.1-8b on 1 x h100 (79.25 GiB), vLLM 0.32.0, context 8,192 tokens

  GiB on one GPU                computed    log  difference  source
  budget                           72.91                     92 % of 79.25 GiB
  weights         14.99 (14.93 to 15.23)  14.99        none  the shape in config.json (estimated)
  activations        1.04 (0.80 to 1.77)                     a step of 8,192 tokens, logits of 1,024
                                                             requests (estimated)
  CUDA graphs        0.61 (0.18 to 1.33)   0.52        none  counted since vLLM 0.20.0 (estimated)
  non-torch          0.32 (0.20 to 0.70)                     buffers of CUDA libraries (estimated)
  KV cache        55.95 (53.72 to 56.95)  51.10       -2.62  the budget minus all of the above
                                                             (estimated)

  KV cache per token  131,072 bytes
  for 8,192 tokens    1.00 GiB, 512 blocks
  KV cache size       418,560 to 418,640 tokens                log: 418,608
  KV blocks           26,160 to 26,165 of 16 tokens
  logged concurrency  51.09 to 51.10 requests of 8,192 tokens  log: 51.1
  safe context        --max-model-len 131072
  safe concurrency    --max-num-seqs 51 without preemption

  What changes most:
  change                       GPUs  KV tokens  requests  output/s  how
  as it is                        1    419,000        51     2,450
  FP8 weights and KV cache        1    944,000       115     5,525  --quantization fp8
                                                                    --kv-cache-dtype fp8
  FP8 KV cache                    1    837,000       102     4,900  --kv-cache-dtype fp8
  AWQ or GPTQ weights, 4 bits     1    497,000        60     2,910  another checkpoint
  FP8 weights                     1    472,000        57     2,760  --quantization fp8
  half the context                1    419,000       102     4,900  --max-model-len 4096
  more GPUs                       2    957,000       115     5,531  -tp 2
"""


def diag(*arguments: str) -> subprocess.CompletedProcess[str]:
    return cli.diag("budget", *arguments)


def test_budget_page_is_complete() -> None:
    log = str(LOGS / "v1_0.32.0_gpu_oom_under_load.log")
    command = f"vllm serve {MODELS}/llama-3.1-8b --max-model-len 8192"
    assert run(BudgetOptions(command, "h100", log=log)) == (WITH_A_LOG, 0)


def test_a_real_cpu_server_is_estimated_exactly(tmp_path: Path) -> None:
    """The log is of tests/live/server.py's small model: 1 GiB, 131,072 tokens, 16.00 requests of 8,192."""
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
    changed(tmp_path, **shape, num_key_value_heads=8, head_dim=64, vocab_size=320, max_position_embeddings=16384)
    command = f"VLLM_CPU_KVCACHE_SPACE=1 vllm serve {tmp_path} --max-model-len 8192 --enforce-eager"
    told = estimate(BudgetOptions(command, log=str(LOGS / "v1_0.32.0_cpu_small.log")))
    known = told.ledger
    assert known.tokens and (known.tokens.low, known.tokens.high) == (131_072, 131_072)
    assert known.concurrency == (16.0, 16.0)
    assert told.logged == {"tokens": 131_072, "length": 8192, "concurrency": 16.0}
    assert (known.verdict, [row.difference for row in known.rows]) == ("fits", [None, 0])


@pytest.mark.parametrize(
    ("arguments", "status", "first"),
    [
        (("{}/llama-3-8b", "--gpu", "h100"), 0, "FITS: llama-3-8b on 1 x h100"),
        (("vllm serve {}/llama-3-70b", "--gpu", "h100"), 2, "DOES NOT FIT: llama-3-70b"),
        (("vllm serve {}/llama-3-70b -tp 2", "--gpu", "h100"), 3, "CANNOT TELL: llama-3-70b on 2 x h100"),
    ],
)
def test_the_exit_status_is_the_verdict(arguments: tuple[str, ...], status: int, first: str) -> None:
    ended = diag(*(each.format(MODELS) for each in arguments))
    assert (ended.returncode, ended.stderr) == (status, "")
    assert ended.stdout.startswith(first)
    assert max(map(len, ended.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("{}",), "does not exist: give a model's folder, or its id in the local cache"),
        (("no/such-model",), "the model 'no/such-model' is neither a folder nor in the local cache"),
        (("vllm serve --max-model-len 4096",), "the command names no model"),
        (("vllm serve 'x",), "an unclosed quotation mark"),
        (("{}/llama-3-8b", "--gpu", "h\x1b[2J"), r"unknown GPU 'h\x1b[2J'"),
        (("{}/llama-3-8b", "--gpu-memory", "0"), "invalid value for --gpu-memory: '0' (expected a size such as 32768"),
        (("{}/llama-3-8b", "--gpu-memory", "80"), "or 79.1GiB, from 1 to 4096 GiB"),
        (
            ("{}/llama-3-8b", "--vllm-version", "latest"),
            "invalid value for --vllm-version: 'latest' (expected a vLLM release",
        ),
        (("{}/llama-3-8b", "--log", "no.log"), "the log 'no.log' cannot be read: No such file or directory"),
        (("vllm serve {}/llama-3-8b -tp 5",), "vLLM refuses --tensor-parallel-size 5"),
    ],
)
def test_invalid_input_is_one_sentence(arguments: tuple[str, ...], says: str) -> None:
    ended = diag(*(each.format(MODELS) for each in arguments))
    assert (ended.returncode, ended.stdout) == (64, "")
    assert says in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "\x1b" not in ended.stderr


@pytest.mark.parametrize("flags", ["", "-tp 2", "-pp 2 --max-model-len 4096"])
def test_a_model_with_other_field_names_is_cannot_tell(tmp_path: Path, flags: str) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NewForCausalLM"], "d_model": 1280}')
    text, status = run(BudgetOptions(f"vllm serve {tmp_path} {flags}", "h100"))
    assert status == 3
    words = " ".join(text.split())
    assert "the architecture 'NewForCausalLM' is unknown, and its config.json has no num_attention_heads and" in words


def test_json_has_whole_bytes_and_ranges() -> None:
    text, status = run(BudgetOptions(f"vllm serve {MODELS}/qwen3-30b-a3b", "h100", version="0.32.0"), as_json=True)
    told = json.loads(text)
    assert (status, told["schema"], told["verdict"]) == (2, "diag.budget/2", "does not fit")
    assert told["kv_cache"]["needed_bytes"] == 24 * 2**30
    weights = 2 * 30_532_122_624 + 2 * 262_144 * 128  # the matrices and the rotary table, which is 64 MiB
    weights += 2**20  # embedding and head end half a MiB before whole steps of 2 MiB
    assert told["rows"][1] == {
        "name": "weights",
        "basis": "estimated",
        "source": "the shape in config.json",
        "bytes": [round(weights * 0.996), round(weights * 1.01) + 96 * 2**20],
        "estimate_bytes": weights,
        "log_bytes": None,
    }
    assert {each["flag"] for each in told["suggestions"]} == {"--max-model-len", "--tensor-parallel-size"}


@pytest.mark.parametrize("log", ["", *some(sorted(each.name for each in LOGS.glob("*.log")), 2)])
def test_the_json_keeps_its_schema(log: str) -> None:
    """Each model with each log, each model with each GPU, and each log with each GPU."""
    gpus = ("", "h100", "cpu")
    for at, model in enumerate(sorted(MODELS.iterdir())):
        for gpu in (gpus[at % 3],) if log else gpus:
            told = run(
                BudgetOptions(str(model), gpu, log=str(LOGS / log) if log else "", version="0.32.0"), as_json=True
            )[0]
            SCHEMA.validate(json.loads(told))


def test_unknown_values_are_null_in_json() -> None:
    told = json.loads(run(BudgetOptions(f"{MODELS}/llama-3-8b"), as_json=True)[0])
    assert (told["gpu"]["total_bytes"], told["kv_cache"]["blocks"], told["rows"][0]["bytes"]) == (None, None, None)


def test_untrusted_names_cannot_send_escape_sequences_to_the_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "evil\x1b[2Jmodel"
    folder.mkdir()
    changed(folder, architectures=["A\x1b[2J"])
    text, status = run(BudgetOptions(str(folder), "h100"))
    assert status == 3
    assert "\x1b" not in text


def test_a_secret_in_the_command_is_not_printed() -> None:
    text, _ = run(
        BudgetOptions(f"HF_TOKEN=hf_abcdefghijkl vllm serve {MODELS}/llama-3-8b --api-key sk-abcdefghijkl", "h100")
    )
    assert "abcdefghijkl" not in text


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve s3://AKIAUSER:hush@bucket/model",
        "vllm serve {}/llama-3-8b --max-model-len sk-hush-hush",
        "vllm serve {}/llama-3-8b --cpu-offload-gb token=hush",
        "vllm serve {}/llama-3-8b --gpu-memory-utilization hf_hushhushhush",
    ],
)
def test_error_does_not_print_a_secret(command: str) -> None:
    with pytest.raises(BadUsage) as refused:
        run(BudgetOptions(command.format(MODELS), "h100"))
    assert "hush" not in str(refused.value)


def test_release_comes_from_the_log_or_is_marked_as_assumed() -> None:
    log = str(LOGS / "v1_0.11.0_tp2_capture_hang.log")
    flags = "-tp 2 --max-model-len 8192 --gpu-memory-utilization 0.95"
    known = estimate(BudgetOptions(f"vllm serve {MODELS}/llama-3.1-8b {flags}", log=log))
    assert (known.ledger.setup.version, known.notes) == ("0.11.0", ())
    assumed = estimate(BudgetOptions(f"{MODELS}/llama-3-8b", "h100"))
    assert "is assumed" in assumed.notes[0]
    assert re.search(
        r": older ones, since 0.9.2, leave as little as [\d.]+ GiB .*: the default share", assumed.notes[0]
    )
    newest = estimate(BudgetOptions(f"{MODELS}/llama-3-8b", "h100", version=assumed.ledger.setup.version))
    assert newest.ledger.kv_cache == assumed.ledger.kv_cache  # was: that of all releases
    assert not any("older ones" in note for note in newest.notes)
    given = estimate(BudgetOptions(f"vllm serve {MODELS}/llama-3-8b --gpu-memory-utilization 0.9", "h100"))
    assert "default share" not in given.notes[0]
    page, _ = run(BudgetOptions("Qwen/Qwen3-30B-A3B", "h100", context="32k"))
    assert re.search(r"older ones, since 0.9.2, certainly hold \d requests of the \d", " ".join(page.split()))


def test_a_name_of_several_sizes_is_explained() -> None:
    assert (
        "a100 is taken for 79.14 GiB; others: a100-40, a100-40-pcie"
        in estimate(BudgetOptions(f"{MODELS}/llama-3-8b", "a100", version="0.32.0")).notes
    )


def test_a_name_of_several_words_is_that_of_a_model() -> None:
    """Was: no command that starts a vLLM server."""
    text, status = run(BudgetOptions("Llama 3.1 8B Instruct", "h100", concurrency=8))
    assert status == 0 and "vllm serve meta-llama/Llama-3.1-8B-Instruct" in text
    with pytest.raises(BadUsage, match="'GPT-4o-Aug-2024' is served by its vendor alone"):
        run(BudgetOptions("GPT 4o (Aug 2024)", "h100"))
    with pytest.raises(BadUsage, match="the text starts SGLang"):
        run(BudgetOptions("sglang serve Qwen3-8B", "h100"))


def test_the_verdict_on_a_fine_tune_names_the_model_that_it_is_taken_for() -> None:
    page, _ = run(BudgetOptions("someone/Llama-2-7B-of-mine", "h100", version="0.33.0"))
    assert page.startswith("FITS: someone/Llama-2-7B-of-mine (taken for meta-llama/Llama-2-7b-chat-hf) on 1 x h100")


def test_a_log_with_another_context_is_noted() -> None:
    log = str(LOGS / "v1_0.11.0_tp2_capture_hang.log")
    told = estimate(BudgetOptions(f"vllm serve {MODELS}/llama-3.1-8b -tp 2 --gpu-memory-utilization 0.95", log=log))
    assert told.notes == ("the log is from a server with --max-model-len 8192, not 131072",)


IN_A_LOG = (
    "Model loading took 14.9889 GiB memory and 12.799889 seconds",
    "Available KV cache memory: 50.14 GiB",
    "GPU KV cache size: 410,720 tokens",
)
FREE = (
    "Free memory on device (78.84/79.25 GiB) on startup. Desired GPU memory utilization is (0.9, 71.33 GiB). Actual"
    " usage is 15.26 GiB for consumed memory"
)


@pytest.mark.parametrize(
    ("flags", "gpu", "first", "why"),
    [
        ("", "h100", "", None),
        ("--kv-cache-memory-bytes 50GiB --gpu-memory-utilization 0.3", "h100", "", None),
        ("--num-gpu-blocks-override 9000 --gpu-memory-utilization 0.3", "h100", "", None),
        ("", "71.4GiB", "", None),  # cards of one name differ
        ("", "70GiB", "", "weights and KV cache of 65.12 GiB, more than the budget of 63.00 GiB"),
        ("", "l40s", "", "weights and KV cache of 65.12 GiB, more than the budget of 39.98 GiB"),
        (
            "--gpu-memory-utilization 0.3",
            "h100",
            "",
            "weights and KV cache of 65.12 GiB, more than the budget of 23.73 GiB",
        ),
        ("-tp 4", "rtx4090", "", "weights and KV cache of 65.12 GiB, more than the budget of 21.18 GiB"),
        ("--gpu-memory-utilization 0.95", "h100", FREE, None),
        ("", "a100-40", FREE, "a GPU of 79.25 GiB, not 39.38 GiB"),
        ("", "h100", "non-default args: {'gpu_memory_utilization': 0.85}", "--gpu-memory-utilization 0.85, not 0.9"),
        ("", "h100", "non-default args: {'a': {'tensor_parallel_size': 2}, 'tensor_parallel_size': 1}", None),
        (
            "",
            "h100",
            "Initializing a V1 LLM engine (v0.13.0) with config: model='a', tensor_parallel_size=2, dtype=x",
            "--tensor-parallel-size 2, not 1",
        ),
        ("-pp 2", "h100", "non-default args: {'pipeline_parallel_size': 4}", "--pipeline-parallel-size 4, not 2"),
    ],
)
def test_sizes_of_another_server_do_not_count(
    tmp_path: Path, flags: str, gpu: str, first: str, why: str | None
) -> None:
    lines = [f"INFO 08-20 18:04:10 [core.py:93] {each}\n" for each in (first, *IN_A_LOG) if each]
    (tmp_path / "log").write_text("".join(lines))
    command = f"vllm serve {MODELS}/llama-3.1-8b --max-model-len 8192 {flags}"
    named = ("", gpu) if gpu.endswith("GiB") else (gpu, "")
    told = estimate(BudgetOptions(command, *named, log=str(tmp_path / "log"), version="0.13.0"))
    assert told.notes == ((f"the log is from a different server, so its sizes are ignored: {why}",) if why else ())
    assert bool(told.logged) is any(row.logged for row in told.ledger.rows) is not bool(why)


def test_the_gpu_share_of_a_log_is_ignored_for_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("INFO 08-20 18:04:10 [a.py:1] non-default args: {'gpu_memory_utilization': 0.5}\n")
    command = f"VLLM_CPU_KVCACHE_SPACE=4 vllm serve {MODELS}/llama-3.1-8b"
    told = estimate(BudgetOptions(command, log=str(tmp_path / "log"), version="0.32.0"))
    assert not any("different server" in each for each in told.notes)


def test_refused_start_is_reported_with_its_memory_share(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "ERROR 09-09 10:00:00 [core.py:700] ValueError: Free memory on device (67.24/79.25 GiB) on startup is less than"
        " desired GPU memory utilization (0.9, 71.33 GiB). Decrease GPU memory utilization or reduce GPU memory used\n"
    )
    command = f"vllm serve {MODELS}/llama-3.1-8b --gpu-memory-utilization 0.8"
    told = estimate(BudgetOptions(command, "h100", log=str(tmp_path / "log"), version="0.9.2"))
    assert told.notes[0].endswith("--gpu-memory-utilization 0.9, not 0.8")


def test_a_start_that_vllm_refused_is_explained_by_its_log(tmp_path: Path) -> None:
    """The words of vLLM 0.32 in tests/recordings' kind of failure: 2 GiB for 131,072 tokens, 1 GiB there is."""
    (tmp_path / "server.log").write_text(
        "(EngineCore pid=1) ERROR 11-21 03:46:40 [core.py:1] ValueError: To serve at least one request with the model's"
        " max seq len (131072), (16.0 GiB KV cache is needed, which is larger than the available KV cache memory (9.97"
        " GiB). Based on the available memory, the estimated maximum model length is 81664. Try increasing\n"
    )
    log = str(tmp_path / "server.log")
    text, status = run(BudgetOptions(f"{MODELS}/llama-3.1-8b", "h100", log=log, version="0.32.0"))
    assert status == 2
    assert re.search(r"for 131,072 tokens +16\.00 GiB, 8,192 blocks +log: 16 GiB$", text, re.M)
    assert re.search(r"safe context +--max-model-len 77824 +log: 81,664$", text, re.M)
    assert "    --kv-cache-dtype fp8\n" in text


def test_a_start_that_found_too_little_free_gets_the_share_that_was(tmp_path: Path) -> None:
    """The words of https://github.com/ovg-project/kvcached/issues/110."""
    (tmp_path / "server.log").write_text(
        "ERROR 09-09 10:00:00 [core.py:700] ValueError: Free memory on device (67.24/79.25 GiB) on startup is less than"
        " desired GPU memory utilization (0.9, 71.33 GiB). Decrease GPU memory utilization or reduce GPU memory used\n"
    )
    told = estimate(BudgetOptions(f"{MODELS}/llama-3.1-8b", log=str(tmp_path / "server.log"), version="0.9.2"))
    assert told.ledger.verdict == "does not fit"
    assert told.suggestions == (("--gpu-memory-utilization", "0.84"),)


def test_graph_memory_estimate_counts_if_graphs_count(tmp_path: Path) -> None:
    """The peak of activations may hold vLLM's estimate of the graphs: the sum would count them twice."""
    head = "(EngineCore pid=9) INFO 10-06 17:00:41 [gpu_worker.py:955] "
    texts = (
        "Estimated CUDA graph memory: 0.36 GiB total",
        "Graph capturing finished in 15 secs, took 0.23 GiB",
        "Free memory on device (78.84/79.25 GiB) on startup. Desired GPU memory utilization is (0.92, 72.91 GiB)."
        " Actual usage is 15.26 GiB for consumed memory (weights + non-torch), 1.44 GiB for peak activation, and 0.23",
    )
    (tmp_path / "log").write_text("".join(f"{head}{each}\n" for each in texts))
    for version, logged in (("0.32.0", [None, 0.36]), ("0.19.0", [1.44, 0.23])):
        told = estimate(BudgetOptions(f"{MODELS}/llama-3.1-8b", "", "", str(tmp_path / "log"), version))
        said = [row.logged for row in told.ledger.rows if row.name in ("activations", "CUDA graphs")]
        assert [each and round((each.low + each.high) / 2**31, 2) for each in said] == logged
        assert told.ledger.setup.total == round(79.25 * 2**30)


def test_a_log_without_memory_sizes_is_noted(tmp_path: Path) -> None:
    (tmp_path / "empty.log").write_text("nothing\n")
    told = estimate(BudgetOptions(f"{MODELS}/llama-3-8b", "h100", log=str(tmp_path / "empty.log"), version="0.32.0"))
    assert told.notes == ("the log has no memory sizes: it ends before start-up completed, or is not vLLM's",)


def test_the_smallest_gpu_of_this_host_is_taken_where_none_is_named(tmp_path: Path) -> None:
    scripted_nvml.build(tmp_path)
    script = tmp_path / "script"
    scripted_nvml.write(script, [scripted_nvml.H100, scripted_nvml.T4])
    ended = cli.installed(
        "budget", f"{MODELS}/llama-3-8b", "--json", **scripted_nvml.environment(tmp_path / "nvml", script)
    )
    told = json.loads(ended.stdout)
    assert told["gpu"] == {"name": "Tesla T4", "total_bytes": 15 * 2**30, "count": 1}
    assert "the GPU is Tesla T4, found on this host" in told["notes"]


def test_memory_of_the_driver_is_not_the_servers(tmp_path: Path) -> None:
    scripted_nvml.build(tmp_path)
    script = tmp_path / "script"
    scripted_nvml.write(script, [scripted_nvml.H100])
    ended = cli.installed(
        "budget", f"{MODELS}/llama-3-8b", "--json", **scripted_nvml.environment(tmp_path / "nvml", script)
    )
    assert json.loads(ended.stdout)["gpu"]["total_bytes"] == 79 * 2**30


def test_an_id_of_the_local_cache_is_enough(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--meta--llama" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    changed(snapshot)
    text, _ = run(BudgetOptions(f"HF_HOME={tmp_path} vllm serve meta/llama", "h100"))
    assert text.startswith("FITS: meta/llama on")


def test_a_command_in_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "start.sh").write_text(f"#!/bin/sh\nexec vllm serve {MODELS}/llama-3-8b --max-model-len 4096\n")
    assert estimate(BudgetOptions(str(tmp_path / "start.sh"), "h100")).ledger.setup.length == 4096


# -- several GPUs -----------------------------------------------------------------------------------------------------

SIZING = validator(Path(report.__file__).parent / "diag.sizing.schema.json")


def test_all_gpus_are_one_table_of_100_columns() -> None:
    """Line 1 is the answer, then the launch to copy, then one table in which every row holds the load."""
    prices = "--price", "h100=2.5", "--price", "l40s=1.2", "--utilisation", "40%"
    ended = diag(f"{MODELS}/llama-3.1-8b", "--all-gpus", "--context", "32k", "--concurrency", "50", *prices)
    lines = ended.stdout.splitlines()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert max(map(len, lines)) <= 100
    first = "2 x h100 (TP 2, --quantization fp8 --kv-cache-dtype fp8) holds 50 requests of 32,000 tokens, "
    assert lines[0].startswith(first)
    launch = f"  vllm serve {MODELS}/llama-3.1-8b --tensor-parallel-size 2 --max-model-len 32000"
    assert launch in ended.stdout
    head = next(at for at, line in enumerate(lines) if line.startswith("  GPUs"))
    assert " ".join(lines[head].split()) == "GPUs layout fits requests output/s prompt/s bound by $/M at 40 % how"
    rows = [re.match(r"  (\d+) x (\S+) .*? yes +([\d,]+) ", line) for line in lines[head + 1 : lines.index("", head)]]
    found = [(row[2], int(row[1]), int(row[3].replace(",", ""))) for row in rows if row]
    assert {name for name, _, _ in found} == set(gpus.gpus())
    assert all(requests >= 50 for _, _, requests in found)


def test_sizing_json_follows_its_schema() -> None:
    ended = diag(f"{MODELS}/llama-3-70b", "--gpu", "h100", "--concurrency", "8", "--price", "h100=2", "--json")
    found = json.loads(ended.stdout)
    SIZING.validate(found)
    rows = [(one["gpus"], one["tensor_parallel_size"], one["flags"]) for one in found["configurations"]]
    assert rows[:3] == [(4, 4, ""), (8, 8, ""), (4, 4, "--kv-cache-dtype fp8")]
    assert all(one["requests"] >= 8 and one["verdict"] == "fits" for one in found["configurations"])
    assert found["answer"].startswith("2 x h100 (TP 2, --quantization fp8")
    assert found["configurations"][1]["decode"]["dollars_per_million_tokens"]["at_utilisation"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("{}/llama-3-8b", "--context", "4k"), "--context, --concurrency, --price and --utilisation need --gpu NAME"),
        (("{}/llama-3-8b", "--concurrency", "4"), "--utilisation need --gpu NAME or --all-gpus"),
        (("{}/llama-3-8b", "--all-gpus", "--gpu", "h100"), "--gpu and --all-gpus exclude each other"),
        (("{}/llama-3-8b", "--all-gpus", "--log", "x"), "--log and --gpu-memory are of one server"),
        (("{}/llama-3-8b", "--gpu", "h101", "--concurrency", "4"), "unknown GPU 'h101' (did you mean h100?)"),
        (("{}/llama-3-8b", "--all-gpus", "--price", "h100"), "(expected GPU=DOLLARS such as h100=2.5)"),
        (("{}/llama-3-8b", "--all-gpus", "--utilisation", "140%"), "(expected a share such as 40%)"),
        (("{}/llama-3-8b", "--all-gpus", "--context", "1m"), "the model supports at most 8192 tokens"),
        (("vllm serve {}/llama-3-8b -q gguf", "--all-gpus"), "the quantization of the model is unknown"),
        (("some/model", "--all-gpus"), "fetch it with `hf download some/model config.json`"),
        (("{}/llama-3-8b", "--gpu", "h100,h101"), "unknown GPU 'h101' (did you mean h100?)"),
        (("{}/llama-3-8b", "--gppu", "h100"), "no such option of diag budget, nor of vLLM: --gppu"),
        (("{}/llama-3-8b", "--gpus", "h100"), "nor of vLLM: --gpus (did you mean --gpu?)"),
        (("{}/llama-3-8b", "--gpu", "h100", "--gpu", "l4", "--log", "x"), "--log and --gpu-memory are of one server"),
        (("{}/llama-3-8b", "{}/llama-2-7b"), "is one argument too many: a target is a model or a launch command"),
        (("{}/llama-3-8b", "--gpu", "h20-mig-3g.48gb"), "unknown GPU 'h20-mig-3g.48gb'"),
    ],
)
def test_gpus_that_cannot_be_compared_are_one_sentence(arguments: tuple[str, ...], says: str) -> None:
    ended = diag(*(each.format(MODELS) for each in arguments))
    assert (ended.returncode, ended.stdout) == (64, "")
    assert says in ended.stderr and ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        ("{}/llama-3-8b -tp 2 --gpu h100", "FITS: llama-3-8b on 2 x h100 (79.10 GiB)"),
        ("vllm serve {}/llama-3-8b --tensor-parallel-size=2 --gpu h100", "FITS: llama-3-8b on 2 x h100 (79.10 GiB)"),
        ("{}/llama-3-8b --gpu a100-mig-3g.40gb", "FITS: llama-3-8b on 1 x a100-mig-3g.40gb (39.25 GiB)"),
        ("{}/llama-3-8b --gpu l4,l40s --concurrency 8", "1 x l4 (TP 1, --quantization fp8) holds 8 requests"),
    ],
)
def test_a_launch_needs_no_quotes_and_gpus_may_be_several_or_parts(arguments: str, first: str) -> None:
    """Was: exit status 64; `nvidia-smi mig -lgip` lists 39.25 GiB."""
    assert diag(*arguments.format(MODELS).split()).stdout.startswith(first)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NewForCausalLM"], "d_model": 1280}')
    ended = diag(str(tmp_path), "--all-gpus")
    assert ended.returncode == 64
    assert "num_hidden_layers: diag cannot compute its ceilings" in ended.stderr


def recorded(folder: Path, launch: str) -> str:
    """A recording of a healthy server that was started otherwise."""
    shutil.copytree("tests/recordings/healthy", folder, dirs_exist_ok=True)
    (folder / "server.log").unlink()
    described = (folder / "recording.toml").read_text(encoding="utf-8")
    (folder / "recording.toml").write_text(re.sub("(?m)^launch = .*", f'launch = "{launch}"', described))
    return str(folder)


def test_a_recording_is_sized_for_its_traffic(tmp_path: Path) -> None:
    """188 output tokens/s of at most 6 requests, as the recording says of itself."""
    command = f"VLLM_CPU_KVCACHE_SPACE=1 vllm serve {MODELS}/llama-3.1-8b --max-model-len 4096"
    options = "--gpu", "l40s", "--concurrency", "6", "--price", "l40s=1", "--json"
    found = json.loads(diag(recorded(tmp_path, command), *options).stdout)
    SIZING.validate(found)
    assert found["vllm"] == "0.32.0" and found["concurrency"] == 6 and 150 < found["context"] < 300
    assert found["measured_output_tokens_per_second"] == pytest.approx(188, rel=0.02)
    one = found["configurations"][0]["decode"]
    load = found["measured_output_tokens_per_second"] / one["tokens_per_second"]
    costs = one["dollars_per_million_tokens"]
    assert costs["at_utilisation"] == pytest.approx(costs["at_ceiling"] / load)


def test_a_recording_without_requests_is_refused() -> None:
    ended = diag("tests/recordings/idle", "--all-gpus")
    assert ended.returncode == 64
    assert "finished no request while it was observed" in ended.stderr


def test_without_a_load_as_many_requests_as_fit_are_the_answer() -> None:
    """Was: exit 64, --concurrency is needed; and of two --gpu only the last one, or none."""
    one = diag(str(MODELS / "llama-3.1-8b"), "--gpu", "h100", "--context", "32k")
    assert one.returncode == 0 and re.match(
        r"1 x h100 \(TP 1\), 79 GiB, holds 1[34] requests of 32,000 tokens", one.stdout
    )
    two = diag(str(MODELS / "llama-3.1-8b"), "--gpu", "h100", "--gpu", "l40s", "--context", "32k")
    joined = diag(str(MODELS / "llama-3.1-8b"), "--gpu", "h100,l40s", "--context", "32k")
    assert two.returncode == 0 and "1 x h100" in two.stdout and two.stdout == joined.stdout
