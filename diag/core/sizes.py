"""Sizes written with a suffix or a unit, in the one table that everything reads.

Four ways of reading them exist. vLLM's flags take human-readable integers: 8k is 8,000 and 8K is 8,192. Units of bytes
mean what they say: 1 GB is 10^9 and 1 GiB 2^30. vLLM's log wrote GB before 0.8.3 and meant GiB.
Kubernetes writes 1G and 1Gi, and 500m for a half.
"""

import re
from collections.abc import Mapping

MIB, GIB = 2**20, 2**30
FLAG_SUFFIXES: Mapping[str, int] = {
    **{"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12},
    **{"K": 2**10, "M": MIB, "G": GIB, "T": 2**40},
}
"""Of vLLM's human-readable integers since 0.8.4: small letters are decimal, capital ones binary."""
BYTE_UNITS: Mapping[str, int] = {
    **{"b": 1, "bytes": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KiB": 2**10, "MiB": MIB, "GiB": GIB, "TiB": 2**40},
}
LOG_UNITS: Mapping[str, int] = {**BYTE_UNITS, "KB": 2**10, "MB": MIB, "GB": GIB}
"""Of vLLM's log: before 0.8.3 it wrote GB and meant GiB."""
QUANTITY_SUFFIXES: Mapping[str, float] = {
    **{"m": 1e-3, "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18},
    **{"Ki": 2**10, "Mi": MIB, "Gi": GIB, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60},
}
"""Of Kubernetes: memory in bytes, CPUs in cores."""
_UNITS: Mapping[str, int] = {**FLAG_SUFFIXES, **BYTE_UNITS}
_WRITTEN = re.compile(r"(\d{1,19}(?:\.\d+)?)( ?)([A-Za-z]*)")


def flag_integer(text: str) -> float | None:
    """A human-readable integer as vLLM's flags read it; None for none: a binary suffix takes whole numbers only."""
    match = _WRITTEN.fullmatch(text)
    if not match or match[2] or match[3] not in FLAG_SUFFIXES or (match[3].isupper() and "." in match[1]):
        return None
    return float(match[1]) * FLAG_SUFFIXES[match[3]]


def resource_quantity(text: str) -> float | None:
    """A quantity as Kubernetes writes it, 64Gi or 500m; None for none."""
    match = _WRITTEN.fullmatch(text)
    known = match and not match[2] and match[3] in QUANTITY_SUFFIXES
    return float(match[1]) * QUANTITY_SUFFIXES[match[3]] if match and known else None


def size(text: str) -> float | None:
    """A size as a person gives it, with a suffix as in flags or a unit of bytes: 32k, 79.1GiB; None for none."""
    match = _WRITTEN.fullmatch(text.strip())
    return float(match[1]) * _UNITS[match[3]] if match and match[3] in _UNITS else None
