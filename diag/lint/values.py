"""Rules about the value of one flag at a time."""

import json
import re
from collections.abc import Iterator

from diag.lint.finding import Edit, removal, shown
from diag.lint.rule import Example, LintRule, Match
from diag.lint.target import LintTarget, at_least, is_open, number
from diag.lint.value_limits import VALUE_RANGES
from diag.vllm.command.command import Given
from diag.vllm.command.redaction import said
from diag.vllm.flags.registry import Flag, described, is_described, known, nearest

_PAIRS = re.compile(r"\w+=\d+(?:,\w+=\d+)*")
_EXECUTORS = ("ray", "mp", "uni", "external_launcher")
_TYPES = {
    "integer": "a whole number",
    "size": "a whole number, optionally with k, M or G",
    "number": "a number",
    "json": "JSON",
    "object": "a JSON object",
    "text": "",
}


def _valued(target: LintTarget) -> Iterator[Given]:
    """The options whose value can be checked."""
    for given in target.accepted():
        is_whole = bool(given.option) and not (given.option and given.option.key)
        if is_whole and given.values and not any(map(is_open, given.values)):
            yield given


def _wrong_type(target: LintTarget) -> Iterator[Match]:
    for given in _valued(target):
        if not _is_readable(given, target.version):
            expected = _TYPES[_flag(given).value]
            yield Match(
                f"{shown(given)}: {said(given)} is not {expected}",
                f"vLLM {target.version} exits with `invalid value`",
                f"Give {given.name} {expected}",
            )


def _is_readable(given: Given, version: str) -> bool:
    return all(_is_type(_flag(given), text, version) for text in given.values)


def _flag(given: Given) -> Flag:
    """The flag as the release has it that the command was read for."""
    return given.option.flag if given.option else known()[given.name]


def _is_type(flag: Flag, text: str, version: str) -> bool:
    """Whether the parser can read it."""
    kind, value = flag.value, number(text)
    if flag.name == "--limit-mm-per-prompt" and not at_least(version, "0.10.0") and _PAIRS.fullmatch(text):
        return True
    if kind == "text" or (flag.null and text in ("", "None")):
        return True
    if kind in ("json", "object"):  # releases before the described one took a bare number for some objects
        return _is_json(text, dict if kind == "object" and at_least(version, described()) else object)
    if kind == "number":
        return value is not None and not text.strip()[-1:].isalpha()
    if kind == "size":
        return text.lower() == "auto" or (value is not None and value == int(value) and "e" not in text.lower())
    return text.strip().lstrip("+-").replace("_", "").isdigit()


def _is_json(text: str, kind: type) -> bool:
    try:
        return isinstance(json.loads(text), kind)
    except (ValueError, RecursionError):
        return False


def _out_of_range(target: LintTarget) -> Iterator[Match]:
    for given in _valued(target):
        if _is_readable(given, target.version) and not _is_in_range(given):
            accepted = VALUE_RANGES[given.name]
            yield Match(
                f"{shown(given)} is {said(given)}, expected a value {accepted}",
                f"vLLM {target.version} does not start with it",
                f"Give {given.name} a value {accepted}",
            )


def _is_in_range(given: Given) -> bool:
    accepted = VALUE_RANGES.get(given.name)
    values = (number(text) for text in given.values)
    return accepted is None or all(value in accepted for value in values if value is not None)


def _not_a_choice(target: LintTarget) -> Iterator[Match]:
    """The choices are known of some releases: for another one it is only a question."""
    for given in _valued(target):
        choices = _flag(given).choices
        is_other = choices and not all(text in choices for text in given.values if text != "None")
        if is_other and _is_readable(given, target.version) and _is_in_range(given):
            same = is_described(target.version)
            release = target.version if same else nearest(target.version)
            yield Match(
                f"{shown(given)}: {said(given)} is not a value that vLLM {release} accepts",
                f"It accepts {', '.join(choices[:12])}{' ...' if len(choices) > 12 else ''}",
                f"Use one of them{'' if same else f', or make sure that vLLM {target.version} accepts this one'}",
                severity=None if same else "info",
            )


def _level_with_settings(target: LintTarget) -> Iterator[Match]:
    """`-O '{...}'` and `-O.key=value`, which were --compilation-config until -O became a level."""
    if not known()["--optimization-level"].in_release(target.version):
        return
    for given in target.command.given:
        if re.fullmatch(r"-O(?:\..*)?", given.spelled) and ("." in given.spelled or "{" in "".join(given.values)):
            at = range(given.words.start, given.words.start + 1)
            new = f"-cc{target.command.words[at.start].removeprefix('-O')}"
            yield Match(
                f"{shown(given)} with compilation settings",
                f"In vLLM {target.version} -O is a level from 0 to 3 and nothing else",
                edits=() if "level" in " ".join((given.spelled, *given.values)) else (Edit(at, (new,)),),
            )


def _no_such_executor(target: LintTarget) -> Iterator[Match]:
    """`--distributed-executor-backend nccl` parses, and Executor.get_class fails later; a class has a dot in it."""
    for given in target.command.all("--distributed-executor-backend"):
        value = "".join(given.values)
        if value and "." not in value and not is_open(value) and value not in _EXECUTORS:
            yield Match(f"{shown(given)}: vLLM has no executor {value[:40]!r}", edits=removal([given]))


RULES = (
    LintRule(
        "value_of_wrong_type",
        "error",
        "A value is of the wrong type",
        "A value that vLLM's parser cannot read as the number, the size or the JSON that the flag takes.",
        "vLLM exits with `invalid value`",
        "Give a value of the type that the finding names",
        Example("vllm serve m --max-num-seqs many"),
        _wrong_type,
    ),
    LintRule(
        "value_out_of_range",
        "error",
        "A value is out of range",
        "A number that is smaller or larger than vLLM accepts for the flag.",
        "vLLM checks the value at startup and does not start with it",
        "Give a value in the range that the finding names",
        Example("vllm serve m --gpu-memory-utilization 1.5"),
        _out_of_range,
    ),
    LintRule(
        "not_a_choice",
        "error",
        "A value is not one of the flag's choices",
        "A value that is not in the flag's list of choices. The lists are those of 26 releases; for any other release"
        " the finding is an info.",
        "vLLM exits with `invalid choice`",
        "Use one of the choices that the finding lists",
        Example("vllm serve m --kv-cache-dtype fp9"),
        _not_a_choice,
    ),
    LintRule(
        "optimization_level_with_settings",
        "error",
        "-O is given compilation settings",
        "`-O '{...}'` or `-O.key=value` with a release in which -O is a level.",
        "-O is a level from 0 to 3 and nothing else",
        "Use -cc, short for --compilation-config, in its place",
        Example("vllm serve m -O.mode=3"),
        _level_with_settings,
    ),
    LintRule(
        "no_such_executor",
        "error",
        "--distributed-executor-backend names no executor",
        "A name other than ray, mp, uni and external_launcher that is no Python class either.",
        "The parser accepts it and the server fails later, when it starts the ranks",
        f"Use one of {', '.join(_EXECUTORS)}, or remove it",
        Example("vllm serve m -tp 2 --distributed-executor-backend nccl"),
        _no_such_executor,
    ),
)
