"""GPUs by the names that NVML and ROCm give them."""

import pytest

from diag.core.errors import BadUsage
from diag.vllm import gpus


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80-pcie"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("AMD Instinct MI355X", "mi355x"),
        ("AMD Instinct MI250X/MI250", "mi250"),
        ("AMD Radeon RX 7900 XTX", "rx7900xtx"),
        ("Radeon RX 7900 XTX", "rx7900xtx"),
        ("AMD Radeon PRO W7900", "w7900"),
        ("AMD Radeon 8060S Graphics", "strix-halo"),
        ("L40S", "l40s"),
        ("NVIDIA GB10", "gb10"),
        ("dgx-spark", "gb10"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA Thor", "thor"),
    ],
)
def test_a_product_name_finds_its_gpu(product: str, name: str) -> None:
    found = gpus.find(product)
    assert found and found.name == name


def test_mig_slice_is_not_the_whole_gpu() -> None:
    part = "NVIDIA A100-SXM4-80GB MIG 1g.10gb"
    assert gpus.find(part) is None
    assert gpus.capability(part) == 8.0


def test_an_unknown_gpu_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(BadUsage, match=r"unknown GPU 'h200x' \(did you mean h200\?\)"):
        gpus.named("h200x")


def test_every_row_is_whole_and_has_a_source() -> None:
    """Types that the tensor cores do half or a quarter of the bits of are two or four times as fast, never slower."""
    for gpu in gpus.gpus().values():
        assert gpu.source.startswith("https://")
        assert 70 <= gpu.watts <= 1400 and 250e9 < gpu.bandwidth <= 8e12 and gpu.pcie in (32e9, 64e9, 128e9, 256e9)
        assert bool(gpu.nvlink) == (gpu.nvlink_gpus > 1)
        assert all(1.99 < gpu.flops[kind] / gpu.flops["bf16"] < 4.1 for kind in ("fp8", "int8") if kind in gpu.flops)
