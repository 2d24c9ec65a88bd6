"""The defaults of a release: by version, by GPU, and none where something decides that is not known."""

import re

import pytest
from support.paths import ROOT

from diag.vllm.flags.registry import UNSET, changes, default, known, versions

GIB = 2**30
A100, H100, H200, B200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200"


@pytest.mark.parametrize(
    ("flag", "version", "expected"),
    [
        ("--gpu-memory-utilization", "0.6.0", 0.90),
        ("--gpu-memory-utilization", "0.19.1", 0.90),
        ("--gpu-memory-utilization", "0.20.0", 0.92),
        ("--gpu-memory-utilization", "0.32.1.dev7+g0a1b2c3", 0.92),
        ("--gpu-memory-utilization", "", None),
        ("--tensor-parallel-size", "", 1),
        ("--tensor-parallel-size", "0.32.0", 1),
        ("--watermark", "0.23.0", None),
        ("--watermark", "0.24.0", 0),
        ("--long-prefill-token-threshold", "0.7.3", 0),
        ("--long-prefill-token-threshold", "0.6.0", None),
        ("--max-num-partial-prefills", "0.26.0", 1),
        ("--max-num-partial-prefills", "0.27.0", None),
        ("--scheduler-reserve-full-isl", "0.19.0", 1),
        ("--enforce-eager", "0.32.0", 0),
        ("--swap-space", "0.17.1", 4),
        ("--swap-space", "0.18.0", None),
        ("--async-scheduling", "0.13.0", 0),
        ("--async-scheduling", "0.14.0", None),
        ("--enable-chunked-prefill", "0.7.3", None),
        ("--enable-chunked-prefill", "0.10.2", 1),
        ("--enable-chunked-prefill", "0.11.0", None),
        ("--enable-prefix-caching", "0.7.3", 0),
        ("--enable-prefix-caching", "0.8.0", None),
        ("--max-model-len", "0.32.0", None),
        ("--num-gpu-blocks-override", "0.32.0", None),
        ("--no-such-flag", "0.32.0", None),
    ],
)
def test_a_default_is_that_of_the_release(flag: str, version: str, expected: float | None) -> None:
    assert default(flag, version) == expected


@pytest.mark.parametrize(
    ("version", "gibibytes", "name", "seqs", "tokens"),
    [
        ("0.7.3", 80, H100, 256, None),
        ("0.8.2", 80, H100, 1024, 8192),
        ("0.8.2", 80, A100, 1024, 2048),
        ("0.8.2", None, "", 1024, None),
        ("0.8.4", 80, H200, 1024, 8192),
        ("0.8.4", 24, "NVIDIA L4", None, 2048),
        ("0.8.5", 80, A100, 1024, 8192),
        ("0.8.5.post1", 24, "NVIDIA L4", 256, 2048),
        ("0.9.0", 80, A100, 256, 2048),
        ("0.9.0", 80, H100, 1024, 8192),
        ("0.9.0", 80, "", None, None),
        ("0.9.0", 24, "", 256, 2048),
        ("0.27.1", 179, B200, 1024, 8192),
        ("0.28.0", 179, B200, 1024, 16384),
        ("0.28.0", 179, "", 1024, 16384),
        ("0.28.0", 140, H200, 1024, 8192),
        ("0.32.0", 120, "NVIDIA GB10", 256, 2048),  # NVML has no memory to tell: FULL=35 (largest=256) in two logs
        ("0.33.0", 120, "NVIDIA GB10", 256, 2048),
        ("0.32.0", None, "", None, None),
        ("", 80, H100, None, None),
    ],
)
def test_the_batch_grows_with_the_gpu(
    version: str, gibibytes: float | None, name: str, seqs: float | None, tokens: float | None
) -> None:
    memory = None if gibibytes is None else gibibytes * GIB
    assert default("--max-num-seqs", version, memory, name) == seqs
    assert default("--max-num-batched-tokens", version, memory, name) == tokens


@pytest.mark.parametrize("version", ["", "0.32.0"])
def test_cpu_has_no_custom_all_reduce_default(version: str) -> None:
    assert default("--disable-custom-all-reduce", version, 80 * GIB, H100) == 0
    assert default("--disable-custom-all-reduce", version) is None


def test_unset_flag_without_default_has_no_number() -> None:
    assert known().keys() >= UNSET
    at_times = {"--api-server-count"}  # 1 up to 0.14, then one for each data-parallel rank
    assert {default(flag, version) for flag in UNSET - at_times for version in versions()} == {None}
    assert {default(*at_times, version) for version in ("0.14.1", "0.15.0")} == {1.0, None}


def test_each_change_of_a_release_is_asked_for_and_each_one_that_is_asked_for_exists() -> None:
    source = "".join(file.read_text() for file in (ROOT / "diag" / "vllm").rglob("*.py"))
    assert set(re.findall(r'since\((?:[\w.]+, )?"([a-z]\w+)"\)', source)) == set(changes())
