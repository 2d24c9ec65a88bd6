"""The table of failures: every kind is found by its own example, and says one thing that can be done."""

import re
import time
from functools import cache
from pathlib import Path

import pytest
from support import raised_errors
from support.paths import LOGS
from support.rows import each_row

from diag.core.log_events import LogContext
from diag.knowledge.known_failures import (
    FUNCTIONS,
    PLACE,
    RESERVE,
    FailureKind,
    KnownFailure,
    is_tried,
    known_failure,
    table,
    told_by_others,
)
from diag.knowledge.raised_errors import raised_by_vllm
from diag.vllm.flags.registry import known

NEAR_MISSES = (LOGS / "near_misses.tsv").read_text(encoding="utf-8").splitlines()
HARMFUL = re.compile(r"--gpu-memory-utilization (?:0\.9[6-9]|1)|kill -9 -1|rm -rf (?:/|~)(?:\s|$)")
COSTLY = re.compile(r"--gpu-reset|[Rr]eplace (?:it|the (?:GPU|card))|power it off|reboot|rm -r|RMA")
USELESS = re.compile(r"(?i)^(?:check the (?:log|configuration)|see the log|roll back|report (?:it|this))[^,;]{0,20}\.$")


OFFLOADS = "vllm/v1/simple_kv_offload/worker.py:register < vllm/v1/worker/gpu_model_runner.py:initialize_kv_cache"


def around(failure: FailureKind) -> LogContext:
    """The log around the example."""
    platform, phase = (each[0] if each else "" for each in (failure.platforms, failure.phases))
    return LogContext(failure.example_nearby, platform, phase)


@cache
def told(failure: FailureKind) -> KnownFailure | None:
    """Return what is told of an example, on a server whose release and model have it if the kind is of a release."""
    release = (failure.releases[0] or failure.releases[1] or "0.32.0") if failure.checked else ""
    model = re.sub(r"\(\?i\)|\[[^]]*\]\??|\(\?:|[()?]", "", failure.models.partition("|")[0])
    return known_failure([failure.example], release, model, failure.example_frames, around(failure))


def test_there_are_kinds_of_every_file() -> None:
    assert len({each.id for each in table()}) == len(table()) >= 120


@each_row("failure", table())
def test_an_example_shows_its_own_kind(failure: FailureKind) -> None:
    assert failure.pattern.search(failure.example)
    assert (found := told(failure)) and found.id == failure.id


@each_row("failure", table())
def test_texts_name_groups_and_functions_that_exist(failure: FailureKind) -> None:
    for place in PLACE.finditer(failure.means + failure.do):
        groups = {
            name for each in (failure.pattern, failure.nearby, failure.frames) for name in re.compile(each).groupindex
        }
        assert {name.strip() for name in place["names"].split(",")} <= groups
        assert place["function"] is None or place["function"] in FUNCTIONS
    assert (found := told(failure)) and not re.search(r"\{\w", found.means + found.do)


@each_row("failure", [each for each in table() if each.basis == "guess"])
def test_a_guess_gives_no_costly_action(failure: FailureKind) -> None:
    assert not COSTLY.search(failure.do)


@pytest.mark.parametrize(
    ("launch", "named"),
    [
        ("vllm serve m", 0),
        ("vllm serve m --speculative_config.model d", 1),
        ("vllm serve m --kv-offloading-size-x 1", 0),
        ("", 5),
    ],
    ids=str,
)
def test_no_option_is_left_out_that_the_command_does_not_give(launch: str, named: int) -> None:
    frames = "vllm/v1/engine/core.py:step_with_batch_queue"
    found = known_failure(["KeyError: 'chatcmpl-8f21'"], "0.33.0", "", frames, LogContext(launch=launch))
    assert found is not None and found.do.count("--") == named


