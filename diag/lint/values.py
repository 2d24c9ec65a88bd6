"""Rules about the value of one flag at a time, and the range of values that vLLM accepts for a flag."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from diag.core.declarations import read
from diag.core.files import parse_json
from diag.lint.rule import Edit, LintTarget, Match, at_least, is_open, number, rule, shown
from diag.vllm.command.command import Given
from diag.vllm.command.redaction import quoted_values
from diag.vllm.flags.registry import Flag, described, is_described, known, nearest

_NO_END = float("inf")


@dataclass(frozen=True)
class ValueRange:
    """Values of `flags` from `least` to `most`; `above` and `below` exclude the end itself, `never` single values."""

    flags: tuple[str, ...]
    least: float
    most: float = _NO_END
    above: bool = False
    below: bool = False
    never: tuple[float, ...] = ()

    def __contains__(self, value: float) -> bool:
        low = self.least < value if self.above else self.least <= value
        high = value < self.most if self.below else value <= self.most
        return low and high and value not in self.never

    def __str__(self) -> str:
        low = f"{'above' if self.above else 'at least'} {self.least:g}"
        return low if self.most == _NO_END else f"{low} and {'below' if self.below else 'at most'} {self.most:g}"


VALUE_RANGES: Mapping[str, ValueRange] = {
    flag: each
    for each in read(Path(__file__).with_name("ranges.toml"), tuple[ValueRange, ...], "range")
    for flag in each.flags
}
_PAIRS = re.compile(r"\w+=\d+(?:,\w+=\d+)*")
_TYPES = {
    "integer": "a whole number",
    "size": "a whole number, optionally with k, M or G",
    "number": "a number",
    "json": "JSON",
    "object": "a JSON object",
    "text": "",
}


def _faults(target: LintTarget) -> Iterator[tuple[str, Given, Flag]]:
    """Yield each option with a wrong value, the first thing that is wrong with it, and its flag in this release."""
    for mention in target.accepted():
        option = mention.option
        if not option or option.key or not mention.values or any(map(is_open, mention.values)):
            continue
        flag, accepted = option.flag, VALUE_RANGES.get(mention.name)
        if not all(_is_of_type(flag, text, target.version) for text in mention.values):
            yield "type", mention, flag
        elif accepted and any(value not in accepted for value in map(number, mention.values) if value is not None):
            yield "range", mention, flag
        elif flag.choices and not {*mention.values} - {"None"} <= {*flag.choices}:
            yield "choice", mention, flag


def _is_of_type(flag: Flag, text: str, version: str) -> bool:
    """Return True if vLLM's parser can read a value of the flag."""
    kind, value = flag.value, number(text)
    if flag.name == "--limit-mm-per-prompt" and not at_least(version, "0.10.0") and _PAIRS.fullmatch(text):
        return True
    if kind == "text" or (flag.null and text in ("", "None")):
        return True
    if kind in ("json", "object"):  # releases before the described one took a bare number for some objects
        try:
            return isinstance(parse_json(text), dict if kind == "object" and at_least(version, described()) else object)
        except ValueError:
            return False
    if kind == "number":
        return value is not None and not text.strip()[-1:].isalpha()
    if kind == "size":
        return text.lower() == "auto" or (value is not None and value == int(value) and "e" not in text.lower())
    return text.strip().lstrip("+-").replace("_", "").isdigit()


@rule()
def value_of_wrong_type(target: LintTarget) -> Iterator[Match]:
    for fault, mention, flag in _faults(target):
        if fault == "type":
            expected = _TYPES[flag.value]
            yield Match(
                f"{shown(mention)}: {quoted_values(mention)} is not {expected}",
                f"vLLM {target.version} exits with `invalid value`",
                f"Give {mention.name} {expected}",
            )


@rule()
def value_out_of_range(target: LintTarget) -> Iterator[Match]:
    for fault, mention, _ in _faults(target):
        if fault == "range":
            accepted = VALUE_RANGES[mention.name]
            yield Match(
                f"{shown(mention)} is {quoted_values(mention)}, expected a value {accepted}",
                f"vLLM {target.version} does not start with it",
                f"Give {mention.name} a value {accepted}",
            )


@rule()
def not_a_choice(target: LintTarget) -> Iterator[Match]:
    for fault, mention, flag in _faults(target):
        if fault == "choice":
            choices, same = flag.choices, is_described(target.version)
            release = target.version if same else nearest(target.version)
            yield Match(
                f"{shown(mention)}: {quoted_values(mention)} is not a value that vLLM {release} accepts",
                f"It accepts {', '.join(choices[:12])}{' ...' if len(choices) > 12 else ''}",
                f"Use one of them{'' if same else f', or make sure that vLLM {target.version} accepts this one'}",
                severity=None if same else "info",
            )


@rule()
def optimization_level_with_settings(target: LintTarget) -> Iterator[Match]:
    """`-O '{...}'` and `-O.key=value` were short for --compilation-config until -O became a level."""
    if not known()["--optimization-level"].in_release(target.version):
        return
    for mention in target.command.given:
        if re.fullmatch(r"-O(?:\..*)?", mention.spelled) and ("." in mention.spelled or "{" in "".join(mention.values)):
            at = range(mention.words.start, mention.words.start + 1)
            new = f"-cc{target.command.words[at.start].removeprefix('-O')}"
            yield Match(
                f"{shown(mention)} with compilation settings",
                f"In vLLM {target.version} -O is a level from 0 to 3 and nothing else",
                edits=() if "level" in " ".join((mention.spelled, *mention.values)) else (Edit(at, (new,)),),
            )
