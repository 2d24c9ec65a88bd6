"""Pages of `diag explain` on popular wrong advice (knowledge/advice.toml) and on flags of vLLM."""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.lint.removed import INEFFECTIVE, INTO, REPLACED
from diag.vllm.flags.registry import Flag, known, release, versions


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
    all_advice = read(PACKAGE / "knowledge" / "advice.toml", tuple[WrongAdvice, ...], "advice")
    return {spelled(name): advice for advice in all_advice for name in advice.names}


def spelled(name: str) -> str:
    """Return the one spelling of a flag or a claim: --swap-space, swap_space and SWAP_SPACE are swap_space."""
    return name.strip().lstrip("-").lower().replace("-", "_").replace(" ", "_")


def advice_page(advice: WrongAdvice) -> str:
    """Return the page of a wrong claim: what is true, and what to use instead."""
    return f"""# {advice.names[0]}: popular advice that is wrong

> {advice.claim}

## What is true

{advice.truth}

## What to use instead

{advice.instead}

Source: {advice.source}
"""


def flag_page(flag: Flag) -> str:
    """Return the page of a flag: the releases that have it, and what replaces it."""
    newest = versions()[-1]
    removed = release(flag.last) < release(newest)
    until = f"to {flag.last}; vLLM {newest} exits with `unrecognized arguments`" if removed else "on"
    lines = [f"# {flag.name}", "", f"A flag of vLLM from {flag.first} {until}."]
    if flag.name in INTO and removed:
        name, key, why = INTO[flag.name]
        lines += ["", f"{why}: it is the key `{key}` of `{name}`."]
    elif flag.name in REPLACED and removed:
        replaced = REPLACED[flag.name]
        words = " ".join(part or "VALUE" for part in replaced.flags)
        lines += ["", f"{replaced.why}." + (f" Use `{words}`." if words else f" {replaced.advice}".rstrip())]
    elif flag.name in INEFFECTIVE:
        lines += ["", f"It has no effect since {INEFFECTIVE[flag.name].first}: {INEFFECTIVE[flag.name].why}."]
    return "\n".join([*lines, "", "`diag lint` checks the flags of a whole command.", ""])


def advice_or_flag(name: str) -> str:
    """Return the page of the advice or flag with that name, "" if there is none.

    A flag is found in the spellings of the command line, of Python and of a YAML file.
    """
    key = spelled(name)
    if key in wrong_advice():
        return advice_page(wrong_advice()[key])
    flag = known().get("--" + key.replace("_", "-"))
    return flag_page(known()[flag.alias] if flag.alias else flag) if flag else ""