def test_what_the_log_around_an_error_decides_comes_first() -> None:
    line = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    nearby = "Exception raised from CUDASymmetricMemory at /pytorch/torch/csrc/x.cu:246"
    found = known_failure([line], "", "", "", LogContext(nearby))
    assert found is not None
    assert (found.id, found.basis, found.seen) == ("symmetric_memory_fails", "named by the error", nearby)
    alone = known_failure([line], "", "")
    assert alone is not None
    assert (alone.id, alone.basis) == ("cuda_illegal_memory_access", "guess")


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        ("load_weights", "weights_do_not_fit"),
        ("profile_memory", "profiling_does_not_fit"),
        ("ready", "step_does_not_fit"),
        ("", "gpu_out_of_memory"),
    ],
)
def test_the_phase_decides_what_makes_room(phase: str, kind: str) -> None:
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50 MiB. GPU has a total capacity of 23.64 GiB"
    found = known_failure([line], "", "", "", LogContext(line, "cuda", phase))
    assert found is not None
    assert found.id == kind


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        ("load_model", "weights_do_not_fit_by_their_frames"),
        ("determine_available_memory", "profiled_step_does_not_fit"),
        ("_allocate_kv_cache_tensors", "kv_cache_did_not_fit_by_its_frames"),
        ("capture_model", "capture_did_not_fit_by_its_frames"),
        ("execute_model", "step_did_not_fit_by_its_frames"),
        ("worker_busy_loop", "gpu_out_of_memory"),
    ],
)
def test_in_a_log_without_its_start_the_frames_decide_what_makes_room(frame: str, kind: str) -> None:
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50 MiB. GPU has a total capacity of 23.64 GiB"
    near = f'  File "/vllm/v1/worker/gpu_worker.py", line 300, in {frame}\n{line}'
    found = known_failure([line], "", "", "", LogContext(near, "cuda", "process_start"))
    assert found is not None
    assert found.id == kind


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_a_similar_line_is_not_of_the_kind(case: str) -> None:
    kind, line, frames = [*case.split("\t"), ""][:3]
    assert kind in {each.id for each in table()}
    found = known_failure([line], "", "", frames)
    assert found is None or found.id != kind


def test_a_build_that_the_server_serves_already_is_not_offered() -> None:
    frames = "vllm/model_executor/layers/quantization/modelopt.py:apply"
    near = "INFO 07-30 10:11:12 [core.py:93] Initializing a V1 LLM engine (v0.20.0) with config: quantization=fp8,"
    texts = ["RuntimeError: shape '[1, 2]' is invalid"]
    free, served = (known_failure(texts, "", "", frames, LogContext(each)) for each in ("", near))
    assert free is not None
    assert served is not None
    assert ("FP8 build" in free.do, "FP8 build" in served.do) == (True, False)


def test_what_stands_beside_an_error_that_says_nothing_names_the_cause() -> None:
    line = "RuntimeError: WorkerProc initialization failed due to an exception in a background process."
    said = "Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:455 'invalid argument'"
    near = (
        f"INFO {said.replace('custom_all_reduce', 'other')}\n{said}\nRuntimeError: Engine core initialization failed."
    )
    found = known_failure([line], "", "", "vllm/v1/executor/multiproc_executor.py:worker_main", LogContext(near))
    assert found is not None
    assert (found.id, found.seen) == ("custom_all_reduce_fails", said)
    plain = known_failure([line.replace("initialization failed", "was slow")], "", "", "", LogContext(near))
    assert plain is None or not plain.id.startswith("custom_all_reduce")


FAULT = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
SAYS_NOTHING = "RuntimeError: Engine core initialization failed. See root cause above."
SHAPES = "ValueError: frobs of shape (100,) into shape (101,)"
FP8_KERNEL = "INFO 10-01 11:00:00 [fp8.py:320] Selected FlashInferFP8ScaledMMLinearKernel for Fp8LinearMethod"
NO_FP8 = "type fp8e4nv not supported in this architecture"
NOT_CALLABLE = "TypeError: 'function' object is not subscriptable"


