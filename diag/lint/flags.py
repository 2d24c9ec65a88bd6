"""Rules about the name of a flag: whether a release has it, and whether it is written out."""

from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache

from diag.lint.finding import Edit, removal, shown
from diag.lint.replaced import INEFFECTIVE, V1_ONLY
from diag.lint.rule import Example, LintRule, Match
from diag.lint.target import HELP, LintTarget, at_least, is_open
from diag.vllm.command.command import Given
from diag.vllm.flags.registry import Flag, known, parsers

_CLOSE = 0.8
_NO_DOTTED_KEYS = "0.8.5"
"""The last release that is known to refuse `--compilation-config.level 3`."""


def _unknown(target: LintTarget) -> Iterator[Match]:
    for given in _unrecognized(target):
        able = _able(target.version)
        near = get_close_matches(given.spelled.replace("_", "-").lower(), able, 1, _CLOSE)
        if len(_beginning_so(given, target)) < 2:
            yield Match(
                f"{shown(given)}: no vLLM release has this flag",
                f"vLLM {target.version} exits with `unrecognized arguments`, unless a plugin adds the flag",
                f"Use {near[0]}, if that was meant" if near else "Remove it",
                (Edit(range(given.words.start, given.words.start + 1), (_renamed(given, near[0]),)),)
                if near and given.words
                else (),
            )


def _ambiguous(target: LintTarget) -> Iterator[Match]:
    for given in _unrecognized(target):
        matching = _beginning_so(given, target)
        if len(matching) > 1:
            names = f"{', '.join(matching[:4])}{' ...' if len(matching) > 4 else ''}"
            yield Match(f"{shown(given)} is ambiguous: matches {names}")


def _unrecognized(target: LintTarget) -> list[Given]:
    """Options that stand for no flag of any release."""
    return [
        given
        for given in target.command.given
        if given.option is None and not is_open(given.spelled) and given.spelled not in HELP
    ]


@lru_cache(maxsize=4)
def _able(version: str) -> dict[str, Flag]:
    return {name: flag for name, flag in known().items() if flag.in_release(version)}


def _beginning_so(given: Given, target: LintTarget) -> list[str]:
    return sorted(name for name in _able(target.version) if name.startswith(given.spelled.replace("_", "-")))


def _renamed(given: Given, name: str) -> str:
    """The name in the place of the other; --name=value keeps its value."""
    return f"{name}={given.values[0]}" if len(given.words) == 1 and given.values else name


def _later(target: LintTarget) -> Iterator[Match]:
    for given in target.command.given:
        flag = given.option.flag if given.option else None
        if flag and not flag.in_release(target.version) and not at_least(target.version, flag.first):
            yield Match(
                f"{shown(given)} exists since vLLM {flag.first}, not in {target.version}",
                f"vLLM {target.version} exits with `unrecognized arguments`",
                f"Remove it, or run vLLM {flag.first} or later",
            )
        elif flag and given.words and given.option:
            yield from _later_form(given, flag, given.option.key, target)


def _later_form(given: Given, flag: Flag, key: str, target: LintTarget) -> Iterator[Match]:
    """A short name, or a key behind a dot, that the flag does not have yet."""
    first = target.command.words[given.words.start]
    if not given.spelled.startswith(("--", "-O")) and given.spelled.partition(".")[0] not in flag.short:
        new = (first.replace(given.spelled, flag.name, 1),)
        why = f"vLLM {target.version} exits with `unrecognized arguments`"
        at = range(given.words.start, given.words.start + 1)
        yield Match(
            f"vLLM {target.version} has no short name {given.spelled.partition('.')[0]}",
            why,
            f"Write {flag.name}",
            (Edit(at, new),),
        )
    elif key and at_least(_NO_DOTTED_KEYS, target.version):
        yield Match(
            f"{shown(given)}: vLLM {target.version} has no keys behind a dot",
            f"vLLM {target.version} exits with `unrecognized arguments`",
            f"Give {flag.name} all of its keys in one JSON object",
        )


def _shortened(target: LintTarget) -> Iterator[tuple[Given, str, Flag]]:
    """Options that are the beginning of a flag, with the name as it is written and the flag."""
    for given in target.command.given:
        flag = given.option.flag if given.option else None
        name = given.spelled.partition(".")[0].replace("_", "-")
        if flag and name.startswith("--") and name != flag.name and flag.name.startswith(name):
            yield given, name, flag


