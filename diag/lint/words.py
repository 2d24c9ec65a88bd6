"""Rules about the words of a command: missing and stray values, repeated options, the place of the model."""

import re
from collections.abc import Iterator

from diag.lint.rule import Edit, LintTarget, Match, at_least, is_open, removal, rule, shown
from diag.vllm.command.command import Command, Given
from diag.vllm.flags.registry import known

_SWITCHES_TOOK_WORDS = "0.8.5"
"""The first release in which no switch takes true or false; before, --enable-chunked-prefill did, and others."""
_WITHOUT_DEMO = "0.25.0"
"""The first release whose wheel is known to lack the demonstration server; 0.24.0 has it."""
_NOT_OFF_BY_DEFAULT = {
    *("--enable-prefix-caching", "--enable-chunked-prefill", "--async-scheduling", "--use-tqdm-on-load"),
    *("--enable-log-deltas", "--enable-flash-late-interaction", "--scheduler-reserve-full-isl"),
}
"""Switches whose false in a --config file matters."""


@rule()
def value_missing(target: LintTarget) -> Iterator[Match]:
    for mention in target.accepted():
        takes = mention.option.flag.takes if mention.option else "optional"
        if takes in ("one", "many") and not mention.values:
            count = "at least one argument" if takes == "many" else "one argument"
            yield Match(
                f"{shown(mention)} has no value",
                f"vLLM {target.version} exits with `expected {count}`",
                f"Write {mention.name} VALUE, or remove it",
            )


@rule()
def switch_with_a_value(target: LintTarget) -> Iterator[Match]:
    for mention in target.accepted():
        option = mention.option
        if not option or not mention.words or option.key or option.flag.takes != "none" or not mention.values:
            continue
        if target.since(_SWITCHES_TOOK_WORDS) or mention.values[0].lower() not in ("true", "false"):
            off = mention.values[0].lower() in ("false", "0") or not option.on
            new = (f"--no-{option.flag.name[2:]}" if off else option.flag.name,) if option.flag.no or not off else ()
            yield Match(
                f"{shown(mention)} takes no value",
                f"vLLM {target.version} refuses the word after it",
                f"Write {new[0]}" if new else "Remove it",
                (Edit(mention.words, new),),
            )


def _strays(target: LintTarget) -> list[int]:
    """Return the positions of words that belong to no flag; none if a shell fills one of them in."""
    command = target.command
    places = [at for at in command.strays if at != command.arguments]  # there it is a second model
    return [] if any(is_open(command.words[at]) for at in places) else places


def _joined(target: LintTarget) -> list[int]:
    return [at for at in _strays(target) if re.match(r"-\S+\s", target.command.words[at])]


@rule()
def flag_and_value_in_one_word(target: LintTarget) -> Iterator[Match]:
    words, places = target.command.words, _joined(target)
    if places:
        flag = words[places[0]].split(maxsplit=1)[0].partition("=")[0]
        named = flag if flag in known() else f"Word {places[0] + 1}: a flag"
        yield Match(
            f"{named} and its value are one word",
            edits=tuple(Edit(range(at, at + 1), tuple(words[at].split())) for at in places),
        )


@rule()
def word_too_many(target: LintTarget) -> Iterator[Match]:
    command, places = target.command, _strays(target)
    if (
        command.by_module
        and command.arguments in command.strays
        and not _is_without_model(command)
        and _model_flags(command)
    ):
        first = range(command.arguments, command.arguments + 1)
        yield Match(
            "A word before the flags belongs to none of them",
            fix="Remove it: --model names the model",
            edits=(Edit(first),),
        )
    if places and not _joined(target):
        before = [shown(mention) for mention in command.given if mention.words and mention.words.stop <= places[0]]
        count = "One word" if len(places) == 1 else f"{len(places)} words"
        yield Match(f"{count} too many, after {before[-1] if before else 'the model'}")


@rule()
def given_twice(target: LintTarget) -> Iterator[Match]:
    command = target.command
    for name in dict.fromkeys(mention.name for mention in command.given if mention.option):
        mentions = command.all(name)
        values = {(mention.values, mention.option.on if mention.option else True) for mention in mentions}
        if len(values) < 2 or name == "--middleware":  # the only flag that collects its values
            continue
        *lost, last = mentions
        from_file = not lost[-1].words
        both_ways = len({on for _, on in values}) > 1
        times = "is given both as --x and as --no-x" if both_ways else f"is given {len(mentions)} times"
        yield Match(
            f"{name} {times}: the last one wins",
            "The command line overrides the --config file" if from_file else "argparse keeps the last value",
            f"Keep only {last.spelled}{'' if both_ways else ' with the intended value'}",
            removal(lost),
            "info" if from_file and len(mentions) == 2 else None,
        )


@rule()
def config_false_ignored(target: LintTarget) -> Iterator[Match]:
    for key in target.command.dropped:
        flag, new = known().get("--" + key.replace("_", "-")), key.replace("_", "-")
        if flag and flag.name in _NOT_OFF_BY_DEFAULT:
            by_name = at_least(target.version, "0.31.0")
            yield Match(
                f"{key}: false (in the --config file) has no effect",
                f"vLLM {target.version} ignores a false" + (" whose key has underscores" if by_name else " there"),
                f"Write {new}: false" if by_name else f"Give --no-{new} on the command line",
            )