@pytest.mark.parametrize(
    ("line", "near", "kind"),
    [
        # an error that points to another one is told by it, also by its topic alone; what names the cause comes first
        (SAYS_NOTHING, "ERROR [core.py:1] FrobError: connection to the frob store was not possible", "topic_network"),
        (
            SAYS_NOTHING,
            "Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:455 'invalid argument'\n"
            "IndexError: index out of range in self",
            "custom_all_reduce_fails",
        ),
        # FlashInfer's FP8 kernel fails on consumer Blackwell, within CUDA graphs
        (FAULT, FP8_KERNEL, "flashinfer_fp8_matrix_in_graphs"),
        (FAULT, f"INFO GPU: NVIDIA B200\n{FP8_KERNEL}", "cuda_illegal_memory_access"),
        (FAULT, f"INFO enforce_eager=True\n{FP8_KERNEL}", "cuda_illegal_memory_access"),
        # a compiler's error in a worker is the same error
        ("RuntimeError: Worker failed with error 'at 1:0:", NO_FP8, "triton_kernel_without_fp8"),
        ("triton.compiler.errors.CompilationError: at 1:0:", NO_FP8, "triton_kernel_without_fp8"),
        # a frame of vLLM alone shows no kernel
        (NOT_CALLABLE, '  File "/vllm/v1/worker/block_table.py", line 9, in compute_slot_mapping', "triton_kernel_on"),
        (NOT_CALLABLE, '  File "/vllm/v1/engine/core.py", line 9, in run_engine_core', ""),
    ],
    ids=[
        "an error beside", "a guess beside", "consumer Blackwell", "B200", "no graphs", "a worker's compiler",
        "a compiler", "a kernel", "no kernel",
    ],
)  # fmt: skip
def test_the_log_around_an_error_decides_its_kind(line: str, near: str, kind: str) -> None:
    found = known_failure([line], "", "", "", LogContext(near, "cuda", "ready"))
    assert found is None if not kind else found is not None and found.id.startswith(kind), found


@pytest.mark.parametrize(
    ("near", "options"),
    [
        ("x", "--speculative-config, --enable-lora and --kv-transfer-config"),
        ("INFO drafts of eagle", "--speculative-config"),
        (f"INFO drafts of eagle {'x' * 400}", "--speculative-config, --enable-lora and --kv-transfer-config"),
        ("INFO speculative_config=None, enable_lora=False", "--kv-transfer-config"),
    ],
    ids=["no hint", "a hint", "a whole configuration", "options that are off"],
)
def test_options_are_those_at_which_the_log_hints_and_that_are_on(near: str, options: str) -> None:
    found = known_failure([SHAPES], "", "", "", LogContext(near, "cuda", "ready"))
    assert found is not None
    assert f"start without {options} and with --no-async-scheduling" in found.do


@pytest.mark.slow
def test_a_search_in_the_lines_around_an_error_takes_no_square_of_them() -> None:
    packed = "\n".join(
        ["Available KV cache memory: 1 Initializing a V1 LLM engine gpu_memory_utilization=0.5 " * 48] * 60
    )
    began = time.process_time()
    known_failure(["ValueError: No available memory for the cache blocks"], "", "", "", LogContext(packed, "cuda"))
    assert time.process_time() - began < 5


UCX = "[1763539863.1] [engine-0:88:0] ib_log.c:246 UCX  ERROR mlx5_0: ibv_create_cq() failed: Cannot allocate memory"


@pytest.mark.parametrize(
    ("line", "near", "kind"),
    [
        # a call into a library failed: what the library says names the cause, and its own sentence if no kind knows it
        ("nixl._bindings.nixlBackendError: NIXL_ERR_BACKEND", UCX, "memlock_limit"),
        ("nixl._bindings.nixlBackendError: NIXL_ERR_BACKEND", "[1.2] [e:1:0] x.c:3 UCX  ERROR odd thing", "says_ucx"),
        (
            "nixl._bindings.nixlBackendError: NIXL_ERR_BACKEND",
            "INFO 11-19 08:11:02 [x.py:1] UCX is used",
            "nixl_backend_error",
        ),
        # an error that names its cause keeps it
        (
            "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8)",
            UCX,
            "heads_not_divisible",
        ),
    ],
)
def test_what_a_library_says_beside_a_call_that_failed_names_the_cause(line: str, near: str, kind: str) -> None:
    found = known_failure([line], "", "", "", LogContext(f"{near}\n{line}"))
    assert found is not None
    assert found.id == kind


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ("Warning Unhealthy 2m kubelet Liveness probe failed: HTTP probe failed with statuscode: 404\n"
         "Normal Killing 2m kubelet Container vllm failed liveness probe, will be restarted", "k8s_probe_wrong_path"),
        ("(raylet) something odd happened\nnode0:8:8 [0] x.cc:1 NCCL WARN Odd thing failed", "says_nccl"),
        ("INFO 11-19 08:11:02 [x.py:1] a prompt: CrashLoopBackOff, OOMKilled", None),
        ("a line of nobody", None),
    ],
)  # fmt: skip
def test_another_programs_line_tells_why_there_is_no_server(lines: str, kind: str | None) -> None:
    told = told_by_others(LogContext(lines), "")
    assert (told and told.id) == kind


