"""The rule about flags that were removed: what replaces each is declared in `replaced`."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from diag.lint.finding import Edit, removal, shown
from diag.lint.replaced import BACKENDS_OF, INTO, KEYS_UNTIL, LARGEST_SIZE, POOLER, REPLACED, TASKS, ReplacedFlag
from diag.lint.rule import Example, LintRule, Match
from diag.lint.target import LintTarget, at_least
from diag.vllm.command.command import Given
from diag.vllm.command.redaction import value
from diag.vllm.flags.registry import Flag, known


def _removed(target: LintTarget) -> Iterator[Match]:
    gone = [
        (given, given.option.flag)
        for given in target.command.given
        if given.option and not given.option.flag.in_release(target.version) and target.since(given.option.flag.first)
    ]
    for given, flag in gone:
        if given.name not in INTO:
            yield _replaced(given, flag, target.version)
    merged = [given for given, _ in gone if given.name in INTO]
    for name in dict.fromkeys(INTO[given.name][0] for given in merged):
        yield _merged(target, [given for given in merged if INTO[given.name][0] == name], name)


def _replaced(given: Given, flag: Flag, version: str) -> Match:
    replacement = _replacement(given, flag)
    words = tuple(word for part in replacement.flags for word in ([part] if part else given.values))
    able = all(known()[word].in_release(version) for word in words if word in known())
    edited = given.words and not replacement.advice
    return Match(
        f"{shown(given)} was removed: {flag.last} is the last release with it",
        replacement.why or f"vLLM {version} exits with `unrecognized arguments`",
        replacement.advice or (f"Use {_said(replacement, given)}" if words and able else "Remove it"),
        (Edit(given.words, words if able else ()),) if edited else (),
    )


def _said(replacement: ReplacedFlag, given: Given) -> str:
    """The words in a sentence, with the value where it may be shown."""
    of_flag = [value(given, text) for text in given.values]
    values = of_flag if of_flag == [*given.values] else ["VALUE"]
    return " ".join(word for part in replacement.flags for word in ([part] if part else values))


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


def _merged(target: LintTarget, parts: Sequence[Given], name: str) -> Match:
    """Several removed flags that became keys of one JSON object, the value of the flag `name`."""
    version = target.version
    content = dict(_entry(given) for given in parts if at_least(KEYS_UNTIL.get(INTO[given.name][1], version), version))
    names = ", ".join(shown(given) for given in parts)
    message = (
        f"{names} {'were' if len(parts) > 1 else 'was'} removed:"
        f" {known()[parts[0].name].last} is the last release with it"
    )
    if not content:
        return Match(message, f"vLLM {version} has nothing in its place", "Remove it", removal(parts))
    text = json.dumps(content)
    named = text if all(value(part, one) == one for part in parts for one in part.values) else "{...}"
    requirement, given = _requirement(content), target.command.get(name) is not None
    able = known()[name].in_release(version) and not given and not requirement
    first, *others = [part for part in parts if part.words] or [parts[0]]
    return Match(
        message,
        INTO[parts[0].name][2],
        f"{f'Add {named} to {name}' if given else f'Use {name} {chr(39)}{named}{chr(39)}'}{requirement}",
        (Edit(first.words, (name, text)), *removal(others)) if first.words and able else (),
    )


def _requirement(content: Mapping[str, object]) -> str:
    """What the backend for structured outputs has to be, "" where it is that."""
    backend = content.get("backend")
    wanted = [able for key, able in BACKENDS_OF.items() if content.get(key) and backend not in able]
    if wanted:
        return f" with {' or '.join(wanted[-1])} as its backend: vLLM refuses it with any other"
    return ", with the options behind the colon as keys" if ":" in str(backend) else ""


def _entry(given: Given) -> tuple[str, object]:
    key, text = INTO[given.name][1], " ".join(given.values).removesuffix(":no-fallback")
    if text == "[ngram]":  # up to 0.8 the model's name was the method's
        return "method", "ngram"
    try:
        return key, json.loads(text) if text else bool(given.option and given.option.on)
    except ValueError:
        return key, text


RULES = (
    LintRule(
        "removed_flag",
        "error",
        "The flag was removed from vLLM",
        "A flag that an earlier release had and this one does not. The finding names the last release with it, and what"
        " replaces it where something does.",
        "vLLM exits with `unrecognized arguments`",
        "Replace it as the finding says, or remove it where nothing replaces it",
        Example("vllm serve m --speculative-model d --num-speculative-tokens 5"),
        _removed,
    ),
)
