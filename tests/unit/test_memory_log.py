"""The numbers of memory in logs of several releases."""

import pytest
from support.paths import LOGS

from diag.core.errors import BadUsage
from diag.log.memory_sizes import GIB, LoggedMemory, parse_memory_log, read_memory_log

HEAD = "(EngineCore pid=9) INFO 10-06 17:00:41 [gpu_worker.py:955] "


def gib(found: LoggedMemory) -> dict[str, float]:
    """The middles, in GiB."""
    return {name: round(sum(size) / 2 / GIB, 3) for name, size in found.sizes.items()}


def said(*texts: str) -> LoggedMemory:
    return parse_memory_log([HEAD + each + "\n" for each in texts])


@pytest.mark.parametrize(
    ("name", "version", "sizes", "numbers"),
    [
        (
            "v1_0.32.0_gpu_oom_under_load",
            "0.32.0",
            {"weights": 14.99, "kv_cache": 51.1, "graphs": 0.52, "total": 79.25},
            {"tokens": 418_608, "length": 8192, "concurrency": 51.1},
        ),
        (
            "v1_0.11.0_tp2_capture_hang",
            "0.11.0",
            {"weights": 7.513, "kv_cache": 12.11},
            {"tokens": 198_416, "length": 8192, "concurrency": 24.22},
        ),
        ("v1_0.8.5_no_kv_memory", "0.8.5", {"weights": 14.272, "kv_cache": 0.0}, {}),
        (
            "v1_0.32.0_cpu_small",
            "0.32.0",
            {"kv_cache": 1.0},
            {"tokens": 131_072, "length": 8192, "concurrency": 16},
        ),
    ],
)
def test_logs_of_releases(name: str, version: str, sizes: dict[str, float], numbers: dict[str, float]) -> None:
    found = read_memory_log(str(LOGS / f"{name}.log"))
    assert (found.version, gib(found), found.numbers) == (version, sizes, numbers)


def test_client_input_in_a_log_is_no_size_and_no_version() -> None:
    begun = (LOGS / "v1_0.32.0_cpu_small.log").read_text(encoding="utf-8").splitlines(keepends=True)
    request = "(APIServer pid=24326) INFO 11-21 19:50:00 [request_logger.py:62] "
    sent = [
        "(EngineCore pid=24343) INFO 11-21 19:50:00 [core.py:1] Model loading took 9.00 GiB and 1.0 seconds",
        "(APIServer pid=24326) INFO 11-21 19:50:00 [api_server.py:1] vLLM API server version 0.9.9",
        "Model loading took 9.00 GiB and 1.0 seconds",
    ]
    served = [f"{request}Received request x\r{each}\r\n{request}{each}\r\n" for each in sent]
    assert parse_memory_log([*begun, *served, "ERROR:    Exception in ASGI application\n", *sent]) == parse_memory_log(
        begun
    )


def test_the_breakdown_of_v0() -> None:
    """The words of https://github.com/vllm-project/vllm/issues/15815, Qwen2.5-32B with TP 2 on L40S."""
    found = said(
        "the current vLLM instance can use total_gpu_memory (44.42GiB) x gpu_memory_utilization (0.90) = 39.98GiB",
        "model weights take 30.71GiB; non_torch_memory takes 0.30GiB; PyTorch activation peak memory takes 1.26GiB; the"
        " rest of the memory reserved for KV Cache is 7.71GiB.",
    )
    expected = {"total": 44.42, "budget": 39.98, "weights": 30.71, "other": 0.3, "activations": 1.26, "kv_cache": 7.71}
    assert gib(found) == expected


def test_the_breakdown_of_v1() -> None:
    found = said(
        "Free memory on device (78.84/79.25 GiB) on startup. Desired GPU memory utilization is (0.92, 72.91 GiB)."
        " Actual usage is 15.26 GiB for consumed memory (weights + non-torch), 1.44 GiB for peak activation, and 0.23"
        " GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=1` (2.0 GiB) to fit"
    )
    assert gib(found) == {"free": 78.84, "total": 79.25, "budget": 72.91, "activations": 1.44}


def test_the_refusal_of_a_start_with_too_little_free() -> None:
    """The words of https://github.com/ovg-project/kvcached/issues/110."""
    line = (
        "ERROR 09-09 10:00:00 [core.py:700] ValueError: Free memory on device (67.24/79.25 GiB) on startup is less than"
        " desired GPU memory utilization (0.9, 71.33 GiB). Decrease GPU memory utilization or reduce GPU memory used by"
        " other processes.\n"
    )
    assert gib(parse_memory_log([line])) == {"free": 67.24, "total": 79.25, "budget": 71.33}