def test_a_secret_around_an_error_is_hidden() -> None:
    line = "torch.AcceleratorError: CUDA error: invalid argument"
    nearby = (
        "symm_mem.py\", line 96, HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123456789 api_key='sk-0123456789abcdefghij'"
    )
    found = known_failure([line], "", "", "", LogContext(nearby))
    assert found is not None
    assert found.seen
    assert "hf_abc" not in found.seen
    assert "sk-012" not in found.seen


PLAIN = LogContext(
    "(EngineCore pid=9) INFO 11-20 03:12:00 [core.py:97] Initializing a V1 LLM engine (v0.11.0) with config:"
    " model='m', revision=None, tokenizer_revision=None, vision_config=None, dtype=torch.bfloat16\n"
    "INFO 11-20 03:12:10 [loggers.py:127] Engine 000: Avg prompt throughput: 812.1 tokens/s, took 12.1 seconds",
    "cuda",
)


@pytest.mark.parametrize("phase", ["process_start", "load_weights", "profile_memory", "capture_graphs", "ready"])
def test_the_log_of_a_plain_server_decides_nothing(phase: str) -> None:
    """The lines that every log of a text model has are no evidence."""
    context = PLAIN._replace(phase=phase)
    deciding = [each.id for each in table() if each.nearby and each.values(each.example, "", context)]
    assert deciding == []


def test_a_secret_is_hidden_before_its_line_is_cut() -> None:
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB."
    key = "correct-horse-battery-staple-9913-kilo-lima"
    nearby = f"non-default args: {{'max_num_seqs': 512, 'api_key': ['{key}'], 'port': 80, 'model': 'Qwen-VL-7B'}}"
    found = known_failure([line], "", "", "", LogContext(nearby, "cuda", "profile_memory"))
    assert found is not None
    assert "Qwen-VL-7B" in found.seen
    assert "staple" not in found.seen


def test_a_search_around_an_error_does_not_begin_with_anything() -> None:
    """It would take the square of the time: 46 s for a log of 150 kB."""
    assert [each.id for each in table() if each.nearby.startswith(("[\\s\\S]*", ".*", "(?=[\\s\\S]*"))] == []


@pytest.mark.parametrize(
    "text",
    [
        "Attempting to allocate 1.9.6G. That was not possible. There are 2.31G free",
        "To serve at least one request with the model's max seq len (131072), (0.00 GiB KV cache is needed, which is"
        " larger than the available KV cache memory (8.00 GiB).",
    ],
)
def test_odd_numbers_of_an_error_are_no_crash(text: str) -> None:
    known_failure([text], "", "")


@each_row("failure", table())
def test_a_pattern_is_bounded_and_an_advice_can_be_followed(failure: FailureKind) -> None:
    outside_of_classes = re.sub(r"(?<!\\)\[[^]]*\]", "x", failure.pattern.pattern)
    assert not re.search(r"(?<!\\)\.[*+]|\\[wS][*+]|x[*+]", outside_of_classes)
    assert not HARMFUL.search(failure.do)
    assert not USELESS.search(failure.do)
    assert failure.means.endswith(".")
    assert failure.do.endswith(".")
    assert failure.source


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (
            "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).",
            "--tensor-parallel-size 1, 2, 4 or 7;",
        ),
        ("flash.cu: The NVIDIA driver on your system is too old (found version 12020).", "12.2"),
    ],
)
def test_an_advice_has_the_numbers_of_the_line(text: str, action: str) -> None:
    found = known_failure([text], "", "")
    assert found is not None
    assert action in found.do + found.means


