"""`diag lint` on a launch command: rules, corrections, checks of this host, and the printed report."""

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import scripted_nvml
from support.paths import MODELS, ROOT
from support.rows import each_row
from support.sampling import THOROUGH
from support.schemas import validator
from support.scripted_nvml import GIB, H100, T4

from diag.cli.app import main
from diag.commands import lint as linting
from diag.core.errors import NoLaunch
from diag.lint.removed import INEFFECTIVE, INTO, REPLACED, REPLACED_VARIABLES, TASKS
from diag.lint.rule import Edit, LintFinding, LintResult, LintTarget
from diag.lint.rules import corrected, lint
from diag.report.settings import LINT, render_lint
from diag.vllm.command.parse import read
from diag.vllm.flags.registry import known, release, versions

NEWEST = versions()[-1]
UNSTATED = "assumed: the image does not say its release"
PINNED, BESIDE = "pinned by the text: a package, a tag of the source or an annotation", "named by the same text"
VERSIONS = st.sampled_from(versions())
MODEL = str(MODELS / "llama-3-8b")
SCHEMA = validator(ROOT / "diag" / "report" / "diag.lint.schema.json")


def found(command: str, version: str = "0.32.0") -> dict[str, LintFinding]:
    return {finding.rule: finding for finding in lint(LintTarget(read(command, version=version), version))}


def rules(command: str, version: str = "0.32.0", *severities: str) -> set[str]:
    return {
        name
        for name, finding in found(command, version).items()
        if finding.severity in (severities or ("error", "warning"))
    }


def after(command: str, version: str = "0.32.0") -> str:
    """The corrected command."""
    one = read(command, version=version)
    return shlex.join(corrected(one, lint(LintTarget(one, version))))


# -- flags that came and went -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "version", "expected"),
    [
        ("--swap-space 4", "0.18.0", "vllm serve m"),
        ("--num-scheduler-steps 8 --port 1", "0.10.1", "vllm serve m --port 1"),
        (
            "--speculative-model X --port 1 --num-speculative-tokens 5",
            "0.32.0",
            """vllm serve m --speculative-config '{"model": "X", "num_speculative_tokens": 5}' --port 1""",
        ),
        (
            "--speculative-model '[ngram]' --ngram-prompt-lookup-max 3",
            "0.9.0",
            """vllm serve m --speculative-config '{"method": "ngram", "prompt_lookup_max": 3}'""",
        ),
        ("--cuda-graph-sizes 1 2 4", "0.13.0", "vllm serve m --cudagraph-capture-sizes 1 2 4"),
        (
            "--guided-decoding-backend xgrammar --guided-decoding-disable-fallback",
            "0.12.0",
            """vllm serve m --structured-outputs-config '{"backend": "xgrammar", "disable_fallback": true}'""",
        ),
        ("--cuda-graph-sizes 512", "0.13.0", "vllm serve m --max-cudagraph-capture-size 512"),
        ("--guided-decoding-disable-fallback", "0.32.0", "vllm serve m"),
        (
            "--guided-decoding-backend xgrammar:no-fallback --guided-decoding-disable-any-whitespace",
            "0.32.0",
            """vllm serve m --structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'""",
        ),
        (
            "--speculative-model X --speculative-disable-by-batch-size 4",
            "0.16.0",
            """vllm serve m --speculative-config '{"model": "X", "disable_by_batch_size": 4}'""",
        ),
        (
            "--speculative-model X --speculative-disable-by-batch-size 4",
            "0.32.0",
            """vllm serve m --speculative-config '{"model": "X"}'""",
        ),
        ("""--override-pooler-config '{"a": 1}'""", "0.32.0", """vllm serve m --pooler-config '{"a": 1}'"""),
        ("-O.mode=3", "0.32.0", "vllm serve m -cc.mode=3"),
        ("""-O '{"mode": 3}'""", "0.32.0", """vllm serve m -cc '{"mode": 3}'"""),
        ("--task embed", "0.13.0", "vllm serve m --runner pooling --convert embed"),
        ("--task generate", "0.13.0", "vllm serve m --runner generate"),
        ("--enable-reasoning --reasoning-parser qwen3", "0.10.0", "vllm serve m --reasoning-parser qwen3"),
        ("--disable-mm-preprocessor-cache", "0.13.0", "vllm serve m --mm-processor-cache-gb 0"),
        ("--disable-log-requests", "0.17.0", "vllm serve m"),
        ("--max-seq-len-to-capture 8192", "0.11.0", "vllm serve m"),
        ("--gpu-memory-utilisation=0.8", "0.32.0", "vllm serve m --gpu-memory-utilization=0.8"),
        ("--max-num-seq 8", "0.32.0", "vllm serve m --max-num-seq 8"),  # argparse takes the beginning of a flag
        ("--enforce-eager true", "0.32.0", "vllm serve m --enforce-eager"),
        ("--enable-prefix-caching=False", "0.32.0", "vllm serve m --no-enable-prefix-caching"),
        ("'--dtype auto' --port 1", "0.32.0", "vllm serve m --dtype auto --port 1"),
        ("--max-num-seqs 8 --port 1 --max-num-seqs 16", "0.32.0", "vllm serve m --port 1 --max-num-seqs 16"),
        ("--device cuda", "0.25.0", "vllm serve m"),
    ],
)
def test_a_command_is_corrected_for_its_release(words: str, version: str, expected: str) -> None:
    text = f"vllm serve m {words}"
    assert after(text, version) == expected
    assert "error" not in {finding.severity for finding in found(expected, version).values()}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rope-theta 1000000", "rope_parameters"),
        ("""--rope-scaling '{"rope_type": "yarn", "factor": 4}'""", "max_position_embeddings"),
        ("""--override-pooler-config '{"normalize": true}'""", "use_activation"),
        ("--guided-decoding-disable-any-whitespace", "xgrammar or guidance as its backend"),
        ("--guided-decoding-backend outlines --guided-decoding-disable-additional-properties", "guidance as its"),
        ("--guided-decoding-backend xgrammar:disable-any-whitespace", "options behind the colon"),
        ("""-O '{"level": 3}'""", "-cc"),
    ],
)
def test_ambiguous_correction_is_described_and_not_written(words: str, said: str) -> None:
    text = shlex.join(shlex.split(f"vllm serve m {words}"))
    assert any(said in finding.fix for finding in found(text).values())
    assert after(text) == text


