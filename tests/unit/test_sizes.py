"""Sizes with a suffix or a unit: as vLLM's flags and its log, people and Kubernetes write them."""

import pytest

from diag.core.formatting import BYTE_UNITS, LOG_UNITS, flag_integer, parse_size, resource_quantity


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8192", 8192),
        ("8k", 8000),
        ("8K", 8192),
        ("25.6k", 25_600),
        ("1t", 10**12),
        ("2T", 2**41),
        ("1.5K", None),
        ("8 k", None),
        ("8kb", None),
        ("8GiB", None),
        ("-8", None),
        ("", None),
        ("9" * 20, None),
    ],
)
def test_flags_take_human_readable_integers(text: str, expected: float | None) -> None:
    """vllm/utils/argparse_utils.py: a small letter is decimal and may follow a fraction, a capital one is binary."""
    assert flag_integer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("32k", 32_000), ("32K", 32_768), ("80GB", 80 * 10**9), (" 80 GiB ", 80 * 2**30), ("80gb", None), ("GiB", None)],
)
def test_sizes_accept_units_of_bytes(text: str, expected: float | None) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64Gi", 2**36), ("1e3", None), ("2", 2), ("250m", 0.25), ("3G", 3e9), ("8 Gi", None), ("None", None)],
)
def test_kubernetes_has_suffixes_of_its_own(text: str, expected: float | None) -> None:
    assert resource_quantity(text) == expected


def test_gb_means_gib_only_in_vllms_log() -> None:
    differing = {unit for unit in BYTE_UNITS if BYTE_UNITS[unit] != LOG_UNITS[unit]}
    assert differing == {"KB", "MB", "GB"}
    assert {unit: LOG_UNITS[unit] for unit in differing} == {"KB": 2**10, "MB": 2**20, "GB": 2**30}