def test_a_defect_is_told_of_its_releases_only() -> None:
    line = "TypeError: type 'array.array' is not subscriptable"
    assert known_failure([line], "0.27.1", "").id == "flashinfer_needs_python_312"  # type: ignore[union-attr]
    for version in ("", "0.26.0"):
        found = known_failure([line], version, "")
        assert found is None or found.id != "flashinfer_needs_python_312"


def test_a_message_of_an_older_release_is_no_reason_to_upgrade_a_newer_server() -> None:
    line = "NotImplementedError: Speculative decoding is not supported on vLLM V0."
    told = {version: known_failure([line], version, "") for version in ("0.9.2", "0.27.1")}
    assert told["0.9.2"] is not None
    assert "Upgrade to vLLM 0.11" in told["0.9.2"].do
    assert told["0.27.1"] is None or "0.11" not in told["0.27.1"].do


def test_a_share_leaves_room_and_is_never_absurd() -> None:
    assert FUNCTIONS["share"]("54.34", "79.18") == f"{0.66}"
    with pytest.raises(ValueError):
        FUNCTIONS["share"]("5.9", "79.2")
    assert 0 < RESERVE < 0.05


def test_a_number_that_cannot_be_computed_is_no_error() -> None:
    assert known_failure(["nothing that is known"], "", "") is None


LISTED = (
    "INFO [cuda.py:507] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER']."
)
MLA = "vllm/v1/attention/backends/mla/flashinfer_mla.py:forward_mqa"
FUSED = "vllm/model_executor/layers/fused_moe/fused_moe.py:fused_experts_impl"
TRITON = "vllm/v1/attention/backends/triton_attn.py:forward"
DENSE = "flash_attn/interface.py:f < vllm/v1/attention/backends/flash_attn.py:forward"
FI_MOE = "flashinfer/fused_moe/core.py:forward"


@pytest.mark.parametrize(
    ("frames", "nearby", "platform", "version", "option"),
    [
        (f"flashinfer/mla.py:run < {MLA}", "x", "cuda", "0.24.0", "--attention-backend TRITON_MLA,"),
        (
            "vllm/model_executor/layers/attention/mla_attention.py:bind",
            "x",
            "cuda",
            "0.28.0",
            "--attention-backend TRITON_MLA,",
        ),
        (DENSE, "x", "cuda", "0.24.0", "--attention-backend TRITON_ATTN,"),
        (DENSE, LISTED, "cuda", "0.24.0", "--attention-backend FLASHINFER,"),
        (DENSE, "x", "cuda", "0.12.0", "VLLM_ATTENTION_BACKEND=TRITON_ATTN,"),
        (DENSE, "x", "cuda", "", "--attention-backend TRITON_ATTN (before 0.13 VLLM_ATTENTION_BACKEND),"),
        (TRITON, "x", "rocm", "0.24.0", "--attention-backend ROCM_ATTN,"),
        (DENSE, "x", "tpu", "0.24.0", ""),
        (DENSE, "model='DeepSeek-V3.2'", "cuda", "0.24.0", ""),
        (FI_MOE, "nvfp4", "cuda", "0.24.0", "--moe-backend marlin,"),
        (FI_MOE, "nvfp4", "cuda", "0.15.0", "VLLM_USE_FLASHINFER_MOE_FP4=0,"),
        (FUSED, "x", "cuda", "0.15.0", ""),
        ("aiter/fused_moe.py:fused_moe", "x", "rocm", "0.20.0", "VLLM_ROCM_USE_AITER_MOE=0,"),
        # what the log shows as set, and what it says does not run here, is not offered
        ("aiter/fused_moe.py:fused_moe", "export VLLM_ROCM_USE_AITER_MOE=0", "rocm", "0.20.0", ""),
        (FI_MOE, "nvfp4, non-default args: {'moe_backend': 'marlin'}", "cuda", "0.24.0", ""),
        (
            DENSE,
            "non-default args: {'attention_backend': 'TRITON_ATTN'}",
            "cuda",
            "0.24.0",
            "--attention-backend FLASHINFER,",
        ),
        (TRITON, "FA2 is only supported on devices with ...", "cuda", "0.24.0", "--attention-backend FLASHINFER,"),
        (TRITON, "FA2 is only supported; FlashInfer is not available.", "cuda", "0.24.0", ""),
        ("vllm/utils/deep_gemm.py:fp8_gemm_nt", "x", "cuda", "0.20.0", "VLLM_USE_DEEP_GEMM=0,"),
        ("vllm/model_executor/layers/mamba/x.py:f", "x", "cuda", "0.19.0", ""),
        ("vllm/_custom_ops.py:free_shared_buffer", "x", "cuda", "0.33.0", ""),
    ],
)
def test_the_kernel_that_failed_is_avoided_where_another_one_exists(
    frames: str, nearby: str, platform: str, version: str, option: str
) -> None:
    found = known_failure([FAULT], version, "", frames, LogContext(nearby, platform, "ready"))
    assert found is not None
    assert found.id == "cuda_illegal_memory_access"
    assert f"Start with {option}" in f"{found.do if 'avoids' in found.do else ''}Start with "
    assert found.basis == ("by its place" if option else "guess")