@pytest.mark.parametrize(
    ("words", "version", "expected"),
    [
        ("-O.mode=3", "0.11.2", set()),
        ("-O3 -O 2", "0.32.0", set()),
        ("-O.mode=3", "0.12.0", {"optimization_level_with_settings"}),
        ("""-cc '{"level": 3}'""", "0.16.0", set()),
        ("-cc.level 3", "0.24.0", {"compilation_level"}),
        ("--limit-mm-per-prompt image=5,video=2", "0.9.2", set()),
        ("--limit-mm-per-prompt image", "0.9.2", {"value_of_wrong_type"}),
        ("--limit-mm-per-prompt image=5", "0.10.0", {"value_of_wrong_type"}),
        ("--enable-log-outputs", "0.10.2", set()),
        ("--enable-log-outputs", "0.11.0", {"outputs_without_requests"}),
        ("--long-prefill-token-threshold 9000 --max-model-len 8000", "0.26.0", set()),
        (
            "--long-prefill-token-threshold 9000 --max-model-len 8000 --max-num-partial-prefills 2",
            "0.10.2",
            {"threshold_above_context"},
        ),
        ("--long-prefill-token-threshold 9000 --max-model-len 8000", "0.27.0", {"threshold_above_context"}),
        ("--config $FILE", "0.6.6", set()),
    ],
)
def test_flag_accepted_by_the_release_is_no_error(words: str, version: str, expected: set[str]) -> None:
    assert rules(f"vllm serve m {words}", version, "error") == expected


def test_help_command_is_not_linted() -> None:
    for words in ("--help", "-h", "--help=all"):
        with pytest.raises(NoLaunch):
            rules(f"vllm serve {words}")


def test_removed_flag_is_reported_with_its_replacement() -> None:
    """No replacement is a flag that a release lacks from which the old one is missing, or is unknown itself."""
    assert {*INTO, *REPLACED, *INEFFECTIVE} <= {*known()}
    for name, (target, _, _) in INTO.items():
        assert known()[target].in_release(NEWEST), name
    for each in (*REPLACED.values(), *TASKS.values()):
        assert {word for word in each.flags if word.startswith("--")} <= {*known()}
    for variable in REPLACED_VARIABLES.values():
        assert not variable.flag or known()[variable.flag].in_release(NEWEST)


def test_a_replacement_that_the_release_does_not_have_yet_is_not_written() -> None:
    assert (
        after("vllm serve m --speculative-model X", "0.8.3") == """vllm serve m --speculative-config '{"model": "X"}'"""
    )
    assert after("vllm serve m --rope-scaling '{}'", "0.6.0") == "vllm serve m --rope-scaling '{}'"


def test_a_flag_of_a_later_release_is_named_with_the_release() -> None:
    said = found("vllm serve m --watermark 0.1", "0.20.0")["flag_of_a_later_release"]
    assert "0.24.0" in said.message
    assert after("vllm serve m --watermark 0.1", "0.20.0") == "vllm serve m --watermark 0.1"


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("swap_space", "4", "removed_flag"),
        ("num_scheduler_steps", "8", "removed_flag"),
        ("preemption_mode", "swap", "removed_flag"),
        ("distributed_executor_backend", "nccl", "no_such_executor"),
    ],
)
def test_spelling_of_python_and_yaml_is_that_of_the_flag(key: str, value: str, rule: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"{key}: {value}\nmax_model_len: 8192\n")
    assert rules(f"vllm serve m --{key} {value}") == {rule}
    assert rules(f"vllm serve m --config {tmp_path / 'c.yaml'}") == {rule}


