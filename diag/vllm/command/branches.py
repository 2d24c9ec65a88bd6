"""Decide the branches of a script by its own values and the defaults of its variables; nothing is executed."""

import re
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial, reduce
from itertools import groupby
from operator import eq, ge, gt, le, lt, ne
from types import MappingProxyType

from diag.vllm.command.shell import LONGEST, NOTATIONS, Bare, Statement

NONE, OWN_OPTIONS = -3, -4
"""The branch of a case whose patterns do not match, and of one that reads the options of the script itself."""
_VARIABLE = re.compile(r"\$(?:(\w+|[@*#])|\{(\w+|[@*#])(?::?-([^{}$]*))?(,,|\^\^)?\})")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DECLARING = ("export", "declare", "typeset", "readonly", "local")
_NUMBERS: Mapping[str, Callable[[float, float], bool]]
_NUMBERS = {"-eq": eq, "-ne": ne, "-gt": gt, "-ge": ge, "-lt": lt, "-le": le}
_SETTINGS = re.compile(r"env|conf|setting|secret|\.sh$|\$")
_SET_ELSEWHERE = re.compile(NOTATIONS["patterns"]["branches_set_elsewhere"])
_OPTION = re.compile(r"--?[\w?]")
_NO_ARGUMENTS: Mapping[str, str | None] = {**dict.fromkeys("@*123456789", ""), "#": "0"}
_MOST = 100
"""Variables of one word."""


def usual_ways(
    steps: Sequence[Statement],
    functions: Sequence[str],
    assignments: Callable[[Sequence[str]], Mapping[str, str]],
    given: Mapping[str, str],
    chosen: Mapping[int, int] = MappingProxyType({}),
    is_open: bool = False,
) -> tuple[dict[int, int], Mapping[int, set[str]]]:
    """Return the branch of each block that the text decides, and the variables that decide it.

    They have the script's own values, those `given`, and the defaults; others are unset, unless it `is_open`, and the
    script gets no arguments. `functions` has the function of each line; `chosen` are ways that nothing decides.
    """
    names, options = dict[int, set[str]](), set[str]()
    values: dict[str, str | None] = {**given}
    sourced = (step.words[-1] for step in steps if step.words[:1] in (["source"], ["."]))
    is_open = is_open or any(map(_SETTINGS.search, sourced))
    ways, subjects = {**chosen}, dict[int, str | None]()
    results: dict[tuple[int, int], bool | None] = {}
    for step in steps:
        block, branch = step.decides or (0, 0)
        around = [way for way in step.path if way[0] != block]
        if any(ways.get(number, way) != way for number, way in around):
            continue
        if step.decides and not {"-d", "-e", "-f"} & {*step.words}:
            names.setdefault(block, set()).update(_names(step.words))
        if step.words[:1] == ["case"] and step.path and len(step.words) > 1:
            number, is_of_options = step.path[-1][0], step.words[1].strip("${}") in options
            subjects[number] = value = None if is_of_options else _filled(step.words[1], values)
            ways |= {number: OWN_OPTIONS} if is_of_options else {number: NONE} if value is not None else {}
        elif step.is_pattern and subjects.get(block) is not None:
            if ways.get(block) == NONE and any(fnmatchcase(subjects[block] or "", word) for word in step.words):
                ways[block] = branch
        elif step.is_pattern:
            ways |= {block: OWN_OPTIONS} if any(map(_OPTION.match, step.words)) else {}
        elif step.decides:
            unset = {} if functions[min(step.line, len(functions) - 1)] else {**_NO_ARGUMENTS}
            unset |= {name: "" for name in _names(step.words) if not (is_open or _SET_ELSEWHERE.fullmatch(name))}
            is_reached = not branch or results.get((block, branch - 1)) is False
            holds = _joined(step.joint, results.get(step.decides), test(step.words, ChainMap(values, unset)))
            results[step.decides] = holds if is_reached else None
            if is_reached:
                way = chosen.get(block) if holds is None else branch if holds else -1
                ways.pop(block, None)
                ways |= {} if way is None else {block: way}
        elif around and step.words[:1] in (["exit"], ["return"]):
            ways.pop(ended := around[-1][0], None)  # without its arguments the script ends there
            if not is_open and names.get(ended) and names[ended] <= values.keys() - given.keys():
                return usual_ways(steps, functions, assignments, given, chosen, is_open=True)  # by another variable
        else:
            if step.words[:1] in (["for"], ["read"], ["select"], ["mapfile"], ["readarray"]):
                values |= dict.fromkeys(step.words[1:])
            options |= {step.words[2]} if step.words[:1] == ["getopts"] and len(step.words) > 2 else set()
            values |= {word.partition("+=")[0]: None for word in step.words[:2] if "+=" in word}
            is_certain = all(number in ways for number, _ in around)
            declared = step.words[step.words[:1] != [] and step.words[0] in _DECLARING :]
            assigned = assignments(step.words)
            if len(assigned) == len(declared) or declared != step.words or step.words[:1] == [":"]:
                values |= {name: _filled(value, values) if is_certain else None for name, value in assigned.items()}
    return ways, names


