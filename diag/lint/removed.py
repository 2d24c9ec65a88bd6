"""Flags and variables that were removed from vLLM or lost their effect, and the rule that finds removed flags."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from diag.core.declarations import read
from diag.core.files import parse_json
from diag.lint.rule import Edit, LintTarget, Match, at_least, removal, rule, shown
from diag.vllm.command.command import Given
from diag.vllm.command.redaction import value
from diag.vllm.flags.registry import known

V1 = "0.8.0"
"""The first release in which V1 is the engine unless VLLM_USE_V1=0 is set."""
V1_ONLY = "0.11.0"
"""The first release without the V0 engine."""


class MergedFlags(NamedTuple):
    """Removed flags whose values are now `keys` of the JSON object that `flag` takes, and why."""

    flag: str
    why: str
    keys: Mapping[str, str]


@dataclass(frozen=True)
class ReplacedFlag:
    """The `flags` that replace a removed flag ("" in them: its value); none if the flag is to be removed.

    `advice` is the fix if the command cannot be corrected mechanically.
    """

    why: str
    flags: tuple[str, ...] = ()
    advice: str = ""


@dataclass(frozen=True)
class IneffectiveFlag:
    """A flag that the parser accepts and that has no effect since the release `first`."""

    first: str
    why: str = ""


@dataclass(frozen=True)
class ReplacedVariable:
    """A hint for releases that do not read a variable: `flag` takes its value, `variable` is its new name."""

    instead: str = ""
    flag: str = ""
    variable: str = ""


class _Tables(NamedTuple):
    """The tables of removed.toml; `tasks` has replacements by the value of --task."""

    merged: tuple[MergedFlags, ...]
    replaced: Mapping[str, ReplacedFlag]
    tasks: Mapping[str, ReplacedFlag]
    ineffective: Mapping[str, IneffectiveFlag]
    variables: Mapping[str, ReplacedVariable]


_MERGED, REPLACED, TASKS, _INEFFECTIVE, REPLACED_VARIABLES = read(Path(__file__).with_name("removed.toml"), _Tables)
INTO: Mapping[str, tuple[str, str, str]] = {
    name: (merged.flag, key, merged.why) for merged in _MERGED for name, key in merged.keys.items()
}
"""Removed flags whose value is now a key of a JSON object: the flag that takes it, the key, and why."""
INEFFECTIVE: Mapping[str, IneffectiveFlag] = {
    name: flag if flag.why else replace(flag, why=REPLACED[name].why) for name, flag in _INEFFECTIVE.items()
}
KEYS_UNTIL: Mapping[str, str] = {"disable_by_batch_size": "0.16.0", "disable_fallback": "0.16.0"}
"""The last release that is known to take a key; 0.24.0 refuses these."""
BACKENDS_OF: Mapping[str, tuple[str, ...]] = {
    "disable_any_whitespace": ("xgrammar", "guidance"),
    "disable_additional_properties": ("guidance",),
}
"""A key of --structured-outputs-config that is refused unless the backend is one of these."""
LARGEST_SIZE = ReplacedFlag("A single number was the largest size", ("--max-cudagraph-capture-size", ""))
"""Replaces --cuda-graph-sizes with a single value."""
POOLER = ReplacedFlag(
    "It was renamed, and some of its keys were removed",
    advice="Use --pooler-config with use_activation in the place of normalize or softmax",
)
"""Replaces --override-pooler-config with a key that was removed."""


def removed_name(mention: Given, version: str) -> str:
    """Return the removed flag that a word abbreviates, as older releases accept it; "" if there is none."""
    begun = mention.spelled.replace("_", "-")
    if mention.option or len(begun) < 6 or begun in known():
        return ""
    longer = [flag for name, flag in known().items() if name.startswith(begun)]
    is_gone = len(longer) == 1 and not longer[0].in_release(version) and at_least(version, longer[0].first)
    return longer[0].name if is_gone else ""


@rule()
def removed_flag(target: LintTarget) -> Iterator[Match]:
    gone = [
        (mention, mention.option.flag)
        for mention in target.command.given
        if mention.option
        and not mention.option.flag.in_release(target.version)
        and target.since(mention.option.flag.first)
    ]
    for mention, flag in gone:
        if mention.name in INTO:
            continue
        text = " ".join(mention.values)
        replacement = REPLACED.get(flag.name, ReplacedFlag(""))
        if flag.name == "--task":
            replacement = TASKS.get(text, ReplacedFlag("--task was split into --runner and --convert"))
        elif flag.name == "--cuda-graph-sizes" and len(mention.values) == 1:
            replacement = LARGEST_SIZE
        elif flag.name == "--override-pooler-config" and re.search(r'"(?:normalize|softmax|activation)"', text):
            replacement = POOLER
        words = tuple(word for part in replacement.flags for word in ([part] if part else mention.values))
        able = all(known()[word].in_release(target.version) for word in words if word in known())
        edited = mention.words and not replacement.advice
        may_be_shown = [value(mention, text) for text in mention.values] == [*mention.values]
        values = mention.values if may_be_shown else ["VALUE"]
        spelled = " ".join(word for part in replacement.flags for word in ([part] if part else values))
        yield Match(
            f"{shown(mention)} was removed: {flag.last} is the last release with it",
            replacement.why or f"vLLM {target.version} exits with `unrecognized arguments`",
            replacement.advice or (f"Use {spelled}" if words and able else "Remove it"),
            (Edit(mention.words, words if able else ()),) if edited else (),
        )
    for mention in target.command.given:
        if name := removed_name(mention, target.version):
            yield Match(
                f"{mention.spelled} is short for {name}, which was removed: {known()[name].last} is the last release"
                " with it",
                REPLACED.get(name, ReplacedFlag("")).why
                or f"vLLM {target.version} exits with `unrecognized arguments`",
                "Remove it",
                (Edit(range(mention.words.start, mention.words.start + 1)),) * (known()[name].takes == "none"),
            )
    merged = [mention for mention, _ in gone if mention.name in INTO]
    for name in dict.fromkeys(INTO[mention.name][0] for mention in merged):
        yield _report_merged(target, [mention for mention in merged if INTO[mention.name][0] == name], name)


def _report_merged(target: LintTarget, parts: Sequence[Given], name: str) -> Match:
    """Report several removed flags that became keys of the JSON object that the flag `name` takes."""
    version = target.version
    content: dict[str, object] = {}
    for mention in parts:
        key, text = INTO[mention.name][1], " ".join(mention.values).removesuffix(":no-fallback")
        if not at_least(KEYS_UNTIL.get(key, version), version):
            continue
        if text == "[ngram]":  # up to 0.8 the method was given as the model's name
            content["method"] = "ngram"
            continue
        try:
            content[key] = parse_json(text) if text else bool(mention.option and mention.option.on)
        except ValueError:
            content[key] = text

    names = ", ".join(shown(mention) for mention in parts)
    last = known()[parts[0].name].last
    message = f"{names} {'were' if len(parts) > 1 else 'was'} removed: {last} is the last release with it"
    if not content:
        return Match(message, f"vLLM {version} has nothing in its place", "Remove it", removal(parts))

    backend = content.get("backend")
    wanted = [able for key, able in BACKENDS_OF.items() if content.get(key) and backend not in able]
    requirement = ", with the options behind the colon as keys" if ":" in str(backend) else ""
    if wanted:
        requirement = f" with {' or '.join(wanted[-1])} as its backend: vLLM refuses it with any other"

    text = json.dumps(content)
    named = text if all(value(part, word) == word for part in parts for word in part.values) else "{...}"
    is_given = target.command.get(name) is not None
    able = known()[name].in_release(version) and not is_given and not requirement
    first, *others = [part for part in parts if part.words] or [parts[0]]
    return Match(
        message,
        INTO[parts[0].name][2],
        (f"Add {named} to {name}" if is_given else f"Use {name} '{named}'") + requirement,
        (Edit(first.words, (name, text)), *removal(others)) if first.words and able else (),
    )