def test_flag_from_a_config_file_is_named_and_not_edited(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: m\nswap-space: 4\nnever-heard-of: 1\ndisable-log-stats: true\n")
    command = read("vllm serve --config c.yaml", tmp_path)
    said = lint(LintTarget(command, "0.32.0"))
    assert any("--swap-space (in the --config file)" in finding.message for finding in said)
    assert any(finding.message.startswith("A key of the --config file: no vLLM") for finding in said)
    assert corrected(command, said) == command.words


@pytest.mark.parametrize(
    ("words", "version", "expected"),
    [
        ("--swap-space 4", "0.17.1", True),
        ("--swap-space 4", "0.7.3", False),
        ("--disable-log-requests", "0.10.1", True),
        ("--disable-log-requests", "0.10.0", False),
        ("--max-seq-len-to-capture 1", "0.10.2", True),
        ("--disable-cascade-attn", "0.32.0", True),
        ("--disable-cascade-attn", "0.20.0", False),
        ("--show-hidden-metrics-for-version 0.9", "0.15.0", True),
        ("--show-hidden-metrics-for-version 0.9", "0.10.0", False),
    ],
)
def test_a_flag_without_effect_is_a_warning_from_the_release_on_that_ignores_it(
    words: str, version: str, expected: bool
) -> None:
    assert ("no_effect" in rules(f"vllm serve m {words}", version)) is expected


def test_the_old_engine_still_swaps() -> None:
    assert "no_effect" not in rules("VLLM_USE_V1=0 vllm serve m --swap-space 4", "0.9.2")


def test_abbreviated_flag_is_an_info() -> None:
    said = found("vllm serve m --kv-cache-memory 1G")
    assert said["abbreviated_flag"].severity == "info"
    assert "abbreviated_flag" not in found("vllm serve m --kv-cache-memory-bytes 1G -tp 2 --no-enable-prefix-caching")


def test_switch_of_an_old_release_accepts_true_or_false() -> None:
    text = "python -m vllm.entrypoints.openai.api_server --model m --enable-chunked-prefill False"
    assert not rules(text, "0.7.3", "error") | rules("vllm serve m --enable-chunked-prefill=false", "0.8.4", "error")
    assert "switch_with_a_value" in rules(text, "0.9.0")


@pytest.mark.parametrize("words", ["--enable-x", "$ARGS", "${EXTRA[@]}", "$@", '"{{ .Values.args }}"', "--port $PORT"])
def test_shell_and_template_variables_are_no_error(words: str) -> None:
    expected = {"unknown_flag"} if words == "--enable-x" else set()
    assert rules(f"vllm serve m {words}") == expected


# -- variables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "version", "expected"),
    [
        ("VLLM_USE_V1=1", "0.11.0", set()),
        ("VLLM_USE_V1=0", "0.11.1", {"variable_not_read"}),
        ("VLLM_USE_V1=0", "0.11.0", {"old_engine"}),
        ("VLLM_USE_V1=0", "0.9.0", {"old_engine"}),
        ("VLLM_USE_V1=0", "0.7.3", set()),
        ("VLLM_ATTENTION_BACKEND=FLASHINFER", "0.14.1", set()),
        ("VLLM_ATTENTION_BACKEND=FLASHINFER", "0.15.0", {"variable_not_read"}),
        ("VLLM_EXECUTE_MODEL_TIMEOUT=600", "0.9.2", {"variable_not_read"}),
        ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=600", "0.9.2", set()),
        ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=600", "0.9.1", {"variable_not_read"}),
        ("VLLM_RPC_TIMEOUT=1", "0.22.1", set()),
        ("VLLM_RPC_TIMEOUT=1", "0.23.0", {"variable_not_read"}),
        ("VLLM_ENGINE_READY_TIMEOUT_S=1", "0.13.0", {"variable_not_read"}),
        ("VLLM_LOGING_LEVEL=DEBUG", "0.32.0", {"variable_not_read"}),
        ("VLLM_LOGING_LEVEL=DEBUG", "0.20.0", {"variable_not_read"}),
        ("VLLM_USE_TRITON_FLASH_ATTN=0", "0.11.0", set()),
        ("VLLM_USE_TRITON_FLASH_ATTN=0", "0.11.1", {"variable_not_read"}),
        ("VLLM_ASCEND_ENABLE_FLASHCOMM1=1", "0.32.0", set()),  # a plugin's own
        ("VLLM_IMAGE=x", "0.32.0", set()),
        ("HF_TOKEN=x", "0.32.0", set()),
    ],
)
def test_a_variable_is_judged_by_the_releases_that_read_it(variable: str, version: str, expected: set[str]) -> None:
    assert rules(f"{variable} vllm serve m", version) == expected


def test_old_engine_is_an_error_after_its_removal_and_a_warning_before() -> None:
    assert found("VLLM_USE_V1=0 vllm serve m", "0.11.0")["old_engine"].severity == "error"
    assert found("VLLM_USE_V1=0 vllm serve m", "0.10.2")["old_engine"].severity == "warning"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("VLLM_USE_V1=0 A=1 vllm serve m", "A=1 vllm serve m"),
        (
            "docker run -e VLLM_USE_V1=0 --rm vllm/vllm-openai --model m",
            "docker run --rm vllm/vllm-openai --model m",
        ),
        ("VLLM_ATTENTION_BACKEND=FLASHINFER vllm serve m", "vllm serve m --attention-backend FLASHINFER"),
        ("VLLM_ATTENTION_BACKEND=TRITON_ATTN_VLLM_V1 vllm serve m", "vllm serve m --attention-backend TRITON_ATTN"),
        ("VLLM_ATTENTION_BACKEND=XFORMERS vllm serve m", "vllm serve m"),
        (
            "VLLM_ATTENTION_BACKEND=FLASH_ATTN vllm serve m --attention-backend FLASHINFER",
            "vllm serve m --attention-backend FLASHINFER",
        ),
        ("env VLLM_EXECUTE_MODEL_TIMEOUT=9 vllm serve m", "env VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=9 vllm serve m"),
        (
            "docker run -e VLLM_EXECUTE_MODEL_TIMEOUT=9 vllm/vllm-openai --model m",
            "docker run -e VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=9 vllm/vllm-openai --model m",
        ),
    ],
)
def test_unread_variable_is_corrected_in_place(text: str, expected: str) -> None:
    assert after(text) == expected


# -- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm serve", {"no_model"}),
        ("vllm serve --served-model-name a b m", {"no_model"}),
        ("vllm serve m", set()),
        ("vllm serve --model m", {"model_by_flag"}),
        ("vllm serve m --model n", {"model_named_twice"}),
        ("python -m vllm.entrypoints.openai.api_server --model m", set()),
        ("python -m vllm.entrypoints.openai.api_server m", {"model_not_read"}),
        ("python -m vllm.entrypoints.openai.api_server m --model m", {"word_too_many"}),
        ("docker run vllm/vllm-openai:v0.32.0 --model m", set()),
        ("docker run vllm/vllm-openai:v0.32.0 --model m n", {"word_too_many"}),
        ("docker run vllm/vllm-openai:v0.32.0 vllm serve m", {"entry_point_repeated"}),
        ("docker run vllm/vllm-openai:v0.32.0 serve m", {"entry_point_repeated"}),
        ("docker run vllm/vllm-openai:v0.32.0 vllm serve --model m", {"entry_point_repeated"}),
        ("docker run --entrypoint vllm vllm/vllm-openai:v0.32.0 serve m", set()),
        ("docker run nvcr.io/nvidia/vllm:25.09-py3 vllm serve m", set()),
        ("docker run vllm/vllm-openai:v0.32.0 m --port 1", set()),
        ("vllm serve -- m", set()),
        ("vllm serve --config $CONFIG", set()),
        ("vllm serve --port 1 $ARGS", set()),
        ("vllm serve $ARGS", set()),
        ("--port 1", set()),  # flags alone say nothing of the model
    ],
)
def test_model_position_is_that_of_the_entry_point(text: str, expected: set[str]) -> None:
    assert rules(text) == expected


