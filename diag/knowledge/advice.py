"""Popular advice about vLLM that is wrong (advice.toml), found by the name of a metric, a flag, or a claim."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class WrongAdvice(NamedTuple):
    """A claim that is wrong, what is true, what to use `instead`, and the source; the first name is the title."""

    names: tuple[str, ...]
    claim: str
    truth: str
    instead: str
    source: str


@cache
def wrong_advice() -> Mapping[str, WrongAdvice]:
    """Return each piece of advice by its names, spelled as `spelled` does."""
    table = tomllib.loads((files("diag.knowledge") / "advice.toml").read_text(encoding="utf-8"))
    all_advice = [WrongAdvice(**{**row, "names": tuple(row["names"])}) for row in table["advice"]]
    return {spelled(name): advice for advice in all_advice for name in advice.names}


def spelled(name: str) -> str:
    """Return the one spelling of a flag or a claim: --swap-space, swap_space and SWAP_SPACE are swap_space."""
    return name.strip().lstrip("-").lower().replace("-", "_").replace(" ", "_")
