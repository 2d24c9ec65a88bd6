"""Rules about single words of a command: values that are missing or too many, and options given twice."""

import re
from collections.abc import Iterator

from diag.lint.finding import Edit, removal, shown
from diag.lint.model_name import by_flag, has_model
from diag.lint.rule import Example, LintRule, Match
from diag.lint.target import LintTarget, at_least, is_open
from diag.vllm.flags.registry import known

_SWITCHES_TOOK_WORDS = "0.8.5"
"""Before, some switches took true or false as a word of its own."""
_ON = {
    *("--enable-prefix-caching", "--enable-chunked-prefill", "--async-scheduling", "--use-tqdm-on-load"),
    *("--enable-log-deltas", "--enable-flash-late-interaction", "--scheduler-reserve-full-isl"),
}
"""Switches that are not off by default: their false matters."""


def _value_missing(target: LintTarget) -> Iterator[Match]:
    for given in target.accepted():
        takes = given.option.flag.takes if given.option else "optional"
        if takes in ("one", "many") and not given.values:
            count = "at least one argument" if takes == "many" else "one argument"
            yield Match(
                f"{shown(given)} has no value",
                f"vLLM {target.version} exits with `expected {count}`",
                f"Write {given.name} VALUE, or remove it",
            )


def _switch_with_a_value(target: LintTarget) -> Iterator[Match]:
    for given in target.accepted():
        option = given.option
        if not option or not given.words or option.key or option.flag.takes != "none" or not given.values:
            continue
        if len(given.words) == 1 or target.since(_SWITCHES_TOOK_WORDS):
            off = given.values[0].lower() in ("false", "0") or not option.on
            new = (f"--no-{option.flag.name[2:]}" if off else option.flag.name,) if option.flag.no or not off else ()
            yield Match(
                f"{shown(given)} takes no value",
                f"vLLM {target.version} refuses the word after it",
                f"Write {new[0]}" if new else "Remove it",
                (Edit(given.words, new),),
            )


def _strays(target: LintTarget) -> list[int]:
    """The places of words that belong to no flag; none where a shell fills one of them in."""
    command = target.command
    places = [at for at in command.strays if at != command.arguments]  # there it is a second model
    return [] if any(is_open(command.words[at]) for at in places) else places


def _joined(target: LintTarget) -> list[int]:
    return [at for at in _strays(target) if re.match(r"-\S+\s", target.command.words[at])]


def _in_one_word(target: LintTarget) -> Iterator[Match]:
    words, places = target.command.words, _joined(target)
    if places:
        yield Match(
            f"{_first(words[places[0]], places[0])} and its value are one word",
            edits=tuple(Edit(range(at, at + 1), tuple(words[at].split())) for at in places),
        )


def _first(word: str, at: int) -> str:
    """The flag that a word begins with, or the place of the word."""
    flag = word.split(maxsplit=1)[0].partition("=")[0]
    return flag if flag in known() else f"Word {at + 1}: a flag"


def _too_many(target: LintTarget) -> Iterator[Match]:
    command, places = target.command, _strays(target)
    if command.by_module and command.arguments in command.strays and has_model(command) and by_flag(command):
        first = range(command.arguments, command.arguments + 1)
        yield Match(
            "A word before the flags belongs to none of them",
            fix="Remove it: --model names the model",
            edits=(Edit(first),),
        )
    if places and not _joined(target):
        before = [shown(given) for given in command.given if given.words and given.words.stop <= places[0]]
        count = "One word" if len(places) == 1 else f"{len(places)} words"
        yield Match(f"{count} too many, after {before[-1] if before else 'the model'}")


def _given_twice(target: LintTarget) -> Iterator[Match]:
    command = target.command
    for name in dict.fromkeys(given.name for given in command.given if given.option):
        mentions = command.all(name)
        values = {(given.values, given.option.on if given.option else True) for given in mentions}
        if len(values) < 2 or name == "--middleware":  # the only one that collects
            continue
        *lost, last = mentions
        from_file = not lost[-1].words
        both_ways = len({on for _, on in values}) > 1
        times = "is given both as --x and as --no-x" if both_ways else f"is given {len(mentions)} times"
        yield Match(
            f"{name} {times}: the last one wins",
            "The command line overrides the --config file" if from_file else "argparse keeps the last value",
            f"Keep only {last.spelled}{'' if both_ways else ' with the value that is meant'}",
            removal(lost),
            "info" if from_file and len(mentions) == 2 else None,
        )


def _config_false_ignored(target: LintTarget) -> Iterator[Match]:
    for key in target.command.dropped:
        flag, new = known().get("--" + key.replace("_", "-")), key.replace("_", "-")
        if flag and flag.name in _ON:
            by_name = at_least(target.version, "0.31.0")
            yield Match(
                f"{key}: false (in the --config file) has no effect",
                f"vLLM {target.version} ignores a false" + (" whose key has underscores" if by_name else " there"),
                f"Write {new}: false" if by_name else f"Give --no-{new} on the command line",
            )


RULES = (
    LintRule(
        "value_missing",
        "error",
        "A flag has no value",
        "A flag that takes a value and stands at the end of the command or before another flag.",
        "vLLM exits with `expected one argument`",
        "Give the flag a value, or remove it",
        Example("vllm serve m --max-num-seqs --port 8000"),
        _value_missing,
    ),
    LintRule(
        "switch_with_a_value",
        "error",
        "A switch has a value",
        "A flag that is either given or not, followed by a value such as true. Up to 0.8.4"
        " vLLM took one as a word of its own.",
        "vLLM refuses the word after it",
        "Write `--x` or `--no-x`",
        Example("vllm serve m --enable-prefix-caching false"),
        _switch_with_a_value,
    ),
    LintRule(
        "flag_and_value_in_one_word",
        "error",
        "A flag and its value are one word",
        "A word such as `'--dtype auto'`, with a space in it, that belongs to no flag.",
        "Quotation marks, or one item of a YAML list, hold them together: vLLM sees one word that it does not know",
        "Write two words, or --flag=value",
        Example("vllm serve m '--dtype auto'"),
        _in_one_word,
    ),
    LintRule(
        "word_too_many",
        "error",
        "A word belongs to no flag",
        "A word behind all the values that the flag before it takes.",
        "vLLM exits with `unrecognized arguments`",
        "Remove it, or put the flag before it whose value it is",
        Example("vllm serve m --port 8000 8001"),
        _too_many,
    ),
    LintRule(
        "given_twice",
        "warning",
        "A flag is given more than once, with different values",
        "A flag with two values, or given both as --x and as --no-x. A value of the --config file that the command line"
        " overrides once is an info.",
        "argparse keeps the last value",
        "Keep only the one that is meant",
        Example("vllm serve m --max-num-seqs 8 --max-num-seqs 16"),
        _given_twice,
    ),
    LintRule(
        "config_false_ignored",
        "warning",
        "A false in the --config file has no effect",
        "A switch that is on by default, or may be, and is false in the --config file.",
        "vLLM ignores a false in the file from 0.9.0 to 0.27, and one whose key has underscores since 0.31.0",
        "Give --no-x on the command line; since 0.31.0 write the key with dashes",
        Example("vllm serve m --config c.yaml", "0.27.1", "c.yaml says `enable-prefix-caching: false`"),
        _config_false_ignored,
    ),
)