@pytest.mark.parametrize(
    ("text", "version", "expected"),
    [
        ("vllm serve --model m", "0.11.0", "error"),
        ("vllm serve --model=m", "0.11.0", "warning"),
        ("vllm serve --model m", "0.11.1", "warning"),
    ],
)
def test_a_model_by_flag_is_refused_by_the_releases_that_do(text: str, version: str, expected: str) -> None:
    assert found(text, version)["model_by_flag"].severity == expected


def test_the_entry_point_of_an_image_is_the_one_of_its_release() -> None:
    assert rules("docker run vllm/vllm-openai:v0.32.0 m", "0.9.1") == {"model_not_read"}
    assert not rules("docker run vllm/vllm-openai:v0.32.0 m", "0.17.1")
    assert not rules("docker run --entrypoint vllm vllm/vllm-openai:v0.32.0 serve m", "0.9.1")
    again = "docker run vllm/vllm-openai:v0.32.0 vllm serve m"
    assert after(again, "0.17.1") == "docker run vllm/vllm-openai:v0.32.0 m"
    assert after(again, "0.9.1") == "docker run vllm/vllm-openai:v0.32.0 --model m"


def test_correction_puts_the_model_where_the_entry_point_reads_it() -> None:
    assert after("vllm serve --port 1 --model m") == "vllm serve m --port 1"
    assert after("python -m vllm.entrypoints.openai.api_server m --port 1").endswith("api_server --model m --port 1")


# -- contradictions and advice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "version", "expected"),
    [
        ("--max-num-partial-prefills 4", "0.26.0", {"partial_prefills"}),
        ("--max-num-partial-prefills 4", "0.10.0", {"falls_back_to_v0"}),
        ("--max-num-partial-prefills 1", "0.26.0", set()),
        ("--max-num-partial-prefills 4", "0.27.0", {"removed_flag"}),
        ("--num-scheduler-steps 8", "0.9.0", {"falls_back_to_v0"}),
        ("--num-scheduler-steps 8", "0.7.3", set()),
        ("--kv-cache-memory-bytes 8G --gpu-memory-utilization 0.9", "0.32.0", {"utilization_is_overridden"}),
        ("--num-gpu-blocks-override 128", "0.32.0", {"kv_cache_size_pinned"}),
        ("--num-gpu-blocks-override $N", "0.32.0", set()),
        ("--disable-log-stats", "0.32.0", {"no_metrics"}),
        ("--gpu-memory-utilization 0.98", "0.32.0", {"little_memory_left"}),
        ("--gpu-memory-utilization 0.95", "0.32.0", set()),
        ("--max-num-batched-tokens 8192 --max-num-seqs 2 --max-model-len 512", "0.32.0", {"larger_step_than_work"}),
        ("--headless --api-server-count 2", "0.32.0", {"servers_of_a_headless_node"}),
        ("--headless --api-server-count 0", "0.32.0", set()),
        ("-dp 4 --data-parallel-external-lb", "0.32.0", set()),
        ("-dp 4 --data-parallel-hybrid-lb", "0.32.0", {"hybrid_balancer_without_local_ranks"}),
        ("-dp 4 --data-parallel-hybrid-lb --data-parallel-size-local $LOCAL", "0.32.0", set()),
        ("--enforce-eager --no-enforce-eager", "0.32.0", {"given_twice"}),
        ("--max-num-seqs 8 --max-num-seqs 8", "0.32.0", set()),
        ("--middleware a.b --middleware c.d", "0.32.0", set()),
        ("-cc.mode 3 -cc.backend inductor", "0.32.0", set()),
        ("--enable-chunked-prefill --no-enable-chunked-prefill", "0.32.0", {"given_twice"}),
        ("--cudagraph-capture-sizes 1 2 4 --max-num-seqs 8", "0.32.0", {"sequences_above_graphs"}),
        ("--cudagraph-capture-sizes 1 2 4 --max-num-seqs 8 --enforce-eager", "0.32.0", set()),
        ("--max-cudagraph-capture-size 64 --max-num-seqs 64", "0.32.0", set()),
        ("-cc.max_cudagraph_capture_size 8 --max-num-seqs 16", "0.32.0", {"sequences_above_graphs"}),
        ("""-cc '{"cudagraph_capture_sizes": [1, 8]}' --max-num-seqs 16""", "0.32.0", {"sequences_above_graphs"}),
        ("""-cc '{"cudagraph_mode": "NONE", "cudagraph_capture_sizes": [1]}' --max-num-seqs 16""", "0.32.0", set()),
        ("--port 99999", "0.32.0", {"value_out_of_range"}),
        ("--max-num-seqs 64 --max-num-batched-tokens $T", "0.32.0", set()),
    ],
)
def test_conflicting_or_harmful_flag_is_named(words: str, version: str, expected: set[str]) -> None:
    assert rules(f"vllm serve m {words}", version) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--gpu-memory-utilization 1.5", "'1.5', expected a value above 0 and at most 1"),
        ("--watermark 1", "'1', expected a value at least 0 and below 1"),
        ("--max-num-seqs 0", "'0', expected a value at least 1"),
    ],
)
def test_value_out_of_range_is_reported_with_the_range(words: str, expected: str) -> None:
    assert found(f"vllm serve m {words}")["value_out_of_range"].message.endswith(expected)