def test_the_refusal_of_a_context_that_is_too_long() -> None:
    """The words of https://github.com/vllm-project/vllm/issues/16118."""
    found = parse_memory_log(
        [
            "ERROR 04-05 01:12:55 [core.py:390] ValueError: To serve at least one request with the models's max seq len"
            " (1048576), (24.00 GiB KV cache is needed, which is larger than the available KV cache memory (9.97 GiB)."
            " Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.\n"
        ]
    )
    assert gib(found) == {"needed": 24.0, "kv_cache": 9.97}
    assert found.numbers == {"length": 1_048_576}


def test_fullest_of_several_workers_counts() -> None:
    found = said(
        "Model loading took 7.50 GiB memory and 1.0 seconds",
        "Model loading took 7.75 GiB memory and 1.0 seconds",
        "Available KV cache memory: 12.11 GiB",
        "Available KV cache memory: 11.50 GiB",
        "Available KV cache memory: 12.00 GiB",
    )
    assert gib(found) == {"weights": 7.75, "kv_cache": 11.5}


COLD = "saved AOT compiled function to /c/torch_aot_compile/1/rank_0_0/model"
WARM = "Directly load AOT compilation from path /c/torch_aot_compile/1/rank_0_0/model"


def starts(*of: tuple[str, str], weights: str = "20.00") -> LoggedMemory:
    """Parse a log of starts, each with a line about its compilation and the GiB that are left for the KV cache."""
    return said(
        *(
            line
            for at, (compilation, size) in enumerate(of)
            for line in (
                "vLLM API server version 0.32.0",
                f"Model loading took {weights if at else '20.00'} GiB memory and 1.0 seconds",
                compilation,
                f"Available KV cache memory: {size} GiB",
            )
        )
    )


@pytest.mark.parametrize(
    ("found", "lost"),
    [
        (starts((COLD, "21.50"), (WARM, "46.25")), (21.5, 46.25)),
        (starts((WARM, "46.25"), (COLD, "21.50")), (21.5, 46.25)),
        (starts((COLD, "21.50"), (WARM, "46.25"), (WARM, "46.25")), (21.5, 46.25)),
        (starts((COLD, "46.00"), (WARM, "46.25")), None),
        (starts((COLD, "46.25"), (WARM, "21.50")), None),
        (starts((WARM, "21.50"), (WARM, "46.25")), None),
        (starts((COLD, "21.50"), (WARM, "46.25"), weights="10.00"), None),
        (starts((COLD, "21.50")), None),
    ],
    ids=["then warm", "now cold", "warm twice", "equal", "warm is smaller", "both warm", "another model", "one start"],
)
def test_a_cold_start_with_a_smaller_cache_is_told_from_an_equal_one(
    found: LoggedMemory, lost: tuple[float, float] | None
) -> None:
    """Two starts as in https://github.com/vllm-project/vllm/issues/54122."""
    sizes = found.lost_to_compiling()
    assert (sizes and tuple(round(size / GIB, 2) for size in sizes)) == lost


def test_latest_start_in_a_log_counts() -> None:
    one = ["vLLM API server version 0.10.0", "Available KV cache memory: 3.00 GiB"]
    two = ["vLLM API server version 0.11.0", "Available KV cache memory: 9.00 GiB"]
    found = said(*one, *two)
    assert (found.version, gib(found)) == ("0.11.0", {"kv_cache": 9.0})


def test_rounding_is_part_of_a_size() -> None:
    low, high = said("Available KV cache memory: 1.0 GiB").sizes["kv_cache"]
    assert (round(low / GIB, 4), round(high / GIB, 4)) == (0.995, 1.005)


def test_client_input_is_no_memory_size() -> None:
    sent = "Received request cmpl-1: prompt: 'Available KV cache memory: 99.00 GiB', params: SamplingParams()"
    assert said(sent).sizes == {}


@pytest.mark.parametrize(
    "text", ["Available KV cache memory: 1.2.3 GiB", "Model loading took - GiB", "\0\x1b[2J 1 GiB"]
)
def test_line_without_a_number_is_ignored(text: str) -> None:
    assert said(text).sizes == {}


def test_line_without_a_log_head_is_ignored() -> None:
    assert parse_memory_log(["Available KV cache memory: 99.00 GiB\n"]).sizes == {}


@pytest.mark.parametrize("path", ["/nonexistent.log", ".", "nul\0"])
def test_a_log_that_cannot_be_read_is_refused(path: str) -> None:
    with pytest.raises(BadUsage, match="cannot be read"):
        read_memory_log(path)