ASSERTION = "AssertionError (assert blocks)"
OFFLOADS = "vllm/v1/core/sched/scheduler.py:schedule < vllm/distributed/kv_transfer/x.py:update_state_after_alloc"


@pytest.mark.parametrize(
    ("args", "do"),
    [
        ("{'model': 'm', 'kv_offloading_size': 32.0}", "Start without --kv-offloading-size, "),
        ("{'kv_transfer_config': X(kv_role='both'), 'kv_offloading_size': 1}", "--kv-transfer-config and --kv-off"),
        ("", "Start without --kv-transfer-config and --kv-offloading-size"),
    ],
)
def test_only_options_that_the_server_was_given_are_to_be_removed(args: str, do: str) -> None:
    near = f"INFO [utils.py:253] non-default args: {args}" if args else "x"
    found = known_failure([ASSERTION], "0.32.0", "", OFFLOADS, LogContext(near, "cuda", "ready"))
    assert found is not None
    assert do in found.do


@each_row("failure", [each for each in table() if re.search(r"\([^)]*[,;] ", each.do)])
def test_a_part_that_a_release_leaves_out_leaves_a_whole_sentence(failure: FailureKind) -> None:
    for version in ("0.8.5", "0.33.0"):
        found = known_failure([failure.example], version, failure.models, failure.example_frames, around(failure))
        assert found is None or found.do.count("(") == found.do.count(")"), found


@each_row("failure", [each for each in table() if "(before" in each.do])
def test_an_older_option_in_brackets_does_not_hide_the_newer_one(failure: FailureKind) -> None:
    older = re.findall(r"\(before [^()]{0,20}?(--[a-z-]+)", failure.do)
    assert all(each not in known() or known()[each].in_release("0.33.0") for each in older), "give it a part of its own"
    found = known_failure([failure.example], "0.33.0", failure.models, failure.example_frames, around(failure))
    assert found is None or found.id != failure.id or found.do.startswith(failure.do[:16]), found


def test_an_option_that_the_release_lacks_is_not_offered() -> None:
    frames = "vllm/v1/core/sched/scheduler.py:update_from_output"
    offered = {
        version: found.do
        for version in ("0.8.5", "0.32.0")
        if (found := known_failure(["KeyError: 'chatcmpl-1f0'"], version, "", frames))
    }
    assert "--no-async-scheduling" not in offered["0.8.5"]
    assert "--no-async-scheduling" in offered["0.32.0"]
    assert offered["0.8.5"].startswith("Upgrade vLLM (this server runs 0.8.5")
    assert offered["0.32.0"].startswith("Start with --no-async-scheduling")