@pytest.mark.parametrize(
    ("words", "version", "expected"),
    [
        ("", "0.32.0", {"context_at_the_maximum"}),
        ("--max-model-len 8k", "0.32.0", set()),
        ("--max-model-len 8k", "0.7.3", {"prefix_caching_off"}),
        ("--max-model-len 8k --enable-prefix-caching", "0.7.3", set()),
        ("--max-model-len 8k --no-enable-prefix-caching", "0.32.0", {"prefix_caching_off"}),
        ("--max-model-len 8k --enforce-eager", "0.32.0", {"eager"}),
        ("--max-model-len 8k --max-num-seqs 1024", "0.32.0", {"sequences_above_graphs"}),
        ("--max-model-len 8k --max-cudagraph-capture-size 512 --max-num-seqs 8", "0.32.0", {"graphs_above_sequences"}),
        ("--max-model-len 8k -dp 4", "0.32.0", {"several_api_servers"}),
        ("--max-model-len 8k -dp 4 --api-server-count 1", "0.32.0", set()),
        ("--max-model-len 8k -dp 4 --data-parallel-external-lb", "0.32.0", set()),
        ("--max-model-len 8k --kv-cache-dtype fp8_new", "0.20.0", {"not_a_choice"}),
    ],
)
def test_minor_finding_is_an_info(words: str, version: str, expected: set[str]) -> None:
    assert rules(f"vllm serve m {words}", version, "info") == expected


def test_little_memory_left_is_worse_where_graphs_come_on_top() -> None:
    words = "vllm serve m --gpu-memory-utilization 0.98"
    assert "CUDA graphs come on top" in found(words, "0.19.1")["little_memory_left"].why
    assert "CUDA graphs come on top" not in found(words, "0.20.0")["little_memory_left"].why
    assert found(words, "0.20.0")["little_memory_left"].fix.endswith("(the default is 0.92)")


def test_repeated_flag_and_contradictory_switch_are_distinguished() -> None:
    assert "is given 2 times" in found("vllm serve m --max-num-seqs 8 --max-num-seqs 9")["given_twice"].message
    assert (
        "is given both as --x and as --no-x"
        in found("vllm serve m --enforce-eager --no-enforce-eager")["given_twice"].message
    )


