"""Samples of long lists of cases, with which a change is tested; with DIAG_THOROUGH=1, as every night, all cases."""

import os
import random
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

THOROUGH = bool(os.environ.get("DIAG_THOROUGH"))
Case = TypeVar("Case")
Test = TypeVar("Test", bound=Callable[..., None])


def some(cases: Iterable[Case], size: int, seed: object = "") -> list[Case]:
    """Return so many of the cases in their order, the same ones in each run; all of them in a thorough run."""
    every = list(cases)
    if THOROUGH or size >= len(every):
        return every
    chosen = sorted(random.Random(f"47 {seed}").sample(range(len(every)), size))
    return [every[at] for at in chosen]


def sampled(names: str | tuple[str, ...], cases: Iterable[Any], size: int = 1) -> Callable[[Test], Test]:
    """Parametrise a test with so many of the cases, which differ from test to test; in a thorough run with all."""
    every = list(cases)
    return lambda test: pytest.mark.parametrize(names, some(every, size, getattr(test, "__name__", "")))(test)