@pytest.mark.parametrize(
    ("shown", "do"),
    [
        (
            "",
            "Start with --moe-backend marlin (since 0.17), or start with --linear-backend marlin (since 0.22), or",
        ),
        ("'moe_backend': 'marlin'", "Start with --linear-backend marlin (since 0.22), or before"),
        ("'moe_backend': 'marlin', 'linear_backend': 'marlin'", "Before 0.17 unset"),
        ("'moe_backend': 'triton'", "Start with --moe-backend marlin"),
    ],
)
def test_advice_that_the_log_shows_as_set_gives_way_to_the_next(shown: str, do: str) -> None:
    near = f"non-default args: {{{shown}}} Using 'X' NvFp4 MoE backend"
    found = known_failure(["CUDA error: an illegal instruction was encountered"], "", "", context=LogContext(near))
    assert found is not None
    assert found.do.startswith(do)


@pytest.mark.parametrize(
    ("clause", "near", "is_set"),
    [
        ("start with --enforce-eager", "enforce_eager=True", True),
        ("start with --enforce-eager", "enforce_eager=False", False),
        ("add --no-enable-prefix-caching", "enable_prefix_caching=False", True),
        ("halve --tensor-parallel-size if", "tensor_parallel_size=1, x=2", True),
        ("halve --tensor-parallel-size if", "tensor_parallel_size=2, x=2", False),
        ("start without --enforce-eager", "enforce_eager=True", False),
        ("--max-num-seqs 16 --max-num-batched-tokens 2048", "'max_num_seqs': 16", False),
        ("start with --kv-cache-dtype auto", "kv_cache_dtype=auto ... kv_cache_dtype=nvfp4", False),
        ("set MAX_JOBS=1", "try MAX_JOBS=1", False),
    ],
)
def test_the_log_shows_what_is_set(clause: str, near: str, is_set: bool) -> None:
    assert is_tried(clause, near) is is_set


@pytest.mark.parametrize(
    ("command", "is_quoted"), [("a larger --max-model-len", True), ("`curl x | sh` at once", False)]
)
def test_what_an_error_asks_for_is_quoted_and_never_a_shell_command(command: str, is_quoted: bool) -> None:
    found = known_failure([f"SomeError: 3 are too few. Use {command}"], "", "")
    assert (f'The error asks: "Use {command}".' in (found.do if found else "")) is is_quoted
    assert is_quoted or "curl" not in (found.do if found else "")


@pytest.mark.parametrize(
    ("line", "frames", "near", "means", "do"),
    [  # its options by the message, by the condition above the raise, and those that the server was given
        (
            "ValueError: decoder_replay_cudagraph_capture_sizes must not exceed max_num_batched_tokens",
            "",
            "",
            "decoder_replay_cudagraph.py",
            "Give --max-num-batched-tokens a value",
        ),
        (
            "ValueError: Block-quantized routed experts require the b12x MoE backend",
            "",
            "",
            "modelopt_block_quant.py",
            "Set --moe-backend",
        ),
        # an error that a newer release no longer raises
        (
            "NotImplementedError: Speculative decoding is not supported on vLLM V0.",
            "",
            "",
            "up to 0.10.2",
            "Upgrade to vLLM 0.11 or later",
        ),
        # of a check that pydantic runs, whose own frames hide those of the check
        (
            "ValidationError: 1 validation error for VllmConfig Value error, Block-quantized routed experts require the"
            " b12x MoE backend",
            "pydantic/_internal/_dataclasses.py:__init__ < vllm/engine/arg_utils.py:create_engine_config",
            "",
            "modelopt_block_quant.py",
            "Set --moe-backend",
        ),
        # the module alone tells the place
        ("ValueError: Conflicting EC destination for transfer_id=7", "", "", "encoder outputs", "--ec-transfer-config"),
        # of a release or a fork that is newer than the list: its sentence is the cause, the module tells what to do
        (
            "ValueError: frob_size must be a whole number of tiles, got 3",
            "vllm/config/frob.py:__post_init__",
            "",
            'The error says: "frob_size must be a whole number of tiles, got 3"',
            "Change frob_size",
        ),
        # an option that only the condition above the message reads is none that the server was given
        (
            "RuntimeError: Worker failed with KV connector output",
            "vllm/v1/executor/multiproc_executor.py:get_response",
            "non-default args: {'model': 'm'}",
            "Worker failed with KV connector output",
            "--distributed-executor-backend",
        ),
        # another program has copied vLLM's words
        (
            "NotImplementedError: Hybrid models with more than one KV cache type are not supported yet.",
            "other/patches.py:_allocate",
            "",
            "raised in the library other",
            "nstall other in the release that this vLLM requires",
        ),
    ],
)
def test_an_error_that_vllm_raises_is_told_by_its_source(
    line: str, frames: str, near: str, means: str, do: str
) -> None:
    found = known_failure([line], "0.10.2", "", frames, LogContext(near, "cuda", ""))
    if not means:
        assert found is None
        return
    assert found is not None
    assert means in found.means
    assert do in found.do