# -- the model and the entry point


def _is_without_model(command: Command) -> bool:
    """Return True unless a model is named, a shell may fill one in, or there are flags alone."""
    is_part = command.writing in ("a --config file", "a Dockerfile")  # the model comes with the command
    # an overlay of Compose, or a patch, names neither the image nor any argument
    is_part = is_part or (command.image == "vllm" and command.arguments == len(command.words))
    is_part = is_part or bool(command.config and command.elsewhere)
    return not command.model and not is_part and command.arguments > 0 and not any(map(is_open, command.words))


def _model_flags(command: Command) -> list[Given]:
    """Return each --model on the command line itself."""
    return [mention for mention in command.all("--model") if mention.words]


@rule()
def no_model(target: LintTarget) -> Iterator[Match]:
    box = target.command.container
    is_built_in = target.build and target.command.entry is not None  # its own entry point may name one
    if _is_without_model(target.command) and not is_built_in and (not box or box.is_whole):
        default = "Qwen/Qwen3-0.6B" if target.since("0.9.0") else "a default model"
        yield Match(why=f"vLLM {target.version} serves {default}")


@rule()
def model_named_twice(target: LintTarget) -> Iterator[Match]:
    command, named = target.command, _model_flags(target.command)
    first = command.words[command.arguments : command.arguments + 1]
    is_twice = command.arguments in command.strays and not any(map(is_open, first))  # it may hold flags
    if named and is_twice and not _is_without_model(command) and not command.by_module:
        yield Match(why=f"vLLM {target.version} exits with `unrecognized arguments`", edits=removal(named))


@rule()
def model_by_flag(target: LintTarget) -> Iterator[Match]:
    command, named = target.command, _model_flags(target.command)
    is_serve = "serve" in command.words[: command.arguments] and not command.entry
    if named and is_serve and not _is_without_model(command) and command.arguments not in command.strays:
        refused = not target.since("0.11.1") and any(len(mention.words) > 1 for mention in named)
        first = range(command.arguments, command.arguments)
        yield Match(edits=(*removal(named), Edit(first, named[-1].values)), severity="error" if refused else None)


@rule()
def model_not_read(target: LintTarget) -> Iterator[Match]:
    command = target.command
    first = command.words[command.arguments : command.arguments + 1]
    is_word = bool(first) and not first[0].startswith("-") and not is_open(first[0])
    is_entry = _is_own_image(command) and command.entry is not None  # the module up to 0.9.1, `vllm serve` in 0.17.1
    is_module = command.by_module or (is_entry and not target.since("0.9.2"))
    if not _is_without_model(command) and is_module and not _model_flags(command) and is_word:
        yield Match(
            "python -m vllm.entrypoints... takes its model only from --model"
            + ("" if command.by_module else ", and it is the entry point of this image"),
            fix="Use vllm serve MODEL ..., or --model MODEL" if command.by_module else "Use --model MODEL",
            edits=(Edit(range(command.arguments, command.arguments), ("--model",)),),
        )


def _is_own_image(command: Command) -> bool:
    """Return True for an image of vLLM's own, by the last part of its name."""
    return command.image.rpartition("/")[2].startswith("vllm-openai")


_SHELL = re.compile(r"(?:\S*/)?(?:ba|da|z|k)?sh")


@rule()
def entry_point_repeated(target: LintTarget) -> Iterator[Match]:
    command = target.command
    if _is_own_image(command) and command.entry is not None and command.entry < command.arguments:
        again = range(command.entry, command.arguments)
        words = " ".join(command.words[at] for at in again)
        yield Match(f"`{words}` after the image, whose entry point starts the server", edits=(Edit(again),))
    for outer, end in command.around if _is_own_image(command) else ():
        at = outer.index(command.image) if command.image in outer[:end] else end
        before, after = outer[:at], outer[at + 1 : end]
        if after and _SHELL.fullmatch(after[0]) and not any(word.startswith("--entrypoint") for word in before):
            yield Match(
                f"`{' '.join(after)}` after the image, whose entry point starts the server",
                fix="Make the shell the container's entry point, such as with --entrypoint",
            )


@rule()
def continuation_lost(target: LintTarget) -> Iterator[Match]:
    if target.command.lost:
        yield Match(f"{target.command.lost} begins a command of its own: the server does not get it")


@rule()
def server_removed(target: LintTarget) -> Iterator[Match]:
    words = target.command.words[: target.command.arguments]
    if "vllm.entrypoints.api_server" in words and target.since(_WITHOUT_DEMO):
        yield Match(f"vllm.entrypoints.api_server is not in vLLM {target.version}")


@rule()
def key_in_the_arguments(target: LintTarget) -> Iterator[Match]:
    command = target.command
    # a pod's $(NAME) is not filled in where the cluster shows its arguments
    if is_open(command.get("--api-key") or "") and not (command.container and command.container.is_pod):
        yield Match()