def test_values_of_the_config_that_the_command_line_overrides_are_an_info(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: m\nport: 1\n")
    said = lint(LintTarget(read("vllm serve --config c.yaml --port 2", tmp_path), "0.32.0"))
    assert {finding.rule: finding.severity for finding in said}["given_twice"] == "info"


@each_row("version", versions())
def test_a_plain_command_is_clean_for_every_release(version: str) -> None:
    words = "--tensor-parallel-size 2 --max-model-len 8192 --gpu-memory-utilization 0.9 --max-num-seqs 64 --port 8000"
    assert not rules(f"vllm serve m {words} --enable-prefix-caching --trust-remote-code", version)


def test_removal_wins_over_other_edits_of_a_word() -> None:
    assert after("vllm serve m --swap-space 4 --disable-log-stats true") == "vllm serve m"
    command = read("vllm serve m --port 1")
    twice = [
        LintFinding("a", "error", "", "", edits=(Edit(range(3, 5), ("--port", "2")),)),
        LintFinding("b", "warning", "", "", edits=(Edit(range(4, 5), ("3",)), Edit(range(5, 5), ("--headless",)))),
        LintFinding("c", "info", "", "", edits=(Edit(range(0, 2)),)),
    ]
    assert corrected(command, twice) == ("vllm", "serve", "m", "--port", "2", "--headless")


# -- this host and the model's folder ---------------------------------------------------------------------------------


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Says what the driver shows."""
    place = scripted_nvml.loaded(tmp_path, monkeypatch)
    yield lambda *shown: scripted_nvml.write(place, shown)


FREE = {**H100, "free": 79 * GIB, "used": 0, "uuid": "GPU-gpu"}
NVLINK = {f"nvmlDeviceGetP2PStatus {peer} 2": 0 for peer in range(4)}
PCIE = {f"nvmlDeviceGetTopologyCommonAncestor {peer}": 50 for peer in range(4)}


def here(words: str) -> dict[str, LintFinding]:
    report = linting.judge(f"vllm serve m --max-model-len 8k {words}", "0.32.0")
    return {finding.rule: finding for finding in report.findings}


@pytest.mark.parametrize(
    ("shown", "words", "expected"),
    [
        ([FREE], "", set()),
        ([H100], "", {"gpu_is_shared"}),
        ([H100], "--gpu-memory-utilization 0.1", set()),
        ([H100], "--kv-cache-memory-bytes 8G", set()),
        ([FREE, H100], "", set()),  # it is the first that would be used
        ([H100, FREE], "", {"gpu_is_shared"}),
        ([FREE], "-tp 2", {"fewer_gpus_than_ranks"}),
        ([FREE], "-tp 0.5", {"value_of_wrong_type"}),
        ([FREE], "-tp 2 --nnodes 2", {"tensor_parallel_across_nodes"}),
        ([FREE], "-pp 2 --nnodes 2", set()),
        ([FREE], "-tp 2 --distributed-executor-backend ray", set()),
        ([FREE] * 2, "-tp 1 -dp 4 --data-parallel-size-local 2 --api-server-count 1", set()),
        ([{**FREE, "also": NVLINK}] * 2, "-tp 2", set()),
        ([{**FREE, "also": PCIE}] * 2, "-tp 2", {"tensor_parallel_over_pcie"}),
        ([{**FREE, "also": PCIE}] * 2, "-pp 2", set()),
        ([{**FREE, "also": NVLINK}, {**T4, "free": 15 * GIB, "also": NVLINK}], "-tp 2", {"unequal_gpus"}),
        ([{**FREE, "also": NVLINK}, {**T4, "free": 15 * GIB, "also": NVLINK}], "", set()),
    ],
)
def test_the_gpus_of_this_host_make_warnings(
    shown: list[dict[str, object]], words: str, expected: set[str], gpus: Callable[..., None]
) -> None:
    gpus(*shown)
    said = here(words)
    assert {*said} == expected
    assert {finding.severity for finding in said.values()} <= {"warning"} or "value_of_wrong_type" in said


def test_shared_gpu_is_reported_with_the_share_that_fits(gpus: Callable[..., None]) -> None:
    gpus({**H100, "free": 30 * GIB, "processes": {1: 40 * GIB}})
    said = here("")["gpu_is_shared"]
    assert "30.0 GiB of 80.0 GiB free" in said.message
    assert "1 other process uses the rest" in said.why
    assert said.fix.startswith("Set --gpu-memory-utilization to 0.37,")
    assert not here("--gpu-memory-utilization 0.37")


def test_only_the_gpus_that_the_command_may_see_count(gpus: Callable[..., None]) -> None:
    gpus(FREE, H100)
    report = linting.judge("CUDA_VISIBLE_DEVICES=1 vllm serve m --max-model-len 8k", "0.32.0")
    assert [finding.rule for finding in report.findings] == ["gpu_is_shared"]


def test_missing_gpus_are_not_checked() -> None:
    report = linting.judge("vllm serve m -tp 8")
    assert any(each.startswith("the GPUs of this host: ") for each in report.not_checked)


def test_unknown_gpu_links_are_not_checked(gpus: Callable[..., None]) -> None:
    gpus(FREE, FREE)
    said = "how the GPUs are connected: the driver does not tell"
    assert said in linting.judge("vllm serve m -tp 2").not_checked
    assert said not in linting.judge("vllm serve m").not_checked


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    **{"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 128256},
    **{"max_position_embeddings": 131072, "num_key_value_heads": 8, "intermediate_size": 14336},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--max-model-len 8192 -tp 8", set()),
        ("--max-model-len 131072", set()),
        ("--max-model-len 131073", {"context_above_the_model"}),
        ("--max-model-len 131073 --hf-overrides '{}'", set()),
        ("--max-model-len 8192 -tp 3", {"heads_do_not_divide"}),
        ("--max-model-len 8192 --enable-expert-parallel", {"experts_of_a_dense_model"}),
    ],
)
def test_model_config_limits_are_checked(words: str, expected: set[str], folder: Path) -> None:
    report = linting.judge(f"vllm serve {folder} {words}", "0.32.0")
    assert {finding.rule for finding in report.findings if finding.severity == "error"} == expected


def test_a_longer_context_may_be_allowed(folder: Path) -> None:
    text = f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve {folder} --max-model-len 200k"
    assert not [finding for finding in linting.judge(text, "0.32.0").findings if finding.severity == "error"]


def test_default_context_is_reported_with_the_model_maximum(folder: Path) -> None:
    report = linting.judge(f"vllm serve {folder}", "0.32.0")
    assert [finding.message for finding in report.findings] == [
        "The context length is left at the model's maximum, 131,072 tokens; one such request takes 16.0 GiB of KV cache"
    ]


@pytest.mark.parametrize(("version", "refused"), [("0.29.0", False), ("0.32.0", True)])
def test_context_extension_depends_on_the_release(version: str, refused: bool, folder: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    stretched = {**CONFIG, "max_position_embeddings": 32768, "rope_scaling": yarn}
    (folder / "config.json").write_text(json.dumps(stretched))
    report = linting.judge(f"vllm serve {folder} --max-model-len 131072", version)
    assert ("context_above_the_model" in {finding.rule for finding in report.findings}) is refused


def test_a_context_that_vllm_leaves_short_is_not_at_the_maximum(folder: Path) -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [32.0]}
    stretched = {**CONFIG, "original_max_position_embeddings": 4096, "rope_scaling": factors}
    (folder / "config.json").write_text(json.dumps(stretched))
    assert linting.judge(f"vllm serve {folder}", "0.32.0").findings == ()


def test_model_without_config_values_has_no_limits(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["Other"], "width": 12, "reach": 1024}))
    report = linting.judge(f"vllm serve {folder} --max-model-len 2048 -tp 2", "0.32.0")
    assert (report.status, report.findings) == (0, ())
    assert any(each.startswith("the model's own limits: ") for each in report.not_checked)


def test_a_folder_without_a_config_is_an_error(tmp_path: Path) -> None:
    report = linting.judge(f"vllm serve {tmp_path}", "0.32.0")
    assert report.findings[0].rule == "no_config"
    assert report.status == 2


@pytest.mark.parametrize(
    ("before", "where"),
    [("docker run r.io/vllm-openai:v0.32.0 --model", "in the container"), ("ssh h vllm serve", "on another")],
)
def test_a_folder_of_another_machine_is_not_looked_for_here(before: str, where: str, tmp_path: Path) -> None:
    report = linting.judge(f"{before} {tmp_path} --max-model-len 8k", "0.32.0")
    assert report.status == 0
    assert any(each.startswith(f"the model's own limits: the model's folder is {where}") for each in report.not_checked)


@pytest.mark.parametrize("name", ["params.json", "model.gguf"])
def test_a_model_in_another_format_needs_no_config(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    report = linting.judge(f"vllm serve {tmp_path}", "0.32.0")
    assert report.status == 0
    assert any(each.startswith("the model's own limits: ") for each in report.not_checked)


# -- the release ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted", "version", "why"),
    [
        ("vllm serve m", "", NEWEST, "the newest known"),
        ("vllm serve m", "v0.9.1", "0.9.1", "--vllm-version"),
        ("vllm serve m", "0.8.5.post1", "0.8.5.post1", "--vllm-version"),
        ("docker run vllm/vllm-openai:v0.10.1.1 --model m", "", "0.10.1.1", "the image's tag"),
        ("docker run vllm/vllm-openai:v0.10.0-x86_64 --model m", "", "0.10.0", "the image's tag"),
        ("docker run vllm/vllm-openai:v0.10.0 --model m", "0.9.1", "0.9.1", "--vllm-version"),
        ("docker run vllm/vllm-openai:latest --model m", "", NEWEST, "the newest known"),
        ("docker run vllm/vllm-openai:v0.9.2 bash -c 'vllm serve m'", "", "0.9.2", "the image's tag"),
        ("docker run mirror:5000/x/vllm-openai-rocm:v0.16.0 m", "", "0.16.0", "the image's tag"),
        ("docker run rocm/vllm:rocm6.4.1_vllm_0.9.1_20250702 vllm serve m", "", "0.9.1", "the image's tag"),
        ("docker run 'vllm/vllm-openai:${VLLM_TAG:-v0.10.1}' --model m", "", "0.10.1", "the image's tag"),
        ("docker run nvcr.io/nvidia/vllm:25.09-py3 vllm serve m", "", NEWEST, UNSTATED),
        ("docker run x/rhaiis/vllm-cuda-rhel9:3.0.0 --model m", "", NEWEST, UNSTATED),
        ("docker run opea/vllm-gaudi:1.2 --model m", "", NEWEST, UNSTATED),
        ("docker run vllm/vllm-openai:v0.12.9 --model m", "", "0.12.9", "the image's tag"),
        ("docker run vllm/vllm-openai:v0.5.4 --model m", "", "0.5.4", "the image's tag"),
        ("docker run lmcache/vllm-openai:v0.3.9 --model m", "", NEWEST, UNSTATED),  # its own version
        ("docker run aibrix/vllm-openai:v0.6.1-edb0-2025 --model m", "", "0.6.1", "the image's tag"),
        ("apptainer exec vllm_0.9.2.sif vllm serve m", "", "0.9.2", "the name of the image"),
        ("pip install 'vllm==0.16.0'\nvllm serve m", "", "0.16.0", PINNED),
        ("I=vllm-openai:v0.16.0\nvllm serve m", "", "0.16.0", BESIDE),
        ("pip install vllm==\nvllm serve m", "", NEWEST, "the newest known"),
    ],
)
def test_the_release_is_the_wanted_one_or_the_images_or_the_newest(
    text: str, wanted: str, version: str, why: str
) -> None:
    report = linting.judge(text, wanted)
    assert (report.version, report.version_source) == (version, why)
    assert why in SCHEMA.schema["properties"]["launches"]["items"]["properties"]["vllm_version_source"]["enum"]


def test_image_tag_without_a_version_is_noted() -> None:
    said = "the image's vLLM release: its tag is not vLLM's version (--vllm-version sets it)"
    assert said in linting.judge("docker run nvcr.io/nvidia/vllm:25.09-py3 vllm serve m").not_checked
    assert said not in linting.judge("docker run nvcr.io/nvidia/vllm:25.09-py3 vllm serve m", "0.10.2").not_checked
    assert said not in linting.judge("docker run vllm/vllm-openai:latest --model m").not_checked


def test_release_newer_than_the_data_is_noted() -> None:
    newer = f"0.{release(NEWEST)[1] + 1}.0"
    report = linting.judge("vllm serve m --swap-space 1", newer)
    assert report.not_checked[0].startswith(f"flags added or removed after {NEWEST}")
    assert report.status == 2


# -- the command line and the report ----------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["diag", "lint", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["vllm serve m --max-model-len 8k"], 0),
        (["vllm serve m --enforce-eager"], 0),
        (["vllm serve m --disable-log-stats"], 1),
        (["vllm serve m --swap-space 4"], 1),  # of an assumed release
        (["vllm serve m --swap-space 4", "--vllm-version", "0.32.0"], 2),
        (["vllm serve m --swap-space 4", "--vllm-version", "0.17.1"], 1),
        (["ls"], 65),
        (["deploy/none.yaml"], 66),
        (["vllm serve m", "--vllm-version", "newest"], 64),
        (["vllm serve m", "--vllm-version", "0.1.0"], 64),
        (["vllm serve 'm"], 64),
    ],
)
def test_the_exit_status_is_that_of_the_worst_finding(
    words: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capsys, *words)
    assert code == status
    assert (err.count("\n") == 1 and not out) if status >= 64 else not err


REPORT = """\
m with vLLM 0.32.0 (--vllm-version): 1 error, 2 warnings, 1 info

ERROR          --swap-space was removed: 0.17.1 is the last release with it [removed_flag]
  why          V1 never swaps the KV cache to the CPU: it recomputes
  fix          Remove --swap-space

WARNING        --api-key is written out [key_in_the_text]
  why          Who reads the file, its history or the list of processes has it
  fix          Use the variable VLLM_API_KEY from a secret in place of --api-key, and replace the
               key

WARNING        --disable-log-stats removes every vllm:... metric [no_metrics]
  why          Neither Prometheus nor diag can tell how the server performs
  fix          Remove --disable-log-stats

INFO           --enforce-eager disables CUDA graphs and compilation [eager]
  why          Every decode step launches its kernels one by one: short steps get much slower on a
               GPU
  fix          Remove --enforce-eager unless the server fails to start without it;
               --max-cudagraph-capture-size saves memory at less cost

  corrected    vllm serve m --max-model-len 8k --enforce-eager --max-num-seqs 64 --served-model-name "$NAME" --api-key \
"${VLLM_API_KEY:?}"

  not checked  the value of --served-model-name, which the text does not show
               vLLM's own parser: vLLM is not installed beside diag (--vllm-python names another
               Python)