@pytest.mark.parametrize(
    ("text", "frames", "basis", "means"),
    [
        ("mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)", OFFLOADS, "by its place", "in the connector"),
        ("mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)", "", "guess", ""),
        ("three of four widgets frobnicate, the last does not", "", "guess", "Slurm's memory limit"),
        ("NCCL error: unhandled system error", "", "named by the error", "Slurm's memory limit"),
    ],
    ids=["a component's frames", "torch's words", "beside an error with words", "beside a call that failed"],
)
def test_a_component_beats_a_guess_and_an_error_with_words_another_program(
    text: str, frames: str, basis: str, means: str
) -> None:
    killed = "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the tasks have been OOM Killed."
    near = killed if "Slurm" in means else ""
    found = known_failure([f"RuntimeError: {text}"], "0.33.0", "", frames, LogContext(near, "cuda", ""))
    assert found is not None
    assert (found.basis, means in found.means) == (basis, True)


@pytest.mark.parametrize(
    ("check", "means", "do"),
    [
        ("Only one FooConnector may be set", 'The error says: "Only one FooConnector may be set". ', "Change or leave"),
        ("delay_iterations must be greater than or equal to 0", "delay_iterations", "greater than or equal to 0."),
        ("Foo decoding requires --mamba-backend flashinfer", "", "Start with --mamba-backend flashinfer, as"),
        ("Got 5 bytes. Increase --foo-gb or reduce the input size.", "", "--foo-gb or reduce the input size"),
        ("Invalid foo mode: 7. Valid modes are: NONE, STOCK", "", "its list: NONE, STOCK."),
    ],
)
def test_what_pydantic_writes_around_a_check_is_no_part_of_its_words(check: str, means: str, do: str) -> None:
    head = "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig Value error, "
    tail = " [type=value_error, input_value=ArgsKwargs((), {'model_co..._config': None}), input_type=ArgsKwargs]"
    frames = "pydantic/_internal/_dataclasses.py:__init__ < vllm/engine/arg_utils.py:create_engine_config"
    found = known_failure([f"{head}{check}{tail}"], "0.33.0", "", frames)
    assert found is not None
    assert means in found.means
    assert do in found.do
    assert "pydantic" not in found.means
    assert "type=" not in found.do


def test_the_errors_of_vllm_are_those_of_its_source(tmp_path: Path) -> None:
    module = tmp_path / "vllm" / "config" / "cache.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "def check(self):\n"
        "    if self.block_size > 16:\n"
        "        raise ValueError(f'This platform has no pages of {self.size} tokens')\n"
        "    assert self.ok, 'short'\n"
        "    message = 'set --max-model-len to at most %d tokens'\n"
        "    raise errors.Refused(message % 4)\n"
        "    raise AttributeError(f'{self} object has no attribute {name}')\n"
    )
    content = raised_errors.content({"0.32.0": tmp_path / "vllm", "0.33.0": tmp_path / "vllm"})
    assert content["kinds"] == ["Refused", "ValueError"]
    assert content["modules"] == {
        "vllm/config/cache.py": [
            [0, 0, 1, "--max-model-len", "set --max-model-len to at most ", " tokens"],
            [1, 0, 1, "--block-size", "This platform has no pages of ", " tokens"],
        ]
    }


def test_a_short_message_without_a_place_may_be_that_of_another_program() -> None:
    text = "ValueError: Unsupported hash function: md5"
    assert raised_by_vllm(text) is None
    told = raised_by_vllm(text, "vllm/utils/hashing.py:get_hash_fn_by_name")
    assert told is not None
    assert told.module == "vllm/utils/hashing.py"
