"""Rules about one word of a launch command at a time: whether a release knows the flag, and what it makes of it."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

from diag.lint.finding import HELP, Edit, LintFinding, at_least, is_open, removal, shown
from diag.lint.replaced import (
    ATTENTION_BACKENDS,
    BACKENDS_OF,
    IDLE,
    INTO,
    KEYS_UNTIL,
    LARGEST_SIZE,
    NEVER,
    POOLER,
    REPLACED,
    TASKS,
    V1_ONLY,
    VARIABLES,
    EnvironmentVariable,
    ReplacedFlag,
)
from diag.vllm.command.parse import Command, Given
from diag.vllm.flags.registry import Flag, described, environment, known

_CLOSE, _VERY_CLOSE = 0.8, 0.93
_SWITCHES_TOOK_WORDS = "0.9.0"
"""Up to 0.8 some switches took true or false as a word of its own."""


def unknown(command: Command, version: str) -> Iterator[LintFinding]:
    """Flags that no release knows."""
    for given in command.given:
        if given.option is None and not is_open(given.spelled) and given.spelled not in HELP:
            yield _unknown(given, version)


def _unknown(given: Given, version: str) -> LintFinding:
    able = {name: flag for name, flag in known().items() if flag.in_release(version)}
    meant = sorted(name for name in able if name.startswith(given.spelled.replace("_", "-")))
    why = f"vLLM {version} ends with `unrecognized arguments`, unless a plugin adds the flag"
    if len(meant) > 1:
        some = ", ".join(meant[:4])
        return LintFinding(
            "ambiguous_flag",
            "error",
            f"{shown(given)} is short for {len(meant)} flags",
            f"vLLM accepts the beginning of a flag only where no other begins so: {some}",
            "write it out",
        )
    near = get_close_matches(given.spelled.replace("_", "-").lower(), able, 1, _CLOSE)
    edits = (Edit(range(given.words.start, given.words.start + 1), (_spelled(given, near[0]),)),) if near else ()
    return LintFinding(
        "unknown_flag",
        "error",
        f"{shown(given)}: no release of vLLM has such a flag",
        why,
        f"{near[0]}, if that was meant" if near else "remove it",
        edits if given.words else (),
    )


def _spelled(given: Given, name: str) -> str:
    """The name in the place of the other; --name=value keeps its value."""
    return f"{name}={given.values[0]}" if len(given.words) == 1 and given.values else name


def absent(command: Command, version: str) -> Iterator[LintFinding]:
    """Flags that other releases have."""
    missing = [each for each in command.given if each.option and not each.option.flag.in_release(version)]
    gone = [each for each in missing if at_least(version, _flag(each).first)]
    for given in missing:
        if given not in gone:
            yield _not_yet(given, _flag(given), version)
        elif given.name not in INTO:
            yield _removed(given, _flag(given), version)
    for target in dict.fromkeys(INTO[each.name][0] for each in gone if each.name in INTO):
        yield _merged(command, [each for each in gone if INTO.get(each.name, ("",))[0] == target], target, version)


def _flag(given: Given) -> Flag:
    return given.option.flag if given.option else known()[given.name]


def _not_yet(given: Given, flag: Flag, version: str) -> LintFinding:
    return LintFinding(
        "flag_of_a_later_release",
        "error",
        f"{shown(given)} exists since {flag.first}, not in {version}",
        f"vLLM {version} ends with `unrecognized arguments`",
        f"remove it, or serve with vLLM {flag.first} or later",
    )


def _removed(given: Given, flag: Flag, version: str) -> LintFinding:
    new = _replacement(given, flag)
    words = tuple(word for each in new.flags for word in ([each] if each else given.values))
    able = all(known()[each].in_release(version) for each in words if each in known())
    instead = new.words or (" ".join(words) if words and able else "remove it")
    return LintFinding(
        "removed_flag",
        "error",
        f"{shown(given)} was removed: {flag.last} is the last release with it",
        new.why or f"vLLM {version} ends with `unrecognized arguments`",
        instead,
        (Edit(given.words, words if able else ()),) if given.words and not new.words else (),
    )


def _replacement(given: Given, flag: Flag) -> ReplacedFlag:
    """What took the place of a flag, which may depend on its value."""
    text = " ".join(given.values)
    if flag.name == "--task":
        return TASKS.get(text, TASKS["generate"])
    if flag.name == "--cuda-graph-sizes" and len(given.values) == 1:
        return LARGEST_SIZE
    if flag.name == "--override-pooler-config" and re.search(r'"(?:normalize|softmax|activation)"', text):
        return POOLER
    return REPLACED.get(flag.name, ReplacedFlag(""))


def _merged(command: Command, parts: Sequence[Given], target: str, version: str) -> LintFinding:
    """Several removed flags that became keys of one JSON object."""
    content = dict(_entry(each) for each in parts if at_least(KEYS_UNTIL.get(INTO[each.name][1], version), version))
    names = ", ".join(shown(each) for each in parts)
    are = "were" if len(parts) > 1 else "was"
    last = known()[parts[0].name].last
    text = json.dumps(content)
    able = known()[target].in_release(version)
    first, *others = [each for each in parts if each.words] or [parts[0]]
    needs = _needs(content)
    given = command.get(target) is not None
    new = f"add {text} to {target}" if given else f"{target} '{text}'"
    edits = (Edit(first.words, (target, text)), *removal(others)) if first.words and able else ()
    return LintFinding(
        "removed_flag",
        "error",
        f"{names} {are} removed: {last} is the last release with it",
        INTO[parts[0].name][2] if content else f"vLLM {version} takes nothing in its place",
        f"{new}{needs}" if content else "remove it",
        (() if given or needs else edits) if content else removal(parts),
    )


def _needs(content: Mapping[str, object]) -> str:
    """What a backend for structured outputs has to be, "" where it is that."""
    backend = content.get("backend")
    wanted = [able for key, able in BACKENDS_OF.items() if content.get(key) and backend not in able]
    if wanted:
        return f" with {' or '.join(wanted[-1])} as its backend: it refuses any other"
    return ", with the options behind the colon as keys" if ":" in str(backend) else ""


def _entry(given: Given) -> tuple[str, object]:
    key, text = INTO[given.name][1], " ".join(given.values).removesuffix(":no-fallback")
    if text == "[ngram]":  # up to 0.8 the model's name was the method's
        return "method", "ngram"
    try:
        return key, json.loads(text) if text else bool(given.option and given.option.on)
    except ValueError:
        return key, text


def abbreviated(command: Command, version: str) -> Iterator[LintFinding]:
    """The beginnings of flags, which argparse accepts; a flag that was removed may be the beginning of another one."""
    for given in command.given:
        flag = given.option.flag if given.option else None
        name = given.spelled.partition(".")[0].replace("_", "-")
        if not flag or not name.startswith("--") or name == flag.name or not flag.name.startswith(name):
            continue
        if name in known():
            yield LintFinding(
                "taken_for_another",
                "error",
                f"{name} was removed, and vLLM {version} takes it for {flag.name}",
                f"{known()[name].last} is the last release with it; the beginning of a flag is accepted for the flag",
                f"remove it, or write {flag.name}",
                removal([given]),
            )
        else:
            yield LintFinding(
                "abbreviated_flag",
                "info",
                f"{name} is short for {flag.name}",
                "it is refused as soon as a release has a second flag that begins so",
                flag.name,
            )


def idle(command: Command, version: str) -> Iterator[LintFinding]:
    """Flags that the release accepts and that do nothing."""
    if command.environment.get("VLLM_USE_V1") == "0" and not at_least(version, V1_ONLY):
        return
    for given in command.given:
        no = IDLE.get(given.name)
        if no and given.option and given.option.flag.in_release(version) and at_least(version, no.first):
            yield LintFinding(
                "no_effect",
                "warning",
                f"{shown(given)} does nothing in {version}",
                no.why,
                "remove it",
                removal([given]),
            )


def switches(command: Command, version: str) -> Iterator[LintFinding]:
    """Switches with a value, and --no-x where there is none."""
    for given in command.given:
        if not given.option or not given.words or not given.option.flag.in_release(version) or given.option.key:
            continue
        flag, on = given.option.flag, given.option.on
        if flag.takes == "none" and given.values and (len(given.words) == 1 or at_least(version, _SWITCHES_TOOK_WORDS)):
            off = given.values[0].lower() in ("false", "0") or not on
            name = f"--no-{flag.name[2:]}" if off else flag.name
            yield LintFinding(
                "switch_with_a_value",
                "error",
                f"{shown(given)} takes no value",
                f"vLLM {version} refuses the word after it",
                name if flag.no or not off else "remove it",
                (Edit(given.words, (name,) if flag.no or not off else ()),),
            )
        elif not on and not flag.no and at_least(version, described()):
            yield LintFinding(
                "no_such_negation",
                "error",
                f"{given.spelled}: {flag.name} has no --no- form",
                f"vLLM {version} ends with `unrecognized arguments`",
                f"remove it: {flag.name} is off unless it is given" if flag.takes == "none" else "remove it",
                removal([given]),
            )


def strays(command: Command, version: str) -> Iterator[LintFinding]:
    """Words that belong to no flag."""
    places = [at for at in command.strays if at != command.arguments]  # there it is a second model
    if not places or any(is_open(command.words[at]) for at in places):
        return
    joined = [at for at in places if re.match(r"-\S+\s", command.words[at])]
    yield _joined(command, joined) if joined else _too_many(command, places, version)


def _joined(command: Command, places: Sequence[int]) -> LintFinding:
    return LintFinding(
        "flag_and_value_in_one_word",
        "error",
        f"{command.words[places[0]].split()[0]} and its value are one word",
        "quotation marks, or one item of a list, hold them together: vLLM sees a word that it does not know",
        "write two words, or --flag=value",
        tuple(Edit(range(at, at + 1), tuple(command.words[at].split())) for at in places),
    )


def _too_many(command: Command, places: Sequence[int], version: str) -> LintFinding:
    count = "a word" if len(places) == 1 else f"{len(places)} words"
    return LintFinding(
        "word_too_many",
        "error",
        f"{count} too many, after {_before(command, places[0])}",
        f"it belongs to no flag: vLLM {version} ends with `unrecognized arguments`",
        "remove it, or put the flag before it that it is the value of",
    )


def _before(command: Command, at: int) -> str:
    """The flag before a word."""
    flags = [each.spelled for each in command.given if each.words and each.words.stop <= at]
    return flags[-1] if flags else "the model"


def variables(command: Command, version: str) -> Iterator[LintFinding]:
    """Environment variables that this release does not read."""
    for name in command.environment:
        one = VARIABLES.get(name)
        if one and not (_from(one.first, version) and (not one.last or at_least(one.last, version))):
            yield _not_read(name, one, command, version)
        elif one is None and name.startswith("VLLM_") and name not in environment() and at_least(version, described()):
            near = get_close_matches(name, environment(), 1, _VERY_CLOSE)
            if near:
                yield LintFinding(
                    "variable_not_read",
                    "warning",
                    f"{name} does nothing: vLLM {version} does not read it",
                    "a variable that vLLM does not know is ignored",
                    f"{near[0]}, if that was meant",
                )


def _from(first: str, version: str) -> bool:
    return first != NEVER and (not first or at_least(version, first))


def _not_read(name: str, one: EnvironmentVariable, command: Command, version: str) -> LintFinding:
    value = command.environment[name]
    backend = value.removesuffix("_VLLM_V1")
    new = (one.flag, backend) if one.flag and backend in ATTENTION_BACKENDS and not command.all(one.flag) else ()
    at = _assignment(command, name)
    end = range(len(command.words), len(command.words))
    return LintFinding(
        "variable_not_read",
        "warning",
        f"{name} does nothing: {'no release reads it' if one.first == NEVER else f'vLLM {version} does not read it'}",
        one.instead,
        " ".join(new) or (f"{one.flag} with a name that {version} has, or remove it" if one.flag else "remove it"),
        (Edit(at, _renamed(command, at, one, value)), *([Edit(end, new)] if new else [])) if at else (),
    )


def _assignment(command: Command, name: str) -> range:
    """The words that set a variable, with the -e of `docker run`; an empty range where others do."""
    for at, word in enumerate(command.words[: command.arguments]):
        if re.fullmatch(rf"(?:--env=|-e)?{name}=.*", word, re.DOTALL):
            return range(at - (at > 0 and command.words[at - 1] in ("-e", "--env")), at + 1)
    return range(0)


def _renamed(command: Command, at: range, one: EnvironmentVariable, value: str) -> tuple[str, ...]:
    before = command.words[at.start : at.stop - 1]
    return (*before, f"{one.variable}={value}") if one.variable else ()