"""


def test_lint_report_is_complete() -> None:
    words = "--max-model-len 8k --enforce-eager --swap-space 4 --disable-log-stats --max-num-seqs 64"
    report = linting.judge(f'vllm serve m {words} --served-model-name "$NAME" --api-key sk-12', "0.32.0")
    printed = render_lint(LintResult((report,)))
    assert printed[: len(REPORT)] == REPORT


def test_a_server_with_a_value_that_was_not_seen_is_not_called_checked() -> None:
    report = linting.judge("vllm serve m --max-model-len $LENGTH", "0.32.0")
    assert ": nothing found in what was checked\n" in render_lint(LintResult((report,)))
    several = render_lint(LintResult((report, report)))
    assert "\n  not checked    what their text does not show: --all lists it\n" in several


@pytest.mark.parametrize(
    ("words", "ignored", "left", "printed"),
    [
        ("", (), 0, "\n  corrected    vllm serve m\n"),
        (" --max-num-seqs many", (), 1, "\n  partly corrected  1 error is left\n               vllm serve m --max"),
        (" --max-num-seqs many", ("value_of_wrong_type",), 1, "\n  partly corrected  1 error is left\n"),
        (" --max-num-seqs many --port x", (), 2, "\n  partly corrected  2 errors are left\n"),
    ],
)
def test_a_correction_that_leaves_an_error_is_called_a_partial_one(
    words: str, ignored: tuple[str, ...], left: int, printed: str
) -> None:
    report = linting.judge(f"vllm serve m --swap-space 4{words}", "0.32.0", ignored=ignored)
    assert printed in render_lint(LintResult((report,)))
    assert json.loads(LINT.text(LintResult((report,))))["launches"][0]["errors_left"] == left


def test_no_line_is_wider_than_a_hundred_columns_but_for_a_word_that_is() -> None:
    long = "/models" * 30
    report = linting.judge(f"vllm serve {'m' * 30} --download-dir {long} --swap-space 4 --{'x' * 300} 1")
    wide = [line for line in render_lint(LintResult((report,))).splitlines() if len(line) > 100]
    assert all(long[:99] in line for line in wide)


def test_the_corrected_command_is_read_back_as_it_is_printed() -> None:
    words = """--swap-space 4 --speculative-model 'a b' --num-speculative-tokens 5 --served-model-name "$NAME" """
    report = linting.judge(f"A='1 2' vllm serve m {words} --override-generation-config '{{\"top_p\": 0.5}}'", "0.32.0")
    printed = render_lint(LintResult((report,)))
    lines = printed[printed.index("  corrected") + 15 : printed.index("  not checked")]
    again = read(lines, version="0.32.0")
    assert again.environment == {"A": "${A:?}"}
    assert json.loads(again.get("--speculative-config") or "") == {"model": "a b", "num_speculative_tokens": 5}
    assert again.get("--served-model-name") == "$NAME"
    assert again.get("--override-generation-config") == '{"top_p": 0.5}'
    assert 'served-model-name "$NAME"' in printed


@pytest.mark.parametrize(
    "words",
    ["--port ${PORT:-8000}", '--download-dir "/models/$NAME"', "$MORE", '"$@"', '"${ARGS[@]}"'],
)
def test_shell_variables_stay_unquoted_in_the_correction(words: str) -> None:
    report = linting.judge(f"vllm serve m --max-model-len 8k {words} --swap-space 4", "0.32.0")
    assert report.corrected == f"vllm serve m --max-model-len 8k {words}"


def test_the_correction_of_a_container_with_an_image_from_before_is_printed() -> None:
    report = linting.judge("IMAGE=vllm/vllm-openai:v0.20.0\ndocker run $IMAGE --model m --swap-space 4")
    assert (report.version, report.corrected) == ("0.20.0", "docker run vllm/vllm-openai:v0.20.0 --model m")


def test_ineffective_false_in_the_config_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("enable_prefix_caching: false\nenforce-eager: false\nheadless: false\n")
    report = lint(LintTarget(read("vllm serve m --config c.yaml", tmp_path, "0.27.1"), "0.27.1"))
    said = [finding for finding in report if finding.rule == "config_false_ignored"]
    assert [finding.message.split(":")[0] for finding in said] == ["enable_prefix_caching"]
    assert "--no-enable-prefix-caching on the command line" in said[0].fix


def test_nothing_secret_is_printed_and_no_escape_reaches_the_terminal() -> None:
    command = (
        "HF_TOKEN=hf_aaaaaaaaaaaa VLLM_API_KEY=topsecret vllm serve 'm\x1b[31m' --api-key alpha bravo"
        " --hf-token charlie --api-kee delta --swap-space 4 '--x\x1b[1m' https://user:echo@host/"
        " --download-dir /home/foxtrot/models"
        ' --kv-transfer-config \'{"password": "golf"\' --max-num-seqs "\x1b[2Jx"'
    )
    report = linting.judge(command, "0.32.0")
    for printed in (render_lint(LintResult((report,))), LINT.text(LintResult((report,)))):
        for secret in ("hf_aaaa", "topsecret", "alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "\x1b"):
            assert secret not in printed, secret


def test_lint_json_has_the_findings_of_the_text() -> None:
    report = linting.judge("vllm serve m --swap-space 4 --enforce-eager", "0.32.0")
    document = json.loads(LINT.text(LintResult((report,))))
    SCHEMA.validate(document)
    assert (document["schema"], document["exit_status"], len(document["launches"])) == ("diag.lint/3", 2, 1)
    content = document["launches"][0]
    assert {key: value for key, value in content.items() if key not in ("findings", "not_checked")} == {
        "file": None,
        "line": 1,
        "name": None,
        "infos_left_out": 0,
        "vllm_version": "0.32.0",
        "vllm_version_source": "--vllm-version",
        "read_from": "",
        "read_as": "vllm serve m --swap-space 4 --enforce-eager",
        "model": "m",
        "exit_status": 2,
        "ignored": {},
        "corrected_command": "vllm serve m --enforce-eager",
        "errors_left": 0,
        "parser_error": None,
    }
    assert [(each["rule"], each["severity"], each["corrected"]) for each in content["findings"]] == [
        ("removed_flag", "error", True),
        ("context_at_the_maximum", "info", False),
        ("eager", "info", False),
    ]


VALUES = st.sampled_from(
    ["", "0", "-1", "1", "8", "1e12", "1e400", "nan", "-inf", "8k", "0.5", "true", "None", "{}", "[1]", "x", "$X", "é"]
)


@pytest.mark.slow
@settings(max_examples=300 if THOROUGH else 75)
@given(st.lists(st.tuples(st.sampled_from(sorted({*known()} - {"--config", "--model"})), VALUES), max_size=6), VERSIONS)
def test_every_correction_has_no_worse_findings_than_its_command(options: list[tuple[str, str]], version: str) -> None:
    command = shlex.join(["vllm", "serve", MODEL, *(word for pair in options for word in pair)])
    report = linting.judge(command, version)
    assert render_lint(LintResult((report,)))
    json.loads(LINT.text(LintResult((report,))))
    if "$" in command and report.corrected:
        return  # a correction that drops an unknown value may show what the value might have been
    again = linting.judge(report.corrected or command, version)
    assert not {
        (finding.rule, finding.message) for finding in again.findings if finding.edits and finding.severity == "error"
    }