def _taken_for_another(target: LintTarget) -> Iterator[Match]:
    for given, name, flag in _shortened(target):
        if name in known():
            yield Match(
                f"{name} was removed, and vLLM {target.version} takes it for {flag.name}",
                f"{known()[name].last} is the last release with it; argparse accepts the beginning of a flag",
                f"Remove it, or write {flag.name}",
                removal([given]),
            )


def _abbreviated(target: LintTarget) -> Iterator[Match]:
    for _, name, flag in _shortened(target):
        if name not in known():
            yield Match(f"{name} is short for {flag.name}", fix=f"Write {flag.name}")


def _ineffective(target: LintTarget) -> Iterator[Match]:
    if target.command.environment.get("VLLM_USE_V1") == "0" and not target.since(V1_ONLY):
        return
    for given in target.accepted():
        ineffective = INEFFECTIVE.get(given.name)
        if ineffective and target.since(ineffective.first):
            yield Match(f"{shown(given)} has no effect in {target.version}", ineffective.why, edits=removal([given]))


def _no_negation(target: LintTarget) -> Iterator[Match]:
    for given in target.accepted():
        option = given.option
        if option and given.words and not option.key and not option.on and not option.flag.no:
            is_refused = option.flag.takes != "none" or not given.values
            if target.since(parsers()[0]) and is_refused:
                off = f": {option.flag.name} is off unless it is given" if option.flag.takes == "none" else ""
                yield Match(
                    f"{given.spelled}: {option.flag.name} has no --no- form",
                    f"vLLM {target.version} exits with `unrecognized arguments`",
                    f"Remove it{off}",
                    removal([given]),
                )


RULES = (
    LintRule(
        "unknown_flag",
        "error",
        "No vLLM release has this flag",
        "A flag that none of the known vLLM releases accepts, even as an abbreviation. A similar flag of this"
        " release is proposed where there is one.",
        "vLLM exits with `unrecognized arguments`, unless a plugin adds the flag",
        "Correct the spelling, or remove the flag",
        Example("vllm serve m --gpu-memory-utilisation 0.8"),
        _unknown,
    ),
    LintRule(
        "ambiguous_flag",
        "error",
        "An abbreviated flag matches more than one flag",
        "The beginning of a flag that two or more flags of this release share.",
        "vLLM accepts the beginning of a flag only where no other flag begins with it",
        "Write the flag out",
        Example("vllm serve m --max-num 8"),
        _ambiguous,
    ),
    LintRule(
        "flag_of_a_later_release",
        "error",
        "The flag was added in a later release",
        "A flag, one of its short names, or a key behind a dot, that vLLM has only since a later release.",
        "vLLM exits with `unrecognized arguments`",
        "Remove the flag, or run the release that the finding names",
        Example("vllm serve m --watermark 0.1", "0.20.0"),
        _later,
    ),
    LintRule(
        "taken_for_another",
        "error",
        "A removed flag is read as another flag",
        "A flag that was removed, and whose name is the beginning of exactly one flag of this release.",
        "argparse accepts the beginning of a flag for the flag: the server starts with a setting that nobody meant",
        "Remove the flag, or write out the one that was meant",
        Example("vllm serve m --device cuda", "0.24.0"),
        _taken_for_another,
    ),
    LintRule(
        "abbreviated_flag",
        "info",
        "A flag is abbreviated",
        "The beginning of a flag in the place of its name.",
        "vLLM refuses it as soon as a release has a second flag that begins with it",
        "Write the flag out",
        Example("vllm serve m --kv-cache-memory 8G"),
        _abbreviated,
    ),
    LintRule(
        "no_effect",
        "warning",
        "The flag has no effect",
        "A flag that this release still accepts and no longer uses.",
        "The command says something that the server does not do",
        "Remove it",
        Example("vllm serve m --swap-space 4", "0.17.1"),
        _ineffective,
    ),
    LintRule(
        "no_such_negation",
        "error",
        "The flag has no --no- form",
        "`--no-x` where this release has `--x` but not its negation.",
        "vLLM exits with `unrecognized arguments`",
        "Remove it: such a switch is off unless it is given",
        Example("vllm serve m --no-headless"),
        _no_negation,
    ),
)
