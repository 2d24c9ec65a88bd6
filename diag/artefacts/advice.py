"""Pages of `diag explain` on popular wrong advice and on flags of vLLM."""

from diag.knowledge.advice import WrongAdvice, wrong_advice
from diag.knowledge.advice import spelled as one_spelling
from diag.lint.removed import INEFFECTIVE, INTO, REPLACED
from diag.vllm.flags.registry import Flag, known, release, versions


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
    spelled = one_spelling(name)
    if spelled in wrong_advice():
        return advice_page(wrong_advice()[spelled])
    flag = known().get("--" + spelled.replace("_", "-"))
    return flag_page(known()[flag.alias] if flag.alias else flag) if flag else ""