def _names(words: Sequence[str]) -> set[str]:
    return {name or braced for name, braced, *_ in _VARIABLE.findall(" ".join(words))}


def _joined(joint: str, before: bool | None, holds: bool | None) -> bool | None:
    """Return the result of two tests that && or || joins; None if it is unknown."""
    if joint not in ("&&", "||"):
        return holds
    decisive = joint == "||"
    return decisive if decisive in (before, holds) else None if None in (before, holds) else not decisive


def _filled(word: str, values: Mapping[str, str | None]) -> str | None:
    """Return a word with the values of its variables; None if one of them is unknown."""

    def value(name: re.Match[str]) -> str:
        known = values.get(name[1] or name[2])
        text = name[3] if name[3] is not None and not known else name[0] if known is None else known
        return text.lower() if name[4] == ",," else text.upper() if name[4] else text

    for _ in range(3):  # a default may name others
        word = _VARIABLE.sub(value, word, _MOST) if len(word) < LONGEST else "$"
    return None if "$" in word or "`" in word else word


def test(words: Sequence[str], values: Mapping[str, str | None]) -> bool | None:
    """Return the result of a test; None if the text does not show it."""
    if signs := next((at for at, word in enumerate(words) if word != "!"), 0):
        holds = test(words[signs:], values)
        return None if holds is None else holds is (signs % 2 == 0)
    is_bracket = words[:1] != [] and words[0] in ("[", "[[", "test")
    parts = [word for at, word in enumerate(words) if not (is_bracket and (at == 0 or word in ("]", "]]")))]
    if is_bracket and "(" in parts:
        return None  # a group counts before && and ||
    for joint, older in (("||", "-o"), ("&&", "-a")) if is_bracket else ():
        name = joint if words[0] == "[[" else older
        groups = [[*group] for is_joint, group in groupby(parts, name.__eq__) if not is_joint]
        if len(groups) > 1:
            return reduce(partial(_joined, joint), (test([words[0], *group], values) for group in groups))
    if is_bracket and (signs := next((at for at, part in enumerate(parts) if part != "!"), 0)):
        return test([*parts[:signs], words[0], *parts[signs:]], values)
    filled = [(part, _filled(part, values)) for part in parts]
    match [value for part, value in filled if value != "" or words[0] == "[[" or not isinstance(part, Bare)]:
        case [] if is_bracket:
            return False
        case ["true" | "false" | ":" as command] if not is_bracket:
            return command != "false"
        case ["-n" | "-z" as sign, str(value)] if is_bracket:
            return bool(value) is (sign == "-n")
        case ["-d" | "-e" | "-f", str(value)] if is_bracket and (_HUB_ID.fullmatch(value) or value == ""):
            return False
        case [str(value)] if is_bracket:
            return bool(value)
        case [str(left), "=" | "==" | "!=" as sign, str(right)] if is_bracket:
            return (fnmatchcase(left, right) if words[0] == "[[" else left == right) is (sign != "!=")
        case [str(left), str(sign), str(right)] if sign in _NUMBERS and left.isdecimal() and right.isdecimal():
            return _NUMBERS[sign](float(left), float(right))
    return None
