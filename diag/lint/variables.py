"""Rules about environment variables."""

import re
from collections.abc import Iterator
from difflib import get_close_matches

from diag.lint.finding import Edit
from diag.lint.replaced import ATTENTION_BACKENDS, NEVER, V1, V1_ONLY, VARIABLES, EnvironmentVariable
from diag.lint.rule import Example, LintRule, Match
from diag.lint.target import LintTarget, at_least
from diag.vllm.command.command import Command
from diag.vllm.flags.registry import described, environment

_VERY_CLOSE = 0.93


def _not_read(target: LintTarget) -> Iterator[Match]:
    for name in target.command.environment:
        variable = VARIABLES.get(name)
        if variable and not _is_read(variable, target.version):
            yield _replaced(name, variable, target)
        elif variable is None and name.startswith("VLLM_") and name not in environment() and target.since(described()):
            near = get_close_matches(name, environment(), 1, _VERY_CLOSE)
            if near:
                yield Match(
                    f"{name} has no effect: vLLM {target.version} does not read it",
                    fix=f"Use {near[0]}, if that was meant",
                )


def _is_read(variable: EnvironmentVariable, version: str) -> bool:
    first, last = variable.first, variable.last
    begun = first != NEVER and (not first or at_least(version, first))
    return begun and (not last or at_least(last, version))


def _replaced(name: str, variable: EnvironmentVariable, target: LintTarget) -> Match:
    command, flag = target.command, variable.flag
    backend = command.environment[name].removesuffix("_VLLM_V1")
    new = (flag, backend) if flag and backend in ATTENTION_BACKENDS and not command.all(flag) else ()
    reader = "no release reads it" if variable.first == NEVER else f"vLLM {target.version} does not read it"
    by_flag = f"Use {flag} with a name that {target.version} has, or remove it"
    return Match(
        f"{name} has no effect: {reader}",
        variable.instead,
        f"Use {' '.join(new)}" if new else by_flag if flag else "Remove it",
        tuple(_edits(name, variable, command, new)),
    )


def _edits(name: str, variable: EnvironmentVariable, command: Command, new: tuple[str, ...]) -> Iterator[Edit]:
    at = _assignment(command, name)
    if at:
        renamed = f"{variable.variable}={command.environment[name]}"
        yield Edit(at, (*command.words[at.start : at.stop - 1], renamed) if variable.variable else ())
        if new:
            yield Edit(range(len(command.words), len(command.words)), new)


def _assignment(command: Command, name: str) -> range:
    """The words that set a variable, with the -e of `docker run`; an empty range where others do."""
    for at, word in enumerate(command.words[: command.arguments]):
        if re.fullmatch(rf"(?:--env=|-e)?{name}=.*", word, re.DOTALL):
            return range(at - (at > 0 and command.words[at - 1] in ("-e", "--env")), at + 1)
    return range(0)


def _old_engine(target: LintTarget) -> Iterator[Match]:
    """From 0.8.0 to 0.10.2 VLLM_USE_V1=0 chooses V0; 0.11.0 reads it and has no V0."""
    if target.command.environment.get("VLLM_USE_V1") == "0" and target.since(V1) and not target.since("0.11.1"):
        removed = target.since(V1_ONLY)
        yield Match(
            why=f"vLLM {target.version} has no V0 engine" if removed else "V0 is slower, and 0.11.0 removed it",
            severity="error" if removed else None,
        )


RULES = (
    LintRule(
        "old_engine",
        "warning",
        "VLLM_USE_V1=0 selects the V0 engine",
        "VLLM_USE_V1=0 with a release from 0.8.0 to 0.11.0. In 0.11.0, which has no V0 engine, it is an error.",
        "V0 is slower, and 0.11.0 removed it",
        "Remove VLLM_USE_V1",
        Example("VLLM_USE_V1=0 vllm serve m", "0.10.2"),
        _old_engine,
    ),
    LintRule(
        "variable_not_read",
        "warning",
        "The environment variable has no effect",
        "A variable that this release does not read: removed, not there yet, or misspelt.",
        "vLLM ignores a variable that it does not know",
        "Remove it, or use what replaces it",
        Example("VLLM_ATTENTION_BACKEND=FLASHINFER vllm serve m"),
        _not_read,
    ),
)
